"""A block of KV and lists of free ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NULL_BLOCK = 0
"""Pads block tables; never allocated."""


@dataclass(eq=False, slots=True)
class Block:
    block_id: int
    ref_count: int = 0
    """Sequences whose table holds it, pins, and transfers of the step under way."""
    is_cached: bool = False
    """The prefix cache has an entry for it. Set by the prefix cache alone."""
    num_pins: int = 0
    """Trunks that keep it: each of them is a reference too."""
    # set by the pool alone
    owner: str | None = None
    """The tenant whose share it counts for, while it is held or cached; None: nobody's, as those of trunks are."""
    released: int = 0
    """When it became free: counts up with every release."""
    # links of the free list that it is in, set by that alone
    free_list: "FreeList | None" = field(default=None, repr=False)
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

    @property
    def first(self) -> Block:
        """Raises IndexError if there is none."""
        block = self._ends.next
        if block is None or block is self._ends:
            raise IndexError("no free block")
        return block

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
        self.remove_all((block,))

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Raises ValueError at the first that is not in the list."""
        for block in blocks:
            before, after = block.previous, block.next
            if block.free_list is not self or before is None or after is None:
                raise ValueError(f"block {block.block_id} is not in the free list")
            before.next, after.previous = after, before
            block.previous = block.next = block.free_list = None
        self._num_blocks -= len(blocks)

    def pop_first(self) -> Block:
        """Raises IndexError if there is none."""
        block = self.first
        self.remove(block)
        return block

    def _insert(self, block: Block, before: Block, after: Block) -> None:
        if block.free_list is not None:
            raise ValueError(f"block {block.block_id} is in the free list already")
        block.previous, block.next, block.free_list = before, after, self
        before.next = after.previous = block
        self._num_blocks += 1
