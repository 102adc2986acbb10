"""Pieces of tails and nodes that somebody sees, and where each row's part of them is."""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.attention_rule import AttentionRule
from kernels.batch import AttentionBatch
from kernels.triton.starts import starts_of


@dataclass(frozen=True, slots=True)
class DecodeCuts:
    """Lists as `kernels.triton.decode` has them. The first token that a row sees is counted from where its tail or node
    begins, and is at the most the one behind it."""

    node_pieces: list[range]
    reader_first: list[int]
    reader_parts: list[int]
    tail_pieces: list[range]
    tail_first: list[int]
    tail_parts: list[int]
    row_parts: list[int]


def cut_decodes(
    batch: AttentionBatch, node_tokens: Sequence[int], piece_tokens: int, rule: AttentionRule
) -> DecodeCuts:
    seen_nodes, seen_tails = _find_seen(batch, node_tokens, piece_tokens, rule)
    # a row's parts: its nodes' in their order, then its tail's
    num_parts = [len(pieces) for _, pieces in seen_tails]
    for node, seen in zip(batch.nodes, seen_nodes, strict=True):
        for row, (_, pieces) in zip(node.rows, seen, strict=True):
            num_parts[row] += len(pieces)
    row_parts = starts_of(num_parts)
    next_parts = row_parts[:-1]
    reader_parts = []
    for node, seen in zip(batch.nodes, seen_nodes, strict=True):
        for row, (_, pieces) in zip(node.rows, seen, strict=True):
            reader_parts.append(next_parts[row] - pieces.start)
            next_parts[row] += len(pieces)
    return DecodeCuts(
        node_pieces=[max((pieces for _, pieces in seen), key=len) for seen in seen_nodes],
        reader_first=[first for seen in seen_nodes for first, _ in seen],
        reader_parts=reader_parts,
        tail_pieces=[pieces for _, pieces in seen_tails],
        tail_first=[first for first, _ in seen_tails],
        tail_parts=[part - pieces.start for part, (_, pieces) in zip(next_parts, seen_tails, strict=True)],
        row_parts=row_parts,
    )


_Seen = tuple[int, range]
"""Of a run of tokens the first one and the pieces that a row sees."""


def _find_seen(
    batch: AttentionBatch, node_tokens: Sequence[int], piece_tokens: int, rule: AttentionRule
) -> tuple[list[list[_Seen]], list[_Seen]]:
    """For each reader of each node, and for each tail."""
    if not rule.window:
        whole = [(0, range(-(-num // piece_tokens))) for num in node_tokens]
        nodes = [[seen] * len(node.rows) for node, seen in zip(batch.nodes, whole, strict=True)]
        return nodes, [(0, range(-(-tail.num_tokens // piece_tokens))) for tail in batch.tails]
    lengths = [tail.num_tokens for tail in batch.tails]
    for node, num_tokens in zip(batch.nodes, node_tokens, strict=True):
        for row in node.rows:
            lengths[row] += num_tokens
    # counted down by the tokens of a row's nodes, in their order
    first_seen = [rule.first_seen(length - 1) for length in lengths]

    def see(row: int, num_tokens: int) -> _Seen:
        """The next run of this row."""
        num_pieces = -(-num_tokens // piece_tokens)
        first = min(max(first_seen[row], 0), num_tokens)
        first_seen[row] -= num_tokens
        return first, range(num_pieces if first == num_tokens else first // piece_tokens, num_pieces)

    nodes = [[see(row, num) for row in node.rows] for node, num in zip(batch.nodes, node_tokens, strict=True)]
    return nodes, [see(row, tail.num_tokens) for row, tail in enumerate(batch.tails)]
