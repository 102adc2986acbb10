"""Which decode rows share leading blocks, so that attention reads those once for all of them. No torch."""

from collections.abc import Sequence as Rows
from typing import NamedTuple

from engine.sequence import Sequence

MIN_SHARED_BLOCKS = 4
"""Below this a node's extra pass and merge cost more than reading its blocks once for each row."""


class SharedNode(NamedTuple):
    """Leading blocks that several decode rows share; a row's tail is the rest of its table.

    All blocks are full and lie wholly before each row's last token. A row is in at most one node.
    """

    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    """Ascending; at least two."""


def find_shared_nodes(rows: Rows[Sequence], block_size: int) -> tuple[SharedNode, ...]:
    """Groups rows by their first `MIN_SHARED_BLOCKS` blocks; each group's node is its longest common leading run.

    Nodes come in the order of their first rows.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, sequence in enumerate(rows):
        # at least one token, the newest, stays with the tail
        if sequence.num_tokens - 1 >= MIN_SHARED_BLOCKS * block_size:
            groups.setdefault(tuple(sequence.block_table[:MIN_SHARED_BLOCKS]), []).append(row)
    nodes = []
    for members in groups.values():
        if len(members) < 2:
            continue
        tables = [rows[row].block_table for row in members]
        limit = min((rows[row].num_tokens - 1) // block_size for row in members)
        # the common run of all is that of the first and the last in lexicographic order
        first, last = min(tables), max(tables)
        num_shared = MIN_SHARED_BLOCKS
        while num_shared < limit and first[num_shared] == last[num_shared]:
            num_shared += 1
        nodes.append(SharedNode(tuple(first[:num_shared]), tuple(members)))
    return tuple(nodes)
