"""The comparison of static with continuous batching, over a tiny model."""

from pathlib import Path

import pytest
import torch

from benchmarks import continuous_batching
from benchmarks.continuous_batching import BATCH_SIZE, LONG, SHORT, Run, measure, skewed_lengths
from engine.config import EngineConfig
from engine.models.prepare import prepare
from tests.tiny_model import make_tiny


@pytest.mark.parametrize("seed", range(20))
def test_of_24_lengths_7_are_long_and_17_short(seed: int) -> None:
    lengths = skewed_lengths(seed)
    assert lengths == skewed_lengths(seed)
    assert sum(LONG[0] <= length <= LONG[1] for length in lengths) == 7
    assert sum(SHORT[0] <= length <= SHORT[1] for length in lengths) == 17


def test_utilisation_and_waste_are_shares_of_what_was_there() -> None:
    run = Run(num_slots=2, active=[2, 2, 1, 1], kv_allocated=64, kv_used=48, kv_sequences=4)
    assert run.utilisation == 6 / 8
    assert run.waste() == 16 / 64
    assert run.waste(reserved_tokens=24) == 48 / 96


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.usefixtures("one_thread")
def test_all_three_give_the_same_tokens_in_the_steps_that_their_batching_needs(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny", max_position_embeddings=1024)
    model = prepare(str(source), tmp_path / "state", "float32", lambda *_: None)
    config = EngineConfig(
        model_dir=str(model.path),
        device="cpu",
        dtype="float32",
        threads=1,
        num_blocks=400,
        max_num_seqs=BATCH_SIZE,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    figures = measure(model, config, num_requests=24, seed=1, num_runs=1, png=None)
    lengths = figures["requests"]["output_tokens"]
    assert lengths == skewed_lengths(1)
    assert figures["answers_that_start_alike"] == "24 of 24"
    longest_of_each = sum(max(lengths[i : i + BATCH_SIZE]) for i in range(0, 24, BATCH_SIZE))
    assert figures["static"]["steps"] == figures["generate"]["steps"] == longest_of_each
    assert figures["static"]["slot_utilisation"] == round(sum(lengths) / (BATCH_SIZE * longest_of_each), 4)
    assert sum(lengths) / BATCH_SIZE <= figures["continuous"]["steps"] < longest_of_each
    assert figures["continuous"]["slot_utilisation"] > figures["static"]["slot_utilisation"]
    waste = figures["kv_waste"]
    assert 0 < waste["paged"] < waste["reserved_for_the_longest"]["waste"] < waste["reserved_for_the_context"]["waste"]


def test_another_model_than_the_engines_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [
        prepare(str(make_tiny(tmp_path / str(seed), seed=seed)), tmp_path / "state", "float32", lambda *_: None)
        for seed in (0, 1)
    ]
    load = continuous_batching.load_hf_model
    monkeypatch.setattr(continuous_batching, "load_hf_model", lambda _model, dtype, **kw: load(models[1], dtype, **kw))
    config = EngineConfig(
        model_dir=str(models[0].path), device="cpu", dtype="float32", threads=1, num_blocks=200, max_num_seqs=BATCH_SIZE
    )
    with pytest.raises(RuntimeError, match="of 8 answers start alike"):
        measure(models[0], config, num_requests=8, seed=1, num_runs=1, png=None)
