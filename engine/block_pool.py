"""Blocks of KV by id: reference counts, owners, and which of the free ones is used again next. Knows no tokens."""

from collections.abc import Iterable, Sequence

from engine.block import NULL_BLOCK, Block
from engine.eviction_order import EvictionOrder, HasChildren
from engine.tenant_shares import TenantShares


class BlockPool:
    """`num_blocks` usable blocks with ids 1 to `num_blocks`; id 0 is the null block.

    A block is *referenced* (ref_count > 0) or *free*; a free one may still be *cached*, that is findable by its hash
    until it is used again. Free blocks are used again in this order: never published ones first, then by the time of
    their last release, and of blocks released together the tail of a sequence before its head; `EvictionOrder` says
    what tenants' shares change in that.

    A block belongs to the tenant for which it was allocated, or to nobody, as long as it is referenced or cached.
    """

    def __init__(
        self, num_blocks: int, shares: TenantShares | None = None, has_children: HasChildren = lambda block: False
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self.num_owned: dict[str, int] = {}
        """By tenant; none is 0. To be changed by the pool alone."""
        self.free_list = EvictionOrder(shares or TenantShares(), self.num_owned, has_children)
        for block in reversed(self.blocks[1:]):
            self.free_list.add(block)

    @property
    def num_free(self) -> int:
        """Cached ones included."""
        return len(self.free_list)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - len(self.free_list)

    def num_free_of(self, owner: str) -> int:
        """Free blocks that are cached for this tenant."""
        return self.free_list.num_cached_of(owner)

    def try_allocate(
        self, num_blocks: int, owner: str | None = None, max_owned: int | None = None
    ) -> list[Block] | None:
        """Takes the first free blocks, each with one reference; None, and nothing taken, if there are too few.

        An owner that has `max_owned` blocks already gets its own free ones, as far as there are any. A block that comes
        with `is_cached` still has its old entry: the caller must evict it before it is written.
        """
        if num_blocks > len(self.free_list):
            return None
        taken = []
        for _ in range(num_blocks):
            if max_owned is not None and owner is not None and self._has_to_give(owner, max_owned):
                block = self.free_list.pop_first_of(owner)
            else:
                block = self.free_list.pop_first()
            assert block.ref_count == 0, f"free {block}"
            block.ref_count = 1
            if block.owner != owner:
                self.disown(block)
                self._own(block, owner)
            taken.append(block)
        return taken

    def add_reference(self, block: Block) -> None:
        """One more table holds the block; a free one leaves the free list."""
        if block.block_id == NULL_BLOCK:
            raise ValueError("the null block cannot be referenced")
        self.add_references((block,))

    def add_references(self, blocks: Sequence[Block]) -> None:
        """As many in one call: a fork takes hundreds. None of them may be the null block, or be there twice."""
        free = []
        for block in blocks:
            ref_count = block.ref_count
            if ref_count == 0:
                free.append(block)
            block.ref_count = ref_count + 1
        if free:
            self.free_list.remove_all(free)

    def release(self, blocks_tail_first: Iterable[Block]) -> None:
        """Takes one reference from each; those left with none become free.

        Raises ValueError for a block that is free already: somebody gave back what was not theirs.
        """
        for block in blocks_tail_first:
            if block.ref_count == 0:
                raise ValueError(f"block {block.block_id} is released, but it is free already")
            block.ref_count -= 1
            if block.ref_count == 0:
                if not block.is_cached:
                    self.disown(block)
                self.free_list.add(block)

    def reuse_first(self, block: Block) -> None:
        """A free block whose content is of no more use goes to the front."""
        self.free_list.remove(block)
        self.disown(block)
        self.free_list.put_first(block)

    def disown(self, block: Block) -> None:
        """It counts for no tenant's share any more."""
        owner = block.owner
        if owner is not None:
            block.owner = None
            self.num_owned[owner] -= 1
            if self.num_owned[owner] == 0:
                del self.num_owned[owner]

    def _own(self, block: Block, owner: str | None) -> None:
        block.owner = owner
        if owner is not None:
            self.num_owned[owner] = self.num_owned.get(owner, 0) + 1

    def _has_to_give(self, owner: str, max_owned: int) -> bool:
        return self.num_owned.get(owner, 0) >= max_owned and self.free_list.num_cached_of(owner) > 0

    def check_integrity(self) -> None:
        """Raises AssertionError, with data, unless exactly the blocks without references are in the free list, and
        exactly those that are held or cached have an owner who counts them.
        """
        listed = [block.block_id for block in self.free_list]
        expected = {block.block_id for block in self.blocks[1:] if block.ref_count == 0}
        assert len(listed) == len(set(listed)) == len(self.free_list), f"free list {listed}, length {self.num_free}"
        assert set(listed) == expected, f"in the free list {sorted(listed)}, without references {sorted(expected)}"
        assert all(block.ref_count >= 0 for block in self.blocks), [b for b in self.blocks if b.ref_count < 0]
        counted: dict[str, int] = {}
        for block in self.blocks:
            if block.owner is not None:
                assert block.ref_count or block.is_cached, f"{block} is neither held nor cached, but has an owner"
                counted[block.owner] = counted.get(block.owner, 0) + 1
        assert counted == self.num_owned, f"blocks by owner {counted}, counted {self.num_owned}"
        null = self.blocks[NULL_BLOCK]
        assert (null.ref_count, null.is_cached, null.free_list, null.owner) == (0, False, None, None), (
            f"null block {null}"
        )
