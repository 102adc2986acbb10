"""Which program reads which tokens for which rows, and where its part goes."""

import numpy as np
import pytest
import torch

from kernels.batch import AttentionBatch, Extend, KVShape, Node, Tail
from kernels.triton.plan import TritonPlan, make_plan
from kernels.triton.tiles import Tiles

SHAPE = KVShape(num_blocks=40, num_kv_heads=2, block_size=8, head_dim=16)
TILES = Tiles(piece_tokens=32, tile_tokens=16, max_node_rows=16, extend_rows=16)
CPU = torch.device("cpu")


def plan(batch: AttentionBatch, group: int = 3) -> TritonPlan:
    return make_plan(batch, SHAPE, group, TILES, CPU)


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
        "tail_tokens": [33, 1, 8],
        "tail_parts": [2, 4, 8],
        "row_parts": [0, 4, 5, 9],
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
        "extend_blocks": [0, 2, 4],
        "extend_context": [5, 0, 0],
        "extend_rows": [0, 11, 12, 28],
    }


@pytest.mark.parametrize(("num_readers", "tile_rows", "num_tiles"), [(2, 16, 1), (6, 32, 1), (9, 32, 1), (30, 64, 2)])
def test_a_tile_has_as_many_rows_as_the_largest_node_up_to_a_limit(
    num_readers: int, tile_rows: int, num_tiles: int
) -> None:
    batch = AttentionBatch(range(num_readers), [Tail([9], 1)] * num_readers, [Node([1], range(num_readers))])
    nodes = make_plan(batch, SHAPE, 3, Tiles(max_node_rows=64), CPU).nodes
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
