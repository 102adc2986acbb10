"""Drift of predictions, on numbers that are known and on a tiny model."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.kv_drift import Drift, measure
from engine.config import EngineConfig
from engine.models.prepare import prepare
from tests.tiny_model import make_tiny


def test_the_figures_of_two_positions() -> None:
    base = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()
    drift = Drift.between(other, base, torch.tensor([0, 1]))
    assert drift.perplexity == pytest.approx(math.sqrt(4 * 2))
    assert drift.ratio == pytest.approx(math.sqrt(8) / 2)
    assert drift.top1_agreement == 0.5
    # of the first: 1/2 ln 2 - 1/4 ln 2, of the second nothing
    assert drift.kl_nats == pytest.approx(math.log(2) / 8)


def test_a_tiny_model_is_compared_with_itself(tmp_path: Path) -> None:
    model = prepare(str(make_tiny(tmp_path / "hf")), tmp_path, "float32", lambda *_: None)
    text = tmp_path / "text"
    text.write_text("The line runs from the harbour to the lake. " * 12)
    config = EngineConfig(model_dir=str(model.path), kernels="reference", device="cpu", num_blocks=60)
    figures = measure(model, [text], config.replace(shared_attention="never"), ["auto", "int8"])["text"]
    assert (figures["auto"]["ratio"], figures["auto"]["top1_agreement"], figures["auto"]["kl_nats"]) == (1, 1, 0)
    assert (figures["auto"]["kv_bytes_per_token"], figures["int8"]["kv_bytes_per_token"]) == (512, 144)
    # a random model is sure of tokens that do not come
    assert figures["int8"]["ratio"] == pytest.approx(1, abs=0.1)
    assert 0 < figures["int8"]["kl_nats"] < 1e-2
