"""The device that is measured, and how a time is taken on it; in a dry run the processor, and nothing is done twice."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from engine.graph_capture import CudaGraphCapture, GraphCapture

Call = Callable[[], object]
RANDOM_VALUES = 1 << 26
MIN_ROUNDS, MAX_ROUNDS = 3, 60


class OutOfTime(Exception):
    """A section's time is used up; what it has found so far stands."""


class Clock:
    """The time that a section has left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.seconds = seconds

    def check(self) -> None:
        """Raises OutOfTime. Before each thing that can be left out."""
        if time.monotonic() > self._end:
            raise OutOfTime(f"after {self.seconds:.0f} s")


class NoGraphs:
    """Launches are made one by one each time."""

    def capture(self, launch: Call) -> Call:
        return launch


@dataclass(frozen=True, slots=True)
class Timing:
    ms: float
    """The median."""
    spread: float
    """From the 10th to the 90th of a hundred, over the median: differences below it are noise."""

    def document(self) -> dict[str, float]:
        return {"ms": round(self.ms, 5), "spread": round(self.spread, 3)}


class Device:
    def __init__(self, *, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.device = torch.device("cpu" if is_dry else "cuda")
        self._generator = torch.Generator(self.device).manual_seed(1)
        # written before each call, so that none finds in the L2 what the one before it left there
        self._flush = None if is_dry else torch.empty(2 * self.l2_bytes, dtype=torch.uint8, device=self.device)

    @property
    def l2_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def random(self, *sizes: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(sizes, generator=self._generator, device=self.device, dtype=torch.float32)
        return values.mul_(scale).to(dtype)

    def fill(self, tensor: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Random numbers, which repeat after some hundred megabytes: zeros are computed with faster."""
        flat = tensor.view(-1)
        some = self.random(min(RANDOM_VALUES, flat.numel()), dtype=tensor.dtype, scale=scale)
        for part in flat.split(RANDOM_VALUES):
            part.copy_(some[: part.numel()])
        return tensor

    def synchronize(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Memory that nothing holds any more."""
        if not self.is_dry:
            torch.cuda.empty_cache()

    def graph_capture(self) -> GraphCapture:
        return NoGraphs() if self.is_dry else CudaGraphCapture()

    def capture(self, call: Call) -> Call:
        """The call's launches as one graph; what it reads and writes must stay where it is."""
        return self.graph_capture().capture(call)

    def warm_up(self, calls: Iterable[Call]) -> None:
        """Compiles and loads what has to be, and makes memory that is used again as large as it will be, before a graph
        has its address. Not in a dry run."""
        if not self.is_dry:
            for call in calls:
                call()

    def wall_ms(self, call: Call) -> float:
        """As a person waits for it, who wants to see the result."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return (time.perf_counter() - start) * 1000

    def times(self, calls: Mapping[str, Call], seconds: float = 0.25) -> dict[str, Timing]:
        """In turn, so that what else the machine does falls on all of them, for about so long altogether."""
        if self.is_dry:
            return {name: Timing(self.wall_ms(call), 0.0) for name, call in calls.items()}
        self.warm_up(calls.values())
        round_ms = sum(self.wall_ms(call) for call in calls.values())
        num_rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds * 1000 / round_ms)))
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(num_rounds):
            for name, call in calls.items():
                taken[name].append(self._event_ms(call))
        return {name: _timing(ms) for name, ms in taken.items()}

    def _event_ms(self, call: Call) -> float:
        assert self._flush is not None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def _timing(ms: list[float]) -> Timing:
    median = statistics.median(ms)
    deciles = statistics.quantiles(ms, n=10)
    return Timing(median, (deciles[-1] - deciles[0]) / median)
