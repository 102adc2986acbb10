"""Copies of blocks and their way to another memory and back: exactly what was there, and nothing else moves."""

import pytest
import torch

from kernels.blocks import copy_blocks, gather_blocks, scatter_blocks


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.uint8], ids=str)
def kv(request: pytest.FixtureRequest) -> torch.Tensor:
    """3 layers of 9 blocks of 8 tokens, 2 heads of 5; no two numbers are equal in float32. Of bytes: as records."""
    if request.param == torch.uint8:
        return torch.arange(3 * 2 * 9 * 2 * 56).view(3, 2, 9, 2, 56).mul(7).remainder(251).to(torch.uint8)
    return torch.arange(3 * 2 * 9 * 2 * 8 * 5).view(3, 2, 9, 2, 8, 5).to(request.param)


def ids(*block_ids: int) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([4], [7]), ([1, 2, 8], [3, 0, 5]), ([2, 2, 2], [3, 4, 5]), ([1, 2], [2, 1]), ([3, 4, 5], [4, 5, 6])],
    ids=["one", "some", "one to several", "exchanged", "a chain"],
)
def test_copies_read_every_source_before_a_target_is_written(
    kv: torch.Tensor, sources: list[int], targets: list[int]
) -> None:
    before = kv.clone()
    copy_blocks(kv, sources, targets)
    origin = list(range(9))
    for source, target in zip(sources, targets, strict=True):
        origin[target] = source
    assert torch.equal(kv, before[:, :, origin])


def test_blocks_come_back_as_they_went(kv: torch.Tensor) -> None:
    before = kv.clone()
    gathered = gather_blocks(kv, ids(6, 1, 3))
    assert torch.equal(gathered, before[:, :, [6, 1, 3]])
    assert gathered.is_contiguous()
    staging = torch.empty_like(gathered)
    assert gather_blocks(kv, ids(6, 1, 3), out=staging).data_ptr() == staging.data_ptr()
    assert torch.equal(staging, gathered)
    kv[:, :, [6, 1, 3]] = 0
    scatter_blocks(kv, ids(6, 1, 3), staging)
    assert torch.equal(kv, before)
    scatter_blocks(kv, ids(0, 8, 4), staging)
    assert torch.equal(kv, before[:, :, [6, 1, 2, 3, 3, 5, 6, 7, 1]])
