"""What is known of the beginning of a sequence: on the device first, and behind that in the host tier."""

from engine.block import Block
from engine.block_hash import scope_of_block
from engine.host_tier import HostTier
from engine.prefix_cache import Entry, Prefix, PrefixCache, Tail
from engine.sequence import Sequence
from engine.sequence_hashes import SequenceHashes, find_tail_ends
from engine.swap_cost import SwapCost


class PrefixLookup:
    """Changes nothing. Finds nothing for a sequence of which every position has to be computed, as it has for
    log-probabilities of the prompt.
    """

    def __init__(
        self, hashes: SequenceHashes, cache: PrefixCache, host: HostTier, swap_cost: SwapCost, block_size: int
    ) -> None:
        self._hashes = hashes
        self._cache = cache
        self._host = host
        self._swap_cost = swap_cost
        self._block_size = block_size

    def shareable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the full blocks that it could take from others: all but that of its last token, whose logits it needs."""
        if sequence.wants_prompt_logprobs:
            return []
        return self._hashes.first(sequence, (sequence.num_tokens - 1) // self._block_size)

    def shareable_tails(self, sequence: Sequence, index: int) -> list[tuple[int, bytes]]:
        """What others may publish of block `index` of its tokens that ends where this sequence would end a tail too.

        Ends and hashes, the longest first; the blocks before it must be full. The last may be a full block, of which
        all but the last token would be of use.
        """
        if sequence.wants_prompt_logprobs:
            return []
        start = index * self._block_size
        ends = [end for end in find_tail_ends(sequence) if start < end <= start + self._block_size]
        return [(end, self._hashes.tail(sequence, end)) for end in reversed(ends)]

    def find_longest_prefix(self, sequence: Sequence) -> Prefix:
        """Of its tokens at most all but the last one.

        Full blocks on the device first; then those that the host has, where swapping them in is cheaper than computing
        them, or else, of the block in which the full ones end, the longest part that a tail vouches for.
        """
        if sequence.wants_prompt_logprobs:
            return Prefix()
        hashes = self.shareable_hashes(sequence)
        prefix = self._cache.find_full_blocks(hashes)
        index = len(prefix.blocks)
        num_host_blocks = self._host.count_known(hashes, index)
        if num_host_blocks and self._swap_cost.is_cheaper(num_host_blocks):
            host_hashes = tuple(hashes[index : index + num_host_blocks])
            num_tokens = (index + num_host_blocks) * self._block_size
            return Prefix(prefix.blocks, prefix.block_ids, num_tokens, host_hashes=host_hashes)
        tail, num_tokens = self._find_tail(sequence, index)
        return prefix.with_tail(tail, num_tokens) if tail is not None else prefix

    def find_all_blocks(self, sequence: Sequence) -> list[Block] | None:
        """Blocks in which all its tokens can be found, the last one too; None if they cannot."""
        index, num_left = divmod(sequence.num_tokens, self._block_size)
        hashes = self._hashes.first(sequence, index)
        blocks = list(self._cache.find_full_blocks(hashes).blocks)
        if len(blocks) < index:
            return None
        if num_left:
            scope = scope_of_block(sequence.scopes, sequence.num_tokens)
            token_ids = sequence.token_ids[-num_left:]
            tail = self._cache.find_tail(self._hashes.parent(sequence, index), scope, token_ids, num_left, num_left)
            if tail is None:
                return None
            blocks.append(tail.block)
        return blocks

    def _find_tail(self, sequence: Sequence, index: int) -> tuple[Entry | Tail | None, int]:
        """What vouches for most of the leading tokens of block `index`, and for how many of use."""
        block_size = self._block_size
        start = index * block_size
        num_left = sequence.num_tokens - start
        if num_left < 2:
            return None, 0
        if num_left == block_size:
            entry = self._cache.find_entry(self._hashes.first(sequence, index + 1)[index])
            if entry is not None:
                return entry, block_size - 1
        parent = self._hashes.parent(sequence, index)
        token_ids = sequence.token_ids[start : start + block_size]
        best, before = None, 0
        for scope in sequence.scopes:
            end = min(scope.end_token - start, block_size - 1)
            if end > before:
                # only what lies in this scope for its reader too; what ends later counts for the next scope
                best = self._cache.find_tail(parent, scope.key, token_ids, before + 1, end) or best
                before = end
        return best, min(len(best.token_ids), num_left - 1) if best is not None else 0
