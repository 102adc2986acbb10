"""Hashes of a sequence, each computed once."""

import pytest

from engine import sequence_hashes
from engine.block_hash import hash_block, root_hash
from engine.protocol import END, Scope
from engine.sequence_hashes import SequenceHashes, find_tail_ends
from tests.engine.sequences import make_sequence

ROOT = root_hash("model")
SCOPES = (Scope(6, b"assistant"), Scope(END, b"a"))


def test_blocks_and_tails_are_chained_from_the_root():
    hashes = SequenceHashes(4, ROOT)
    sequence = make_sequence("s", list(range(10)), scopes=SCOPES)
    first = hash_block(ROOT, b"assistant", [0, 1, 2, 3])
    second = hash_block(first, b"a", [4, 5, 6, 7])
    assert hashes.first(sequence, 2) == [first, second]
    assert [hashes.parent(sequence, index) for index in (0, 1, 2)] == [ROOT, first, second]
    assert hashes.tail(sequence, 6) == hash_block(first, b"assistant", [4, 5])
    assert hashes.tail(sequence, 8) == second
    assert hashes.tail(sequence, 10) == hash_block(second, b"a", [8, 9])


def test_none_is_computed_twice(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def count(parent, scope, token_ids):
        calls.append(list(token_ids))
        return hash_block(parent, scope, token_ids)

    monkeypatch.setattr(sequence_hashes, "hash_block", count)
    hashes = SequenceHashes(4, ROOT)
    sequence = make_sequence("s", list(range(10)))
    hashes.first(sequence, 1)
    hashes.parent(sequence, 2)
    hashes.first(sequence, 2)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_others_may_go_on_from_ends_of_scopes_and_of_the_prompt():
    assert find_tail_ends(make_sequence("s", list(range(10)), scopes=SCOPES)) == [6, 10]
    assert find_tail_ends(make_sequence("s", list(range(6)), scopes=SCOPES)) == [6]
    assert find_tail_ends(make_sequence("s", list(range(3)))) == [3]
