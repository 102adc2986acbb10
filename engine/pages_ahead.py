"""Pages of a KV cache that are taken from the system before blocks need them."""

import os
import threading
from collections.abc import Callable

import torch

AHEAD_BYTES = 512 * 2**20
PAGE_BYTES = 2 * 2**20
LEAST_URGENT = 19


class PagesAhead:
    """Keeps `ahead_bytes` behind the highest block that was used: while the processor has nothing else to do.

    The first write to a page costs up to 2 ms, and the blocks of one page are spread over 2 * num_layers of them. All
    that may ever be needed is not taken at the start: an idle server would hold gigabytes. Blocks are used in order
    of their ids at first.
    """

    def __init__(self, kv: torch.Tensor, touch: Callable[[int, int], None], ahead_bytes: int = AHEAD_BYTES) -> None:
        """kv: [num_layers, 2, num_blocks, ...]; `touch(address, num_bytes)` may be called from another thread."""
        self._kv = kv
        self._touch = touch
        planes = kv.shape[0] * kv.shape[1]
        self._plane_bytes = kv[0, 0].numel() * kv.itemsize
        self._block_bytes = self._plane_bytes // kv.shape[2]
        self._num_ahead = -(-ahead_bytes // (planes * self._block_bytes))
        self._num_at_once = -(-PAGE_BYTES // self._block_bytes)
        self._num_taken = 0
        self._thread: threading.Thread | None = None

    @property
    def num_blocks_taken(self) -> int:
        """From the first one on, those on their way included."""
        return self._num_taken

    def use(self, block_id: int) -> None:
        """Begins to take what is missing behind this block, unless that is little, or something is being taken."""
        wanted = min(block_id + 1 + self._num_ahead, self._kv.shape[2])
        missing = wanted - self._num_taken
        if missing <= 0 or (missing < self._num_at_once and wanted < self._kv.shape[2]):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        first, self._num_taken = self._num_taken, wanted
        self._thread = threading.Thread(target=self._take, args=(first, wanted), name="pages-ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being taken."""
        if self._thread is not None:
            self._thread.join()

    def _take(self, first: int, end: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_URGENT)
        address = self._kv.data_ptr()
        for block_id in range(first, end, self._num_at_once):
            num_bytes = min(self._num_at_once, end - block_id) * self._block_bytes
            for plane in range(self._kv.shape[0] * self._kv.shape[1]):
                self._touch(address + plane * self._plane_bytes + block_id * self._block_bytes, num_bytes)
