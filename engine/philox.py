"""Philox4x32-10, a counter-based generator: the noise of a draw is a function of (seed, choice, position) alone.

No state is kept and no draw depends on another, so a request gives the same tokens alone, in any batch, and when it is
resubmitted after a crash. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits so that a product has room."""


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four words for each element. All arrays have one shape and hold words below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice, position)."""
    seed = np.array([s % 2**64 for s in seeds], dtype=np.uint64)
    choice, position = np.array(choices, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    counter = (position & _LOW, position >> _32, choice & _LOW, np.zeros_like(position))
    high, low, *_ = philox4x32(counter, (seed & _LOW, seed >> _32))
    bits = ((high << _32) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
