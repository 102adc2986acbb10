"""bf16 on a text of several hundred tokens: the C++ decoder names the same next token as fp32 at least as often as
Hugging Face's bf16 does, and gives it no less likely probabilities."""

from pathlib import Path

import torch

from benchmarks.hf_model import load_hf_model
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.models.packed_decoder import PackedDecoder
from engine.prepared import PreparedModel
from engine.text.tokenizer import Tokenizer
from tests.engine.runner_driver import RunnerDriver
from tests.kernels.libraries import compiler

TEXT = Path(__file__).parent / "data" / "harbour_line.txt"


@torch.inference_mode()
def logits_of_transformers(model: PreparedModel, dtype: str, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = load_hf_model(model, dtype, device="cpu")(torch.tensor([token_ids])).logits[0].float()
    return logits


def agreement(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Share of the positions at which both name the same token."""
    return (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()


def divergence(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean KL divergence of the next token, in nats."""
    ours, theirs = logits.log_softmax(-1), exact.log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


def test_bf16_is_as_near_to_fp32_as_that_of_transformers(
    demo_model: PreparedModel, demo_model_fp32: PreparedModel
) -> None:
    compiler()
    token_ids = Tokenizer.load(demo_model).encode(TEXT.read_text())
    exact = logits_of_transformers(demo_model_fp32, "float32", token_ids)
    theirs = logits_of_transformers(demo_model, "bfloat16", token_ids)
    config = EngineConfig(model_dir=str(demo_model.path), device="cpu", dtype="bfloat16", num_blocks=200)
    runner = ModelRunner(demo_model, config)
    assert isinstance(runner._decoder, PackedDecoder)
    chunks = [256] * (len(token_ids) // 256) + [len(token_ids) % 256]
    ours = RunnerDriver(runner).logits_in_chunks(token_ids, chunks)
    for who, logits in (("ours", ours), ("transformers", theirs)):
        print(f"{who}: top-1 {agreement(logits, exact):.1%}, KL {divergence(logits, exact):.1e}, {len(logits)} tokens")
    assert agreement(ours, exact) >= agreement(theirs, exact)
    assert divergence(ours, exact) <= divergence(theirs, exact)
