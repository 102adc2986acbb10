"""The CPU backend against plain torch: odd heads, ragged tails, nodes of every size, poison where nothing is."""

import pytest
import torch

from kernels.batch import AttentionBatch, Extend, Node, Tail
from kernels.cpu.backend import CpuKernels
from kernels.cpu.plan import group_tails
from kernels.reference.backend import ReferenceKernels
from tests.kernels.pool import Pool, assert_near, exact


def backends() -> list[CpuKernels | ReferenceKernels]:
    return [CpuKernels(packs_linears=False), ReferenceKernels(torch.device("cpu"))]


HEADS = [(9, 3), (4, 4), (7, 1), (5, 1), (4, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_decode_of_ragged_tails(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    lengths = [1, 15, 16, 17, 100, 33, 2, 64, 5]
    pool = Pool(kv_heads=kv_heads, block_size=16, head_dim=head_dim, dtype=dtype)
    tables = [pool.blocks(length) for length in lengths]
    q = pool.random(len(lengths), heads, head_dim)
    expected = torch.cat([exact(q[i : i + 1], pool.tokens(tables[i], n), n - 1) for i, n in enumerate(lengths)])
    batch = AttentionBatch([0] * len(lengths), [Tail(t, n) for t, n in zip(tables, lengths, strict=True)])
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
    batch = AttentionBatch([0] * 5, [Tail(t, n) for t, n in zip(tables, lengths, strict=True)], nodes)
    for kernels in backends():
        out = torch.empty_like(q)
        kernels.decode_attention(q, pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        assert_near(out, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_extends_see_their_context_and_themselves(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    shares = [(0, 1), (0, 40), (1, 1), (16, 16), (37, 5), (100, 70)]  # (context, new)
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
    batch = AttentionBatch([0] * len(q), (), (), extends)
    for kernels in backends():
        out = torch.empty_like(q)
        kernels.extend_attention(q, pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        assert_near(out, torch.cat(expected))


def test_writing_kv_touches_its_slots_only() -> None:
    pool = Pool(num_blocks=6, kv_heads=2, block_size=8, head_dim=4, dtype=torch.float32)
    slots = [8, 15, 47, 23]  # block 1 offset 0, block 1 offset 7, block 5 offset 7, block 2 offset 7
    key_value = pool.random(4, 4, 4)
    expected = pool.kv.clone()
    for row, (block, offset) in enumerate([(1, 0), (1, 7), (5, 7), (2, 7)]):
        expected[0, block, :, offset] = key_value[row, :2]
        expected[1, block, :, offset] = key_value[row, 2:]
    for kernels in backends():
        kv = pool.kv.clone()
        plan = kernels.plan(AttentionBatch(slots, (), (), [Extend(4, 0, [1])]), pool.shape, torch.float32)
        kernels.write_kv(kv, key_value, plan)
        assert torch.equal(kv.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_tails_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    tails = [Tail(list(range(n)), n * 16) for n in (3, 200, 4, 7, 190, 90)]
    assert group_tails(tails) == [[1, 4], [5], [0, 2, 3]]
