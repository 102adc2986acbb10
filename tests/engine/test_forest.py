"""Shared leading blocks of decode rows."""

from engine.forest import SharedNode, find_shared_nodes
from tests.engine.sequences import make_sequence

BLOCK_SIZE = 8


def row(num_tokens: int, *block_table: int):
    sequence = make_sequence("r", [1] * num_tokens)
    assert -(-num_tokens // BLOCK_SIZE) == len(block_table)
    sequence.block_table += block_table
    return sequence


def test_rows_with_one_trunk_share_it_up_to_where_they_part():
    rows = [row(41, 1, 2, 3, 4, 5, 6), row(44, 1, 2, 3, 4, 5, 7), row(49, 1, 2, 3, 4, 5, 8, 9)]
    assert find_shared_nodes(rows, BLOCK_SIZE) == (SharedNode((1, 2, 3, 4, 5), (0, 1, 2)),)


def test_each_trunk_has_a_node_and_single_rows_have_none():
    rows = [
        row(34, 11, 12, 13, 14, 1),
        row(34, 21, 22, 23, 24, 2),
        row(34, 31, 32, 33, 34, 3),
        row(34, 21, 22, 23, 24, 4),
        row(35, 11, 12, 13, 14, 5),
    ]
    assert find_shared_nodes(rows, BLOCK_SIZE) == (
        SharedNode((11, 12, 13, 14), (0, 4)),
        SharedNode((21, 22, 23, 24), (1, 3)),
    )


def test_a_short_common_beginning_is_not_worth_a_node():
    assert find_shared_nodes([row(34, 1, 2, 3, 4, 5), row(34, 1, 2, 3, 6, 7)], BLOCK_SIZE) == ()


def test_blocks_lie_before_the_last_token_of_every_row():
    # the third row's 40 tokens fill five blocks: the fifth holds its last token
    rows = [row(41, 1, 2, 3, 4, 5, 6), row(41, 1, 2, 3, 4, 5, 7), row(40, 1, 2, 3, 4, 5)]
    assert find_shared_nodes(rows, BLOCK_SIZE) == (SharedNode((1, 2, 3, 4), (0, 1, 2)),)
    assert find_shared_nodes([row(32, 1, 2, 3, 4), row(33, 1, 2, 3, 4, 5)], BLOCK_SIZE) == ()


def test_one_row_that_shares_little_does_not_cost_the_others_their_run():
    """Ten rows share eight blocks and an eleventh the first four of them: one node over all would save 40 reads."""
    trunk = (1, 2, 3, 4, 5, 6, 7, 8)
    rows = [row(66, *trunk, 20 + i) for i in range(10)] + [row(66, 1, 2, 3, 4, 15, 16, 17, 18, 40)]
    assert find_shared_nodes(rows, BLOCK_SIZE) == (SharedNode(trunk, tuple(range(10))),)


def test_a_stretch_is_split_only_where_that_saves_more():
    """Two documents of one more block under one trunk of six: one node saves 18 reads, two would save 14."""
    trunk = (1, 2, 3, 4, 5, 6)
    rows = [row(58, *trunk, 7, 20), row(58, *trunk, 8, 21), row(58, *trunk, 7, 22), row(58, *trunk, 8, 23)]
    assert find_shared_nodes(rows, BLOCK_SIZE) == (SharedNode(trunk, (0, 1, 2, 3)),)
    long = tuple(range(100, 120))
    rows = [
        row(218, *trunk, *long, 7, 20),
        row(218, *trunk, *range(200, 220), 8, 21),
        row(218, *trunk, *long, 7, 22),
        row(218, *trunk, *range(200, 220), 8, 23),
    ]
    assert find_shared_nodes(rows, BLOCK_SIZE) == (
        SharedNode((*trunk, *long, 7), (0, 2)),
        SharedNode((*trunk, *range(200, 220), 8), (1, 3)),
    )


def test_equal_ids_in_other_places_are_not_shared():
    assert find_shared_nodes([row(34, 9, 2, 3, 4, 5), row(34, 1, 2, 3, 4, 6)], BLOCK_SIZE) == ()


def test_no_rows():
    assert find_shared_nodes([], BLOCK_SIZE) == ()
