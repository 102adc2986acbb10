"""What slots ought to hold, and what is said when they do not. Blocks hold 4 tokens."""

import pytest

from engine.protocol import END, Scope
from engine.scheduled_batch import BlockCopy, ScheduledBatch, ScheduledSequence, Transfers
from engine.sequence import Sequence
from engine.shadow_kv import ShadowKV
from tests.engine.sequences import make_sequence


def row(table: list[int], token_ids: list[int], num_computed: int = 0, **more) -> ScheduledSequence:
    """All tokens from `num_computed` on are computed in the step."""
    sequence = make_sequence(f"at {table}", token_ids, **more)
    sequence.block_table += table
    sequence.num_computed_tokens = num_computed
    return ScheduledSequence(sequence, len(token_ids) - num_computed, True)


def step(shadow: ShadowKV, *rows: ScheduledSequence, copies: tuple[BlockCopy, ...] = ()) -> None:
    shadow.execute(ScheduledBatch(rows, transfers=Transfers(copies=copies)))
    for sequence, num_new_tokens, _ in rows:
        sequence.num_computed_tokens += num_new_tokens


def grow(sequence: Sequence, *token_ids: int) -> ScheduledSequence:
    sequence.token_ids += token_ids
    return ScheduledSequence(sequence, sequence.num_uncomputed_tokens, True)


def test_a_sequence_reads_what_it_wrote():
    shadow, first = ShadowKV(4, 4), row([1, 2], [5, 6, 7])
    step(shadow, first)
    step(shadow, grow(first.sequence, 8, 9))
    step(shadow, grow(first.sequence, 5))


def test_a_shared_beginning_reads_right():
    shadow = ShadowKV(4, 4)
    step(shadow, row([1, 2], [5, 6, 7, 8, 9]))
    step(shadow, row([1, 3], [5, 6, 7, 8, 1], 4))


def test_a_beginning_that_is_written_in_the_same_step_reads_right():
    """All rows' keys and values of a layer are written before its attention."""
    step(ShadowKV(4, 4), row([1, 3], [5, 6, 7, 8, 1], 4), row([1, 2], [5, 6, 7, 8, 9]))


@pytest.mark.parametrize(
    ("token_ids", "token"),
    [([5, 6, 0, 8, 1], 2), ([0, 6, 7, 8, 1], 0)],
)
def test_a_beginning_of_other_tokens_is_an_error(token_ids, token):
    shadow = ShadowKV(4, 4)
    step(shadow, row([1, 2], [5, 6, 7, 8, 9]))
    message = rf"'at \[1, 3\]' is about to read token {token} of 5 in block 1 at offset {token}, which holds the KV of"
    with pytest.raises(AssertionError, match=message):
        step(shadow, row([1, 3], token_ids, 4))


def test_equal_tokens_behind_other_ones_are_an_error():
    shadow = ShadowKV(8, 4)
    step(shadow, row([1, 2], [5, 6, 7, 8, 1, 2, 3, 4]))
    step(shadow, row([3], [0, 0, 0, 0]))
    with pytest.raises(AssertionError, match="token 4 of 9 in block 2 at offset 0"):
        step(shadow, row([3, 2, 4], [0, 0, 0, 0, 1, 2, 3, 4, 5], 8))


def test_equal_tokens_of_another_tenant_are_an_error():
    shadow = ShadowKV(4, 4)
    step(shadow, row([1], [5, 6, 7, 8], scopes=(Scope(END, b"tenant a"),)))
    with pytest.raises(AssertionError, match="or another scope"):
        step(shadow, row([1, 2], [5, 6, 7, 8, 9], 4, scopes=(Scope(END, b"tenant b"),)))


def test_a_trunk_that_ends_in_mid_block_reads_right_and_what_follows_it_does_not():
    shadow, trunk = ShadowKV(4, 4), Scope(2, b"trunk")
    step(shadow, row([1], [5, 6, 7], scopes=(trunk, Scope(END, b"tenant a"))))
    copies = (BlockCopy(1, 2),)
    step(shadow, row([2], [5, 6, 7], 2, scopes=(trunk, Scope(END, b"tenant b"))), copies=copies)
    with pytest.raises(AssertionError, match=r"token 2 of 4 in block 1 at offset 2, which holds .* another scope"):
        step(shadow, row([1], [5, 6, 7, 8], 3, scopes=(trunk, Scope(END, b"tenant b"))))


def test_what_was_never_written_is_an_error():
    with pytest.raises(AssertionError, match="which holds nothing"):
        step(ShadowKV(4, 4), row([1, 2], [5, 6, 7, 8, 9], 4))


def test_two_writers_of_one_block_are_an_error():
    with pytest.raises(AssertionError, match=r"'at \[1\]' is about to read token 0"):
        step(ShadowKV(4, 4), row([1], [5, 6]), row([1], [7, 8]))


def test_a_write_beyond_the_table_is_an_error():
    with pytest.raises(AssertionError, match="writes token 4, its table has 4 slots"):
        step(ShadowKV(4, 4), row([1], [5, 6, 7, 8, 9]))


def test_copies_carry_what_was_written():
    shadow = ShadowKV(4, 4)
    step(shadow, row([1, 2], [5, 6, 7, 8, 9, 10]))
    step(shadow, row([1, 3], [5, 6, 7, 8, 9, 11], 5), copies=(BlockCopy(2, 3),))
    with pytest.raises(AssertionError, match="in block 4 at offset 0, which holds nothing"):
        step(shadow, row([1, 4], [5, 6, 7, 8, 9, 11], 5), copies=(BlockCopy(2, 3),))


def test_what_a_failed_step_wrote_may_be_anything():
    shadow, scheduled = ShadowKV(4, 4), row([1, 2], [5, 6, 7, 8, 9])
    batch = ScheduledBatch((scheduled,), transfers=Transfers(copies=(BlockCopy(2, 3),)))
    shadow.execute(batch)
    shadow.forget(batch)
    with pytest.raises(AssertionError, match="in block 1 at offset 0, which holds nothing"):
        step(shadow, row([1, 4], [5, 6, 7, 8, 1], 4))
