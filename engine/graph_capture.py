"""What a function launches, recorded once and launched again by one call."""

from collections.abc import Callable
from typing import Protocol

import torch


class GraphCapture(Protocol):
    def capture(self, launch: Callable[[], object]) -> Callable[[], object]:
        """`launch` is called once for what it compiles and allocates, and then recorded; what comes back launches the
        same. What it reads and writes must stay where it is; what it allocates is used by other graphs too."""


class CudaGraphCapture:
    """CUDA graphs with one pool of memory, for replays one after the other. Not run on a device yet."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, launch: Callable[[], object]) -> Callable[[], object]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            launch()
        return graph.replay
