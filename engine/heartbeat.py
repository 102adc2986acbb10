"""Counts for how long another process was silent. No torch."""

from dataclasses import dataclass


@dataclass(slots=True)
class Heartbeat:
    """Counts the time for which the other one was silent while somebody listened."""

    timeout_s: float
    interval_s: float
    """Between two looks."""
    looked_at_s: float
    silent_s: float = 0.0

    def beat(self) -> None:
        """The other one said something."""
        self.silent_s = 0.0

    def look(self, now_s: float) -> bool:
        """Whether it has been silent for too long.

        A look that comes late, or a clock that jumps, is no sign of the other one: whoever looks was stopped itself.
        """
        self.silent_s += min(max(0.0, now_s - self.looked_at_s), 2 * self.interval_s)
        self.looked_at_s = now_s
        return self.silent_s >= self.timeout_s
