"""The next token of each row, with the rules of `engine.cpu_draw` and without a sort.

Tokens are ranked by logit, equal ones by id, lowest first; min_p, top_k and top_p each keep a leading run of the
ranking. One uniform number, Philox(seed, choice, position), is looked up in the cumulative distribution of what they
leave: in the order of the ranking if there is a filter, of ids if not. So a seed draws here what it draws on a CPU.
With noise of its own added to every logit, and the largest taken, it would not, and 152,000 numbers would be needed
instead of one.

A place in the ranking is found by searching for its value: sixteen candidates divide what is left of the 31 bits of a
value, one pass over the row tells how many tokens, or how much of their mass, each has above it, and after eight passes
the value is known. What tokens of this value have above them is the same for all, so that the place among them is a
division.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.batch import DrawBatch
from kernels.triton.tiles import tiles_for

LAST_KEY = tl.constexpr(0x7FFFFFFF)


class DrawArrays(NamedTuple):
    """`kernels.batch.DrawBatch` on the device."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    """0: off; less than there are tokens."""
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
    positions: torch.Tensor


def draw(logits: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
    """As `kernels.interface.TokenDraw`."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    top_ks = np.where(batch.top_ks < vocab_size, batch.top_ks, 0)  # all of them is no filter, and draws alike
    arrays = DrawArrays(
        torch.from_numpy(batch.temperatures).to(device),
        torch.from_numpy(top_ks).to(device),
        torch.from_numpy(batch.top_ps).to(device),
        torch.from_numpy(batch.min_ps).to(device),
        torch.from_numpy(batch.seeds).to(device),
        torch.from_numpy(batch.choices).to(device),
        torch.from_numpy(batch.positions).to(device),
    )
    drawn = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    launch_draw(logits, arrays, drawn)
    return drawn


def launch_draw(logits: torch.Tensor, arrays: DrawArrays, drawn: torch.Tensor) -> None:
    """drawn: as `draw` returns it."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    assert drawn.is_contiguous()
    tiles = tiles_for(logits.device)
    draw_tokens[(num_rows,)](
        logits,
        *arrays,
        drawn,
        num_rows,
        VOCABULARY=vocab_size,
        TILE=tiles.draw_tokens,
        FILTER_TILE=tiles.search_tokens,
        **tiles.draw.options,
    )


@triton.jit
def uniform(seed, choice, position):
    """fp64 in [0, 1) with 53 random bits; the same as `engine.philox.uniforms`."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, choice.to(tl.uint32), choice.to(tl.uint32) * 0)
    bits = (first.to(tl.uint64) << 21) | (second.to(tl.uint64) >> 11)
    return bits.to(tl.int64).to(tl.float64) * (2.0**-53)


@triton.jit
def load_scaled(logits, first, best, temperature, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """A tile: where there are tokens, (logit - best) / temperature, and its key, which grows as the value falls."""
    ids = first + tl.arange(0, TILE)
    is_there = ids < VOCABULARY
    scaled = (tl.load(logits + ids, mask=is_there, other=float("-inf")) - best) / temperature
    keys = tl.where(is_there, tl.abs(scaled).to(tl.int32, bitcast=True), LAST_KEY)
    return is_there, scaled, keys


@triton.jit
def count_and_mass(logits, best, temperature, end_key, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """Of the tokens whose keys are below `end_key`: int32 and fp64."""
    count = tl.zeros([1], tl.int32)
    mass = tl.zeros([1], tl.float64)
    for first in range(0, VOCABULARY, TILE):
        _, scaled, keys = load_scaled(logits, first, best, temperature, VOCABULARY, TILE)
        is_in = keys < end_key
        count += tl.sum(is_in.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_in, tl.exp(scaled), 0.0), 0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def find_place(logits, best, temperature, goal, BY_MASS: tl.constexpr, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """The first place of the ranking at which the tokens so far, counted or their masses added, reach `goal`.

    goal: fp64, at least the first token's and at most that of all. Returns the place as (key, tokens of greater values,
    their mass, tokens of this value up to the place).
    """
    candidates = tl.arange(0, 16)
    key = tl.zeros([1], tl.int32)
    for digit in range(0, 8):
        shift = 28 - 4 * digit
        # of the first digit the upper half is negative and reaches nothing
        ends = key + ((candidates + 1) << shift) - 1
        reached = tl.zeros([16], tl.float64)
        for first in range(0, VOCABULARY, TILE):
            _, scaled, keys = load_scaled(logits, first, best, temperature, VOCABULARY, TILE)
            worth = tl.exp(scaled) if BY_MASS else tl.full([TILE], 1.0, tl.float32)
            is_in = keys[None, :] <= ends[:, None]
            reached += tl.sum(tl.where(is_in, worth[None, :], 0.0), 1).to(tl.float64)
        key += tl.min(tl.where(reached >= goal, candidates, 15), 0) << shift
    key = tl.sum(key, 0)
    count, mass = count_and_mass(logits, best, temperature, key, VOCABULARY, TILE)
    worth = tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64) if BY_MASS else 1.0
    rest = (goal - (mass if BY_MASS else count)) / worth
    return key, count, mass, tl.maximum(tl.ceil(rest).to(tl.int32), 1)


@triton.jit
def find_equal(logits, best, temperature, key, place, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """The id of the `place`th token, from 1, of those with this key; the last of them if there are fewer."""
    found = tl.zeros([1], tl.int32)
    before = tl.zeros([1], tl.int32)
    for first in range(0, VOCABULARY, TILE):
        _, _, keys = load_scaled(logits, first, best, temperature, VOCABULARY, TILE)
        is_equal = (keys == key).to(tl.int32)
        ranks = before + tl.cumsum(is_equal, 0)
        is_up_to = (is_equal > 0) & (ranks <= place)
        found = tl.maximum(found, tl.max(tl.where(is_up_to, first + tl.arange(0, TILE), 0), 0))
        before += tl.sum(is_equal, 0)
    return tl.sum(found, 0)


@triton.jit
def find_by_id(logits, best, temperature, share, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """The first id at which the masses of the ids so far reach `share` of all."""
    _num_tokens, total = count_and_mass(logits, best, temperature, LAST_KEY, VOCABULARY, TILE)
    goal = share * total
    found = tl.zeros([1], tl.int32)
    before = tl.zeros([1], tl.float64)
    for first in range(0, VOCABULARY, TILE):
        is_there, scaled, _ = load_scaled(logits, first, best, temperature, VOCABULARY, TILE)
        masses = tl.where(is_there, tl.exp(scaled), 0.0)
        mass = tl.sum(masses, 0).to(tl.float64)
        within = tl.cumsum(masses, 0).to(tl.float64)
        # the two sums of a tile may differ in their last bits
        goal_within = tl.minimum(goal - before, tl.max(within, 0))
        place = tl.min(tl.where(within >= goal_within, tl.arange(0, TILE), TILE - 1), 0)
        is_here = (before < goal) & (before + mass >= goal)
        found = tl.where(is_here, first + place, found)
        before += mass
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["num_rows"])
def draw_tokens(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    choices,
    positions,
    drawn,
    num_rows,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    FILTER_TILE: tl.constexpr,
):
    """Grid (rows). logits fp32 [rows, VOCABULARY], contiguous; of every other array one number a row.

    temperatures fp32, 0: the largest logit; top_ks int32, 0: off; top_ps fp64, 1: off; min_ps fp64, 0: off; seeds
    int64, choices int32, positions int64. drawn int64 [2, num_rows]: ids, and 1, or 0 if the largest logit is not
    finite or one is NaN, and what is drawn then is nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    largest = tl.full([1], float("-inf"), tl.float32)
    best_id = tl.zeros([1], tl.int32)
    num_nan = tl.zeros([1], tl.int32)
    for first in range(0, VOCABULARY, TILE):
        ids = first + tl.arange(0, TILE)
        tile = tl.load(logits + ids, mask=ids < VOCABULARY, other=float("-inf"))
        num_nan += tl.sum((tile != tile).to(tl.int32), 0)
        tile = tl.where(tile != tile, float("-inf"), tile)
        tile_best = tl.max(tile, 0)
        tile_id = tl.min(tl.where(tile == tile_best, ids, LAST_KEY), 0)
        best_id = tl.where(tile_best > largest, tile_id, best_id)
        largest = tl.maximum(largest, tile_best)
    best = tl.max(largest, 0)
    token = tl.sum(best_id, 0)
    is_good = (tl.sum(num_nan, 0) == 0) & (tl.abs(best) < float("inf"))
    temperature = tl.load(temperatures + row)
    if is_good & (temperature > 0.0):
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        min_p = tl.load(min_ps + row)
        # in (0, 1]: the first token whose cumulative mass reaches it has a mass of its own
        share = 1.0 - uniform(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            token = draw_filtered(logits, best, temperature, top_k, top_p, min_p, share, VOCABULARY, FILTER_TILE)
        else:
            token = find_by_id(logits, best, temperature, share, VOCABULARY, TILE)
    tl.store(drawn + row, token.to(tl.int64))
    tl.store(drawn + num_rows + row, is_good.to(tl.int64))


@triton.jit
def draw_filtered(logits, best, temperature, top_k, top_p, min_p, share, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    # how many tokens, and how much mass, min_p leaves; without it all
    kept_arr = tl.zeros([1], tl.int32)
    mass_arr = tl.zeros([1], tl.float64)
    for first in range(0, VOCABULARY, TILE):
        is_there, scaled, _ = load_scaled(logits, first, best, temperature, VOCABULARY, TILE)
        masses = tl.exp(scaled)
        is_in = is_there & (masses.to(tl.float64) >= min_p)
        kept_arr += tl.sum(is_in.to(tl.int32), 0)
        mass_arr += tl.sum(tl.where(is_in, masses, 0.0), 0).to(tl.float64)
    kept = tl.sum(kept_arr, 0)
    mass = tl.sum(mass_arr, 0)
    if (top_k > 0) & (top_k < kept):
        key, above, mass_above, place = find_place(
            logits, best, temperature, top_k.to(tl.float64), False, VOCABULARY, TILE
        )
        kept = top_k
        mass = mass_above + place * tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)
    if top_p < 1.0:
        key, above, mass_above, place = find_place(logits, best, temperature, top_p * mass, True, VOCABULARY, TILE)
        place = tl.minimum(place, kept - above)
        kept = above + place
        mass = mass_above + place * tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)
    key, above, mass_above, place = find_place(logits, best, temperature, share * mass, True, VOCABULARY, TILE)
    return find_equal(logits, best, temperature, key, tl.minimum(place, kept - above), VOCABULARY, TILE)
