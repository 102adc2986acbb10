"""Draws the token of one row on a CPU, from what the filters leave of its distribution.

Row by row: a row of logits fits the second cache, all of them together do not, and nothing a row gets can depend on its
neighbours. Where filters cut, tokens are ranked by logit, equal ones by id, lowest first; the order of the filters is
min_p, top_k, top_p. One uniform number is looked up in the cumulative distribution.
"""

import numpy as np
import numpy.typing as npt

from engine.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

NUM_CANDIDATES = 1024
"""The filters look at this many best tokens, and at the whole vocabulary only if those do not settle it."""
STRETCH_TOKENS = 256
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class CpuDraw:
    """Memory for one row, used again and again."""

    def __init__(self) -> None:
        self._scaled: Floats = np.empty(0, dtype=np.float32)
        self._stretches: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)

    def draw(self, logits: Floats, best: float, params: SamplingParams, uniform: float) -> int:
        """logits: [vocab_size]; best: the largest of them, finite; uniform: in [0, 1)."""
        vocab_size = len(logits)
        if len(self._scaled) != vocab_size:
            self._scaled = np.empty(vocab_size, dtype=np.float32)
            self._stretches = np.arange(0, vocab_size, STRETCH_TOKENS)
        scaled = self._scaled
        # from the largest down, so that nothing overflows however low the temperature
        with np.errstate(over="ignore"):
            np.subtract(logits, np.float32(best), out=scaled)
            if params.temperature != 1.0:
                np.divide(scaled, np.float32(min(params.temperature, _MAX_FLOAT32)), out=scaled)
        # in (0, 1]: the first token whose cumulative sum reaches it has a share of its own
        share = 1.0 - uniform
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0  # all of them is no filter, and draws alike
        if top_k or params.top_p < 1.0 or params.min_p > 0.0:
            return _draw_filtered(scaled, share, top_k, params.top_p, params.min_p)
        return self._draw_plain(np.exp(scaled, out=scaled), share)

    def _draw_plain(self, shares: Floats, share: float) -> int:
        """In the order of ids: first which stretch of them, then which id."""
        bounds = np.add.reduceat(shares, self._stretches).cumsum(dtype=np.float64)
        target = share * bounds[-1]
        stretch = int(bounds.searchsorted(target))
        first = stretch * STRETCH_TOKENS
        rest = target - bounds[stretch - 1] if stretch else target
        within = shares[first : first + STRETCH_TOKENS].cumsum(dtype=np.float64)
        # the two sums of a stretch may differ in their last bits
        return first + int(within.searchsorted(min(rest, within[-1])))


def _draw_filtered(scaled: Floats, share: float, top_k: int, top_p: float, min_p: float) -> int:
    """scaled: [vocab_size], largest value 0. Values are sorted without their ids, which is several times faster: of
    those equal to the value that is drawn, the id is found by counting."""
    vocab_size = len(scaled)
    num_candidates = top_k or NUM_CANDIDATES
    is_by_mass = not top_k and not min_p > 0.0
    total = float(np.exp(scaled).sum(dtype=np.float64)) if is_by_mass else None
    rank = None
    # where not even the best one's share for each of the candidates would do, they need not be looked for
    if num_candidates < vocab_size and (total is None or num_candidates > top_p * total):
        first = vocab_size - num_candidates
        values = np.sort(np.partition(scaled, first)[first:])[::-1]
        rank = _find_rank(values, share, top_p, min_p, total, is_all=top_k > 0)
    if rank is None:
        values = np.sort(scaled)[::-1]
        rank = _find_rank(values, share, top_p, min_p, None, is_all=True)
        assert rank is not None
    value = values[rank]
    place = rank - np.count_nonzero(scaled > value)
    return int(np.flatnonzero(scaled == value)[place])


def _find_rank(
    values: Floats, share: float, top_p: float, min_p: float, total: float | None, *, is_all: bool
) -> int | None:
    """The rank drawn; None if the filters may keep more than `values`.

    values: the best of a row, best first. is_all: there are no others, or top_k keeps none of them. total: the mass of
    the whole row, if there is no filter but top_p. Every filter keeps a leading run of the ranking.
    """
    shares: Doubles = np.exp(values).astype(np.float64)
    cumulative = shares.cumsum()
    kept = int(np.count_nonzero(shares >= min_p))
    if is_all or kept < len(values):
        mass = float(cumulative[kept - 1])
    elif total is None:
        return None
    else:
        mass = total
    if top_p < 1.0:
        kept = min(kept, int(cumulative.searchsorted(top_p * mass)) + 1)
    if top_p * mass > cumulative[kept - 1]:
        return None
    target = share * cumulative[kept - 1]
    return min(int(cumulative.searchsorted(target)), kept - 1)
