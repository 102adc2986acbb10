"""Shared blocks of decode rows, at several levels."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.forest import SharedNode, count_blocks_not_read, find_shared_nodes
from engine.sequence import Sequence
from engine.shared_attention import NodeCost, SharedAttention
from tests.engine.sequences import check_nodes, make_sequence

BLOCK_SIZE = 8
ALWAYS = SharedAttention("always")
CHEAP = SharedAttention("auto", NodeCost(read_s=1.0, merge_s=1.0, node_s=20.0))
"""Two rows pay for a node from four blocks on, eleven from one."""
TRUNK = (1, 2, 3, 4, 5, 6)


def row(*block_table: int, last: int = 1) -> Sequence:
    """`last`: tokens in its last block."""
    sequence = make_sequence("r", [1] * ((len(block_table) - 1) * BLOCK_SIZE + last))
    sequence.block_table += block_table
    return sequence


def find(*rows: Sequence, shared_attention: SharedAttention = CHEAP) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    nodes = find_shared_nodes(rows, BLOCK_SIZE, shared_attention)
    check_nodes(rows, nodes, BLOCK_SIZE)
    return [tuple(node) for node in nodes]


def test_rows_with_one_trunk_share_it_up_to_where_they_part():
    assert find(row(*TRUNK, 7), row(*TRUNK, 8), row(*TRUNK, 9, 10)) == [(TRUNK, (0, 1, 2))]


def test_each_trunk_has_a_node_and_single_rows_have_none():
    rows = (11, 12, 13, 14, 1), (21, 22, 23, 24, 2), (31, 32, 33, 34, 3), (21, 22, 23, 24, 4), (11, 12, 13, 14, 5)
    assert find(*(row(*table) for table in rows)) == [((11, 12, 13, 14), (0, 4)), ((21, 22, 23, 24), (1, 3))]


def test_trunk_document_and_siblings_are_a_node_each():
    document, answer = range(20, 26), range(30, 36)
    rows = [
        row(*TRUNK, *document, *answer, 90),
        row(*TRUNK, 91),
        row(*TRUNK, *document, 92),
        row(*TRUNK, *document, *answer, 93),
    ]
    assert find(*rows) == [(TRUNK, (0, 1, 2, 3)), (tuple(document), (0, 2, 3)), (tuple(answer), (0, 3))]


def test_a_short_common_beginning_is_not_worth_a_node():
    rows = row(1, 2, 3, 4), row(1, 2, 5, 6)
    assert find(*rows) == []
    assert find(*rows, shared_attention=ALWAYS) == [((1, 2), (0, 1))]


def test_blocks_lie_before_the_last_token_of_every_row():
    assert find(row(*TRUNK, 7), row(*TRUNK, 8), row(*TRUNK, last=8)) == [(TRUNK[:5], (0, 1, 2))]
    assert find(row(1, last=8), row(1, 2), shared_attention=ALWAYS) == []


def test_rows_that_share_a_little_more_read_on_in_the_trunks_node():
    """A node of one more block would not pay, but two of four rows read it too if the others have no node at all."""
    rows = [row(*TRUNK, 7, 20), row(*TRUNK, 7, 21), row(1, 22)]
    assert find(*rows) == [((*TRUNK, 7), (0, 1))]
    assert find(*rows, shared_attention=ALWAYS) == [((1,), (0, 1, 2)), ((*TRUNK[1:], 7), (0, 1))]


def test_documents_of_a_block_more_do_not_split_the_trunk():
    rows = [row(*TRUNK, 7, 20), row(*TRUNK, 8, 21), row(*TRUNK, 7, 22), row(*TRUNK, 8, 23)]
    assert find(*rows) == [(TRUNK, (0, 1, 2, 3))]


def test_equal_ids_in_other_places_are_not_shared():
    assert find(row(9, 2, 3, 4, 5), row(1, 2, 3, 4, 6), shared_attention=ALWAYS) == []


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_without_company_there_is_no_node(mode):
    assert find(shared_attention=SharedAttention(mode)) == find(row(1, 2, 3), shared_attention=SharedAttention(mode))
    if mode == "never":
        assert find(row(*TRUNK, 7), row(*TRUNK, 8), shared_attention=SharedAttention(mode)) == []


def test_many_rows_that_part_one_after_the_other():
    """More branches above one another than calls may nest."""
    rows = [row(*range(1, i + 2), 10_000 + i) for i in range(1500)]
    [*nodes] = find(*rows, shared_attention=ALWAYS)
    assert nodes[0] == ((1,), tuple(range(1500)))
    assert nodes[-1] == ((1499,), (1498, 1499))
    assert len(nodes) == 1499


tables = st.lists(st.integers(1, 2), min_size=1, max_size=6)
batches = st.lists(st.builds(lambda table, last: row(*table, last=last), tables, st.integers(1, 8)), max_size=12)
costs = st.builds(
    NodeCost, read_s=st.sampled_from([0.0, 1.0, 3.0]), merge_s=st.integers(0, 30), node_s=st.integers(0, 90)
)


def leading_blocks(sequence: Sequence, unit: int = 1) -> tuple[int, ...]:
    """All that may be in nodes."""
    return tuple(sequence.block_table[: (sequence.num_tokens - 1) // BLOCK_SIZE // unit * unit])


def prefixes(rows: list[Sequence], unit: int = 1) -> Counter[tuple[int, ...]]:
    """How many rows begin with it, for each number of blocks that is a multiple of the unit."""
    tables = [leading_blocks(sequence, unit) for sequence in rows]
    return Counter(table[:n] for table in tables for n in range(unit, len(table) + 1, unit))


@given(batches)
def test_always_reads_every_shared_block_once(rows):
    nodes = find_shared_nodes(rows, BLOCK_SIZE, ALWAYS)
    check_nodes(rows, nodes, BLOCK_SIZE)
    assert count_blocks_not_read(nodes) == sum(count - 1 for count in prefixes(rows).values())


@given(batches, st.sampled_from(["auto", "always"]), costs, st.sampled_from([2, 3]))
def test_nodes_of_whole_pieces_begin_and_end_on_their_grid(rows, mode, cost, unit):
    nodes = find_shared_nodes(rows, BLOCK_SIZE, SharedAttention(mode, cost, unit * BLOCK_SIZE))
    check_nodes(rows, nodes, BLOCK_SIZE)
    assert all(len(node.block_ids) % unit == 0 for node in nodes)
    if mode == "always":
        assert count_blocks_not_read(nodes) == unit * sum(count - 1 for count in prefixes(rows, unit).values())


def saved_s(nodes: tuple[SharedNode, ...], cost: NodeCost) -> float:
    return sum(
        (len(node.rows) - 1) * len(node.block_ids) * BLOCK_SIZE * cost.read_s
        - len(node.rows) * cost.merge_s
        - cost.node_s
        for node in nodes
    )


def all_forests(rows: list[Sequence]) -> Iterator[tuple[SharedNode, ...]]:
    """Every row cuts its leading blocks in every way; rows with one piece after the same beginning are its readers."""
    ways = []
    for sequence in rows:
        num_blocks = len(leading_blocks(sequence))
        cuts = [n for k in range(num_blocks + 1) for n in itertools.combinations(range(1, num_blocks + 1), k)]
        ways.append([list(itertools.pairwise((0, *cut))) for cut in cuts])
    for pieces_of_rows in itertools.product(*ways):
        readers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for index, pieces in enumerate(pieces_of_rows):
            for start, end in pieces:
                readers.setdefault((start, leading_blocks(rows[index])[:end]), []).append(index)
        if all(len(members) > 1 for members in readers.values()):
            yield tuple(SharedNode(table[start:], tuple(members)) for (start, table), members in readers.items())


@given(
    st.lists(st.builds(lambda table: row(*table), st.lists(st.integers(1, 2), min_size=1, max_size=5)), max_size=3),
    costs,
)
def test_no_other_forest_of_few_rows_saves_more(rows, cost):
    nodes = find_shared_nodes(rows, BLOCK_SIZE, SharedAttention("auto", cost))
    check_nodes(rows, nodes, BLOCK_SIZE)
    assert saved_s(nodes, cost) == max(saved_s(forest, cost) for forest in all_forests(rows))


@given(batches, costs)
def test_what_pays_is_never_worse_than_nothing_and_everything(rows, cost):
    nodes = find_shared_nodes(rows, BLOCK_SIZE, SharedAttention("auto", cost))
    check_nodes(rows, nodes, BLOCK_SIZE)
    assert saved_s(nodes, cost) >= max(0.0, saved_s(find_shared_nodes(rows, BLOCK_SIZE, ALWAYS), cost))
