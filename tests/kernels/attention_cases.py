"""What attention, rotation, norms and merges have to give, against float64, whichever backend computes them.

Each check takes `make`: for a number of query heads the backends to be checked, which go by `rule`. Poison lies where
nothing is, and where no row of the step sees anything.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.attention_rule import FULL, AttentionRule
from kernels.batch import AttentionBatch, Extend, KVQuantisation, Node, Tail
from kernels.checked import CheckedKernels
from tests.kernels.pool import Pool, assert_near, exact

Make = Callable[[int], list[CheckedKernels]]
Layout = Sequence[tuple[int, list[int]]]
"""(blocks, rows) of each node, of five rows."""

HEADS = [(9, 3), (4, 4), (7, 1), (8, 2)]  # groups of 3, 1, 7 and 4
HEAD_DIMS = [64, 80, 96, 128]
QUANTISATIONS: list[KVQuantisation] = ["int8", "fp8"]
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 15, 16, 17, 100, 255, 33, 2, 256, 64, 257, 5]
NODE_LAYOUTS: dict[str, Layout] = {
    "one node for all": [(4, [0, 1, 2, 3, 4])],
    "one block": [(1, [1, 2])],
    "shorter than the tails": [(2, [0, 4])],
    "long": [(70, [0, 2, 3])],
    "two nodes": [(5, [0, 2]), (9, [1, 4])],
    "two nodes and everyone": [(5, [4, 0, 2]), (4, [1, 3])],
    "two levels": [(5, [0, 1, 2, 3, 4]), (3, [0, 2]), (1, [4, 1])],
    "eight at two levels": [(5, [0, 1]), (66, [2, 3, 4]), *((2 + row, [row]) for row in range(5)), (1, [0, 4])],
}
EXTENDS = [(0, 1), (0, 40), (1, 1), (16, 16), (37, 5), (100, 70), (250, 20), (0, 257)]
"""(context, new tokens)"""
QUESTIONS = [(250, 5), (0, 3), (90, 9), (129, 1)]
"""Likewise: few new tokens behind long contexts."""


def check_decode(
    make: Make,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    quantisation: KVQuantisation | None = None,
    rule: AttentionRule = FULL,
) -> None:
    pool = Pool(kv_heads=kv_heads, block_size=16, head_dim=head_dim, dtype=dtype, quantisation=quantisation)
    tables = [pool.blocks(length) for length in LENGTHS]
    q = pool.random(len(LENGTHS), heads, head_dim)
    expected = torch.cat([exact(q[i : i + 1], pool.tokens(tables[i], n), n - 1, rule) for i, n in enumerate(LENGTHS)])
    pool.keep_only([(table, rule.first_seen(n - 1), n) for table, n in zip(tables, LENGTHS, strict=True)])
    batch = AttentionBatch(range(len(LENGTHS)), [Tail(t, n) for t, n in zip(tables, LENGTHS, strict=True)])
    for kernels in make(heads):
        out = torch.empty_like(q)
        kernels.decode_attention(q, pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        assert_near(out, expected)


@dataclass(frozen=True)
class NodesCase:
    """Five rows of a pool, each behind the nodes that it reads."""

    q: torch.Tensor
    grouped: AttentionBatch
    flat: AttentionBatch
    """The same with each row's nodes at the beginning of its tail."""
    expected: torch.Tensor

    @classmethod
    def of(cls, pool: Pool, heads: int, layout: Layout, rule: AttentionRule = FULL) -> "NodesCase":
        block_size = pool.shape.block_size
        lengths = [1, 30, 16, 90, 7]
        tables = [pool.blocks(length) for length in lengths]
        nodes = [Node(pool.blocks(num * block_size), rows) for num, rows in layout]
        shared: list[list[int]] = [[] for _ in lengths]
        for node in nodes:
            for row in node.rows:
                shared[row] += node.block_ids
        q = pool.random(len(lengths), heads, pool.shape.head_dim)
        own = [Tail(s + t, len(s) * block_size + n) for s, t, n in zip(shared, tables, lengths, strict=True)]
        expected = [
            exact(q[row : row + 1], pool.tokens(tail.block_ids, tail.num_tokens), tail.num_tokens - 1, rule)
            for row, tail in enumerate(own)
        ]
        pool.keep_only([(tail.block_ids, rule.first_seen(tail.num_tokens - 1), tail.num_tokens) for tail in own])
        tails = [Tail(t, n) for t, n in zip(tables, lengths, strict=True)]
        return cls(q, AttentionBatch(range(5), tails, nodes), AttentionBatch(range(5), own), torch.cat(expected))


def check_nodes(
    make: Make,
    dtype: torch.dtype,
    layout: str,
    block_size: int,
    num_heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    quantisation: KVQuantisation | None = None,
    rule: AttentionRule = FULL,
) -> None:
    heads, kv_heads = num_heads
    pool = Pool(kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype, quantisation=quantisation)
    case = NodesCase.of(pool, heads, NODE_LAYOUTS[layout], rule)
    for kernels in make(heads):
        grouped, flat = torch.empty_like(case.q), torch.empty_like(case.q)
        kernels.decode_attention(case.q, pool.kv, kernels.plan(case.grouped, pool.shape, dtype), grouped)
        assert_near(grouped, case.expected)
        if dtype == torch.float32:
            kernels.decode_attention(case.q, pool.kv, kernels.plan(case.flat, pool.shape, dtype), flat)
            # torch's operators sum in another order on each processor
            assert (flat - grouped).abs().max() <= (4e-6 if kernels.name == "cpu" else 1e-6)


def check_extends(
    make: Make,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int = 32,
    quantisation: KVQuantisation | None = None,
    rule: AttentionRule = FULL,
    sizes: Sequence[tuple[int, int]] = EXTENDS,
) -> None:
    pool = Pool(kv_heads=kv_heads, block_size=16, head_dim=head_dim, dtype=dtype, quantisation=quantisation)
    tables = [pool.blocks(context + new) for context, new in sizes]
    q = pool.random(sum(new for _, new in sizes), heads, head_dim)
    expected = []
    first = 0
    for (context, new), table in zip(sizes, tables, strict=True):
        expected.append(exact(q[first : first + new], pool.tokens(table, context + new), context, rule))
        first += new
    pool.keep_only(
        [(table, rule.first_seen(n), n + new) for (n, new), table in zip(sizes, tables, strict=True)],
    )
    # blocks allocated ahead of the new tokens are not read
    extends = [Extend(new, context, [*table, 0]) for (context, new), table in zip(sizes, tables, strict=True)]
    batch = AttentionBatch(range(len(q)), (), (), extends)
    for kernels in make(heads):
        out = torch.empty_like(q)
        kernels.extend_attention(q, pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        assert_near(out, torch.cat(expected))


def check_rotation(make: Make, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int = 80) -> None:
    pool = Pool(num_blocks=6, kv_heads=kv_heads, block_size=8, head_dim=head_dim, dtype=dtype)
    slots = [8, 15, 47, 23]  # block 1 offset 0, block 1 offset 7, block 5 offset 7, block 2 offset 7
    half = head_dim // 2
    given = pool.random(4, heads + 2 * kv_heads, head_dim)
    angles = pool.random(4, 1, half).float() * 10
    cosines, sines = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    wide = given.double()
    turned = torch.complex(wide[..., :half], wide[..., half:]) * torch.polar(torch.ones(4, 1, half), angles)
    exact = torch.cat((turned.real, turned.imag), -1)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    for kernels in make(heads):
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


def check_quantised_writes(
    make: Make, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, quantisation: KVQuantisation
) -> None:
    """The bytes are those of what the same kernels write into a cache that is not quantised, and no other byte moves.
    Rows of zeros, of next to nothing, beyond 448, and with what is not finite are among them."""
    plain = Pool(num_blocks=6, kv_heads=kv_heads, block_size=8, head_dim=head_dim, dtype=dtype)
    pool = Pool(
        num_blocks=6, kv_heads=kv_heads, block_size=8, head_dim=head_dim, dtype=dtype, quantisation=quantisation
    )
    assert pool.quantised is not None
    slots = [8, 15, 47, 23, 20, 21, 22]
    given = pool.random(len(slots), heads + 2 * kv_heads, head_dim)
    given[1] *= 300
    given[2] = 0
    given[3] *= 1e-37
    given[4, heads] = math.nan
    given[5, -1, 3] = math.inf
    given[6] *= 2.0**-7
    angles = pool.random(len(slots), 1, head_dim // 2).float() * 10
    cosines, sines = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    batch = AttentionBatch(slots, (), (), [Extend(len(slots), 0, [1])])
    for kernels in make(heads):
        kv, kept = pool.kv.clone(), plain.kv.clone()
        q = kernels.rope_and_write_kv(given.clone(), cosines, sines, kv, kernels.plan(batch, pool.shape, dtype))
        same = kernels.rope_and_write_kv(given.clone(), cosines, sines, kept, kernels.plan(batch, plain.shape, dtype))
        assert torch.equal(q.nan_to_num(), same.nan_to_num())
        expected = pool.kv.clone()
        block, offset = torch.tensor(slots) // 8, torch.tensor(slots) % 8
        values, scales = pool.quantised.split(expected, head_dim)
        new_values, new_scales = pool.quantised.quantise(kept[:, block, :, offset])
        values[:, block, :, offset] = new_values
        if scales is not None and new_scales is not None:
            scales[:, block, :, offset] = new_scales
        assert torch.equal(kv, expected)


def check_merge(make: Make, num_parts: int) -> None:
    """Of 17 rows; some parts are empty and hold NaN, and of the last row all of them."""
    generator = torch.Generator().manual_seed(num_parts)
    values = torch.randn(17, 6, num_parts, 64, generator=generator)
    lse = torch.randn(17, 6, num_parts, generator=generator) * 50
    is_empty = torch.rand(lse.shape, generator=generator) < 0.3
    is_empty[:16, :, -1], is_empty[16] = False, True
    lse[is_empty], values[is_empty] = -math.inf, math.nan
    weights = lse[:16].double().softmax(-1).unsqueeze(-1)
    expected = (weights * values[:16].nan_to_num().double()).sum(-2)
    for kernels in make(6):
        merged, merged_lse = kernels.merge(values, lse)
        torch.testing.assert_close(merged[:16].double(), expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(merged_lse[:16].double(), lse[:16].double().logsumexp(-1), atol=1e-6, rtol=1e-6)
        assert (merged[16] == 0).all()
        assert (merged_lse[16] == -math.inf).all()


def check_norms(make: Make, dtype: torch.dtype, size: int) -> None:
    """Of rows, of heads in a wider row, and behind a linear with its residual, which is exact."""
    generator = torch.Generator().manual_seed(size)
    x, residual = (torch.randn(5, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=generator).to(dtype)
    heads = torch.randn(5, 4, size, generator=generator).to(dtype)[:, 1:3]
    square = torch.randn(size, size, generator=generator).to(dtype) / size**0.5
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[dtype]

    def expected(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    for kernels in make(4):
        for rows in (x, heads):
            normed = kernels.rms_norm(rows, weight, 1e-5)
            torch.testing.assert_close(normed.double(), expected(rows), atol=tolerance, rtol=tolerance)
        packed = kernels.pack_linear(square)
        summed, normed = kernels.linear_and_norm(x, packed, residual, weight, 1e-5)
        exact_sum = x.double() @ square.double().T + residual.double()
        torch.testing.assert_close(summed.double(), exact_sum, atol=2 * tolerance, rtol=tolerance)
        torch.testing.assert_close(normed.double(), expected(summed), atol=tolerance, rtol=tolerance)


def check_swiglu(make: Make, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(5, 32, generator=generator).to(dtype)
    gate, up = (torch.randn(size, 32, generator=generator).to(dtype) / 32**0.5 for _ in range(2))
    expected = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[dtype]
    for kernels in make(4):
        got = kernels.swiglu(x, kernels.pack_linear(gate), kernels.pack_linear(up))
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
