"""What nodes save is measured at the first start and kept."""

import os
from pathlib import Path

import pytest

from engine import attention_timing
from engine.attention_timing import SIZES, measure_nodes
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.shared_attention import USUAL_NODE_COST, NodeCost, NodeTiming
from tests.tiny_model import make_tiny

COST = NodeCost(read_s=1e-8, merge_s=2e-7, node_s=3e-6)
BACKENDS = {"compiled": {}, "torch": {"max_isa": "none"}, "reference": {"kernels": "reference"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path = tmp_path_factory.mktemp("model")
    return prepare(str(make_tiny(path / "tiny")), path / "state", "float32", lambda *_: None)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that were measured, each of which is found to cost `COST`."""
    backends: list[str] = []

    def measure(decoder, config, kv_shape):
        backends.append(decoder.backend)
        return [
            NodeTiming(
                nodes,
                tokens,
                readers,
                1.0,
                1.0 + nodes * (readers * tokens * 1e-8 - tokens * 1e-8 - readers * 2e-7 - 3e-6),
            )
            for nodes, tokens, readers in SIZES
        ]

    monkeypatch.setattr(attention_timing, "measure_nodes", measure)
    return backends


def start(model: PreparedModel, folder: Path, **settings) -> NodeCost:
    config = EngineConfig(model_dir=str(model.path), device="cpu", dtype="float32", num_blocks=8, threads=1)
    return ModelRunner(model, config.replace(kernels_dir=str(folder), max_isa="none", **settings)).node_cost


def assert_cost(cost: NodeCost) -> None:
    assert (cost.read_s, cost.merge_s, cost.node_s) == pytest.approx((COST.read_s, COST.merge_s, COST.node_s), rel=1e-3)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == attention_timing.__name__]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_timed_with_nodes_and_without(model, backend, monkeypatch):
    monkeypatch.setattr(attention_timing, "BUDGET_S", 0.0)
    config = EngineConfig(model_dir=str(model.path), device="cpu", dtype="float32", num_blocks=8, threads=1)
    runner = ModelRunner(model, config.replace(shared_attention="never", **BACKENDS[backend]))
    timings = measure_nodes(runner._decoder, model.manifest.config, runner._kv_shape)
    assert [(t.num_nodes, t.num_tokens, t.num_readers) for t in timings] == SIZES
    assert all(0.0 < t.nodes_s < 10.0 and 0.0 < t.flat_s < 10.0 for t in timings)


def test_the_first_start_measures_and_later_ones_read(model, measured, tmp_path, caplog):
    assert_cost(start(model, tmp_path / "kernels"))
    assert len(measured) == 1
    assert_cost(start(model, tmp_path / "kernels"))
    assert len(measured) == 1
    start(model, tmp_path / "kernels", block_size=32)
    start(model, tmp_path / "kernels", kernels="reference")
    start(model, tmp_path / "kernels", threads=2)
    assert len(measured) == 4, "other attention"
    assert warnings(caplog) == []


def test_nothing_is_measured_where_nothing_is_chosen(model, measured, tmp_path):
    for mode in ("always", "never"):
        assert start(model, tmp_path, shared_attention=mode) == USUAL_NODE_COST
    assert measured == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"read_s":-1.0,"merge_s":0,"node_s":0}', b"\xff"])
def test_a_file_that_is_of_no_use_is_written_anew(model, measured, content, tmp_path, caplog):
    start(model, tmp_path)
    [path] = tmp_path.glob("node-cost-*")
    path.write_bytes(content)
    assert_cost(start(model, tmp_path))
    [warning] = warnings(caplog)
    assert "measured again" in warning
    assert_cost(start(model, tmp_path))
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(model, measured, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert_cost(start(model, tmp_path / "file" / "kernels"))
    [warning] = warnings(caplog)
    assert "cannot be kept" in warning
    assert os.listdir(tmp_path) == ["file"]
