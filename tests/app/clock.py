"""A clock that a test sets."""

from dataclasses import dataclass

NOW = 1_800_000_000.0
"""Seconds since 1970."""


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now
