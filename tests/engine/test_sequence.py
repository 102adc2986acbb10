"""The token state of one request."""

from engine.protocol import END, Scope
from engine.sequence import SequenceStatus
from tests.engine.sequences import make_sequence


def test_a_new_sequence_waits_with_nothing_computed():
    sequence = make_sequence("a", [5, 6, 7])
    assert sequence.status is SequenceStatus.WAITING
    assert (sequence.num_tokens, sequence.num_prompt_tokens, sequence.num_output_tokens) == (3, 3, 0)
    assert (sequence.num_computed_tokens, sequence.num_uncomputed_tokens) == (0, 3)
    assert (sequence.num_cached_tokens, sequence.block_table, sequence.is_finished) == (None, [], False)


def test_output_follows_the_prompt_and_leaves_it_alone():
    prompt_ids = [5, 6, 7]
    sequence = make_sequence("a", prompt_ids)
    sequence.num_computed_tokens = 3
    sequence.token_ids.append(8)
    assert (sequence.num_tokens, sequence.num_output_tokens, sequence.num_uncomputed_tokens) == (4, 1, 1)
    assert sequence.output_ids == [8]
    assert sequence.prompt_ids == prompt_ids == [5, 6, 7]


def test_end_ids_end_it_unless_they_are_ignored():
    assert make_sequence("a", [1], stop_token_ids=(3,), eos_token_ids=(1, 2)).stop_ids == {1, 2, 3}
    assert make_sequence("a", [1], stop_token_ids=(3,), eos_token_ids=(1, 2), ignore_eos=True).stop_ids == {3}


def test_two_sequences_with_equal_fields_are_two():
    assert len({make_sequence("a", [1]), make_sequence("a", [1])}) == 2


def test_cached_tokens_of_the_trunk_are_those_of_a_first_scope_with_a_key_of_its_own():
    def trunk_tokens(num_cached, *scopes):
        sequence = make_sequence("a", [1] * 9, scopes=scopes)
        sequence.num_cached_tokens = num_cached
        return sequence.num_cached_trunk_tokens

    trunk, mark, rest = Scope(4, b"assistant"), Scope(6, b"private"), Scope(END, b"private")
    assert [trunk_tokens(n, trunk, rest) for n in (None, 0, 3, 4, 8)] == [None, 0, 3, 4, 4]
    assert [trunk_tokens(n, trunk, mark, rest) for n in (None, 0, 3, 4, 8)] == [None, 0, 3, 4, 4]
    assert [trunk_tokens(n, mark, rest) for n in (None, 0, 8)] == [None, 0, 0], "a mark within one scope is no trunk"
    assert trunk_tokens(8, rest) == 0
