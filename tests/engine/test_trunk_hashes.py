"""Hashes of trunks are computed once. Blocks hold 4 tokens."""

import pytest

from engine import sequence_hashes
from engine.block_hash import root_hash
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import END, Scope
from engine.trunk_hashes import MAX_TRUNKS, TrunkHashes
from tests.engine.sequences import make_sequence

TRUNK = list(range(10))
SCOPES = (Scope(10, b"assistant"), Scope(END, b"tenant"))


@pytest.fixture
def hashed(monkeypatch) -> list[list[int]]:
    """Token ids of each block that is hashed."""
    calls = []
    compute = sequence_hashes.hash_block

    def hash_block(parent, scope, token_ids):
        calls.append(token_ids)
        return compute(parent, scope, token_ids)

    monkeypatch.setattr(sequence_hashes, "hash_block", hash_block)
    return calls


def hashes_of(kv: KVCacheManager, token_ids: list[int], scopes: tuple[Scope, ...] = SCOPES) -> list[bytes]:
    return kv.shareable_hashes(make_sequence("s", token_ids, scopes=scopes))


def make_manager() -> KVCacheManager:
    return KVCacheManager(4, 4, root_hash("model"))


def test_a_request_pays_for_its_own_text_only(hashed):
    kv = make_manager()
    first = hashes_of(kv, [*TRUNK, 50, 51, 52])
    assert hashed == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 50, 51]]
    hashed.clear()
    second = hashes_of(kv, [*TRUNK, 60, 61, 62])
    assert hashed == [[8, 9, 60, 61]]
    assert second[:2] == first[:2]
    assert second == hashes_of(make_manager(), [*TRUNK, 60, 61, 62])


@pytest.mark.parametrize(
    ("token_ids", "scopes"),
    [
        ([*TRUNK[:7], 99, 8, 9, 60, 61, 62], SCOPES),
        (TRUNK[:6], SCOPES),
        ([*TRUNK, 60, 61, 62], (Scope(10, b"another"), Scope(END, b"tenant"))),
        ([*TRUNK, 60, 61, 62], (Scope(9, b"assistant"), Scope(END, b"tenant"))),
        ([*TRUNK, 60, 61, 62], (Scope(END, b"assistant"),)),
    ],
)
def test_another_trunk_is_hashed_anew(hashed, token_ids, scopes):
    kv = make_manager()
    hashes_of(kv, [*TRUNK, 50, 51, 52])
    hashed.clear()
    assert hashes_of(kv, token_ids, scopes) == hashes_of(make_manager(), token_ids, scopes)
    assert len(hashed) == 2 * ((len(token_ids) - 1) // 4)


def test_an_edited_trunk_takes_the_place_of_the_old_one(hashed):
    kv = make_manager()
    hashes_of(kv, [*TRUNK, 50, 51, 52])
    edited = [7, *TRUNK[1:]]
    hashes_of(kv, [*edited, 50, 51, 52])
    hashed.clear()
    hashes_of(kv, [*edited, 60, 61, 62])
    assert hashed == [[8, 9, 60, 61]]


def test_trunks_that_nobody_asks_for_are_forgotten():
    trunks = TrunkHashes(4)

    def remember(name: bytes) -> None:
        sequence = make_sequence("s", TRUNK, scopes=(Scope(10, name), Scope(END, b"")))
        sequence.block_hashes = [b"1", b"2"]
        trunks.remember(sequence, 0)

    def found(name: bytes) -> list[bytes]:
        return trunks.find(make_sequence("s", TRUNK, scopes=(Scope(10, name), Scope(END, b""))))

    remember(b"kept")
    remember(b"forgotten")
    for i in range(MAX_TRUNKS - 1):
        assert found(b"kept") == [b"1", b"2"]
        remember(b"%d" % i)
    assert found(b"kept") == [b"1", b"2"]
    assert found(b"forgotten") == []
