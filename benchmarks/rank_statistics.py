"""Whether measurements of one kind tend to be smaller than of another: Mann and Whitney's U, as area and interval."""

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.document import Document

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95


def wins(less: Sequence[float], more: Sequence[float]) -> np.ndarray:
    """[len(less), len(more)]: 1 where the first is smaller, 1/2 where both are equal, else 0."""
    a, b = np.asarray(less)[:, None], np.asarray(more)[None, :]
    return (a < b) + 0.5 * (a == b)


def area(less: Sequence[float], more: Sequence[float], *, seed: int = 0) -> Document:
    """How well a threshold would tell both kinds apart: 1/2 if not at all, 1 if all of `less` are the smaller ones.

    `less[i]` and `more[i]` were measured near each other: the interval (percentiles of a bootstrap) resamples such
    pairs. `p` is of the U test in its normal approximation, two-sided, and does not know of pairs.
    """
    table = wins(less, more)
    n, m = table.shape
    if n != m or n < 2:
        raise ValueError(f"pairs are needed, at least 2; got {n} and {m} measurements")
    u = float(table.sum())
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    chance = np.random.default_rng(seed)
    areas = []
    for _ in range(NUM_RESAMPLES):
        drawn = chance.integers(n, size=n)
        areas.append(table[np.ix_(drawn, drawn)].mean())
    low, high = np.quantile(areas, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return {
        "auc": round(u / (n * m), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "confidence": CONFIDENCE,
        "u": u,
        "p": float(f"{math.erfc(abs(z) / math.sqrt(2)):.3g}"),
    }
