"""Entries by hash and parent."""

import pytest

from engine.block_pool import Block
from engine.prefix_cache import Entry, Prefix, PrefixCache

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
    prefix = cache.find_longest_prefix(hashes)
    assert prefix.num_tokens == 4 * len(prefix.blocks)
    return [block.block_id for block in prefix.blocks]


def test_an_empty_cache_finds_nothing():
    assert PrefixCache().find_longest_prefix([b"a"]) == Prefix((), 0)


def test_the_longest_known_beginning_is_found():
    cache = PrefixCache()
    publish(cache, [(b"a", 1), (b"b", 2), (b"c", 3)])
    assert find(cache, b"a", b"b", b"c", b"d") == [1, 2, 3]
    assert find(cache, b"a", b"b") == [1, 2]
    assert find(cache, b"a", b"x", b"c") == [1]
    assert find(cache, b"b", b"c") == [2, 3]  # hashes are chained: whoever has b's has a's as well
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
