"""Timers that are due when the test says so."""

from collections.abc import Callable


class Timers:
    """What is to be called, and when."""

    def __init__(self) -> None:
        self.left: dict[float, Callable[[], None]] = {}

    def later(self, seconds: float, call: Callable[[], None]) -> "Timers.Timer":
        self.left[seconds] = call
        return Timers.Timer(self, seconds)

    def first(self) -> None:
        """It is due."""
        self.left.pop(min(self.left))()

    class Timer:
        def __init__(self, timers: "Timers", seconds: float) -> None:
            self._timers, self._seconds = timers, seconds

        def cancel(self) -> None:
            self._timers.left.pop(self._seconds, None)
