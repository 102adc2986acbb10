"""Blocks on their way to host memory and back. Two layers, blocks of 3 heads, 8 tokens, 4 numbers each."""

import pytest
import torch

from engine.host_cache import HostCache
from engine.scheduled_batch import SwapIn, SwapOut


def make_kv(num_blocks: int = 6) -> torch.Tensor:
    return torch.randn((2, 2, num_blocks, 3, 8, 4), generator=torch.Generator().manual_seed(1))


def test_blocks_come_back_bit_for_bit_in_every_layer():
    kv = make_kv()
    before = kv.clone()
    host = HostCache(kv, 3)
    host.swap_out([SwapOut(4, 2), SwapOut(1, 0)])
    kv[:, :, [1, 4]] = float("nan")
    host.swap_in([SwapIn(0, 5), SwapIn(2, 1)])
    assert torch.equal(kv[:, :, 5], before[:, :, 1])
    assert torch.equal(kv[:, :, 1], before[:, :, 4])
    assert torch.equal(kv[:, :, [0, 2, 3]], before[:, :, [0, 2, 3]])


def test_what_was_swapped_in_stays_on_the_host():
    kv = make_kv()
    before = kv.clone()
    host = HostCache(kv, 1)
    host.swap_out([SwapOut(2, 0)])
    for target in (3, 4):
        host.swap_in([SwapIn(0, target)])
    assert torch.equal(kv[:, :, 3], before[:, :, 2])
    assert torch.equal(kv[:, :, 4], before[:, :, 2])


def test_one_gather_and_one_scatter_for_all_blocks(monkeypatch):
    kv = make_kv()
    host = HostCache(kv, 3)
    calls = []
    for name in ("index_select", "index_copy_"):
        method = getattr(torch.Tensor, name)

        def count(tensor, *args, _name=name, _method=method):
            calls.append(_name)
            return _method(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, count)
    host.swap_out([SwapOut(i, i) for i in range(3)])
    host.swap_in([SwapIn(i, i) for i in range(3)])
    assert calls == ["index_select", "index_copy_"] * 2


def test_the_measured_time_is_a_step_and_so_much_for_each_block():
    kv = torch.zeros((2, 2, 50, 3, 8, 4))
    host = HostCache(kv, 40)
    times = iter([0.0, 0.5, 1.0, 1.3, 2.0, 2.4, 10.0, 16.5, 20.0, 30.0, 40.0, 50.0])
    cost = host.measure(lambda: next(times))
    # there and back: one block 0.3 s at best, 32 of them 6.5 s
    assert cost.block_s == pytest.approx((3.25 - 0.15) / 31)
    assert cost.step_s == pytest.approx(0.15 - (3.25 - 0.15) / 31)
    assert not kv.any()


def test_one_slot_can_be_measured_too():
    cost = HostCache(torch.zeros((2, 2, 5, 3, 8, 4)), 1).measure()
    assert cost.block_s > 0
    assert cost.step_s == 0


def test_blocks_go_through_pinned_memory_for_a_gpu(monkeypatch):
    """The same way with memory that is not pinned, as there need not be a GPU."""
    kv = make_kv()
    before = kv.clone()
    host = HostCache(kv, 3)
    staged = []

    def staging(num_blocks: int) -> torch.Tensor:
        staged.append(torch.full((2, 2, num_blocks, 3, 8, 4), float("nan")))
        return staged[-1]

    monkeypatch.setattr(host, "_on_gpu", True)
    monkeypatch.setattr(host, "_staging", staging)
    host.swap_out([SwapOut(4, 2), SwapOut(1, 0)])
    kv[:, :, [1, 4]] = float("nan")
    host.swap_in([SwapIn(0, 5), SwapIn(2, 1)])
    assert torch.equal(kv[:, :, 5], before[:, :, 1])
    assert torch.equal(kv[:, :, 1], before[:, :, 4])
    assert [tuple(tensor.shape) for tensor in staged] == [(2, 2, 2, 3, 8, 4)] * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_blocks_of_each_device_that_is_there_come_back_bit_for_bit(device):
    kv = make_kv().to(device)
    before = kv.clone()
    host = HostCache(kv, 3)
    assert host._host.is_pinned() == (device == "cuda")
    host.swap_out([SwapOut(4, 2), SwapOut(1, 0)])
    kv[:, :, [1, 4]] = float("nan")
    host.swap_in([SwapIn(0, 5), SwapIn(2, 1)])
    assert torch.equal(kv[:, :, 5], before[:, :, 1])
    assert torch.equal(kv[:, :, 1], before[:, :, 4])
