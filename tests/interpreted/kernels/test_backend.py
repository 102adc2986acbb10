"""Triton's kernels against float64, interpreted, within the tolerances of every other backend.

With the tiles that a GPU gets, and with small ones, so that short tables too are cut into many pieces and tiles.
"""

import dataclasses
import math

import pytest
import torch

from kernels.attention_rule import FULL, AttentionRule
from kernels.batch import AttentionBatch, Extend, KVQuantisation, Node, Tail
from kernels.checked import CheckedKernels
from kernels.triton.arithmetic import INTERPRETED
from kernels.triton.backend import TritonKernels
from kernels.triton.tiles import DEFAULT, Tiles
from tests.kernels import attention_cases as cases
from tests.kernels.pool import Pool, exact

CPU = torch.device("cpu")
SMALL = Tiles(piece_tokens=32, tile_tokens=16, max_node_rows=16, extend_rows=16, merge_heads=2, pointwise_values=256)


WINDOW = AttentionRule(window=40)
"""Begins within a tile, a piece or a block, or on its border, by the row."""
SOFT_CAP = AttentionRule(window=100, soft_cap=1.5)


def make(tiles: Tiles, rule: AttentionRule = FULL) -> cases.Make:
    return lambda num_heads: [CheckedKernels(TritonKernels(CPU, num_heads, tiles, rule))]


def test_these_kernels_are_interpreted() -> None:
    assert INTERPRETED.value is True


DTYPES = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
DTYPES_AND_TILES = pytest.mark.parametrize(
    ("dtype", "tiles"), [(torch.float32, SMALL), (torch.bfloat16, DEFAULT)], ids=["fp32, small", "bf16, as on a GPU"]
)
TILES = pytest.mark.parametrize("tiles", [DEFAULT, SMALL], ids=["as on a GPU", "small"])
EVERY_GROUP_AND_SIZE = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(*heads, dim) for heads, dim in zip(cases.HEADS, cases.HEAD_DIMS, strict=True)],
)
"""Each group and each head size once."""
EVERY_PAIR = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(*heads, dim) for heads in cases.HEADS for dim in cases.HEAD_DIMS]
)


@DTYPES
@EVERY_GROUP_AND_SIZE
def test_decode_of_ragged_tails(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    cases.check_decode(make(DEFAULT), dtype, heads, kv_heads, head_dim)


@pytest.mark.slow
@DTYPES
@TILES
@EVERY_PAIR
def test_decode_of_all_heads(dtype: torch.dtype, tiles: Tiles, heads: int, kv_heads: int, head_dim: int) -> None:
    cases.check_decode(make(tiles), dtype, heads, kv_heads, head_dim)


@pytest.mark.parametrize(
    ("dtype", "layout", "block_size", "tiles"),
    [
        (torch.float32, "one node for all", 16, DEFAULT),
        (torch.bfloat16, "two levels", 8, SMALL),
        (torch.float32, "two nodes and everyone", 8, SMALL),
        (torch.bfloat16, "eight at two levels", 16, DEFAULT),
    ],
    ids=str,
)
def test_nodes_are_read_for_all_their_rows(dtype: torch.dtype, layout: str, block_size: int, tiles: Tiles) -> None:
    cases.check_nodes(make(tiles), dtype, layout, block_size)


@pytest.mark.slow
@DTYPES
@TILES
@pytest.mark.parametrize("layout", cases.NODE_LAYOUTS)
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_nodes_of_all_kinds(dtype: torch.dtype, tiles: Tiles, layout: str, block_size: int) -> None:
    cases.check_nodes(make(tiles), dtype, layout, block_size)


@pytest.mark.slow
@DTYPES
@EVERY_PAIR
def test_nodes_of_all_heads(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    cases.check_nodes(make(DEFAULT), dtype, "eight at two levels", 16, (heads, kv_heads), head_dim)


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (4, 4)])
def test_extends_see_their_context_and_themselves(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    cases.check_extends(make(DEFAULT), dtype, heads, kv_heads)


@pytest.mark.slow
@DTYPES
@TILES
@EVERY_PAIR
def test_extends_of_all_heads(dtype: torch.dtype, tiles: Tiles, heads: int, kv_heads: int, head_dim: int) -> None:
    cases.check_extends(make(tiles), dtype, heads, kv_heads, head_dim)


def test_extends_that_are_cut_along_their_tokens() -> None:
    """Into pieces of 32 tokens and more, some of which rows of a tile do not see."""
    cases.check_extends(make(SMALL), torch.float32, 3, 1, sizes=cases.QUESTIONS)


NOT_FINITE = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""numpy, which interprets, tells that infinity times nothing is NaN."""
QUANTISATIONS = pytest.mark.parametrize("quantisation", cases.QUANTISATIONS)


@pytest.mark.parametrize(
    ("quantisation", "dtype", "heads", "kv_heads", "head_dim"),
    [("int8", torch.bfloat16, 7, 1, 96), ("fp8", torch.bfloat16, 8, 2, 80)],
)
def test_quantised_tails(
    quantisation: KVQuantisation, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    cases.check_decode(make(DEFAULT), dtype, heads, kv_heads, head_dim, quantisation)


@QUANTISATIONS
def test_quantised_nodes_and_extends(quantisation: KVQuantisation) -> None:
    cases.check_nodes(make(SMALL), torch.float32, "two levels", 8, quantisation=quantisation)
    cases.check_extends(make(DEFAULT), torch.float32, 3, 1, quantisation=quantisation)


@NOT_FINITE
@QUANTISATIONS
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"), [(torch.float32, 9, 3, 64), (torch.bfloat16, 7, 1, 80)], ids=str
)
def test_quantised_writes(
    quantisation: KVQuantisation, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    cases.check_quantised_writes(make(DEFAULT), dtype, heads, kv_heads, head_dim, quantisation)


@pytest.mark.slow
@NOT_FINITE
@DTYPES_AND_TILES
@QUANTISATIONS
@EVERY_GROUP_AND_SIZE
def test_quantised_caches_of_all_heads(
    quantisation: KVQuantisation, dtype: torch.dtype, tiles: Tiles, heads: int, kv_heads: int, head_dim: int
) -> None:
    cases.check_decode(make(tiles), dtype, heads, kv_heads, head_dim, quantisation)
    cases.check_nodes(make(tiles), dtype, "eight at two levels", 16, (heads, kv_heads), head_dim, quantisation)
    cases.check_extends(make(tiles), dtype, heads, kv_heads, head_dim, quantisation, sizes=cases.QUESTIONS)
    cases.check_quantised_writes(make(tiles), dtype, heads, kv_heads, head_dim, quantisation)


def test_int8_beside_fp16_rows() -> None:
    """Values of a few thousandths: weights times their scales would be next to nothing in fp16."""
    pool = Pool(num_blocks=8, kv_heads=1, block_size=16, head_dim=32, dtype=torch.float16, quantisation="int8")
    table = pool.blocks(100)
    assert pool.quantised is not None
    _, scales = pool.quantised.split(pool.kv[1, table], 32)
    assert scales is not None
    scales.mul_(2.0**-12)
    pool.kv[1, table, 0, -32:] = scales.view(torch.uint8)[:, 0]
    q, out = pool.random(1, 2, 32), torch.empty(1, 2, 32, dtype=torch.float16)
    kernels = TritonKernels(CPU, 2)
    batch = AttentionBatch([99], [Tail(table, 100)])
    kernels.decode_attention(q, pool.kv, kernels.plan(batch, pool.shape, torch.float16), out)
    expected = exact(q, pool.tokens(table, 100), 99)
    assert (out.double() - expected).norm() <= 5e-3 * expected.norm()


def test_windows_and_soft_caps() -> None:
    cases.check_decode(make(SMALL, WINDOW), torch.float32, 3, 1, 64, rule=WINDOW)
    cases.check_nodes(make(SMALL, WINDOW), torch.float32, "two levels", 8, rule=WINDOW)
    cases.check_nodes(make(DEFAULT, SOFT_CAP), torch.bfloat16, "eight at two levels", 16, (3, 1), rule=SOFT_CAP)
    cases.check_extends(make(SMALL, WINDOW), torch.float32, 3, 1, rule=WINDOW, sizes=cases.QUESTIONS)
    cases.check_extends(make(DEFAULT, SOFT_CAP), torch.float32, 3, 1, rule=SOFT_CAP)


@pytest.mark.slow
@DTYPES_AND_TILES
@pytest.mark.parametrize(
    ("rule", "quantisation"),
    [
        (AttentionRule(window=1), None),
        (WINDOW, None),
        (SOFT_CAP, None),
        (AttentionRule(soft_cap=5.0), None),
        (WINDOW, "int8"),
        (SOFT_CAP, "fp8"),
    ],
    ids=str,
)
@EVERY_GROUP_AND_SIZE
def test_windows_and_soft_caps_of_all_heads(
    quantisation: KVQuantisation | None,
    rule: AttentionRule,
    dtype: torch.dtype,
    tiles: Tiles,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    cases.check_decode(make(tiles, rule), dtype, heads, kv_heads, head_dim, quantisation, rule)
    for layout in ("two levels", "eight at two levels"):
        cases.check_nodes(make(tiles, rule), dtype, layout, 16, (heads, kv_heads), head_dim, quantisation, rule)
    cases.check_extends(make(tiles, rule), dtype, heads, kv_heads, head_dim, quantisation, rule, cases.QUESTIONS)


@DTYPES
@TILES
@EVERY_GROUP_AND_SIZE
def test_heads_are_turned_by_their_angles_and_written_to_their_slots_only(
    dtype: torch.dtype, tiles: Tiles, heads: int, kv_heads: int, head_dim: int
) -> None:
    cases.check_rotation(make(tiles), dtype, heads, kv_heads, head_dim)


def test_a_row_with_a_slot_below_zero_is_turned_and_not_written() -> None:
    """As a graph's rows that no sequence has."""
    pool = Pool(num_blocks=4, kv_heads=1, block_size=8, head_dim=16, dtype=torch.float32)
    kernels = TritonKernels(CPU, 2)
    plan = kernels.plan(AttentionBatch([-1, 9], (), (), [Extend(2, 0, [1])]), pool.shape, torch.float32)
    given, kv = pool.random(2, 4, 16), pool.kv.clone()
    table = torch.ones(2, 1, 16)
    q = kernels.rope_and_write_kv(given.clone(), table, torch.zeros(2, 1, 16), kv, plan)
    assert torch.equal(q, given[:, :2])
    assert torch.equal(kv[:, 1, 0, 1], given[1, 2:])
    kv[:, 1, 0, 1] = math.nan
    assert kv.isnan().all()


@pytest.mark.parametrize(("num_parts", "tiles"), [(1, DEFAULT), (2, SMALL), (9, DEFAULT)], ids=["1", "2", "9"])
def test_parts_are_merged_by_their_weights(num_parts: int, tiles: Tiles) -> None:
    cases.check_merge(make(tiles), num_parts)


@DTYPES
@TILES
@pytest.mark.parametrize("size", [64, 80])
def test_norms(dtype: torch.dtype, tiles: Tiles, size: int) -> None:
    cases.check_norms(make(tiles), dtype, size)


@DTYPES
@TILES
def test_swiglu(dtype: torch.dtype, tiles: Tiles) -> None:
    cases.check_swiglu(make(tiles), dtype, 80)


@DTYPES
def test_a_row_has_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    """Of a decode row behind a node, with one reader more or less, and of a token in a whole prompt and in chunks. In
    the interpreter: in which order a device sums is its own affair."""
    pool = Pool(kv_heads=2, block_size=16, head_dim=64, dtype=dtype)
    kernels = TritonKernels(CPU, 4, SMALL)
    lengths = [70, 1, 33, 16]
    node, tables = pool.blocks(80), [pool.blocks(length) for length in lengths]
    q = pool.random(4, 4, 64)

    def decode(rows: list[int]) -> torch.Tensor:
        batch = AttentionBatch(
            range(len(rows)), [Tail(tables[r], lengths[r]) for r in rows], [Node(node, range(len(rows)))]
        )
        out = torch.empty(len(rows), 4, 64, dtype=dtype)
        kernels.decode_attention(q[rows], pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        return out

    together = decode([0, 1, 2, 3])
    assert torch.equal(decode([0])[0], together[0])
    assert torch.equal(decode([3, 1]), together[[3, 1]])

    prompt, table = pool.random(70, 4, 64), tables[0]

    def extend(first: int, end: int) -> torch.Tensor:
        batch = AttentionBatch(range(end - first), (), (), [Extend(end - first, first, table)])
        out = torch.empty(end - first, 4, 64, dtype=dtype)
        kernels.extend_attention(prompt[first:end], pool.kv, kernels.plan(batch, pool.shape, dtype), out)
        return out

    whole = extend(0, 70)
    assert torch.equal(torch.cat([extend(0, 1), extend(1, 18), extend(18, 70)]), whole)


@DTYPES
def test_a_grid_for_the_most_that_can_come_gives_what_the_exact_one_gives(dtype: torch.dtype) -> None:
    """Items behind the counted ones are not looked at: here they are out of range."""
    pool = Pool(kv_heads=1, block_size=8, head_dim=16, dtype=dtype)
    kernels = TritonKernels(CPU, 2, SMALL)
    node, tables = pool.blocks(40), [pool.blocks(length) for length in (3, 20, 35)]
    extended = pool.blocks(20)
    tails = [Tail(table, num) for table, num in zip(tables, (3, 20, 35), strict=True)]
    batch = AttentionBatch(range(23), tails, [Node(node, [0, 2])], [Extend(20, 0, extended)])
    plan = kernels.plan(batch, pool.shape, dtype)
    q = pool.random(23, 2, 16)

    def attend(plan: object) -> torch.Tensor:
        out = torch.empty_like(q)
        kernels.decode_attention(q[:3], pool.kv, plan, out[:3])
        kernels.extend_attention(q[3:], pool.kv, plan, out[3:])
        return out

    exact = attend(plan)
    larger = {
        name: dataclasses.replace(
            part,
            num_items=part.num_items + 5,
            **{
                field: torch.cat((getattr(part, field), torch.full((5,), 2**30, dtype=torch.int32)))
                for field in part.__dataclass_fields__
                if field.startswith("item_") and field != "item_count"
            },
        )
        for name in ("nodes", "tails", "extends")
        for part in [getattr(plan, name)]
    }
    assert torch.equal(attend(dataclasses.replace(plan, **larger)), exact)
