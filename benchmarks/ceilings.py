"""What this machine can do at best: bytes a second that come from memory, and operations a second of a large product.

    python -m benchmarks.ceilings

Reading is measured by `csrc/read_bandwidth.cpp`, compiled here and now, over a buffer about as large as what a step of
the demo model reads, so that the last cache plays the same part in both: with small and with huge pages, on one thread
and on all, with and without asking for lines ahead of their use.
"""

import ctypes
import mmap
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.document import write
from engine.machine import available_cpus
from kernels.cpu.build import find_compiler

SOURCE = Path(__file__).parent / "csrc" / "read_bandwidth.cpp"
READ_BYTES = 320 << 20
COPY_BYTES = 1 << 30
PREFETCH_BYTES = 2048
MEASURE_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Gigabytes (10^9) a second."""

    huge_pages: bool
    num_threads: int
    plain: float
    prefetched: float

    @property
    def best(self) -> float:
        return max(self.plain, self.prefetched)


@dataclass(frozen=True, slots=True)
class Ceilings:
    num_threads: int
    readings: list[Reading]
    """Empty where nothing can be compiled."""
    copy_gb_s: float
    """Read and written bytes together; small pages."""
    matmul_tflops: dict[str, float]
    """By dtype, 2048 x 2048 x 2048, random numbers, all threads."""

    def read_gb_s(self, *, huge_pages: bool, num_threads: int) -> float:
        """The best that was reached; without a compiler what copying reads."""
        found = [r.best for r in self.readings if (r.huge_pages, r.num_threads) == (huge_pages, num_threads)]
        return max(found, default=self.copy_gb_s / 2)


class ReadKernel:
    """The compiled reader."""

    def __init__(self, compiler: str) -> None:
        """Raises subprocess.CalledProcessError and OSError if it cannot be had."""
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "read_bandwidth.so"
            flags = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
            subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
            self._read = ctypes.CDLL(str(library)).read_seconds
        self._read.restype = ctypes.c_double
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]

    def gb_s(self, buffer: "Buffer", num_threads: int, ahead_bytes: int) -> float:
        """The median of passes."""
        seconds = repeat(lambda: self._read(buffer.address, buffer.num_bytes, num_threads, 1, ahead_bytes))
        return buffer.num_bytes / seconds / 1e9


class Buffer:
    """Anonymous memory with every page its own."""

    def __init__(self, num_bytes: int, *, huge_pages: bool) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        array = np.frombuffer(self._memory, dtype=np.uint8)
        array[:] = 1
        self.address = array.ctypes.data


def repeat(seconds_of: Callable[[], float]) -> float:
    """The median of what the function says, called for about `MEASURE_S` after one call to warm up."""
    seconds_of()
    end = time.perf_counter() + MEASURE_S
    seconds = [seconds_of()]
    while time.perf_counter() < end:
        seconds.append(seconds_of())
    return float(np.median(seconds))


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_ceilings(num_threads: int | None = None) -> Ceilings:
    num_threads = num_threads or available_cpus()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    compiler = find_compiler()
    kernel = ReadKernel(compiler) if compiler else None
    readings = []
    for huge_pages in (False, True):
        buffer = Buffer(READ_BYTES, huge_pages=huge_pages)
        for threads in sorted({1, num_threads}):
            if kernel:
                plain, prefetched = (kernel.gb_s(buffer, threads, ahead) for ahead in (0, PREFETCH_BYTES))
                readings.append(Reading(huge_pages, threads, round(plain, 2), round(prefetched, 2)))
    source = torch.ones(COPY_BYTES // 4)
    target = torch.ones(COPY_BYTES // 4)
    copy_s = repeat(lambda: timed(lambda: target.copy_(source)))
    matmul = {name: round(_matmul_tflops(getattr(torch, name)), 3) for name in ("bfloat16", "float32")}
    torch.set_num_threads(threads_before)
    return Ceilings(num_threads, readings, round(2 * COPY_BYTES / copy_s / 1e9, 2), matmul)


def _matmul_tflops(dtype: torch.dtype) -> float:
    size = 2048
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / repeat(lambda: timed(lambda: a @ b)) / 1e12


def main() -> None:
    write(asdict(measure_ceilings()), None)


if __name__ == "__main__":
    main()
