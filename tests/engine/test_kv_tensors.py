"""The order of a step's moves: out, in, then copies, so that room may be used again at once."""

import pytest
import torch

from engine.kv_tensors import KVTensors
from engine.scheduled_batch import BlockCopy, SwapIn, SwapOut, Transfers
from kernels import blocks
from kernels.batch import KVShape


def make(num_host_blocks: int = 2) -> KVTensors:
    """Block i holds the number i everywhere."""
    tensors = KVTensors(2, KVShape(6, 1, 8, 4), torch.float32, torch.device("cpu"), blocks, num_host_blocks)
    assert tensors.kv.shape == (2, 2, 6, 1, 8, 4)
    assert not tensors.kv.any()
    tensors.kv += torch.arange(6.0)[:, None, None, None]
    return tensors


def held(tensors: KVTensors) -> list[float]:
    of_blocks = tensors.kv.transpose(0, 2).flatten(1)
    assert torch.equal(of_blocks.amin(1), of_blocks.amax(1))
    return of_blocks[:, 0].tolist()


def test_room_that_is_made_is_used_in_the_same_step() -> None:
    tensors = make()
    tensors.move(Transfers(swap_outs=(SwapOut(3, 1),)))
    assert held(tensors) == [0, 1, 2, 3, 4, 5]
    # 4 makes room for what 3 held, of which 5 becomes a copy
    tensors.move(Transfers((SwapOut(4, 0),), (SwapIn(1, 4),), (BlockCopy(4, 5),)))
    assert held(tensors) == [0, 1, 2, 3, 3, 3]
    tensors.move(Transfers(swap_ins=(SwapIn(0, 1),)))
    assert held(tensors) == [0, 4, 2, 3, 3, 3]


def test_records_of_a_quantised_cache_move_whole() -> None:
    """8 tokens of 4 values, and their scales, of 3 heads."""
    shape = KVShape(6, 3, 8, 4, "int8")
    tensors = KVTensors(2, shape, torch.bfloat16, torch.device("cpu"), blocks, 1)
    assert (tensors.kv.shape, tensors.kv.dtype) == ((2, 2, 6, 3, 8 * 4 + 8 * 2), torch.uint8)
    tensors.kv.copy_(torch.arange(tensors.kv.numel()).view(tensors.kv.shape) * 7 % 251)
    before = tensors.kv.clone()
    tensors.move(Transfers((SwapOut(4, 0),), (), (BlockCopy(1, 4),)))
    tensors.move(Transfers(swap_ins=(SwapIn(0, 2),)))
    assert torch.equal(tensors.kv, before[:, :, [0, 1, 4, 3, 1, 5]])


def test_a_swap_without_a_host_tier_is_an_error() -> None:
    tensors = make(0)
    assert tensors.host is None
    tensors.move(Transfers(copies=(BlockCopy(1, 2),)))
    assert held(tensors) == [0, 1, 1, 3, 4, 5]
    with pytest.raises(AssertionError, match="without a host tier"):
        tensors.move(Transfers(swap_outs=(SwapOut(1, 0),)))
