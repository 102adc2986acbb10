"""Gives sequences their blocks of KV: from the prefix cache where the same tokens are known, else from the pool."""

from collections.abc import Iterable

from engine.block_hash import hash_block, scope_of_block
from engine.block_pool import Block, BlockPool
from engine.prefix_cache import Entry, Prefix, PrefixCache
from engine.protocol import BlockStats
from engine.scheduled_batch import BlockCopy
from engine.sequence import Sequence
from engine.trunk_hashes import TrunkHashes

NO_PREFIX = Prefix()


class KVCacheManager:
    """Tables, references and entries of all sequences of one engine. The only one who writes block tables.

    `root` is where the hash chains of this model start (`engine.block_hash.root_hash`).
    """

    def __init__(self, num_blocks: int, block_size: int, root: bytes, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache()
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
        """Hashes of the full blocks of its tokens that the sequence is going to publish."""
        if not self._enable_prefix_caching:
            return []
        num_blocks = sequence.num_tokens // self.block_size
        self._hash_blocks(sequence, num_blocks)
        return sequence.block_hashes[sequence.num_published_blocks : num_blocks]

    def find_longest_prefix(self, sequence: Sequence) -> Prefix:
        """What is known of the beginning of its tokens, at most up to the last one but one. Changes nothing."""
        return self.cache.find_longest_prefix(self.shareable_hashes(sequence))

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
        num_taken = num_new + sum(block.ref_count == 0 for block in prefix.blocks)
        num_copied = 1 if prefix.num_tokens % self.block_size else 0
        if num_taken + num_copied > self.pool.num_free:
            return None
        for block in prefix.blocks:
            self.pool.add_reference(block)
        new_blocks = self._allocate(num_new)
        if prefix.blocks:
            table.extend(block.block_id for block in prefix.blocks)
            sequence.num_computed_tokens = prefix.num_tokens
            sequence.num_published_blocks = prefix.num_tokens // self.block_size
        new_ids = [block.block_id for block in new_blocks]
        table.extend(new_ids)
        return new_ids

    def ensure_writable(self, sequence: Sequence) -> list[BlockCopy]:
        """Makes every slot from `num_computed_tokens` on the sequence's own: the only site of copy-on-write.

        To be called once a prefix was given out; later on nobody shares a block that is still being filled. The
        sources stay referenced until `release_copies`, so that no write of the same step can overtake the copy.
        """
        copies = []
        table = sequence.block_table
        for index in range(sequence.num_computed_tokens // self.block_size, len(table)):
            block = self.pool.blocks[table[index]]
            if block.ref_count > 1 or block.is_cached:
                [own] = self._allocate(1)
                table[index] = own.block_id
                copies.append(BlockCopy(block.block_id, own.block_id))
        return copies

    def release_copies(self, copies: Iterable[BlockCopy]) -> None:
        """The step that made them is over."""
        self.pool.release(self.pool.blocks[copy.source] for copy in copies)

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
            block = self.pool.blocks[sequence.block_table[index]]
            if not block.is_cached:
                parent = hashes[index - 1] if index else self._root
                self.cache.publish(Entry(hashes[index], parent, self.block_size, block))
        return hashes[first:num_full]

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks back, tail first. A second call finds an empty table and does nothing."""
        self.pool.release(self.pool.blocks[block_id] for block_id in reversed(sequence.block_table))
        sequence.block_table.clear()
        sequence.num_computed_tokens = sequence.num_published_blocks = 0

    def stats(self) -> BlockStats:
        return BlockStats(
            total=self.pool.num_blocks,
            free=self.pool.num_free,
            cached=len(self.cache),
            referenced=self.pool.num_referenced,
            pinned=0,
        )

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError, with data, unless the tables of these (all that run) explain every reference."""
        self.pool.check_integrity()
        self.cache.check_integrity(self._root)
        expected: dict[int, list[str]] = {}
        for sequence in sequences:
            for block_id in sequence.block_table:
                expected.setdefault(block_id, []).append(sequence.request_id)
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
                for unreachable in self.cache.evict(block):
                    if unreachable.ref_count == 0:
                        self.pool.reuse_first(unreachable)
        return blocks

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
