"""Attention that the benchmarks time, on a tiny model."""

import pytest
import torch

from benchmarks.attention_bench import AttentionBench
from benchmarks.step_work import DecodeShape
from engine.config import EngineConfig
from engine.models.prepare import prepare
from engine.shared_attention import SharedAttention
from tests.tiny_model import make_tiny


def test_with_nodes_and_without_the_same_is_computed(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bench")
    model = prepare(str(make_tiny(folder / "hf")), folder, "float32", lambda *_: None)
    config = EngineConfig(
        model_dir=str(model.path), dtype="float32", kernels="reference", device="cpu", shared_attention="always"
    )
    bench = AttentionBench(model, config, 60)
    shape = DecodeShape(6, 130, 12, 2)
    batches = [bench.plan(shape, mode)[0] for mode in (bench.shared_attention, SharedAttention("never"))]
    assert [len(batch.nodes) for batch in batches] == [2, 0]
    assert batches[0].sequences[3].sequence.block_table == batches[1].sequences[3].sequence.block_table
    grouped, flat = (bench.attention(batch)() for batch in batches)
    assert grouped.shape == (6, 4, 16)
    torch.testing.assert_close(grouped, flat, rtol=1e-4, atol=1e-5)
    assert float(flat.abs().max()) > 0.01
