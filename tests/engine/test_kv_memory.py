"""Memory for keys and values is zero and of the size that was asked for."""

import torch

from engine.kv_memory import allocate_blocks, allocate_host_blocks

SIZES = (2, 2, 5, 3, 8, 4)


def test_blocks_are_zeros_that_keep_what_is_written():
    for kv in (
        allocate_blocks(SIZES, torch.bfloat16, torch.device("cpu")),
        allocate_host_blocks(SIZES, torch.bfloat16, for_gpu=False),
    ):
        assert (tuple(kv.shape), kv.dtype, kv.is_contiguous()) == (SIZES, torch.bfloat16, True)
        assert not kv.any()
        kv[1, 1, 4] = 7.0
        assert kv.sum(dtype=torch.float32) == 7.0 * 3 * 8 * 4
