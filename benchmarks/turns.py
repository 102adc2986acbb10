"""Times several things in turn, so that what else the machine does falls on all of them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Step = Callable[[], Any]


@dataclass(slots=True)
class Times:
    clock_ms: list[float] = field(default_factory=list)
    processor_ms: list[float] = field(default_factory=list)
    """Of all threads together: on a busy machine it says more than the clock."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.clock_ms)

    @property
    def processor_median_ms(self) -> float:
        return statistics.median(self.processor_ms)

    def __str__(self) -> str:
        spread = f"({min(self.clock_ms):.1f} - {max(self.clock_ms):.1f})"
        return f"{self.median_ms:7.1f} {spread}, processor {self.processor_median_ms:.1f}"


def take_turns(steps: Sequence[Step], num_rounds: int) -> list[Times]:
    """One for each step; a round more warms up. Every other round goes backwards, so that nobody always follows the
    same neighbour."""
    times = [Times() for _ in steps]
    for number in range(num_rounds + 1):
        order = range(len(steps)) if number % 2 else reversed(range(len(steps)))
        for i in order:
            start, processor_start = time.perf_counter(), time.process_time()
            steps[i]()
            if number:
                times[i].clock_ms.append((time.perf_counter() - start) * 1000)
                times[i].processor_ms.append((time.process_time() - processor_start) * 1000)
    return times


def ratio(times: Times, base: Times, *, of_processor: bool = False) -> float:
    """The median of the ratios within a round."""
    a, b = (t.processor_ms if of_processor else t.clock_ms for t in (times, base))
    return statistics.median(x / y for x, y in zip(a, b, strict=True))
