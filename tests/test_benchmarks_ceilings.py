"""What the machine reaches."""

import mmap
from pathlib import Path

import pytest

from benchmarks import ceilings
from benchmarks.ceilings import Buffer, ReadKernel, repeat
from tests.kernels.libraries import compiler


def test_a_buffer_is_read_by_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "MEASURE_S", 0)
    kernel = ReadKernel(str(compiler()))
    buffer = Buffer(5 * mmap.PAGESIZE, huge_pages=False)
    assert all(kernel.gb_s(buffer, threads, ahead) > 0 for threads in (1, 2, 3) for ahead in (0, 2048))


def test_every_page_of_a_buffer_is_its_own() -> None:
    """The page of zeros that untouched ones share would stay in the nearest cache."""
    before = resident_bytes()
    buffer = Buffer(64 << 20, huge_pages=False)
    assert resident_bytes() - before > buffer.num_bytes * 0.9


def test_what_is_said_is_the_median_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "MEASURE_S", 1)
    clock = iter([0.0, 0.5, 0.9, 1.1])
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(clock))
    seconds = iter([100.0, 3.0, 1.0, 2.0])
    assert repeat(lambda: next(seconds)) == 2.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
