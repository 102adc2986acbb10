"""Answers that are not stored and that only their own websocket can continue: the latest one of each lane."""

from app.response_plan import Parent
from app.started import Started

MAX_LANES = 64
"""Beyond that the lane that has been idle for the longest time is forgotten."""


class UnstoredLanes:
    """Of one websocket."""

    def __init__(self) -> None:
        self._latest: dict[str | None, tuple[str, Parent]] = {}

    @property
    def parents(self) -> dict[str, Parent]:
        """By response id."""
        return dict(self._latest.values())

    def ended(self, lane: str | None, started: Started | None) -> None:
        """The lane's answer has ended; None: it was no answer of the lane's own."""
        self._latest.pop(lane, None)
        if started is None or started.run.is_stored or started.run.response.is_running:
            return
        self._latest[lane] = (started.run.response.id, started.as_parent())
        if len(self._latest) > MAX_LANES:
            del self._latest[next(iter(self._latest))]
