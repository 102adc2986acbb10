"""Which decode rows share leading blocks, so that attention reads those once for all of them. No torch.

The leading full blocks of all rows make a trie. It **branches** where rows that have shared so far part; the run of
blocks between two branches is shared by the rows that meet in the lower one. A row's nodes follow one another from its
first block on and each ends at a branch, but not every branch has to end a node: rows may read on as one node over
several runs, while others of the same run have a node that ends earlier, or none.

What is best is found from the lowest branches up. `saved(branch, start)` is the most that the rows of a branch can save
if their nodes so far end at block `start`, which is 0 or a branch above:

    apart    = sum of saved(child, start)                               no node ends here
    together = sum of max(saved(child, start),                          these rows stay out of it
                          readers of child * reading + saved(child, branch))
               - what the node costs once

with the rows that are in no further branch as children that save nothing more. As costs grow by equal steps with tokens
and readers, nothing else can be better. There are as many pairs (branch, start) as branches have branches above them:
a handful, and at the very most half the square of the rows.
"""

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from engine.sequence import Sequence
from engine.shared_attention import NodeCost, SharedAttention

EVERYTHING_THAT_PAYS = SharedAttention()


class SharedNode(NamedTuple):
    """Blocks that several decode rows share, all full and wholly before each row's last token.

    A row may be in several: the first holds its first blocks, the next those that follow. Its tail is the rest.
    """

    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    """Ascending; at least two."""


def count_blocks_not_read(nodes: Iterable[SharedNode]) -> int:
    """That would be read if each reader read them for itself."""
    return sum((len(node.rows) - 1) * len(node.block_ids) for node in nodes)


def find_shared_nodes(
    rows: Rows[Sequence], block_size: int, shared_attention: SharedAttention = EVERYTHING_THAT_PAYS
) -> tuple[SharedNode, ...]:
    """In the order of their first blocks' places, so in each row's order, and then of their first rows."""
    if shared_attention.mode == "never" or len(rows) < 2:
        return ()
    unit_blocks = max(1, shared_attention.unit_tokens // block_size)
    tables = []
    for row, sequence in enumerate(rows):
        # at least one token, the newest, stays with the tail
        if num_blocks := (sequence.num_tokens - 1) // block_size // unit_blocks * unit_blocks:
            tables.append((sequence.block_table[:num_blocks], row))
    tables.sort()  # rows that share most are neighbours
    branches = _find_branches([table for table, _ in tables], unit_blocks)
    if shared_attention.mode == "always":
        ends = [_End(branch, branch.parent_depth, range(branch.first, branch.end)) for branch in branches]
    else:
        for branch in branches:
            branch.decide(shared_attention.cost, block_size)
        ends = _find_ends(branches)
    nodes = []
    for branch, start, members in ends:
        block_ids = tuple(tables[branch.first][0][start : branch.depth])
        nodes.append((start, SharedNode(block_ids, tuple(sorted(tables[member][1] for member in members)))))
    nodes.sort(key=lambda placed: (placed[0], placed[1].rows))
    return tuple(node for _, node in nodes)


@dataclass(eq=False, slots=True)
class _Branch:
    """Where members `[first, end)`, at least two, have shared `depth` blocks and then part. In the order of tables."""

    depth: int
    first: int
    end: int = 0
    children: "list[_Branch]" = field(default_factory=list)
    parent: "_Branch | None" = None
    starts: list[int] = field(default_factory=list)
    """0 and the depths of the branches above, ascending: where a node that ends here may begin."""
    saved_s: list[float] = field(default_factory=list)
    """For each of `starts`."""
    joins: "list[list[_Branch] | None]" = field(default_factory=list)
    """For each of `starts` the children that are in the node which ends here; None: none ends here."""

    @property
    def num_members(self) -> int:
        return self.end - self.first

    @property
    def parent_depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth

    @property
    def leaves(self) -> list[int]:
        """Members that are in no child."""
        inner = {member for child in self.children for member in range(child.first, child.end)}
        return [member for member in range(self.first, self.end) if member not in inner]

    def decide(self, cost: NodeCost, block_size: int) -> None:
        """After its children."""
        num_leaves = self.num_members - sum(child.num_members for child in self.children)
        for i, start in enumerate(self.starts):
            read_s = (self.depth - start) * block_size * cost.read_s
            reader_s = read_s - cost.merge_s
            apart_s, together_s = 0.0, num_leaves * max(0.0, reader_s) - read_s - cost.node_s
            joined = []
            for child in self.children:
                out_s = child.saved_s[i]
                in_s = child.num_members * reader_s + child.saved_s[-1]
                apart_s += out_s
                together_s += max(out_s, in_s)
                if in_s > out_s:
                    joined.append(child)
            is_together = together_s > apart_s
            self.saved_s.append(together_s if is_together else apart_s)
            self.joins.append(joined if is_together else None)


class _End(NamedTuple):
    """A node: members' blocks from `start` to the branch."""

    branch: _Branch
    start: int
    members: Iterable[int]


def _find_branches(tables: list[list[int]], unit_blocks: int) -> list[_Branch]:
    """Of sorted tables, each after its children."""
    branches: list[_Branch] = []
    open_branches = [_Branch(0, 0)]
    for i, (a, b) in enumerate(pairwise(tables), start=1):
        depth = _common_blocks(a, b) // unit_blocks * unit_blocks
        first = i - 1
        while open_branches[-1].depth > depth:
            done = open_branches.pop()
            done.end, first = i, done.first
            branches.append(done)
            if open_branches[-1].depth < depth:
                open_branches.append(_Branch(depth, first))
            _adopt(open_branches[-1], done)
        if open_branches[-1].depth < depth:
            open_branches.append(_Branch(depth, first))
    while len(open_branches) > 1:
        done = open_branches.pop()
        done.end = len(tables)
        branches.append(done)
        _adopt(open_branches[-1], done)
    for branch in reversed(branches):
        branch.starts = [0] if branch.parent is None else [*branch.parent.starts, branch.parent.depth]
    return branches


def _adopt(parent: _Branch, child: _Branch) -> None:
    if parent.depth:
        parent.children.append(child)
        child.parent = parent


def _common_blocks(a: list[int], b: list[int]) -> int:
    """That both tables begin with."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end
    return bisect_left(range(end), True, key=lambda i: a[: i + 1] != b[: i + 1])


def _find_ends(branches: list[_Branch]) -> list[_End]:
    """The nodes of what has been decided."""
    ends = []
    todo = [(branch, 0) for branch in branches if branch.parent is None]
    while todo:
        branch, i = todo.pop()
        joined = branch.joins[i]
        if joined is not None:
            members = branch.leaves
            for child in joined:
                members += range(child.first, child.end)
            ends.append(_End(branch, branch.starts[i], members))
        todo += [(child, -1 if joined is not None and child in joined else i) for child in branch.children]
    return ends
