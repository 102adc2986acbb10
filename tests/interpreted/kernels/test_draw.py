"""Draws without a sort give the tokens that the processor's own draw gives, from the same noise; that those follow the
distribution is tested there."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine import philox
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from kernels.triton import draw as draw_kernels
from kernels.triton.draw import draw, uniform
from kernels.triton.tiles import Tiles

SMALL = Tiles(draw_tokens=64, search_tokens=64)
"""So that a small vocabulary too has many tiles, and the last one is not full."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_kernels, "tiles_for", lambda device: SMALL)


def sequence(i: int, **params: Any) -> Sequence:
    return Sequence(
        "r", [1] * (1 + i % 5), SamplingParams(max_tokens=None, **params), (), i * 7919 - 40, 10**6, choice=i % 3
    )


def logits_like_a_model(num_rows: int, vocab_size: int) -> torch.Tensor:
    """A few likely tokens over a broad tail, rounded to bfloat16 so that many are equal."""
    generator = torch.Generator().manual_seed(vocab_size)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 3).bfloat16().float()


def assert_drawn_alike(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    expected = Sampler().sample(logits.clone(), sequences)
    assert Sampler(draw).sample(logits.clone(), sequences) == expected


@triton.jit
def write_uniforms(seeds, choices, positions, out):
    row = tl.program_id(0)
    drawn = uniform(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
    tl.store(out + row, drawn)


def test_the_noise_is_the_engines_to_the_bit() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    choices, positions = [0, 1, 2, 127, 3], [0, 1, 2**31, 2**33 + 5, 77]
    out = torch.empty(5, dtype=torch.float64)
    write_uniforms[(5,)](
        torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)),
        torch.tensor(choices, dtype=torch.int32),
        torch.tensor(positions),
        out,
    )
    assert out.tolist() == philox.uniforms(seeds, choices, positions).tolist()


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.0},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"top_k": 40, "top_p": 0.5},
    {"top_k": 140, "top_p": 0.95, "min_p": 0.001},
    {"top_k": 151},
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_filters(temperature: float) -> None:
    sequences = [sequence(i, temperature=temperature, **filters) for i, filters in enumerate(FILTERS)]
    assert_drawn_alike(logits_like_a_model(len(FILTERS), 150), sequences)


@pytest.mark.usefixtures("small_tiles")
def test_equal_logits_are_ranked_by_id() -> None:
    logits = torch.full((6, 150), 1.0)
    logits[:, 100] = 2.0
    params = [{"top_k": 2}, {"top_k": 60}, {"top_p": 0.3}, {"top_p": 0.9}, {"min_p": 0.3}, {}]
    assert_drawn_alike(logits, [sequence(i, temperature=1.0, **p) for i, p in enumerate(params)])


@pytest.mark.usefixtures("small_tiles")
def test_rows_without_a_largest_logit_are_faults_and_masked_ids_are_not_drawn() -> None:
    logits = logits_like_a_model(7, 150)
    logits[0, 70], logits[1], logits[2, 5] = math.nan, -math.inf, math.inf
    logits[3:6, 2:] = -math.inf
    params = [{}, {}, {}, {"top_k": 9}, {"top_p": 0.99}, {}, {"temperature": 1e30}]
    assert_drawn_alike(logits, [sequence(i, **{"temperature": 1.0, **p}) for i, p in enumerate(params)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_everything_at_once_over_a_large_vocabulary(seed: int) -> None:
    choose = random.Random(seed)
    sequences = [
        sequence(
            97 * seed + i,
            temperature=choose.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=choose.choice([0, 0, 1, 5, 50, 20_000]),
            top_p=choose.choice([1.0, 0.9, 0.5, 0.0]),
            min_p=choose.choice([0.0, 0.05, 0.5]),
        )
        for i in range(30)
    ]
    assert_drawn_alike(logits_like_a_model(30, 20_000 + seed), sequences)
