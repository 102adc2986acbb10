"""Moves of blocks by Triton: the cases that `kernels.blocks` has to meet too, and blocks of more than one tile."""

import pytest
import torch

from kernels import blocks as torch_blocks
from kernels.triton import blocks

BLOCK = (3, 16, 100)
"""KV heads, tokens and head size: more values than one program moves, and no multiple of them."""


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.uint8], ids=str)
def kv(request: pytest.FixtureRequest) -> torch.Tensor:
    """2 layers of 7 blocks; no two numbers are equal in float32. Of bytes: as records of int8."""
    if request.param == torch.uint8:
        return torch.arange(2 * 2 * 7 * 3 * 1632).view(2, 2, 7, 3, 1632).mul(7).remainder(251).to(torch.uint8)
    return torch.arange(2 * 2 * 7 * 3 * 16 * 100).view(2, 2, 7, *BLOCK).to(request.param)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([4], [6]), ([1, 2], [3, 0]), ([2, 2, 2], [3, 4, 5]), ([1, 2], [2, 1]), ([3, 4, 5], [4, 5, 6])],
    ids=["one", "some", "one to several", "exchanged", "a chain"],
)
def test_copies_read_every_source_before_a_target_is_written(
    kv: torch.Tensor, sources: list[int], targets: list[int]
) -> None:
    expected = kv.clone()
    torch_blocks.copy_blocks(expected, sources, targets)
    blocks.copy_blocks(kv, sources, targets)
    assert torch.equal(kv, expected)


def test_blocks_come_back_as_they_went(kv: torch.Tensor) -> None:
    before, ids = kv.clone(), torch.tensor([6, 1, 3])
    gathered = blocks.gather_blocks(kv, ids)
    assert torch.equal(gathered, before[:, :, [6, 1, 3]])
    staging = torch.empty_like(gathered)
    assert blocks.gather_blocks(kv, ids, out=staging).data_ptr() == staging.data_ptr()
    assert torch.equal(staging, gathered)
    kv[:, :, [6, 1, 3]] = 0
    blocks.scatter_blocks(kv, ids, staging)
    assert torch.equal(kv, before)


def test_blocks_of_another_size_are_refused(kv: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        blocks.scatter_blocks(kv, torch.tensor([1]), torch.zeros(2, 2, 1, 3, 16, 99, dtype=kv.dtype))
