"""Hashes of a sequence's blocks and of the ends at which it shares: each computed once and kept with the sequence."""

from engine.block_hash import hash_block, scope_of_block
from engine.sequence import Sequence
from engine.trunk_hashes import TrunkHashes


class SequenceHashes:
    """`root` is where the hash chains of this model start (`engine.block_hash.root_hash`)."""

    def __init__(self, block_size: int, root: bytes) -> None:
        self.root = root
        self._block_size = block_size
        self._trunks = TrunkHashes(block_size)

    def first(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Of the first `num_blocks` blocks, which must be full."""
        self.ensure(sequence, num_blocks)
        return sequence.block_hashes[:num_blocks]

    def parent(self, sequence: Sequence, index: int) -> bytes:
        """Of the block before block `index`, or the root."""
        if index == 0:
            return self.root
        self.ensure(sequence, index)
        return sequence.block_hashes[index - 1]

    def tail(self, sequence: Sequence, end: int) -> bytes:
        """Of the tokens up to `end` in the block that holds the last of them; the blocks before it must be full."""
        index = (end - 1) // self._block_size
        parent = self.parent(sequence, index)
        scope = scope_of_block(sequence.scopes, end)
        return hash_block(parent, scope, sequence.token_ids[index * self._block_size : end])

    def ensure(self, sequence: Sequence, num_blocks: int) -> None:
        """That `block_hashes` has those of the first `num_blocks` blocks, which must be full."""
        hashes, block_size = sequence.block_hashes, self._block_size
        if len(hashes) >= num_blocks:
            return
        if not hashes:
            hashes += self._trunks.find(sequence)
        num_known = len(hashes)
        for index in range(num_known, num_blocks):
            start, end = index * block_size, (index + 1) * block_size
            parent = hashes[index - 1] if index else self.root
            scope = scope_of_block(sequence.scopes, end)
            hashes.append(hash_block(parent, scope, sequence.token_ids[start:end]))
        self._trunks.remember(sequence, num_known)


def find_tail_ends(sequence: Sequence) -> list[int]:
    """Where others may go on from a sequence: ends of scopes inside its prompt, and the prompt's; ascending."""
    num_tokens = sequence.num_prompt_tokens
    ends = {scope.end_token for scope in sequence.scopes if 0 < scope.end_token < num_tokens}
    return [*sorted(ends), num_tokens]
