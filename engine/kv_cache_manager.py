"""Gives sequences their blocks of KV: from the prefix cache where the same tokens are known, else from the pool."""

from collections.abc import Iterable

from engine.block import Block
from engine.block_hash import scope_of_block
from engine.block_pool import BlockPool
from engine.host_tier import HostTier
from engine.pins import Pins
from engine.prefill_rate import PrefillRate
from engine.prefix_cache import Entry, Prefix, PrefixCache, Tail
from engine.prefix_lookup import PrefixLookup
from engine.protocol import BlockStats
from engine.scheduled_batch import Transfers
from engine.sequence import Sequence
from engine.sequence_hashes import SequenceHashes, find_tail_ends
from engine.swap_cost import SwapCost, SwapTime
from engine.tenant_shares import TenantShares
from engine.transfers import PendingTransfers

NO_PREFIX = Prefix()


class KVCacheManager:
    """Tables, references and entries of all sequences of one engine. The only one who writes block tables.

    `root` is where the hash chains of this model start (`engine.block_hash.root_hash`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        root: bytes,
        enable_prefix_caching: bool = True,
        pin_budget_blocks: int = 0,
        *,
        num_host_blocks: int = 0,
        swap_cost: SwapCost | None = None,
        shares: TenantShares | None = None,
    ) -> None:
        self.block_size = block_size
        self.cache = PrefixCache()
        self._shares = shares or TenantShares()
        self.pool = BlockPool(num_blocks, self._shares, self.cache.has_children)
        self.pins = Pins(self.pool, pin_budget_blocks)
        self.host = HostTier(num_host_blocks)
        self._swap_cost = swap_cost or SwapCost(SwapTime(), PrefillRate(), block_size)
        self._transfers = PendingTransfers(self.pool)
        self._hashes = SequenceHashes(block_size, root)
        self._lookup = PrefixLookup(self._hashes, self.cache, self.host, self._swap_cost, block_size)
        self._enable_prefix_caching = enable_prefix_caching

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    # ---- finding

    def shareable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the full blocks that the sequence could take from others (`PrefixLookup`)."""
        return self._lookup.shareable_hashes(sequence) if self._enable_prefix_caching else []

    def shareable_tails(self, sequence: Sequence, index: int) -> list[tuple[int, bytes]]:
        """What others may publish of block `index` that would be of use to the sequence (`PrefixLookup`)."""
        return self._lookup.shareable_tails(sequence, index) if self._enable_prefix_caching else []

    def find_longest_prefix(self, sequence: Sequence) -> Prefix:
        """What is known of the beginning of its tokens, at most up to the last one but one. Changes nothing."""
        return self._lookup.find_longest_prefix(sequence) if self._enable_prefix_caching else NO_PREFIX

    def find_all_blocks(self, sequence: Sequence) -> list[Block] | None:
        """Blocks in which all its tokens can be found, the last one too; None if they cannot."""
        return self._lookup.find_all_blocks(sequence)

    # ---- giving

    def count_blocks_to_start(self, sequence: Sequence, prefix: Prefix) -> int:
        """Free blocks that `try_start` needs at the least, of `prefix` the blocks that nobody holds among them."""
        blocks = prefix.without_tail(self.block_size).blocks
        num_new = -(-sequence.num_tokens // self.block_size) - len(blocks)
        return num_new + [block.ref_count for block in blocks].count(0)

    def try_start(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Gives a sequence without blocks those for all its tokens.

        A tail that is in nobody's use needs a free block more than computing its tokens again: without one it is left.
        False, and nothing changed, if there are too few free blocks for the sequence.
        """
        if self.try_allocate_slots(sequence, sequence.num_tokens, prefix) is None:
            if prefix.tail is None:
                return False
            prefix = prefix.without_tail(self.block_size)
            if self.try_allocate_slots(sequence, sequence.num_tokens, prefix) is None:
                return False
        if isinstance(prefix.tail, Tail):
            self.cache.touch(prefix.tail)
        self.ensure_writable(sequence)
        return True

    def try_allocate_slots(self, sequence: Sequence, num_tokens: int, prefix: Prefix = NO_PREFIX) -> list[int] | None:
        """Lets the table reach over `num_tokens` tokens; returns the ids of the new blocks, often none.

            |<-- prefix, by reference -->|<-- prefix, from the host -->|<---- to be computed ---->|
                                         |<------------------- new blocks ----------------------->|
            |<------------------------------------ num_tokens ----------------------------------->|

        A prefix only goes into an empty table. None, and nothing changed, if the pool has too few free blocks, or the
        tenant too few that it may have.
        """
        table = sequence.block_table
        assert not (table and prefix.num_tokens), f"{sequence.request_id}: a prefix for a table of {len(table)} blocks"
        first = len(table) + len(prefix.blocks)
        num_new = -(-num_tokens // self.block_size) - first
        if num_new <= 0 and not prefix.blocks:
            return []
        # a hit takes a free block out of the free list, just as a new block does; one is copied if it ends in mid-block
        num_copied = 1 if prefix.num_tokens % self.block_size else 0
        num_free = self.pool.num_free - num_new - num_copied
        if num_free < len(prefix.blocks) and num_free < [block.ref_count for block in prefix.blocks].count(0):
            return None
        if self._count_over_share(sequence, first - num_copied, num_new + num_copied, prefix):
            return None
        slots = [self.host.read(block_hash) for block_hash in prefix.host_hashes]
        self.pool.add_references(prefix.blocks)
        new_blocks = self._allocate(sequence, first, num_new)
        for slot, block in zip(slots, new_blocks, strict=False):
            self._transfers.swap_in(slot, block)
        if prefix.num_tokens:
            table.extend(prefix.block_ids)
            sequence.num_computed_tokens = prefix.num_tokens
            # what comes from the host is written in this step, and published after it like what is computed
            sequence.num_published_blocks = prefix.num_tokens // self.block_size - len(slots)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_host_tokens = len(slots) * self.block_size
        new_ids = [block.block_id for block in new_blocks]
        table.extend(new_ids)
        return new_ids

    def ensure_writable(self, sequence: Sequence) -> None:
        """Makes every slot from `num_computed_tokens` on the sequence's own: the only site of copy-on-write.

        To be called once a prefix was given out; later on nobody shares a block that is still being filled: tails of
        it are findable, but whoever uses one copies it in the same step, and the slots of a tail never change.
        """
        table = sequence.block_table
        for index in range(sequence.num_computed_tokens // self.block_size, len(table)):
            block = self.pool.blocks[table[index]]
            if block.ref_count > 1 or block.is_cached:
                [own] = self._allocate(sequence, index, 1)
                table[index] = own.block_id
                self._transfers.copy(block, own)

    def count_over_share(self, sequence: Sequence, prefix: Prefix = NO_PREFIX) -> int:
        """Blocks that others of its tenant have to give back first, as the tenant may have no more; most often none.

        Above 0 it is this limit that keeps the sequence from having blocks for all its tokens. Other tenants need not
        wait for that.
        """
        prefix = prefix.without_tail(self.block_size)
        first = len(sequence.block_table) + len(prefix.blocks)
        num_new = -(-sequence.num_tokens // self.block_size) - first
        return self._count_over_share(sequence, first, num_new, prefix)

    def count_held_blocks(self, tenant: str) -> int:
        """Blocks of its own that its sequences hold."""
        return self.pool.num_owned.get(tenant, 0) - self.pool.num_free_of(tenant)

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks back, tail first. A second call finds an empty table and does nothing."""
        self.pool.release(self.pool.blocks[block_id] for block_id in reversed(sequence.block_table))
        sequence.block_table.clear()
        sequence.unpublished_tails.clear()
        sequence.num_computed_tokens = sequence.num_published_blocks = 0

    # ---- moving

    def take_transfers(self) -> Transfers:
        """What the step that is being scheduled has to move before it computes."""
        return self._transfers.take()

    def settle_transfers(self, *, has_succeeded: bool) -> None:
        """The step that moved them is over. If it has failed, nothing that it may have written is found."""
        self._transfers.settle()
        if self.host.num_blocks:
            self.host.settle(has_succeeded=has_succeeded)

    # ---- publishing

    def unpublished_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full blocks and tails of its tokens that the sequence is going to publish."""
        if not self._enable_prefix_caching:
            return []
        hashes = self._hashes.first(sequence, sequence.num_tokens // self.block_size)
        sequence.unpublished_tails = [
            (end, self._hashes.tail(sequence, end))
            for end in find_tail_ends(sequence)
            if end > sequence.num_computed_tokens and end % self.block_size
        ]
        tails = [tail_hash for _, tail_hash in sequence.unpublished_tails]
        return hashes[sequence.num_published_blocks :] + tails

    def commit_full_blocks(self, sequence: Sequence) -> list[bytes]:
        """Publishes the blocks that `num_computed_tokens` has filled since the last call; returns their hashes.

        Only to be called when their KV is written: from here on others read it.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        first = sequence.num_published_blocks
        if num_full <= first or not self._enable_prefix_caching:
            return []
        self._hashes.ensure(sequence, num_full)
        hashes = sequence.block_hashes
        sequence.num_published_blocks = num_full
        # Where this sequence computed what another had published, and the other's block was evicted since, its own
        # blocks take over from the start: an entry whose parent is not findable could never be reached.
        start = first if first == 0 or hashes[first - 1] in self.cache else 0
        for index in range(start, num_full):
            if hashes[index] not in self.cache:
                block = self.pool.blocks[sequence.block_table[index]]
                parent = hashes[index - 1] if index else self._hashes.root
                self.cache.publish(Entry(hashes[index], parent, self.block_size, block))
        return hashes[first:num_full]

    def commit_tails(self, sequence: Sequence) -> list[bytes]:
        """Publishes the tails whose ends `num_computed_tokens` has reached; returns their hashes.

        As with full blocks: only to be called when their KV is written, and after those.
        """
        hashes = []
        while sequence.unpublished_tails and sequence.unpublished_tails[0][0] <= sequence.num_computed_tokens:
            end, tail_hash = sequence.unpublished_tails.pop(0)
            self._publish_tail(sequence, end)
            hashes.append(tail_hash)
        return hashes

    def commit_end(self, sequence: Sequence) -> None:
        """Publishes what is computed of the block in which a sequence ends.

        That of a trunk stands in for the same tail of another sequence, which may still be filling its block.
        """
        index, num_tokens = divmod(sequence.num_computed_tokens, self.block_size)
        if not self._enable_prefix_caching or num_tokens == 0:
            return
        # one that ends between a step and its update may have nothing there yet but what the step is to copy
        if not self._transfers.is_target(self.pool.blocks[sequence.block_table[index]]):
            self._publish_tail(sequence, sequence.num_computed_tokens, replace=sequence.is_trunk)

    def _publish_tail(self, sequence: Sequence, end: int, *, replace: bool = False) -> None:
        index, num_tokens = divmod(end, self.block_size)
        parent = self._hashes.parent(sequence, index)
        if index and parent not in self.cache:
            return  # the block before it was evicted, as another one's: nobody could come to this one
        tail = Tail(
            parent,
            scope_of_block(sequence.scopes, end),
            tuple(sequence.token_ids[end - num_tokens : end]),
            self.pool.blocks[sequence.block_table[index]],
        )
        self._reuse_first(self.cache.publish_tail(tail, replace=replace))

    # ---- accounting

    def stats(self) -> BlockStats:
        return BlockStats(
            total=self.pool.num_blocks,
            free=self.pool.num_free,
            cached=len(self.cache),
            referenced=self.pool.num_referenced,
            pinned=self.pins.num_blocks,
        )

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError, with data, unless pins, and the tables of all that run, explain each reference."""
        self.pool.check_integrity()
        self.cache.check_integrity(self._hashes.root)
        self.pins.check_integrity()
        self.host.check_integrity()
        expected: dict[int, list[str]] = {}
        for sequence in sequences:
            for block_id in sequence.block_table:
                expected.setdefault(block_id, []).append(sequence.request_id)
        for trunk_id, blocks in self.pins.holders():
            for block in blocks:
                assert block.is_cached, f"{block} is pinned for {trunk_id!r}, but nobody can find it"
                expected.setdefault(block.block_id, []).append(f"trunk {trunk_id}")
        for block in self._transfers.holders():
            expected.setdefault(block.block_id, []).append("a step under way")
        for block in self.pool.blocks:
            holders = expected.get(block.block_id, [])
            assert block.ref_count == len(holders), f"{block} is held by {holders}"
        num_cached = sum(block.is_cached for block in self.pool.blocks)
        assert num_cached == len(self.cache), f"{num_cached} blocks say they are cached, {len(self.cache)} are"

    # ---- the pool

    def _allocate(self, sequence: Sequence, first: int, num_blocks: int) -> list[Block]:
        """For its table from index `first` on. What has to make room for them goes to the host, if there is one."""
        num_trunk = self._count_trunk_blocks(sequence, first, num_blocks)
        max_blocks = self._shares.max_blocks(sequence.tenant)
        blocks: list[Block] = []
        for index in range(num_blocks):
            taken = self.pool.try_allocate(1, None if index < num_trunk else sequence.tenant, max_blocks)
            assert taken is not None, f"{num_blocks} blocks wanted, too few free: it should have been checked"
            if taken[0].is_cached:
                self._evict(taken[0])  # before the next is chosen: by what can still be found under it
            blocks += taken
        return blocks

    def _count_trunk_blocks(self, sequence: Sequence, first: int, num_blocks: int) -> int:
        """Of `num_blocks` from index `first` of its table on: nobody's share, as others read them too."""
        return min(max(sequence.num_trunk_tokens // self.block_size - first, 0), num_blocks)

    def _evict(self, block: Block) -> None:
        entry = self.cache.entry_of(block)
        if entry is not None and self.host.num_blocks and self._swap_cost.can_pay:
            slot = self.host.try_write(entry.hash)
            if slot is not None:
                self._transfers.swap_out(block, slot)
        self._reuse_first(self.cache.evict(block))

    def _count_over_share(self, sequence: Sequence, first: int, num_blocks: int, prefix: Prefix) -> int:
        """For `num_blocks` from index `first` of its table on, beside the blocks of the prefix."""
        tenant = sequence.tenant
        max_blocks = self._shares.max_blocks(tenant)
        if max_blocks is None:
            return 0
        num_trunk = self._count_trunk_blocks(sequence, first, num_blocks)
        # those that are cached for it and that nobody holds can go
        num_held = self.count_held_blocks(tenant)
        num_wanted = sum(block.ref_count == 0 and block.owner == tenant for block in prefix.blocks)
        num_over = num_held + num_wanted + num_blocks - num_trunk - max_blocks
        if num_over <= 0 or prefix.tail is not None:
            return max(num_over, 0)  # a tail can be left
        # A tenant's only sequence may always have the blocks for its tokens, also where the limit was lowered under it:
        # nobody would give any back, and it would never end.
        num_own = sum(self.pool.blocks[block_id].owner == tenant for block_id in sequence.block_table)
        return min(num_over, num_held - num_own)

    def _reuse_first(self, unreachable: Iterable[Block]) -> None:
        for block in unreachable:
            if block.ref_count == 0:
                self.pool.reuse_first(block)
