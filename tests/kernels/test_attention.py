"""The CPU backend against plain torch: odd heads, ragged tails, nodes of every size, poison where nothing is."""

import math

import pytest
import torch

from kernels.batch import AttentionBatch, Extend, Node, Tail
from kernels.checked import CheckedKernels
from kernels.cpu.backend import CpuKernels
from kernels.cpu.plan import group_tails
from kernels.reference.backend import ReferenceKernels
from tests.kernels.pool import Pool, assert_near, exact


def backends() -> list[CheckedKernels]:
    return [CheckedKernels(CpuKernels(packs_linears=False)), CheckedKernels(ReferenceKernels(torch.device("cpu")))]


HEADS = [(9, 3), (4, 4), (7, 1), (8, 2)]  # groups of 3, 1, 7 and 4
LENGTHS = [1, 15, 16, 17, 100, 255, 33, 2, 256, 64, 257, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_decode_of_ragged_tails(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    pool = Pool(kv_heads=kv_heads, block_size=16, head_dim=head_dim, dtype=dtype)
    tables = [pool.blocks(length) for length in LENGTHS]
    q = pool.random(len(LENGTHS), heads, head_dim)
    expected = torch.cat([exact(q[i : i + 1], pool.tokens(tables[i], n), n - 1) for i, n in enumerate(LENGTHS)])
    batch = AttentionBatch(range(len(LENGTHS)), [Tail(t, n) for t, n in zip(tables, LENGTHS, strict=True)])
    for kernels in backends():
        out = torch.empty_like(q)
        kernels.decode_attention(q, pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        assert_near(out, expected)


NODE_LAYOUTS = {
    "one node for all": [(4, [0, 1, 2, 3, 4])],
    "one block": [(1, [1, 2])],
    "shorter than the tails": [(2, [0, 4])],
    "long": [(70, [0, 2, 3])],
    "two nodes": [(5, [0, 2]), (9, [1, 4])],
    "two nodes and everyone": [(5, [4, 0, 2]), (4, [1, 3])],
    "two levels": [(5, [0, 1, 2, 3, 4]), (3, [0, 2]), (1, [4, 1])],
    "eight at two levels": [(5, [0, 1]), (66, [2, 3, 4]), *((2 + row, [row]) for row in range(5)), (1, [0, 4])],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", NODE_LAYOUTS)
@pytest.mark.parametrize("block_size", [8, 16])
def test_nodes_are_read_for_all_their_rows(dtype: torch.dtype, layout: str, block_size: int) -> None:
    heads, kv_heads, head_dim = 9, 3, 64
    lengths = [1, 30, 16, 90, 7]
    pool = Pool(kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype)
    tables = [pool.blocks(length) for length in lengths]
    nodes = [Node(pool.blocks(num * block_size), rows) for num, rows in NODE_LAYOUTS[layout]]
    heads_of: dict[int, list[int]] = {}
    for node in nodes:
        for row in node.rows:
            heads_of.setdefault(row, []).extend(node.block_ids)
    q = pool.random(len(lengths), heads, head_dim)
    expected = []
    for row, length in enumerate(lengths):
        shared = heads_of.get(row, [])
        total = len(shared) * block_size + length
        expected.append(exact(q[row : row + 1], pool.tokens(shared + tables[row], total), total - 1))
    batch = AttentionBatch(range(5), [Tail(t, n) for t, n in zip(tables, lengths, strict=True)], nodes)
    for kernels in backends():
        out = torch.empty_like(q)
        kernels.decode_attention(q, pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        assert_near(out, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_extends_see_their_context_and_themselves(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    shares = [(0, 1), (0, 40), (1, 1), (16, 16), (37, 5), (100, 70), (250, 20), (0, 257)]  # (context, new)
    pool = Pool(kv_heads=kv_heads, block_size=16, head_dim=32, dtype=dtype)
    tables = [pool.blocks(context + new) for context, new in shares]
    q = pool.random(sum(new for _, new in shares), heads, 32)
    expected = []
    first = 0
    for (context, new), table in zip(shares, tables, strict=True):
        expected.append(exact(q[first : first + new], pool.tokens(table, context + new), context))
        first += new
    # blocks allocated ahead of the new tokens are not read
    extends = [Extend(new, context, [*table, 0]) for (context, new), table in zip(shares, tables, strict=True)]
    batch = AttentionBatch(range(len(q)), (), (), extends)
    for kernels in backends():
        out = torch.empty_like(q)
        kernels.extend_attention(q, pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        assert_near(out, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads_are_turned_by_their_angles_and_written_to_their_slots_only(
    dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    pool = Pool(num_blocks=6, kv_heads=kv_heads, block_size=8, head_dim=80, dtype=dtype)
    slots = [8, 15, 47, 23]  # block 1 offset 0, block 1 offset 7, block 5 offset 7, block 2 offset 7
    given = pool.random(4, heads + 2 * kv_heads, 80)
    angles = pool.random(4, 1, 40).float() * 10
    cosines, sines = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    wide = given.double()
    turned = torch.complex(wide[..., :40], wide[..., 40:]) * torch.polar(torch.ones(4, 1, 40), angles)
    exact = torch.cat((turned.real, turned.imag), -1)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    for kernels in backends():
        kv = pool.kv.clone()
        plan = kernels.plan(AttentionBatch(slots, (), (), [Extend(4, 0, [1])]), pool.shape, dtype)
        q = kernels.rope_and_write_kv(given.clone(), cosines, sines, kv, plan)
        torch.testing.assert_close(q.double(), exact[:, :heads], atol=tolerance, rtol=tolerance)
        for row, (block, offset) in enumerate([(1, 0), (1, 7), (5, 7), (2, 7)]):
            keys, values = kv[:, block, :, offset].double()
            torch.testing.assert_close(keys, exact[row, heads:-kv_heads], atol=tolerance, rtol=tolerance)
            assert torch.equal(values, wide[row, -kv_heads:])
            kv[:, block, :, offset] = math.nan
        assert kv.isnan().all()


@pytest.mark.parametrize("num_parts", [1, 2, 9])
def test_parts_are_merged_by_their_weights(num_parts: int) -> None:
    """Of 17 rows; some parts are empty and hold NaN, and of the last row all of them."""
    generator = torch.Generator().manual_seed(num_parts)
    values = torch.randn(17, 6, num_parts, 64, generator=generator)
    lse = torch.randn(17, 6, num_parts, generator=generator) * 50
    is_empty = torch.rand(lse.shape, generator=generator) < 0.3
    is_empty[:16, :, -1], is_empty[16] = False, True
    lse[is_empty], values[is_empty] = -math.inf, math.nan
    weights = lse[:16].double().softmax(-1).unsqueeze(-1)
    expected = (weights * values[:16].nan_to_num().double()).sum(-2)
    for kernels in backends():
        merged, merged_lse = kernels.merge(values, lse)
        torch.testing.assert_close(merged[:16].double(), expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(merged_lse[:16].double(), lse[:16].double().logsumexp(-1), atol=1e-6, rtol=1e-6)
        assert (merged[16] == 0).all()
        assert (merged_lse[16] == -math.inf).all()


def test_tails_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    tails = [Tail(list(range(n)), n * 16) for n in (3, 200, 4, 7, 190, 90)]
    assert group_tails(tails) == [[1, 4], [5], [0, 2, 3]]
