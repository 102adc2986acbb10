"""Gives sequences their blocks of KV: from the prefix cache where the same tokens are known, else from the pool."""

from collections.abc import Iterable

from engine.block_hash import hash_block, scope_of_block
from engine.block_pool import Block, BlockPool
from engine.pins import Pins
from engine.prefix_cache import Entry, Prefix, PrefixCache, Tail
from engine.protocol import BlockStats
from engine.scheduled_batch import Transfers
from engine.sequence import Sequence
from engine.transfers import PendingTransfers
from engine.trunk_hashes import TrunkHashes

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
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache()
        self.pins = Pins(self.pool, pin_budget_blocks)
        self._transfers = PendingTransfers(self.pool)
        self._root = root
        self._trunk_hashes = TrunkHashes(block_size)
        self._enable_prefix_caching = enable_prefix_caching

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def shareable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full blocks that the sequence could take from others.

        All but the block of its last token, whose logits it needs. None if every position has to be computed, as for
        log-probabilities of the prompt.
        """
        if not self._enable_prefix_caching or sequence.wants_prompt_logprobs:
            return []
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        self._hash_blocks(sequence, num_blocks)
        return sequence.block_hashes[:num_blocks]

    def unpublished_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full blocks and tails of its tokens that the sequence is going to publish."""
        if not self._enable_prefix_caching:
            return []
        num_blocks = sequence.num_tokens // self.block_size
        self._hash_blocks(sequence, num_blocks)
        sequence.unpublished_tails = [
            (end, self._hash_tail(sequence, end))
            for end in self._tail_ends(sequence)
            if end > sequence.num_computed_tokens and end % self.block_size
        ]
        tails = [tail_hash for _, tail_hash in sequence.unpublished_tails]
        return sequence.block_hashes[sequence.num_published_blocks : num_blocks] + tails

    def shareable_tails(self, sequence: Sequence, index: int) -> list[tuple[int, bytes]]:
        """What others may publish of block `index` of its tokens that ends where this sequence would end a tail too.

        Ends and hashes, the longest first; the blocks before it must be full. The last may be a full block, of which
        all but the last token would be of use.
        """
        if not self._enable_prefix_caching or sequence.wants_prompt_logprobs:
            return []
        start = index * self.block_size
        ends = [end for end in self._tail_ends(sequence) if start < end <= start + self.block_size]
        return [(end, self._hash_tail(sequence, end)) for end in reversed(ends)]

    def find_longest_prefix(self, sequence: Sequence) -> Prefix:
        """What is known of the beginning of its tokens, at most up to the last one but one. Changes nothing.

        Full blocks first; then, of the block in which they end, the longest part that a tail vouches for.
        """
        prefix = self.cache.find_full_blocks(self.shareable_hashes(sequence))
        if not self._enable_prefix_caching or sequence.wants_prompt_logprobs:
            return prefix
        tail, num_tokens = self._find_tail(sequence, len(prefix.blocks))
        if tail is None:
            return prefix
        return Prefix((*prefix.blocks, tail.block), prefix.num_tokens + num_tokens, tail)

    def _find_tail(self, sequence: Sequence, index: int) -> tuple[Entry | Tail | None, int]:
        """What vouches for most of the leading tokens of block `index`, and for how many of use."""
        block_size = self.block_size
        start = index * block_size
        num_left = sequence.num_tokens - start
        if num_left < 2:
            return None, 0
        parent = sequence.block_hashes[index - 1] if index else self._root
        if num_left == block_size:
            self._hash_blocks(sequence, index + 1)
            entry = self.cache.find_entry(sequence.block_hashes[index])
            if entry is not None:
                return entry, block_size - 1
        token_ids = sequence.token_ids[start : start + block_size]
        best, before = None, 0
        for scope in sequence.scopes:
            end = min(scope.end_token - start, block_size - 1)
            if end > before:
                # only what lies in this scope for its reader too; what ends later counts for the next scope
                best = self.cache.find_tail(parent, scope.key, token_ids, before + 1, end) or best
                before = end
        return best, min(len(best.token_ids), num_left - 1) if best is not None else 0

    def try_start(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Gives a sequence without blocks those for all its tokens.

        A tail that is in nobody's use needs a free block more than computing its tokens again: without one it is left.
        False, and nothing changed, if the pool has too few free blocks.
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

            |<---- prefix, by reference ---->|<---- new blocks ---->|
            |<-------------------- num_tokens ------------------>|

        A prefix only goes into an empty table. None, and nothing changed, if the pool has too few free blocks.
        """
        table = sequence.block_table
        assert not (table and prefix.blocks), f"{sequence.request_id}: a prefix for a table with {len(table)} blocks"
        num_new = -(-num_tokens // self.block_size) - len(table) - len(prefix.blocks)
        if num_new <= 0 and not prefix.blocks:
            return []
        # a hit takes a free block out of the free list, just as a new block does; one is copied if it ends in mid-block
        num_taken = num_new + [block.ref_count for block in prefix.blocks].count(0)
        num_copied = 1 if prefix.num_tokens % self.block_size else 0
        if num_taken + num_copied > self.pool.num_free:
            return None
        self.pool.add_references(prefix.blocks)
        new_blocks = self._allocate(num_new)
        if prefix.blocks:
            table.extend([block.block_id for block in prefix.blocks])
            sequence.num_computed_tokens = prefix.num_tokens
            sequence.num_published_blocks = prefix.num_tokens // self.block_size
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
                [own] = self._allocate(1)
                table[index] = own.block_id
                self._transfers.copy(block, own)

    def take_transfers(self) -> Transfers:
        """What the step that is being scheduled has to move before it computes."""
        return self._transfers.take()

    def settle_transfers(self) -> None:
        """The step that moved them is over."""
        self._transfers.settle()

    def commit_full_blocks(self, sequence: Sequence) -> list[bytes]:
        """Publishes the blocks that `num_computed_tokens` has filled since the last call; returns their hashes.

        Only to be called when their KV is written: from here on others read it.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        first = sequence.num_published_blocks
        if num_full <= first or not self._enable_prefix_caching:
            return []
        self._hash_blocks(sequence, num_full)
        hashes = sequence.block_hashes
        sequence.num_published_blocks = num_full
        # Where this sequence computed what another had published, and the other's block was evicted since, its own
        # blocks take over from the start: an entry whose parent is not findable could never be reached.
        start = first if first == 0 or hashes[first - 1] in self.cache else 0
        for index in range(start, num_full):
            if hashes[index] not in self.cache:
                block = self.pool.blocks[sequence.block_table[index]]
                parent = hashes[index - 1] if index else self._root
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

    def find_all_blocks(self, sequence: Sequence) -> list[Block] | None:
        """Blocks in which all its tokens can be found, the last one too; None if they cannot."""
        index, num_left = divmod(sequence.num_tokens, self.block_size)
        self._hash_blocks(sequence, index)
        hashes = sequence.block_hashes[:index]
        blocks = list(self.cache.find_full_blocks(hashes).blocks)
        if len(blocks) < index:
            return None
        if num_left:
            parent = hashes[-1] if hashes else self._root
            scope = scope_of_block(sequence.scopes, sequence.num_tokens)
            token_ids = sequence.token_ids[-num_left:]
            tail = self.cache.find_tail(parent, scope, token_ids, num_left, num_left)
            if tail is None:
                return None
            blocks.append(tail.block)
        return blocks

    def _publish_tail(self, sequence: Sequence, end: int, *, replace: bool = False) -> None:
        index, num_tokens = divmod(end, self.block_size)
        self._hash_blocks(sequence, index)
        parent = sequence.block_hashes[index - 1] if index else self._root
        if index and parent not in self.cache:
            return  # the block before it was evicted, as another one's: nobody could come to this one
        tail = Tail(
            parent,
            scope_of_block(sequence.scopes, end),
            tuple(sequence.token_ids[end - num_tokens : end]),
            self.pool.blocks[sequence.block_table[index]],
        )
        self._reuse_first(self.cache.publish_tail(tail, replace=replace))

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks back, tail first. A second call finds an empty table and does nothing."""
        self.pool.release(self.pool.blocks[block_id] for block_id in reversed(sequence.block_table))
        sequence.block_table.clear()
        sequence.unpublished_tails.clear()
        sequence.num_computed_tokens = sequence.num_published_blocks = 0

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
        self.cache.check_integrity(self._root)
        self.pins.check_integrity()
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

    def _allocate(self, num_blocks: int) -> list[Block]:
        blocks = self.pool.try_allocate(num_blocks)
        assert blocks is not None, f"{num_blocks} blocks wanted, {self.pool.num_free} free: it should have been checked"
        for block in blocks:
            if block.is_cached:
                self._reuse_first(self.cache.evict(block))
        return blocks

    def _reuse_first(self, unreachable: Iterable[Block]) -> None:
        for block in unreachable:
            if block.ref_count == 0:
                self.pool.reuse_first(block)

    def _tail_ends(self, sequence: Sequence) -> list[int]:
        """Ends of scopes inside the prompt, and the prompt's; ascending."""
        num_tokens = sequence.num_prompt_tokens
        ends = {scope.end_token for scope in sequence.scopes if 0 < scope.end_token < num_tokens}
        return [*sorted(ends), num_tokens]

    def _hash_tail(self, sequence: Sequence, end: int) -> bytes:
        """Of the tokens up to `end` in the block that holds the last of them; the blocks before it must be full."""
        index = (end - 1) // self.block_size
        self._hash_blocks(sequence, index)
        parent = sequence.block_hashes[index - 1] if index else self._root
        scope = scope_of_block(sequence.scopes, end)
        return hash_block(parent, scope, sequence.token_ids[index * self.block_size : end])

    def _hash_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """Extends the hashes to the first `num_blocks` blocks, which must be full; none is ever computed twice."""
        hashes, block_size = sequence.block_hashes, self.block_size
        if not hashes:
            hashes += self._trunk_hashes.find(sequence)
        num_known = len(hashes)
        for index in range(num_known, num_blocks):
            start, end = index * block_size, (index + 1) * block_size
            parent = hashes[index - 1] if index else self._root
            scope = scope_of_block(sequence.scopes, end)
            hashes.append(hash_block(parent, scope, sequence.token_ids[start:end]))
        self._trunk_hashes.remember(sequence, num_known)
