"""The KV cache of one process: all blocks of the device, those of the host tier, and moves between them."""

import torch

from engine.host_cache import HostCache
from engine.kv_memory import allocate_blocks
from engine.scheduled_batch import Transfers
from kernels.batch import KVShape
from kernels.interface import BlockMoves
from kernels.kv_format import cache_dtype, layer_sizes


class KVTensors:
    """`kv`: zeros at first, a layer's cache for each of the layers, [num_layers, 2, num_blocks, num_kv_heads, ...] as
    `kernels.interface` has it; `shape`: of a layer's."""

    def __init__(
        self,
        num_layers: int,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device,
        moves: BlockMoves,
        num_host_blocks: int,
    ) -> None:
        """dtype: the model's."""
        self.shape = shape
        self.kv = allocate_blocks((num_layers, *layer_sizes(shape)), cache_dtype(shape, dtype), device)
        self._moves = moves
        self.host = HostCache(self.kv, num_host_blocks, moves) if num_host_blocks else None

    def move(self, transfers: Transfers) -> None:
        """Swaps out, then swaps in, then copies, before anything of the step is written."""
        if transfers.swap_outs or transfers.swap_ins:
            assert self.host is not None, f"{transfers} without a host tier"
            if transfers.swap_outs:
                self.host.swap_out(transfers.swap_outs)
            if transfers.swap_ins:
                self.host.swap_in(transfers.swap_ins)
        if transfers.copies:
            sources, targets = [copy.source for copy in transfers.copies], [copy.target for copy in transfers.copies]
            self._moves.copy_blocks(self.kv, sources, targets)
