"""A list of free blocks through the blocks themselves."""

import pytest

from engine.block import Block, FreeList


def test_the_free_list_refuses_what_it_has_and_what_it_has_not():
    free_list, block = FreeList(), Block(7)
    with pytest.raises(ValueError, match="block 7 is not in the free list"):
        free_list.remove(block)
    free_list.append(block)
    with pytest.raises(ValueError, match="block 7 is in the free list already"):
        free_list.prepend(block)
    assert free_list.pop_first() is block
    with pytest.raises(IndexError):
        free_list.pop_first()


def test_many_are_taken_out_of_the_middle():
    free_list, blocks = FreeList(), [Block(i) for i in range(6)]
    for block in blocks:
        free_list.append(block)
    free_list.remove_all([blocks[1], blocks[2], blocks[5]])
    assert list(free_list) == [blocks[0], blocks[3], blocks[4]]
    assert (len(free_list), free_list.first) == (3, blocks[0])
    with pytest.raises(ValueError, match="block 5 is not in the free list"):
        free_list.remove_all([blocks[5]])


def test_a_block_of_another_list_is_refused():
    one, other, block = FreeList(), FreeList(), Block(7)
    one.append(block)
    with pytest.raises(ValueError, match="block 7 is not in the free list"):
        other.remove(block)
    assert (list(one), len(other)) == ([block], 0)
