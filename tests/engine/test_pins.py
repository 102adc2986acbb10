"""Blocks that trunks keep: a pool of ten, at most four of them pinned."""

import pytest

from engine.block_pool import BlockPool
from engine.pins import Pins


@pytest.fixture
def pool() -> BlockPool:
    pool = BlockPool(10)
    pool.try_allocate(8)
    return pool


def test_pins_are_references_within_the_budget(pool):
    pins, blocks = Pins(pool, 4), pool.blocks
    assert pins.try_pin("a", blocks[1:4])
    assert (pins.num_blocks, [block.ref_count for block in blocks[1:5]]) == (3, [2, 2, 2, 1])
    assert not pins.try_pin("b", blocks[4:6])
    assert (pins.num_blocks, blocks[4].ref_count, "b" in pins) == (3, 1, False)
    assert pins.try_pin("c", blocks[4:5])
    assert (pins.can_pin(0), pins.can_pin(1)) == (True, False)
    pins.check_integrity()


def test_a_block_of_two_trunks_counts_once_and_stays_until_both_have_gone(pool):
    pins, blocks = Pins(pool, 4), pool.blocks
    pins.try_pin("a", blocks[1:4])
    assert pins.try_pin("b", [*blocks[1:3], blocks[5]])
    assert (pins.num_blocks, blocks[1].ref_count) == (4, 3)
    pins.unpin("a")
    pins.unpin("a")
    assert (pins.num_blocks, [block.ref_count for block in blocks[1:6]]) == (3, [2, 2, 1, 1, 2])
    pins.check_integrity()
    pins.unpin("b")
    assert (pins.num_blocks, [block.ref_count for block in blocks[1:6]]) == (0, [1, 1, 1, 1, 1])


def test_a_block_with_no_other_reference_is_free_again_tail_first():
    pool = BlockPool(4)
    pins = Pins(pool, 4)
    pins.try_pin("a", pool.blocks[1:4])
    assert pool.num_free == 1
    for block in pool.blocks[1:4]:
        block.is_cached = True
    pins.unpin("a")
    assert [block.block_id for block in pool.free_list] == [4, 3, 2, 1]


def test_the_newest_is_dropped_first(pool):
    pins = Pins(pool, 4)
    pins.try_pin("a", pool.blocks[1:2])
    pins.try_pin("b", pool.blocks[2:3])
    assert pins.try_drop_newest()
    assert ("a" in pins, "b" in pins, pins.num_dropped) == (True, False, 1)
    assert pins.try_drop_newest()
    assert not pins.try_drop_newest()


def test_check_integrity_sees_a_count_that_no_trunk_explains(pool):
    pins = Pins(pool, 4)
    pins.try_pin("a", pool.blocks[1:2])
    pool.blocks[1].num_pins += 1
    with pytest.raises(AssertionError, match=r"pins by block \{1: 2\}, of the trunks \{1: 1\}"):
        pins.check_integrity()
