"""Logits against transformers': every family, whole, in chunks and token by token through the cache."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from tests.engine.runner_driver import RunnerDriver
from tests.kernels_under_test import NAME
from tests.tiny_model import make_tiny

NUM_TOKENS = 50
CHUNKINGS = {
    "whole": [NUM_TOKENS],
    "chunks": [1, 15, 16, 18],
    "token by token": [1] * NUM_TOKENS,
    "prompt, then decode": [NUM_TOKENS - 10] + [1] * 10,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, untied": ("llama", {"tie_word_embeddings": False}),
    "llama, all biases": ("llama", {"config_changes": {"attention_bias": True, "mlp_bias": True}}),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, one kv head, three queries": ("llama", {"num_heads": 3, "num_kv_heads": 1, "hidden_size": 48}),
    "mistral": ("mistral", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def runner_of(model: PreparedModel, **changes: Any) -> ModelRunner:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "threads": 1, **changes}
    return ModelRunner(model, EngineConfig(model_dir=str(model.path), **settings))


def transformers_logits(path: Path, token_ids: list[int], **kwargs: Any) -> torch.Tensor:
    """[positions, vocab_size]"""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **kwargs
    )
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


@pytest.fixture(params=MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, options = MODELS[request.param]
    return make_tiny(tmp_path / "source", family, **options)


BACKENDS: dict[str, dict[str, Any]] = {
    "C++": {},
    "C++, avx512": {"max_isa": "avx512"},
    "C++, avx2": {"max_isa": "avx2"},
    "torch": {"max_isa": "none"},
    "reference": {"kernels": "reference"},
}
if NAME != "auto":
    BACKENDS = {NAME: {}}


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_transformers(tiny: Path, tmp_path: Path, backend: str) -> None:
    token_ids = [(7 * i * i + 3 * i + 11) % 380 for i in range(NUM_TOKENS)]
    expected = transformers_logits(tiny, token_ids)
    model = prepare(str(tiny), tmp_path / "state", "float32", lambda *_: None)
    driver = RunnerDriver(runner_of(model, **BACKENDS[backend]))
    for how, sizes in CHUNKINGS.items():
        difference = (driver.logits_in_chunks(token_ids, sizes) - expected).abs().max().item()
        assert difference < 1e-4, how


@pytest.mark.slow
def test_logits_of_the_demo_model_equal_transformers(
    demo_gguf: Path, demo_model_fp32: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 over 200 positions, loaded from the same GGUF file by transformers."""
    # its loader asks for accelerate, which it uses for placing weights on several devices only
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    text = " ".join(f"Chapter {i}: the trunk line of the town." for i in range(40))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(demo_model_fp32.tokenizer_path))
    token_ids = tokenizer.encode(text)[:200]
    assert len(token_ids) == 200
    expected = transformers_logits(demo_gguf.parent, token_ids, gguf_file=demo_gguf.name)
    driver = RunnerDriver(runner_of(demo_model_fp32))
    for sizes in ([200], [64, 64, 72], [150] + [1] * 50):
        difference = (driver.logits_in_chunks(token_ids, sizes) - expected).abs().max().item()
        assert difference < 2e-3, sizes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_transformers(dtype: str, tmp_path: Path) -> None:
    """Not a tight bound, but a wrong scale or a lost residual would break it."""
    tiny = make_tiny(tmp_path / "source")
    token_ids = [(7 * i * i + 3 * i + 11) % 380 for i in range(NUM_TOKENS)]
    expected = transformers_logits(tiny, token_ids)
    model = prepare(str(tiny), tmp_path / "state", dtype, lambda *_: None)
    got = RunnerDriver(runner_of(model, dtype=dtype)).logits_in_chunks(token_ids, [40] + [1] * 10)
    assert (got - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_size_changes_nothing(block_size: int, tmp_path: Path) -> None:
    model = prepare(str(make_tiny(tmp_path / "source")), tmp_path / "state", "float32", lambda *_: None)
    token_ids = [i % 380 for i in range(NUM_TOKENS)]
    results = [
        RunnerDriver(runner_of(model, block_size=size)).logits_in_chunks(token_ids, [30] + [1] * 20)
        for size in (16, block_size)
    ]
    assert torch.allclose(*results, atol=1e-4)


def test_a_mixed_batch_gives_each_sequence_its_own_logits(tmp_path: Path) -> None:
    """Decodes of several lengths, two of them sharing blocks, and two extends in one step."""
    model = prepare(str(make_tiny(tmp_path / "source", "qwen3")), tmp_path / "state", "float32", lambda *_: None)
    driver = RunnerDriver(runner_of(model))
    prompts = [[(start + 5 * i) % 380 for i in range(length)] for start, length in enumerate((100, 90, 3, 70, 40))]
    prompts[1][:80] = prompts[0][:80]
    alone = [driver.logits_in_chunks(prompt, [len(prompt)]) for prompt in prompts]

    a, b, c, d, e = (driver.sequence(prompt) for prompt in prompts)
    driver.logits([(a, 99)])
    driver.share(a, b, 5)
    for sequence, num in ((b, 9), (c, 2), (d, 30)):
        driver.logits([(sequence, num)])
    batch = driver.batch([(a, 1), (b, 1), (c, 1), (d, 40), (e, 40)])
    assert [(node.block_ids, node.rows) for node in batch.nodes] == [(tuple(a.block_table[:5]), (0, 1))]
    got = driver.runner.logits(batch)
    expected = torch.cat([alone[0][99:], alone[1][89:], alone[2][2:], alone[3][30:], alone[4]])
    assert torch.allclose(got, expected, atol=1e-4)


def test_b44_tied_and_untied_heads_present_and_absent(tmp_path: Path) -> None:
    """Tied: the embedding is the head, whether or not the file repeats it. Untied: the file's. Absent: an error."""
    from engine.errors import ModelNotSupported

    token_ids = list(range(30))
    for tied, present in itertools.product((True, False), (True, False)):
        source = make_tiny(tmp_path / f"{tied}-{present}", tie_word_embeddings=tied, head_in_file=present)
        if not tied and not present:
            with pytest.raises(ModelNotSupported, match=r"has no tensor lm_head\.weight \(1 of 21 are missing\)"):
                prepare(str(source), tmp_path / "state", "float32", lambda *_: None)
            continue
        driver = RunnerDriver(runner_of(prepare(str(source), tmp_path / "state", "float32", lambda *_: None)))
        got = driver.logits_in_chunks(token_ids, [30])
        assert (got - transformers_logits(source, token_ids)).abs().max() < 1e-4, (tied, present)
