"""Blocks of KV by id: reference counts and the order in which free ones are used again. Knows no tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

NULL_BLOCK = 0
"""Pads block tables; never allocated."""


@dataclass(eq=False, slots=True)
class Block:
    block_id: int
    ref_count: int = 0
    """Sequences whose table holds it, and pins."""
    is_cached: bool = False
    """The prefix cache has an entry for it. Set by the prefix cache alone."""
    num_pins: int = 0
    """Trunks that keep it: each of them is a reference too."""
    # links of the free list, set by it alone
    previous: "Block | None" = field(default=None, repr=False)
    next: "Block | None" = field(default=None, repr=False)


class FreeList:
    """Free blocks in the order of their next use: a doubly linked list through the blocks themselves.

    A prefix cache hit takes a block out of the middle, which costs the same as taking the first.
    """

    def __init__(self) -> None:
        self._ends = Block(NULL_BLOCK)  # sentinel: its next is the first, its previous the last
        self._ends.next = self._ends.previous = self._ends
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Used again after all others."""
        last = self._ends.previous
        assert last is not None
        self._insert(block, last, self._ends)

    def prepend(self, block: Block) -> None:
        """Used again before all others."""
        first = self._ends.next
        assert first is not None
        self._insert(block, self._ends, first)

    def remove(self, block: Block) -> None:
        before, after = block.previous, block.next
        if before is None or after is None:
            raise ValueError(f"block {block.block_id} is not in the free list")
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._num_blocks -= 1

    def pop_first(self) -> Block:
        """Raises IndexError if there is none."""
        block = self._ends.next
        if block is None or block is self._ends:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def _insert(self, block: Block, before: Block, after: Block) -> None:
        if block.next is not None:
            raise ValueError(f"block {block.block_id} is in the free list already")
        block.previous, block.next = before, after
        before.next = after.previous = block
        self._num_blocks += 1


class BlockPool:
    """`num_blocks` usable blocks with ids 1 to `num_blocks`; id 0 is the null block.

    A block is *referenced* (ref_count > 0) or *free*; a free one may still be *cached*, that is findable by its hash
    until it is used again. Free blocks are used again in this order: never published ones first, then by the time of
    their last release, and of blocks released together the tail of a sequence before its head.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self.free_list = FreeList()
        for block in self.blocks[1:]:
            self.free_list.append(block)

    @property
    def num_free(self) -> int:
        """Cached ones included."""
        return len(self.free_list)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - len(self.free_list)

    def try_allocate(self, num_blocks: int) -> list[Block] | None:
        """Takes the first free blocks, each with one reference; None, and nothing taken, if there are too few.

        A block that comes with `is_cached` still has its old entry: the caller must evict it before it is written.
        """
        if num_blocks > len(self.free_list):
            return None
        taken = []
        for _ in range(num_blocks):
            block = self.free_list.pop_first()
            assert block.ref_count == 0, f"free {block}"
            block.ref_count = 1
            taken.append(block)
        return taken

    def add_reference(self, block: Block) -> None:
        """One more table holds the block; a free one leaves the free list."""
        if block.block_id == NULL_BLOCK:
            raise ValueError("the null block cannot be referenced")
        self.add_references((block,))

    def add_references(self, blocks: Iterable[Block]) -> None:
        """As many in one call: a fork takes hundreds. None of them may be the null block."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_list.remove(block)
            block.ref_count += 1

    def release(self, blocks_tail_first: Iterable[Block]) -> None:
        """Takes one reference from each; those left with none become free.

        Raises ValueError for a block that is free already: somebody gave back what was not theirs.
        """
        for block in blocks_tail_first:
            if block.ref_count == 0:
                raise ValueError(f"block {block.block_id} is released, but it is free already")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.is_cached:
                    self.free_list.append(block)
                else:
                    self.free_list.prepend(block)

    def reuse_first(self, block: Block) -> None:
        """A free block whose content is of no more use goes to the front."""
        self.free_list.remove(block)
        self.free_list.prepend(block)

    def check_integrity(self) -> None:
        """Raises AssertionError, with data, unless exactly the blocks without references are in the free list."""
        listed = [block.block_id for block in self.free_list]
        expected = {block.block_id for block in self.blocks[1:] if block.ref_count == 0}
        assert len(listed) == len(set(listed)) == len(self.free_list), f"free list {listed}, length {self.num_free}"
        assert set(listed) == expected, f"in the free list {sorted(listed)}, without references {sorted(expected)}"
        assert all(block.ref_count >= 0 for block in self.blocks), [b for b in self.blocks if b.ref_count < 0]
        null = self.blocks[NULL_BLOCK]
        assert (null.ref_count, null.is_cached, null.next, null.previous) == (0, False, None, None), (
            f"null block {null}"
        )
