"""Where each of several runs begins, laid one behind the other."""

from collections.abc import Iterable
from itertools import accumulate


def starts_of(sizes: Iterable[int]) -> list[int]:
    """And where the last one ends."""
    return [0, *accumulate(sizes)]
