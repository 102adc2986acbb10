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


def test_equal_ids_in_other_places_are_not_shared():
    assert find_shared_nodes([row(34, 9, 2, 3, 4, 5), row(34, 1, 2, 3, 4, 6)], BLOCK_SIZE) == ()


def test_no_rows():
    assert find_shared_nodes([], BLOCK_SIZE) == ()
