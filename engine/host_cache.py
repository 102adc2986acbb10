"""Keys and values of blocks in host memory, and their way there and back."""

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.kv_memory import allocate_host_blocks
from engine.scheduled_batch import SwapIn, SwapOut
from engine.swap_cost import SwapTime
from kernels import blocks
from kernels.interface import BlockMoves

MEASURED_BLOCKS = 32
MEASUREMENTS = 3


class HostCache:
    """`num_blocks` slots for blocks of `kv`, the device's [num_layers, 2, blocks, num_kv_heads, ...].

    A step's blocks move together, in one gather and one scatter for all layers.
    """

    def __init__(self, kv: torch.Tensor, num_blocks: int, moves: BlockMoves = blocks) -> None:
        """moves: of the device; the host's own blocks are moved by torch."""
        self._kv = kv
        self._moves = moves
        self._on_gpu = kv.is_cuda
        sizes = (*kv.shape[:2], num_blocks, *kv.shape[3:])
        self._host = allocate_host_blocks(sizes, kv.dtype, for_gpu=self._on_gpu)

    def swap_out(self, swaps: Sequence[SwapOut]) -> None:
        """Returns when the host has them: their blocks may be written from then on."""
        gathered = self._moves.gather_blocks(self._kv, self._index(swap.source for swap in swaps))
        if self._on_gpu:
            gathered = self._staging(len(swaps)).copy_(gathered)
        blocks.scatter_blocks(self._host, torch.tensor([swap.target for swap in swaps]), gathered)

    def swap_in(self, swaps: Sequence[SwapIn]) -> None:
        """What the device computes after this call finds them; the host's slots are as they were."""
        slots = torch.tensor([swap.source for swap in swaps])
        if self._on_gpu:
            staging = blocks.gather_blocks(self._host, slots, out=self._staging(len(swaps)))
            gathered = staging.to(self._kv.device, non_blocking=True)
        else:
            gathered = blocks.gather_blocks(self._host, slots)
        self._moves.scatter_blocks(self._kv, self._index(swap.target for swap in swaps), gathered)

    def measure(self, clock: Callable[[], float] = time.perf_counter) -> SwapTime:
        """What a step pays for swapping and what each block adds, from moving one block and some; the best of three.

        To be called before anything is stored: it leaves zeros where zeros were. Both ways are timed, and the half of
        that is one way.
        """
        num_blocks = min(MEASURED_BLOCKS, self._host.shape[2], self._kv.shape[2])
        one, some = (self._measure(count, clock) for count in (1, num_blocks))
        block_s = max(some - one, 0.0) / (num_blocks - 1) if num_blocks > 1 else one
        return SwapTime(step_s=max(one - block_s, 0.0), block_s=block_s)

    def _measure(self, num_blocks: int, clock: Callable[[], float]) -> float:
        """Seconds for so many blocks in one direction."""
        outs = [SwapOut(i, i) for i in range(num_blocks)]
        ins = [SwapIn(i, i) for i in range(num_blocks)]
        times = []
        for _ in range(MEASUREMENTS):
            start = clock()
            self.swap_out(outs)
            self.swap_in(ins)
            if self._on_gpu:
                torch.cuda.synchronize(self._kv.device)
            times.append((clock() - start) / 2)
        return min(times)

    def _index(self, block_ids: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(block_ids), dtype=torch.int64, device=self._kv.device)

    def _staging(self, num_blocks: int) -> torch.Tensor:
        """Pinned; torch keeps such memory and gives it out again once the device has done with it."""
        sizes = (*self._kv.shape[:2], num_blocks, *self._kv.shape[3:])
        return torch.empty(sizes, dtype=self._kv.dtype, pin_memory=True)
