"""What blocks are known by."""

import pytest

from engine.block_hash import hash_block, root_hash, scope_of_block
from engine.protocol import END, Scope

ROOT = root_hash("fingerprint", "float32")


def test_b05_the_hash_is_wide_and_chained_to_the_parent():
    first = hash_block(ROOT, b"scope", [1, 2, 3, 4])
    assert len(ROOT) == len(first) == 32
    assert hash_block(first, b"scope", [1, 2, 3, 4]) != first
    assert hash_block(hash_block(first, b"scope", [5]), b"scope", [6]) != hash_block(first, b"scope", [6])


def test_b05_the_hash_is_the_same_in_every_process():
    """It is SHA-256 over length-prefixed fields; Python's own hash is salted for each process and can collide."""
    expected = "ad846db9d306832d2398871686812da3c86e266cea1c1fa644fc70dde0a67661"
    assert hash_block(bytes(32), b"s", [1, 2]).hex() == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((ROOT, b"tenant a", [1, 2]), (ROOT, b"tenant b", [1, 2])),
        ((ROOT, b"a", [1, 2]), (ROOT, b"a", [1, 2, 0])),
        ((ROOT, b"a", [1, 2]), (ROOT, b"a", [2, 1])),
        ((ROOT, b"a", [258]), (ROOT, b"a", [2, 1])),
        ((ROOT, b"", [1, 2]), (ROOT, b"\0", [1, 2])),
        # the border between two fields is part of the input
        ((ROOT + b"a", b"b", [1]), (ROOT, b"ab", [1])),
        ((ROOT, b"a\1\0\0\0", []), (ROOT, b"a", [1])),
    ],
)
def test_different_inputs_have_different_hashes(one, other):
    assert hash_block(*one) != hash_block(*other)


def test_roots_differ_with_each_of_their_fields():
    roots = [
        root_hash("f", "bfloat16", "rope 10000"),
        root_hash("f", "float32", "rope 10000"),
        root_hash("g", "bfloat16", "rope 10000"),
        root_hash("f", "bfloat16", "rope 500000"),
        root_hash("f", "bfloat16rope 10000"),
        root_hash("fbfloat16", "rope 10000"),
    ]
    assert len(set(roots)) == len(roots)


def test_a_block_belongs_to_the_first_scope_whose_end_it_does_not_pass():
    scopes = [Scope(20, b"assistant"), Scope(40, b"tenant"), Scope(END, b"user")]
    ends = [8, 16, 20, 24, 32, 40, 48]
    keys = [b"assistant", b"assistant", b"assistant", b"tenant", b"tenant", b"tenant", b"user"]
    assert [scope_of_block(scopes, end) for end in ends] == keys


def test_a_block_behind_all_scopes_is_an_error():
    with pytest.raises(ValueError, match="ends at token 24 lies in none of the 1 scopes"):
        scope_of_block([Scope(20, b"assistant")], 24)
