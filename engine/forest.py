"""Which decode rows share leading blocks, so that attention reads those once for all of them. No torch."""

import itertools
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
    """Nodes that save the most reads: (readers - 1) times blocks, with each row in one node at most.

    Rows are looked at in the order of their tables, where those that share most are neighbours. A stretch of them is
    one node over the run that all have in common, or several over longer runs of fewer rows, whichever saves more.
    Nodes come in the order of their first rows.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, sequence in enumerate(rows):
        # at least one token, the newest, stays with the tail
        if sequence.num_tokens - 1 >= MIN_SHARED_BLOCKS * block_size:
            groups.setdefault(tuple(sequence.block_table[:MIN_SHARED_BLOCKS]), []).append(row)
    nodes: list[SharedNode] = []
    for members in groups.values():
        if len(members) > 1:
            members.sort(key=lambda row: rows[row].block_table)
            runs = [_common_run(rows[a], rows[b], block_size) for a, b in itertools.pairwise(members)]
            _, stretches = _most_saved(runs, 0, len(members))
            for start, end in stretches:
                run = rows[members[start]].block_table[: min(runs[start : end - 1])]
                nodes.append(SharedNode(tuple(run), tuple(sorted(members[start:end]))))
    return tuple(sorted(nodes, key=lambda node: node.rows[0]))


def _common_run(a: Sequence, b: Sequence, block_size: int) -> int:
    """Leading full blocks that both tables have, each before the newest token of either."""
    limit = (min(a.num_tokens, b.num_tokens) - 1) // block_size
    run = MIN_SHARED_BLOCKS
    while run < limit and a.block_table[run] == b.block_table[run]:
        run += 1
    return run


def _most_saved(runs: list[int], start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """Blocks saved, and the stretches, over members `[start, end)`; `runs[i]` is that of members i and i + 1."""
    if end - start < 2:
        return 0, []
    shortest = min(runs[start : end - 1])
    together = shortest * (end - start - 1)
    cuts = [i + 1 for i in range(start, end - 1) if runs[i] == shortest]
    apart, stretches = 0, []
    for a, b in itertools.pairwise([start, *cuts, end]):
        if b - a < end - start:
            saved, inner = _most_saved(runs, a, b)
            apart += saved
            stretches += inner
    return (apart, stretches) if apart > together else (together, [(start, end)])
