"""Ranks of a group, here a thread each, compute what the whole model does."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.models.choose import choose_decoder
from engine.models.decoder import Decoder
from engine.models.prepare import prepare
from engine.models.shard import WHOLE, Shard, split_config
from engine.models.sharded_kernels import ShardedKernels
from engine.models.weights import Weights
from engine.prepared import PreparedModel
from engine.rank_group import join_group
from kernels.batch import AttentionBatch, Extend, KVShape, Tail
from kernels.checked import CheckedKernels
from kernels.cpu.backend import CpuKernels
from kernels.interface import Kernels, select_kernels
from kernels.reference.backend import ReferenceKernels
from tests.tiny_model import make_tiny

CPU = torch.device("cpu")
TOKENS = np.array([(7 * i * i + 3 * i + 11) % 380 for i in range(40)], dtype=np.int32)
NUM_BLOCKS, BLOCK_SIZE = 9, 8
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"config_changes": {"attention_bias": True, "mlp_bias": True}},
    "qwen2": {},
    "qwen3": {},
}


def hidden_states(model: PreparedModel, shard: Shard, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The residual stream of a prompt, and of a token after it, all rows; the logits too, of the rank that has them."""
    whole = model.manifest.config
    config = split_config(whole, shard.size)
    if shard.all_reduce is not None:
        kernels = ShardedKernels(kernels, is_first=shard.is_first, all_reduce=shard.all_reduce)
    weights = Weights(model.weights_path("float32"), whole, shard)
    decoder = Decoder(config, weights, CheckedKernels(kernels), CPU, 64)
    shape = KVShape(NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    kv = torch.zeros(config.num_layers, 2, NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    table, last = list(range(1, 7)), len(TOKENS) - 1
    slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(TOKENS))]
    prompt = AttentionBatch(slots[:last], extends=[Extend(last, 0, table)])
    token = AttentionBatch(slots[last:], tails=[Tail(table, len(TOKENS))])
    places = np.arange(len(TOKENS), dtype=np.int32)
    states = []
    with torch.inference_mode():
        for batch, rows in ((prompt, slice(0, last)), (token, slice(last, None))):
            plan = decoder.plan(batch, shape)
            states.append(decoder.forward(TOKENS[rows], places[rows], kv, plan, batch.num_decodes).clone())
        hidden = torch.cat(states)
        return hidden, decoder.logits(hidden) if shard.is_first else None


def of_all_ranks(model: PreparedModel, size: int, kernels: list[Kernels], store: Path) -> list[Any]:
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = hidden_states(model, join_group(rank, size, CPU, store), kernels[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_two_ranks_compute_what_the_whole_model_does(family: str, backend: str, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny", family, tie_word_embeddings=family == "qwen3", **FAMILIES[family])
    model = prepare(str(source), tmp_path / "state", "float32", lambda *_: None)

    def kernels() -> Kernels:
        return ReferenceKernels(CPU) if backend == "reference" else select_kernels(CPU, torch.float32, 4)

    assert backend == "reference" or isinstance(kernels(), CpuKernels)
    hidden, logits = hidden_states(model, WHOLE, kernels())
    (first, first_logits), (second, second_logits) = of_all_ranks(model, 2, [kernels(), kernels()], tmp_path / "store")
    torch.testing.assert_close(first, hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first_logits, logits, rtol=1e-4, atol=1e-4)
    assert second_logits is None
    assert torch.equal(second, first), "the ranks' residual streams must not drift apart"


def test_four_ranks(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny", num_heads=8, num_kv_heads=4, head_dim=8)
    model = prepare(str(source), tmp_path / "state", "float32", lambda *_: None)
    hidden, _ = hidden_states(model, WHOLE, ReferenceKernels(CPU))
    ranks = of_all_ranks(model, 4, [ReferenceKernels(CPU) for _ in range(4)], tmp_path / "store")
    torch.testing.assert_close(ranks[0][0], hidden, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(ranks[0][0], other) for other, _ in ranks[1:])


@pytest.mark.parametrize(("rank", "num_warnings"), [(0, 1), (1, 0)])
def test_on_a_cpu_torchs_operators_serve_a_split_model_with_one_warning(
    rank: int, num_warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = prepare(str(make_tiny(tmp_path / "tiny")), tmp_path / "state", "float32", lambda *_: None)
    whole = model.manifest.config
    weights = Weights(model.weights_path("float32"), whole, Shard(rank, 2, lambda x: None))
    config = EngineConfig(model_dir=str(model.path), tensor_parallel=2)
    decoder = choose_decoder(split_config(whole, 2), weights, config, CPU, torch.float32, 64)
    assert isinstance(decoder, Decoder)
    assert decoder.kernels_name == "cpu"
    warnings = [record.message for record in caplog.records if "tensor parallel" in record.message]
    assert len(warnings) == num_warnings
    assert all("C++ decoder takes whole models only" in warning for warning in warnings)
