"""Entries by hash and parent."""

import pytest

from engine.block import Block
from engine.prefix_cache import MAX_TAILS, Entry, Prefix, PrefixCache, Tail

ROOT = b"root"


def publish(cache: PrefixCache, chain: list[tuple[bytes, int]], parent: bytes = ROOT) -> list[Block]:
    """Entries of 4 tokens with these hashes and block ids, each under the one before it."""
    blocks = []
    for block_hash, block_id in chain:
        blocks.append(Block(block_id))
        assert cache.publish(Entry(block_hash, parent, 4, blocks[-1]))
        parent = block_hash
    cache.check_integrity(ROOT)
    return blocks


def find(cache: PrefixCache, *hashes: bytes) -> list[int]:
    prefix = cache.find_full_blocks(hashes)
    assert prefix.num_tokens == 4 * len(prefix.blocks)
    return [block.block_id for block in prefix.blocks]


def test_an_empty_cache_finds_nothing():
    assert PrefixCache().find_full_blocks([b"a"]) == Prefix()


def test_the_longest_known_beginning_is_found():
    cache = PrefixCache()
    publish(cache, [(b"a", 1), (b"b", 2), (b"c", 3)])
    assert find(cache, b"a", b"b", b"c", b"d") == [1, 2, 3]
    assert find(cache, b"a", b"b") == [1, 2]
    assert find(cache, b"a", b"x", b"c") == [1]
    assert find(cache) == []
    assert len(cache) == 3


def test_of_equal_blocks_the_first_published_stays():
    cache = PrefixCache()
    [first] = publish(cache, [(b"a", 1)])
    second = Block(2)
    assert not cache.publish(Entry(b"a", ROOT, 4, second))
    assert first.is_cached
    assert not second.is_cached
    assert find(cache, b"a") == [1]
    cache.check_integrity(ROOT)


def test_a_block_has_one_entry():
    cache = PrefixCache()
    [block] = publish(cache, [(b"a", 1)])
    with pytest.raises(AssertionError, match="has an entry already"):
        cache.publish(Entry(b"b", ROOT, 4, block))


def tail(parent: bytes, token_ids: tuple[int, ...], block: Block, scope: bytes = b"s") -> Tail:
    return Tail(parent, scope, token_ids, block)


def find_tail(cache: PrefixCache, parent: bytes, *token_ids: int, scope: bytes = b"s") -> int | None:
    found = cache.find_tail(parent, scope, token_ids, 1, 3)
    return found.block.block_id if found is not None else None


def test_tails_are_found_by_parent_scope_and_every_token():
    cache = PrefixCache()
    publish(cache, [(b"a", 1)])
    one, two = Block(2), Block(3)
    assert cache.publish_tail(tail(b"a", (5,), one)) == []
    assert cache.publish_tail(tail(b"a", (5, 6), two)) == []
    assert find_tail(cache, b"a", 5, 6, 7) == 3
    assert find_tail(cache, b"a", 5, 7) == 2
    assert find_tail(cache, b"a", 6, 5) is None
    assert find_tail(cache, b"a", 5, 6, scope=b"t") is None
    assert find_tail(cache, ROOT, 5, 6) is None
    assert cache.find_tail(b"a", b"s", (5, 6), 1, 1).block is one
    assert cache.find_tail(b"a", b"s", (5, 6), 3, 3) is None
    assert len(cache) == 3
    cache.check_integrity(ROOT)


def test_a_block_is_forgotten_with_all_that_it_vouched_for():
    cache = PrefixCache()
    block, under = Block(1), Block(2)
    cache.publish_tail(tail(ROOT, (5,), block))
    cache.publish_tail(tail(ROOT, (5, 6), block))
    cache.publish(Entry(b"a", ROOT, 4, block))
    cache.publish_tail(tail(b"a", (9,), under))
    assert len(cache) == 2
    assert cache.evict(block) == [under]
    assert (block.is_cached, under.is_cached, len(cache)) == (False, False, 0)
    assert find_tail(cache, ROOT, 5, 6) is None
    cache.check_integrity(ROOT)


def test_a_tail_can_be_replaced_by_that_of_another_block():
    cache = PrefixCache()
    first, second = Block(1), Block(2)
    cache.publish_tail(tail(ROOT, (5,), first))
    assert cache.publish_tail(tail(ROOT, (5,), second)) == []
    assert find_tail(cache, ROOT, 5) == 1
    assert cache.publish_tail(tail(ROOT, (5,), second), replace=True) == [first]
    assert find_tail(cache, ROOT, 5) == 2
    assert (first.is_cached, second.is_cached) == (False, True)
    cache.check_integrity(ROOT)


def test_a_pinned_tail_is_replaced_by_no_other():
    cache = PrefixCache()
    cache.publish_tail(tail(ROOT, (5,), Block(1, num_pins=1)))
    assert cache.publish_tail(tail(ROOT, (5,), Block(2)), replace=True) == []
    assert find_tail(cache, ROOT, 5) == 1


def test_pinned_tails_make_no_room():
    cache = PrefixCache()
    for i in range(MAX_TAILS):
        cache.publish_tail(tail(ROOT, (i,), Block(i + 1, num_pins=int(i == 0))))
    [dropped] = cache.publish_tail(tail(ROOT, (99,), Block(50)))
    assert dropped.block_id == 2
    assert [find_tail(cache, ROOT, i) for i in (0, 1, 2, 99)] == [1, None, 3, 50]


def test_an_evicted_tail_leaves_its_head():
    cache = PrefixCache()
    blocks = publish(cache, [(b"a", 1), (b"b", 2)])
    assert cache.evict(blocks[1]) == []
    assert find(cache, b"a", b"b") == [1]
    assert [block.is_cached for block in blocks] == [True, False]
    cache.check_integrity(ROOT)


def test_what_hangs_under_an_evicted_block_goes_with_it():
    cache = PrefixCache()
    a, b, c = publish(cache, [(b"a", 1), (b"b", 2), (b"c", 3)])
    [d] = publish(cache, [(b"d", 4)], parent=b"b")
    [other] = publish(cache, [(b"e", 5)], parent=b"a")
    assert set(cache.evict(b)) == {c, d}
    assert [block.is_cached for block in (a, b, c, d, other)] == [True, False, False, False, True]
    assert find(cache, b"a", b"e") == [1, 5]
    assert find(cache, b"c") == []
    assert len(cache) == 2
    cache.check_integrity(ROOT)


def test_what_was_evicted_can_be_published_again():
    cache = PrefixCache()
    [block] = publish(cache, [(b"a", 1)])
    cache.evict(block)
    publish(cache, [(b"a", 7)])
    assert find(cache, b"a") == [7]


def test_check_integrity_sees_what_cannot_be_reached():
    cache = PrefixCache()
    cache.publish(Entry(b"b", b"unknown parent", 4, Block(1)))
    with pytest.raises(AssertionError, match="0 entries can be reached, there are 1"):
        cache.check_integrity(ROOT)
