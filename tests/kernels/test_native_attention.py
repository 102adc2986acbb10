"""Attention in C++ against float64, and what its rows' bits may depend on."""

import itertools
import mmap
from dataclasses import replace

import pytest
import torch

from kernels.batch import AttentionBatch, Extend, Node, Tail
from kernels.cpu.build import Isa
from kernels.cpu.native import NativeDecoder, StepArrays
from tests.kernels.attention_cases import Layout, NodesCase
from tests.kernels.libraries import BEST, KINDS, decoder
from tests.kernels.pool import Pool, assert_near, exact

HEADS = [(9, 3), (2, 2), (4, 1), (14, 2)]  # groups of 3, 1, 4 and 7
MAP_NORESERVE = 0x4000  # of Linux; Python has a name for it from 3.13 on
LENGTHS = [1, 15, 16, 17, 33, 100, 255, 256, 257, 700]


def attend(native: NativeDecoder, pool: Pool, q: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    out = torch.full_like(q, float("nan"))
    native.attention(0, StepArrays.of(batch), pool.kv.data_ptr(), pool.shape.num_blocks, q.data_ptr(), out.data_ptr())
    return out


def decoder_for(pool: Pool, heads: int, isa: Isa | None = None, num_threads: int = 1) -> NativeDecoder:
    return decoder(
        pool.dtype,
        isa,
        num_threads=num_threads,
        num_heads=heads,
        num_kv_heads=pool.shape.num_kv_heads,
        head_dim=pool.shape.head_dim,
        block_size=pool.shape.block_size,
        quantisation=pool.shape.quantisation,
    )


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_decode_of_ragged_tails(dtype: torch.dtype, isa: Isa, heads: int, kv_heads: int, head_dim: int) -> None:
    pool = Pool(kv_heads=kv_heads, block_size=16, head_dim=head_dim, dtype=dtype)
    tables = [pool.blocks(length) for length in LENGTHS]
    q = pool.random(len(LENGTHS), heads, head_dim)
    expected = torch.cat([exact(q[i : i + 1], pool.tokens(tables[i], n), n - 1) for i, n in enumerate(LENGTHS)])
    batch = AttentionBatch([0] * len(LENGTHS), [Tail(t, n) for t, n in zip(tables, LENGTHS, strict=True)])
    assert_near(attend(decoder_for(pool, heads, isa), pool, q, batch), expected)


NODE_LAYOUTS: dict[str, Layout] = {
    "none": [],
    "one for all": [(4, [0, 1, 2, 3, 4])],
    "one block": [(1, [1, 2])],
    "shorter than the tails": [(2, [0, 4])],
    "long": [(70, [0, 2, 3])],
    "three": [(5, [0, 2]), (9, [1]), (40, [4, 3])],
    "two levels": [(5, [0, 1, 2, 3, 4]), (3, [0, 2]), (20, [4, 1])],
    "eight at two levels": [(5, [0, 1]), (66, [2, 3, 4]), *((2 + row, [row]) for row in range(5)), (1, [0, 4])],
}


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize("layout", NODE_LAYOUTS)
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_nodes_are_read_for_all_their_rows(
    dtype: torch.dtype, isa: Isa, layout: str, block_size: int, num_threads: int
) -> None:
    assert_nodes_are_read(dtype, isa, layout, block_size, num_threads, (9, 3), 64)


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_nodes_are_read_by_heads_of_all_sizes(
    dtype: torch.dtype, isa: Isa, heads: tuple[int, int], head_dim: int
) -> None:
    assert_nodes_are_read(dtype, isa, "eight at two levels", 16, 2, heads, head_dim)


def assert_nodes_are_read(
    dtype: torch.dtype,
    isa: Isa,
    layout: str,
    block_size: int,
    num_threads: int,
    num_heads: tuple[int, int],
    head_dim: int,
) -> None:
    heads, kv_heads = num_heads
    pool = Pool(kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype)
    case = NodesCase.of(pool, heads, NODE_LAYOUTS[layout])
    native = decoder_for(pool, heads, isa, num_threads)
    grouped = attend(native, pool, case.q, case.grouped)
    assert_near(grouped, case.expected)
    if dtype == torch.float32:
        assert (attend(native, pool, case.q, case.flat) - grouped).abs().max() <= 1e-6


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_extends_see_their_context_and_themselves(
    dtype: torch.dtype, isa: Isa, heads: int, kv_heads: int, head_dim: int
) -> None:
    shares = [(0, 1), (0, 40), (1, 1), (16, 16), (37, 5), (250, 20), (0, 270), (0, 255), (256, 17)]  # (context, new)
    pool = Pool(kv_heads=kv_heads, block_size=16, head_dim=head_dim, dtype=dtype)
    tables = [pool.blocks(context + new) for context, new in shares]
    tail = pool.blocks(21)
    q = pool.random(1 + sum(new for _, new in shares), heads, head_dim)
    expected = [exact(q[:1], pool.tokens(tail, 21), 20)]
    first = 1
    for (context, new), table in zip(shares, tables, strict=True):
        expected.append(exact(q[first : first + new], pool.tokens(table, context + new), context))
        first += new
    # blocks allocated ahead of the new tokens are not read
    extends = [Extend(new, context, [*table, 0]) for (context, new), table in zip(shares, tables, strict=True)]
    batch = AttentionBatch([0] * len(q), [Tail(tail, 21)], (), extends)
    assert_near(attend(decoder_for(pool, heads, isa, 2), pool, q, batch), torch.cat(expected))


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (7, 1), (2, 2)])
def test_a_token_has_the_same_bits_alone_in_company_and_in_any_chunk(
    dtype: torch.dtype, isa: Isa, heads: int, kv_heads: int
) -> None:
    num_tokens, head_dim = 600, 80
    pool = Pool(kv_heads=kv_heads, block_size=16, head_dim=head_dim, dtype=dtype)
    table = pool.blocks(num_tokens)
    q = pool.random(num_tokens, heads, head_dim)
    whole = attend(decoder_for(pool, heads, isa), pool, q, AttentionBatch([0] * 600, (), (), [Extend(600, 0, table)]))

    cuts = [0, 1, 18, 255, 256, 300, 599, 600]
    for start, end in itertools.pairwise(cuts):
        batch = AttentionBatch([0] * (end - start), (), (), [Extend(end - start, start, table)])
        chunk = attend(decoder_for(pool, heads, isa, 2), pool, q[start:end].contiguous(), batch)
        assert torch.equal(chunk, whole[start:end]), (start, end)

    positions = [0, 1, 16, 254, 255, 256, 257, 511, 512, 599, 40, 41, 42]
    batch = AttentionBatch([0] * len(positions), [Tail(table[: p // 16 + 1], p + 1) for p in positions])
    together = attend(decoder_for(pool, heads, isa, 3), pool, q[positions].contiguous(), batch)
    assert torch.equal(together, whole[positions])
    for position in positions:
        batch = AttentionBatch([0], [Tail(table[: position // 16 + 1], position + 1)])
        alone = attend(decoder_for(pool, heads, isa), pool, q[position : position + 1].contiguous(), batch)
        assert torch.equal(alone[0], whole[position]), position


@pytest.mark.parametrize(("dtype", "isa"), BEST, ids=str)
@pytest.mark.parametrize("num_readers", [1, 2, 5, 32])
def test_a_row_behind_a_node_has_the_same_bits_with_any_company_and_any_number_of_threads(
    dtype: torch.dtype, isa: None, num_readers: int
) -> None:
    pool = Pool(kv_heads=2, block_size=16, head_dim=64, dtype=dtype, num_blocks=400)
    lengths = [1 + 7 * row for row in range(32)]
    node, tables = pool.blocks(100 * 16), [pool.blocks(length) for length in lengths]
    q = pool.random(32, 6, 64)

    def of(num_readers: int, num_threads: int) -> torch.Tensor:
        tails = [Tail(t, n) for t, n in zip(tables, lengths, strict=True)][:num_readers]
        batch = AttentionBatch([0] * num_readers, tails, [Node(node, range(num_readers))])
        return attend(decoder_for(pool, 6, isa, num_threads), pool, q[:num_readers].contiguous(), batch)

    everyone = of(32, 1)
    for num_threads in (1, 2, 3, 7):
        assert torch.equal(of(num_readers, num_threads), everyone[:num_readers])


@pytest.mark.parametrize("isa", [isa for dtype, isa in KINDS if dtype == torch.bfloat16])
def test_the_last_blocks_of_a_pool_of_more_than_two_to_the_31_elements_are_the_right_ones(isa: Isa) -> None:
    """A block's number times its size needs 64 bits. Of the 8 GiB only the pages of these blocks are ever there."""
    pool = Pool(num_blocks=8, kv_heads=2, block_size=16, head_dim=64, dtype=torch.bfloat16)
    q, table = pool.random(1, 4, 64), pool.blocks(40)
    native = decoder_for(pool, 4, isa)
    expected = attend(native, pool, q, AttentionBatch([0], [Tail(table, 40)]))
    num_blocks = 2**31 // pool.kv[0, 0].numel() + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 2 * num_blocks * pool.kv[0, 0].nbytes, flags=flags)
    vast = torch.frombuffer(memory, dtype=torch.bfloat16).view(2, num_blocks, *pool.kv.shape[2:])
    last = [num_blocks - 1 - i for i in range(len(table))]
    for block_id, before in zip(last, table, strict=True):
        vast[:, block_id] = pool.kv[:, before]
    pool.kv, pool.shape = vast, replace(pool.shape, num_blocks=num_blocks)
    assert torch.equal(attend(native, pool, q, AttentionBatch([0], [Tail(last, 40)])), expected)


def test_a_step_outside_of_the_cache_is_refused() -> None:
    pool = Pool(kv_heads=1, block_size=16, head_dim=16, dtype=torch.float32, num_blocks=4)
    native, q = decoder_for(pool, 1), pool.random(1, 1, 16)
    for slot, block, what in (
        (0, 4, "block ids from 4 to 4, expected 0 to 3"),
        (0, -1, "block ids from -1 to -1, expected 0 to 3"),
        (64, 1, "slots from 64 to 64, expected 0 to 63"),
    ):
        with pytest.raises(IndexError, match=what):
            attend(native, pool, q, AttentionBatch([slot], [Tail([block], 1)]))
