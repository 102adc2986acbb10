"""Moves of whole blocks of a cache, kv [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim], or of records,
uint8 [num_layers, 2, num_blocks, num_kv_heads, block_bytes], on any device.

All layers and all blocks of a step in one call. Block ids that are tensors: int64 [num], on the cache's device.
"""

from collections.abc import Sequence

import torch


def copy_blocks(kv: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Every source is read before a target is written, so a block may be both. No target comes twice."""
    if kv.device.type == "cpu":
        # a step copies one block or two, for which torch's operators take three times as long
        num_layers, _, num_blocks = kv.shape[:3]
        blocks = kv.view(num_layers * 2, num_blocks, -1).view(torch.uint8).numpy()
        blocks[:, targets] = blocks[:, sources]
    else:
        ids = torch.tensor([sources, targets], dtype=torch.int64, device=kv.device)
        scatter_blocks(kv, ids[1], gather_blocks(kv, ids[0]))


def gather_blocks(kv: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[num_layers, 2, num, num_kv_heads, ...], contiguous, into `out` if it is given (swap out)."""
    if out is None:
        return kv.index_select(2, block_ids)
    return torch.index_select(kv, 2, block_ids, out=out)


def scatter_blocks(kv: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """What `gather_blocks` made, on the cache's device, to these blocks, none of which comes twice (swap in)."""
    kv.index_copy_(2, block_ids, blocks)
