"""Which program reads which tokens for which rows, and where its part goes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention_rule import FULL, AttentionRule
from kernels.batch import AttentionBatch, Extend, KVShape, Node, Tail
from kernels.triton.plan import TritonPlan, make_plan
from kernels.triton.split import ExtendSize, find_piece_tokens
from kernels.triton.tiles import Tiles

SHAPE = KVShape(num_blocks=40, num_kv_heads=2, block_size=8, head_dim=16)
TILES = Tiles(piece_tokens=32, tile_tokens=16, max_node_rows=16, extend_rows=16)
CPU = torch.device("cpu")


def plan(batch: AttentionBatch, group: int = 3, window: int = 0) -> TritonPlan:
    return make_plan(batch, SHAPE, group, TILES, AttentionRule(window), CPU)


def numbers(part: object) -> dict[str, object]:
    """By name, arrays as lists."""
    values = {name: getattr(part, name) for name in part.__dataclass_fields__}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def test_rows_behind_nodes_at_two_levels() -> None:
    """A trunk of five blocks for rows 0 and 2, one block behind it for row 2 alone, and tails of 33, 1 and 8 tokens."""
    nodes = [Node([1, 2, 3, 4, 5], [0, 2]), Node([6], [2])]
    tails = [Tail([10, 11, 12, 13, 14], 33), Tail([20], 1), Tail([30], 8)]
    made = plan(AttentionBatch([112, 160, 247], tails, nodes))
    assert made.slots.tolist() == [112, 160, 247]
    assert made.blocks.tolist() == [1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 20, 30]
    # row 0: two pieces of the trunk, two of its tail; row 1: its tail; row 2: two of the trunk, the block, its tail
    assert numbers(made.tails) == {
        "num_items": 4,
        "num_parts": 9,
        "item_count": [4],
        "item_rows": [0, 0, 1, 2],
        "item_pieces": [0, 1, 0, 0],
        "tail_blocks": [6, 11, 12],
        "tail_first": [0, 0, 0],
        "tail_tokens": [33, 1, 8],
        "tail_parts": [2, 4, 8],
        "row_parts": [0, 4, 5, 9],
        "merged_rows": [0, 1, 2],
    }
    assert numbers(made.nodes) == {
        "num_items": 3,
        "tile_rows": 16,
        "item_count": [3],
        "item_nodes": [0, 0, 1],
        "item_tiles": [0, 0, 0],
        "item_pieces": [0, 1, 0],
        "node_blocks": [0, 5],
        "node_tokens": [40, 8],
        "node_readers": [0, 2, 3],
        "reader_rows": [0, 2, 2],
        "reader_first": [0, 0, 0],
        "reader_parts": [0, 5, 7],
    }
    assert made.extends is None


def test_extends_are_cut_by_tokens_and_heads_together() -> None:
    """Of 3 heads a group, 16 rows of a tile are five tokens and a third of the next."""
    extends = [Extend(11, 5, [1, 2]), Extend(1, 0, [3, 0]), Extend(16, 0, [4, 5])]
    made = plan(AttentionBatch(range(28), (), (), extends))
    assert made.nodes is None
    assert made.tails is None
    assert numbers(made.extends) == {
        "num_items": 7,
        "item_count": [7],
        "item_extends": [0, 0, 0, 1, 2, 2, 2],
        "item_tiles": [0, 1, 2, 0, 0, 1, 2],
        "item_pieces": [0] * 7,
        "extend_blocks": [0, 2, 4],
        "extend_context": [5, 0, 0],
        "extend_rows": [0, 11, 12, 28],
        "extend_first": [0, 0, 0],
        "extend_piece_tokens": [16, 1, 16],
        "extend_pieces": [1, 1, 1],
        "extend_parts": [-1, -1, -1],
        "num_parts": 0,
        "row_parts": [0],
        "merged_rows": [],
    }


def test_few_rows_behind_a_long_context_are_cut_along_the_tokens() -> None:
    """A question of 2 tokens behind 90 is cut into three pieces, one of 3 tokens behind 10 is not: 2 KV heads, a tile
    of rows each, 92 and 13 tokens are 210 tokens of work, which 7 programs share evenly."""
    extends = [Extend(3, 10, [7, 8]), Extend(2, 90, list(range(20, 32)))]
    tiles = replace(TILES, split_programs=7)
    made = make_plan(AttentionBatch(range(5), (), (), extends), SHAPE, 3, tiles, FULL, CPU)
    assert numbers(made.extends) == {
        "num_items": 4,
        "num_parts": 6,
        "item_count": [4],
        "item_extends": [0, 1, 1, 1],
        "item_tiles": [0, 0, 0, 0],
        "item_pieces": [0, 0, 1, 2],
        "extend_blocks": [0, 2],
        "extend_context": [10, 90],
        "extend_rows": [0, 3, 5],
        "extend_first": [0, 0],
        "extend_piece_tokens": [13, 32],
        "extend_pieces": [1, 3],
        "extend_parts": [-1, 0],
        "row_parts": [0, 3, 6],
        "merged_rows": [3, 4],
    }


@pytest.mark.parametrize(
    ("rows", "context", "programs", "piece_tokens"),
    [
        (2, 61, 264, 63),
        (2, 62, 264, 32),
        (2, 8000, 264, 64),
        (2, 8000, 100, 192),
        (200, 1000, 264, 352),
        (400, 1000, 264, 1400),
    ],
)
def test_extends_are_cut_only_as_far_as_programs_are_missing(
    rows: int, context: int, programs: int, piece_tokens: int
) -> None:
    """Pieces are a multiple of 32 tokens, or all where that are less than two, or where tiles are programs enough."""
    tiles = replace(TILES, split_programs=programs)
    size = ExtendSize(num_tiles=-(-rows * 3 // 16), num_tokens=rows + context)
    assert find_piece_tokens([size], 2, tiles) == [piece_tokens]


def test_a_window_leaves_out_the_pieces_that_nobody_sees() -> None:
    """Rows 0 and 1 read a trunk of 48 tokens, then have tails of 8 and 33, row 2 one of 70: 56, 81 and 70 tokens, of
    which they see the last 30, from tokens 26, 51 and 40 on."""
    tails = [Tail([10], 8), Tail([11, 12, 13, 14, 15], 33), Tail(range(20, 29), 70)]
    batch = AttentionBatch([87, 120, 229], tails, [Node([1, 2, 3, 4, 5, 6], [0, 1])])
    made = plan(batch, window=30)
    nodes, cut = numbers(made.nodes), numbers(made.tails)
    # row 0 sees the trunk's pieces 0 and 1, row 1 none of it; its tail from its token 3 on, row 2's from 40 on, which
    # leaves out piece 0
    assert (nodes["item_pieces"], nodes["reader_first"], nodes["reader_parts"]) == ([0, 1], [26, 48], [0, 1])
    assert (cut["item_rows"], cut["item_pieces"]) == ([0, 1, 1, 2, 2], [0, 0, 1, 1, 2])
    assert (cut["tail_first"], cut["tail_parts"], cut["row_parts"]) == ([0, 3, 40], [2, 3, 4], [0, 3, 5, 7])
    assert plan(batch, window=8).nodes is None
    [extend] = [plan(AttentionBatch([0], (), (), [Extend(5, 90, range(1, 13))]), window=30).extends]
    assert extend is not None
    assert (extend.extend_first.tolist(), extend.extend_pieces.tolist()) == ([61], [1])


@pytest.mark.parametrize(("num_readers", "tile_rows", "num_tiles"), [(2, 16, 1), (6, 32, 1), (9, 32, 1), (30, 64, 2)])
def test_a_tile_has_as_many_rows_as_the_largest_node_up_to_a_limit(
    num_readers: int, tile_rows: int, num_tiles: int
) -> None:
    batch = AttentionBatch(range(num_readers), [Tail([9], 1)] * num_readers, [Node([1], range(num_readers))])
    nodes = make_plan(batch, SHAPE, 3, Tiles(max_node_rows=64), FULL, CPU).nodes
    assert nodes is not None
    assert (nodes.tile_rows, nodes.item_tiles.tolist()) == (tile_rows, list(range(num_tiles)))


def test_every_array_begins_at_the_same_alignment_so_that_no_kernel_is_compiled_twice() -> None:
    extends = [Extend(3, 5, [1])]
    for num in (1, 2, 7, 40):
        tails = [Tail(np.arange(1, 4, dtype=np.int32), 20)] * num
        made = plan(AttentionBatch(range(num + 3), tails, [Node([5], range(num))], extends))
        arrays = [made.slots, made.blocks]
        arrays += [x for part in (made.nodes, made.tails, made.extends) for x in vars_of(part)]
        assert len({x.untyped_storage().data_ptr() for x in arrays}) == 1
        assert all(x.storage_offset() % 32 == 0 and x.dtype == torch.int32 for x in arrays)


def vars_of(part: object) -> list[torch.Tensor]:
    return [x for name in part.__dataclass_fields__ if isinstance(x := getattr(part, name), torch.Tensor)]
