"""Reference counts, and the order in which free blocks are used again."""

import pytest

from engine.block import Block
from engine.block_pool import BlockPool
from engine.protocol import TenantShare
from engine.tenant_shares import TenantShares


def allocate(pool: BlockPool, num_blocks: int, *, cached: bool = False) -> list[Block]:
    blocks = pool.try_allocate(num_blocks)
    assert blocks is not None
    for block in blocks:
        block.is_cached = cached
    return blocks


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def test_a_new_pool_gives_blocks_by_id_and_never_the_null_block():
    pool = BlockPool(4)
    assert ids(pool.free_list) == [1, 2, 3, 4]
    assert ids(allocate(pool, 4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.num_referenced == 4
    pool.check_integrity()


def test_what_does_not_fit_takes_nothing():
    pool = BlockPool(4)
    allocate(pool, 3)
    assert pool.try_allocate(2) is None
    assert ids(pool.free_list) == [4]
    pool.check_integrity()


def test_cached_blocks_go_by_their_release_tail_before_head():
    pool = BlockPool(6)
    first, second = allocate(pool, 3, cached=True), allocate(pool, 3, cached=True)
    pool.release(reversed(second))
    pool.release(reversed(first))
    assert ids(pool.free_list) == [6, 5, 4, 3, 2, 1]
    pool.check_integrity()


def test_never_published_blocks_are_used_again_first():
    pool = BlockPool(5)
    cached, private = allocate(pool, 3, cached=True), allocate(pool, 2)
    pool.release(reversed(cached))
    pool.release(reversed(private))
    assert ids(pool.free_list) == [4, 5, 3, 2, 1]


def test_a_hit_takes_a_block_out_of_the_middle():
    pool = BlockPool(4)
    blocks = allocate(pool, 4, cached=True)
    pool.release(blocks)
    assert ids(pool.free_list) == [1, 2, 3, 4]
    pool.add_reference(blocks[2])
    assert ids(pool.free_list) == [1, 2, 4]
    pool.release([blocks[2]])
    assert ids(pool.free_list) == [1, 2, 4, 3]  # the freshest
    pool.check_integrity()


def test_a_shared_block_is_free_when_its_last_reader_leaves():
    pool = BlockPool(2)
    [block] = allocate(pool, 1, cached=True)
    pool.add_reference(block)
    pool.release([block])
    assert ids(pool.free_list) == [2]
    pool.release([block])
    assert ids(pool.free_list) == [2, 1]


def test_a_block_of_no_more_use_goes_to_the_front():
    pool = BlockPool(3)
    blocks = allocate(pool, 3, cached=True)
    pool.release(blocks)
    pool.reuse_first(blocks[2])
    assert ids(pool.free_list) == [3, 1, 2]


def test_b07_a_second_release_raises():
    pool = BlockPool(2)
    [block] = allocate(pool, 1)
    pool.release([block])
    with pytest.raises(ValueError, match="block 1 is released, but it is free already"):
        pool.release([block])
    pool.check_integrity()


def test_the_null_block_can_neither_be_referenced_nor_released():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="null block"):
        pool.add_reference(pool.blocks[0])
    with pytest.raises(ValueError, match="block 0"):
        pool.release([pool.blocks[0]])


def test_a_pool_has_at_least_one_block():
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockPool(0)


def test_check_integrity_sees_a_lost_block():
    pool = BlockPool(3)
    [block] = allocate(pool, 1)
    block.ref_count = 0
    with pytest.raises(AssertionError, match=r"in the free list \[2, 3\], without references \[1, 2, 3\]"):
        pool.check_integrity()


def test_check_integrity_sees_a_free_block_with_a_reference():
    pool = BlockPool(2)
    pool.blocks[2].ref_count = 1
    with pytest.raises(AssertionError, match=r"in the free list \[1, 2\], without references \[1\]"):
        pool.check_integrity()


def test_what_is_held_or_cached_has_an_owner():
    pool = BlockPool(4)
    [a1, a2] = pool.try_allocate(2, "a")
    [b1] = pool.try_allocate(1, "b")
    [trunk] = pool.try_allocate(1)
    assert pool.num_owned == {"a": 2, "b": 1}
    a1.is_cached = b1.is_cached = trunk.is_cached = True
    pool.release([a1, a2, b1, trunk])  # a2 is found by nobody
    assert pool.num_owned == {"a": 1, "b": 1}
    assert (pool.num_free_of("a"), pool.num_free_of("b"), pool.num_free_of("c")) == (1, 1, 0)
    assert ids(pool.try_allocate(2, "c")) == [2, 1]
    assert pool.num_owned == {"b": 1, "c": 2}
    pool.reuse_first(b1)
    assert pool.num_owned == {"c": 2}
    pool.check_integrity()


def test_who_has_all_that_it_may_gets_its_own_free_ones():
    pool = BlockPool(6)
    theirs, mine = pool.try_allocate(2, "them"), pool.try_allocate(3, "me")
    for block in theirs + mine:
        block.is_cached = True
    pool.release(theirs + mine)
    assert ids(pool.free_list) == [6, 1, 2, 3, 4, 5]
    assert ids(pool.try_allocate(3, "me", max_owned=4)) == [6, 3, 4]
    assert pool.num_owned == {"them": 2, "me": 4}
    pool.check_integrity()


def test_a_limit_does_not_keep_blocks_from_an_owner_without_free_ones():
    pool = BlockPool(3)
    assert ids(pool.try_allocate(2, "me", max_owned=1)) == [1, 2]


def test_a_tenant_over_its_share_gives_first():
    shares = TenantShares()
    shares.set([TenantShare(tenant="heavy", weight=2.0)])
    pool = BlockPool(7, shares)
    light, heavy = pool.try_allocate(2, "light"), pool.try_allocate(5, "heavy")
    for block in light + heavy:
        block.is_cached = True
    pool.release(light + heavy)
    # five of seven are more than two thirds; then four of six are not, and the longest free one goes
    assert ids(pool.try_allocate(2)) == [3, 1]


def test_check_integrity_sees_an_owner_of_nothing():
    pool = BlockPool(2)
    pool.blocks[1].owner = "a"
    with pytest.raises(AssertionError, match="neither held nor cached, but has an owner"):
        pool.check_integrity()
