"""Index arrays of one step, made on the host and brought to the device in one copy.

All lie in one int32 buffer, each at a multiple of 128 bytes, so that pointers are always aligned alike and no kernel is
compiled twice. Numbers of items are in it too, as kernels read them there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention_rule import AttentionRule
from kernels.batch import AttentionBatch, Extend, Int32Array, KVShape, Node, Tail
from kernels.triton.pieces import cut_decodes
from kernels.triton.split import cut_extends
from kernels.triton.starts import starts_of
from kernels.triton.tiles import Tiles

ALIGNMENT = 32
"""Of arrays in the buffer, in numbers."""
MIN_ROWS = 16
"""Of a tile: what the units that multiply matrices take."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Arrays as `kernels.triton.decode.attend_nodes` has them."""

    num_items: int
    tile_rows: int
    """(reader, head) pairs of one program."""
    item_count: torch.Tensor
    item_nodes: torch.Tensor
    item_tiles: torch.Tensor
    item_pieces: torch.Tensor
    node_blocks: torch.Tensor
    node_tokens: torch.Tensor
    node_readers: torch.Tensor
    reader_rows: torch.Tensor
    reader_first: torch.Tensor
    reader_parts: torch.Tensor


@dataclass(frozen=True, slots=True)
class TailPlan:
    """Arrays as `kernels.triton.decode.attend_tails` and `merge_parts` have them."""

    num_items: int
    num_parts: int
    """Of all rows, those of nodes counted."""
    item_count: torch.Tensor
    item_rows: torch.Tensor
    item_pieces: torch.Tensor
    tail_blocks: torch.Tensor
    tail_first: torch.Tensor
    tail_tokens: torch.Tensor
    tail_parts: torch.Tensor
    row_parts: torch.Tensor
    merged_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """Arrays as `kernels.triton.extend.attend_extends` has them, and as `merge_parts` has those of what was cut."""

    num_items: int
    num_parts: int
    item_count: torch.Tensor
    item_extends: torch.Tensor
    item_tiles: torch.Tensor
    item_pieces: torch.Tensor
    extend_blocks: torch.Tensor
    extend_context: torch.Tensor
    extend_rows: torch.Tensor
    extend_first: torch.Tensor
    extend_piece_tokens: torch.Tensor
    extend_pieces: torch.Tensor
    extend_parts: torch.Tensor
    row_parts: torch.Tensor
    merged_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class TritonPlan:
    shape: KVShape
    slots: torch.Tensor
    blocks: torch.Tensor
    """The tables of all nodes, tails and extends, one after the other."""
    nodes: NodePlan | None
    tails: TailPlan | None
    extends: ExtendPlan | None


Arrays = dict[str, Sequence[int] | Int32Array]


@dataclass(frozen=True, slots=True)
class PlanNumbers:
    """A plan on the host: arrays by group ("step", "nodes", "tails", "extends") and name."""

    tile_rows: int
    arrays: dict[str, Arrays]

    def num_items(self, group: str) -> int:
        return self.arrays[group]["item_count"][0]

    def num_parts(self, group: str) -> int:
        """Of the tails, those of nodes counted, or of the extends."""
        return self.arrays[group]["row_parts"][-1]


def make_plan(
    batch: AttentionBatch, shape: KVShape, group: int, tiles: Tiles, rule: AttentionRule, device: torch.device
) -> TritonPlan:
    """group: query heads of one KV head."""
    most_rows = max((len(node.rows) for node in batch.nodes), default=0) * group
    numbers = number_plan(batch, shape, group, tiles, rule, find_tile_rows(most_rows, tiles))
    nodes, tails, extends = (numbers.num_items(name) for name in ("nodes", "tails", "extends"))
    tail_parts, extend_parts = numbers.num_parts("tails"), numbers.num_parts("extends")
    on_device = _to_device(numbers.arrays, device)
    return TritonPlan(
        shape,
        **on_device["step"],
        nodes=NodePlan(num_items=nodes, tile_rows=numbers.tile_rows, **on_device["nodes"]) if nodes else None,
        tails=TailPlan(num_items=tails, num_parts=tail_parts, **on_device["tails"]) if tails else None,
        extends=ExtendPlan(num_items=extends, num_parts=extend_parts, **on_device["extends"]) if extends else None,
    )


def find_tile_rows(most_rows: int, tiles: Tiles) -> int:
    """Of nodes of which the largest has `most_rows` (reader, head) pairs."""
    tile_rows = MIN_ROWS
    while tile_rows < min(tiles.max_node_rows, most_rows):
        tile_rows *= 2
    return tile_rows


def number_plan(
    batch: AttentionBatch, shape: KVShape, group: int, tiles: Tiles, rule: AttentionRule, tile_rows: int
) -> PlanNumbers:
    """tile_rows: (reader, head) pairs of one program of a node."""
    tables: list[Node | Tail | Extend] = [*batch.nodes, *batch.tails, *batch.extends]
    starts = starts_of(len(table.block_ids) for table in tables)
    first_tail = len(batch.nodes)
    first_extend = first_tail + len(batch.tails)
    blocks = np.concatenate([np.asarray(table.block_ids, dtype=np.int32) for table in tables])
    node_tokens = [len(node.block_ids) * shape.block_size for node in batch.nodes]
    cuts = cut_decodes(batch, node_tokens, tiles.piece_tokens, rule)
    nodes = _node_items([len(node.rows) * group for node in batch.nodes], cuts.node_pieces, tile_rows)
    tails = [(row, piece) for row, pieces in enumerate(cuts.tail_pieces) for piece in pieces]
    extends = cut_extends(batch.extends, shape.num_kv_heads, group, tiles, rule)
    arrays: dict[str, Arrays] = {
        "step": {"slots": batch.slots, "blocks": blocks},
        "nodes": {
            "item_count": [len(nodes)],
            **_columns(nodes, "item_nodes", "item_tiles", "item_pieces"),
            "node_blocks": starts[:first_tail],
            "node_tokens": node_tokens,
            "node_readers": starts_of(len(node.rows) for node in batch.nodes),
            "reader_rows": [row for node in batch.nodes for row in node.rows],
            "reader_first": cuts.reader_first,
            "reader_parts": cuts.reader_parts,
        },
        "tails": {
            "item_count": [len(tails)],
            **_columns(tails, "item_rows", "item_pieces"),
            "tail_blocks": starts[first_tail:first_extend],
            "tail_first": cuts.tail_first,
            "tail_tokens": [tail.num_tokens for tail in batch.tails],
            "tail_parts": cuts.tail_parts,
            "row_parts": cuts.row_parts,
            "merged_rows": range(len(batch.tails)),
        },
        "extends": {
            "item_count": [len(extends.items)],
            **_columns(extends.items, "item_extends", "item_tiles", "item_pieces"),
            "extend_blocks": starts[first_extend:-1],
            "extend_context": [extend.num_context_tokens for extend in batch.extends],
            "extend_rows": starts_of(extend.num_rows for extend in batch.extends),
            "extend_first": extends.firsts,
            "extend_piece_tokens": extends.piece_tokens,
            "extend_pieces": extends.num_pieces,
            "extend_parts": extends.parts,
            "row_parts": extends.row_parts,
            "merged_rows": extends.merged_rows,
        },
    }
    return PlanNumbers(tile_rows, arrays)


def _node_items(node_rows: list[int], node_pieces: list[range], tile_rows: int) -> list[tuple[int, int, int]]:
    """(node, tile, piece) of each program; the tiles of a piece follow one another, as they read the same tokens."""
    return [
        (node, tile, piece)
        for node, (rows, pieces) in enumerate(zip(node_rows, node_pieces, strict=True))
        for piece in pieces
        for tile in range(-(-rows // tile_rows))
    ]


def _columns(items: Sequence[tuple[int, ...]], *names: str) -> Arrays:
    columns = np.array(items, dtype=np.int32).reshape(len(items), len(names)).T
    return dict(zip(names, columns, strict=True))


def _to_device(groups: Mapping[str, Arrays], device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    host = {
        (group, name): np.asarray(values, dtype=np.int32)
        for group, arrays in groups.items()
        for name, values in arrays.items()
    }
    places = starts_of(-(-max(len(array), 1) // ALIGNMENT) * ALIGNMENT for array in host.values())
    flat = np.zeros(places[-1], dtype=np.int32)
    for place, array in zip(places[:-1], host.values(), strict=True):
        flat[place : place + len(array)] = array
    buffer = torch.from_numpy(flat).to(device)
    on_device: dict[str, dict[str, torch.Tensor]] = {group: {} for group in groups}
    for place, ((group, name), array) in zip(places[:-1], host.items(), strict=True):
        on_device[group][name] = buffer[place : place + len(array)]
    return on_device
