"""What becomes of a stored answer that nobody reads: it goes on for a while, then it is paused, and at last it ends.

Decided without I/O; app/readers.py carries it out. Times are seconds of one monotonic clock.
"""

import enum
from dataclasses import dataclass

from app.limits import Limits


@dataclass(frozen=True, slots=True)
class GraceRules:
    grace_s: float
    """An answer goes on for so long when its last reader has gone,"""
    unread_tokens: int
    """and for no more tokens than these. Then it is paused."""
    paused_ttl_s: float
    """A paused answer waits for so long for a reader. Then it ends."""

    @classmethod
    def of(cls, limits: Limits) -> "GraceRules":
        return cls(limits.grace_s, limits.grace_tokens, limits.paused_ttl_s)


class Step(enum.Enum):
    PAUSE = enum.auto()
    GO_ON = enum.auto()
    END = enum.auto()


@dataclass(slots=True)
class Grace:
    """Of one answer. Whoever drives it carries out each step, and then says so in `paused_at`."""

    rules: GraceRules
    unread_since: float
    """When its last reader left, or it began; of no meaning while it is read."""
    num_read_tokens: int = 0
    """It had so many then."""
    num_readers: int = 0
    """On this gateway."""
    is_read_elsewhere: bool = False
    paused_at: float | None = None

    @property
    def is_read(self) -> bool:
        return self.num_readers > 0 or self.is_read_elsewhere

    def left(self, now: float, num_tokens: int) -> None:
        """Nobody reads it from now on."""
        self.unread_since, self.num_read_tokens = now, num_tokens

    def next_step(self, now: float, num_tokens: int) -> Step | None:
        """What is to be done now that it has so many tokens."""
        if self.is_read:
            return None if self.paused_at is None else Step.GO_ON
        if self.paused_at is not None:
            return Step.END if now - self.paused_at >= self.rules.paused_ttl_s else None
        is_over = now - self.unread_since >= self.rules.grace_s
        is_full = num_tokens - self.num_read_tokens >= self.rules.unread_tokens
        return Step.PAUSE if is_over or is_full else None
