"""Moves of whole blocks, as `kernels.blocks` has them: all layers, and all blocks of a step, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

TILE_VALUES = 4096


def copy_blocks(kv: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """As `kernels.blocks.copy_blocks`. One launch; two, by way of a buffer, if a block is both source and target."""
    # two tensors: rows of one would be aligned now so and now so, and the kernel compiled for each
    source_ids = torch.tensor(sources, dtype=torch.int64, device=kv.device)
    target_ids = torch.tensor(targets, dtype=torch.int64, device=kv.device)
    if set(sources).isdisjoint(targets):
        _move(kv, kv, source_ids, target_ids)
    else:
        scatter_blocks(kv, target_ids, gather_blocks(kv, source_ids))


def gather_blocks(kv: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `kernels.blocks.gather_blocks`."""
    if out is None:
        out = kv.new_empty(*kv.shape[:2], len(block_ids), *kv.shape[3:])
    _move(kv, out, block_ids, None)
    return out


def scatter_blocks(kv: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """As `kernels.blocks.scatter_blocks`."""
    _move(blocks, kv, None, block_ids)


def _move(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor | None, target_ids: torch.Tensor | None
) -> None:
    """No ids: block i of the moved ones."""
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert (source.dtype, source.shape[3:]) == (target.dtype, target.shape[3:])
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    block_values = source[0, 0, 0].numel()
    grid = (len(ids), source.shape[0] * 2, triton.cdiv(block_values, TILE_VALUES))
    move_blocks[grid](
        source,
        target,
        source_ids,
        target_ids,
        source.shape[2],
        target.shape[2],
        BLOCK_VALUES=block_values,
        TILE=TILE_VALUES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["source_blocks", "target_blocks"])
def move_blocks(
    source,
    target,
    source_ids,
    target_ids,
    source_blocks,
    target_blocks,
    BLOCK_VALUES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (moved blocks, layers * 2, tiles of a block). source [layers * 2, source_blocks, BLOCK_VALUES], target
    likewise; ids [moved blocks], None: the blocks in their order."""
    moved = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    values = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_there = values < BLOCK_VALUES
    source_block = moved if source_ids is None else tl.load(source_ids + moved)
    target_block = moved if target_ids is None else tl.load(target_ids + moved)
    read = tl.load(source + (plane * source_blocks + source_block) * BLOCK_VALUES + values, mask=is_there)
    tl.store(target + (plane * target_blocks + target_block) * BLOCK_VALUES + values, read, mask=is_there)
