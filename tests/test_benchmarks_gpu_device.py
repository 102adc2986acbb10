"""How a time is taken: in turn, the L2 overwritten before each, the median of what the device's own clock says."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_device
from benchmarks.gpu_device import Clock, Device, OutOfTime


class FakeEvents:
    """Events that read a clock which the timed calls set forward, and a record of what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.happened: list[str] = []
        events = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at_ms = -1.0

            def record(self) -> None:
                self.at_ms = events.now_ms

            def synchronize(self) -> None:
                events.happened.append("waited")

            def elapsed_time(self, end: "Event") -> float:
                return end.at_ms - self.at_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def call(self, name: str, *ms: float) -> gpu_device.Call:
        """Takes so long, one after the other, and the last for ever."""
        left = list(ms)

        def call() -> None:
            self.happened.append(name)
            self.now_ms += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_variants_take_turns_behind_a_flush_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    events = FakeEvents(monkeypatch)
    device = Device(is_dry=True)
    device.is_dry = False
    device._flush = SimpleNamespace(zero_=lambda: events.happened.append("flush"))  # type: ignore[assignment]
    # two calls warm up, then three rounds
    calls = {"a": events.call("a", 100.0, 100.0, 5.0, 90.0, 6.0), "b": events.call("b", 2.0)}
    monkeypatch.setattr(gpu_device, "MAX_ROUNDS", 3)
    times = device.times(calls)
    assert events.happened[:4] == ["a", "b", "a", "b"]
    assert events.happened[4:] == ["flush", "a", "waited", "flush", "b", "waited"] * 3
    assert (times["a"].ms, times["b"].ms, times["b"].spread) == (6.0, 2.0, 0.0)
    assert times["a"].spread > 1


def test_a_dry_run_calls_once() -> None:
    called: list[str] = []
    times = Device(is_dry=True).times({"a": lambda: called.append("a"), "b": lambda: called.append("b")})
    assert called == ["a", "b"]
    assert all(timing.ms >= 0 for timing in times.values())


def test_filled_memory_is_random_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device, "RANDOM_VALUES", 64)
    filled = Device(is_dry=True).fill(torch.zeros(3, 50), scale=2.0)
    assert (filled != 0).all()
    assert torch.equal(filled.view(-1)[64:128], filled.view(-1)[:64])


def test_a_section_without_time_begins_nothing() -> None:
    Clock(1e6).check()
    with pytest.raises(OutOfTime, match="after -1 s"):
        Clock(-1.0).check()
