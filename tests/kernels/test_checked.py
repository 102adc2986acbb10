"""Arguments that the interface does not allow are assertions, whichever backend would have taken them."""

from collections.abc import Callable

import pytest
import torch

from kernels.batch import AttentionBatch, Extend, KVShape, Node, Tail
from kernels.checked import CheckedKernels, CheckedPlan
from kernels.reference.backend import ReferenceKernels

SHAPE = KVShape(num_blocks=4, num_kv_heads=2, block_size=8, head_dim=16)
KERNELS = CheckedKernels(ReferenceKernels(torch.device("cpu")))
KV = torch.zeros(2, 4, 2, 8, 16)


def plan() -> CheckedPlan:
    """Two decode rows and an extend of three."""
    tails = [Tail([1], 4), Tail([2], 3)]
    return KERNELS.plan(AttentionBatch([11, 18, 24, 25, 26], tails, (), [Extend(3, 0, [3])]), SHAPE, torch.float32)


def decode(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
    KERNELS.decode_attention(q, kv, plan(), out)


CALLS: dict[str, Callable[[], object]] = {
    "fewer rows than the plan has": lambda: decode(torch.ones(1, 4, 16), KV, torch.empty(1, 4, 16)),
    "heads that no group is made of": lambda: decode(torch.ones(2, 3, 16), KV, torch.empty(2, 3, 16)),
    "a result of another dtype": lambda: decode(torch.ones(2, 4, 16), KV, torch.empty(2, 4, 16, dtype=torch.bfloat16)),
    "a result with gaps": lambda: decode(torch.ones(2, 4, 16), KV, torch.empty(2, 8, 16)[:, :4]),
    "a cache of another shape": lambda: decode(torch.ones(2, 4, 16), KV[:, :3], torch.empty(2, 4, 16)),
    "a cache with gaps": lambda: decode(torch.ones(2, 4, 16), KV.mT.contiguous().mT, torch.empty(2, 4, 16)),
    "decode rows as extends": lambda: KERNELS.extend_attention(torch.ones(2, 4, 16), KV, plan(), torch.empty(2, 4, 16)),
    "tables of another dtype": lambda: KERNELS.rope_and_write_kv(
        torch.ones(5, 8, 16), torch.ones(5, 1, 16).double(), torch.ones(5, 1, 16), KV, plan()
    ),
    "too few inputs": lambda: KERNELS.linear(torch.ones(2, 7), KERNELS.pack_linear(torch.ones(4, 8))),
    "a residual of another width": lambda: KERNELS.linear(
        torch.ones(2, 8), KERNELS.pack_linear(torch.ones(4, 8)), torch.ones(2, 8)
    ),
    "gate and up of different sizes": lambda: KERNELS.swiglu(
        torch.ones(2, 8), KERNELS.pack_linear(torch.ones(4, 8)), KERNELS.pack_linear(torch.ones(5, 8))
    ),
    "a norm's weight of another size": lambda: KERNELS.rms_norm(torch.ones(2, 8), torch.ones(4), 1e-5),
    "log-sum-exps of the parts first": lambda: KERNELS.merge(torch.ones(2, 4, 3, 16), torch.ones(3, 2, 4)),
    "log-sum-exps in bfloat16": lambda: KERNELS.merge(torch.ones(2, 4, 3, 16), torch.ones(2, 4, 3).bfloat16()),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_the_interface_does_not_allow(call: str) -> None:
    with pytest.raises(AssertionError):
        CALLS[call]()


BATCHES = {
    "one slot twice": AttentionBatch([8, 8], [Tail([1], 1), Tail([1], 1)]),
    "a slot behind the cache": AttentionBatch([32], [Tail([1], 1)]),
    "a block behind the cache": AttentionBatch([8], [Tail([4], 1)]),
    "more rows than slots": AttentionBatch([8], [Tail([1], 1)], (), [Extend(2, 0, [2])]),
    "more tokens than its blocks hold": AttentionBatch([8], [Tail([1], 9)]),
    "no token": AttentionBatch([8], [Tail([1], 0)]),
    "a node that no row reads": AttentionBatch([8], [Tail([1], 1)], [Node([2], [])]),
    "a node of an extend": AttentionBatch([8, 9], (), [Node([2], [0])], [Extend(2, 0, [1])]),
    "a node without blocks": AttentionBatch([8], [Tail([1], 1)], [Node([], [0])]),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_batches_that_make_no_step(batch: str) -> None:
    with pytest.raises(AssertionError):
        KERNELS.plan(BATCHES[batch], SHAPE, torch.float32)
