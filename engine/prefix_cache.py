"""Which blocks can be found again, and by what. Holds no references: the block pool does."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.block import Block

MAX_TAILS = 20
"""Tails kept under one parent for one scope; then the one that was used longest ago makes room. So a lookup stays
short however many chats go on from the same block. Twice as many as the widest beam search has beams: it finds the ends
of them all, also while those of the next step are published beside them."""
MAX_CHAINS = 64
"""Chains of blocks that are kept ready, the last used ones."""


class Entry(NamedTuple):
    """A full block whose KV is written. A named tuple, as each step makes some."""

    hash: bytes
    """Of parent, scope and the token ids: two entries with one hash hold the same KV for the same readers."""
    parent: bytes
    """Hash of the block before it, or the root."""
    num_tokens: int
    block: Block


@dataclass(frozen=True, eq=False, slots=True)
class Tail:
    """The leading `token_ids`, fewer than a block has, of a block whose KV is written as far as that.

    What stands behind them in the block is nobody's business: a sequence may still be filling it. So a tail is used by
    copying its block, never by reference.
    """

    parent: bytes
    scope: bytes
    """Who may find it: the scope in which its last token lies, and so all of them."""
    token_ids: tuple[int, ...]
    block: Block


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest known beginning of some tokens."""

    blocks: tuple[Block, ...] = ()
    block_ids: tuple[int, ...] = ()
    """Of `blocks`."""
    num_tokens: int = 0
    """KV there is: `blocks`, in this order, and what comes from the host behind them hold tokens `[0, num_tokens)`."""
    tail: Entry | Tail | None = None
    """What vouches for the last of the blocks if it is to be copied, as not all of its slots are meant."""
    host_hashes: tuple[bytes, ...] = ()
    """The full blocks behind `blocks` that are to come from the host tier; then there is no tail."""

    def with_tail(self, tail: Entry | Tail, num_tokens: int) -> "Prefix":
        """Longer by `num_tokens` in the tail's block."""
        block = tail.block
        return Prefix((*self.blocks, block), (*self.block_ids, block.block_id), self.num_tokens + num_tokens, tail)

    def without_tail(self, block_size: int) -> "Prefix":
        """Only what can be used without copying."""
        if self.tail is None:
            return self
        return Prefix(self.blocks[:-1], self.block_ids[:-1], (len(self.blocks) - 1) * block_size)


class PrefixCache:
    """Full blocks by hash, tails by parent, scope and their very tokens. A block may have one entry and several tails,
    all of them under the same parent; a hash, or a tail's tokens, has one block.

    Of two blocks with the same content the first published stays findable; the other serves its own sequence only.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._of_block: dict[int, list[Entry | Tail]] = {}
        self._children: dict[bytes, dict[bytes, Entry]] = {}
        self._tails: dict[bytes, dict[bytes, dict[tuple[int, ...], Tail]]] = {}
        """By parent, scope and tokens; in the order of their last use."""
        self._chains: OrderedDict[bytes, Prefix] = OrderedDict()
        """By the hash of the last block. As no entry outlives its parent, and a hash has one block, a chain stays as it
        is while its last entry lives: a fork of hundreds of blocks need not look each of them up."""

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._of_block)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def find_full_blocks(self, block_hashes: Sequence[bytes]) -> Prefix:
        """The known beginning of a chain of full blocks, given by their hashes from the first on. Changes no entry.

        No entry outlives its parent, so the known ones of a chain are its first ones and their number can be bisected.
        """
        entries = self._entries
        num_known = bisect_left(block_hashes, True, key=lambda block_hash: block_hash not in entries)
        if num_known == 0:
            return Prefix()
        last = block_hashes[num_known - 1]
        chain = self._chains.get(last)
        if chain is not None:
            self._chains.move_to_end(last)
            return chain
        blocks = tuple([entries[block_hash].block for block_hash in block_hashes[:num_known]])
        block_ids = tuple([block.block_id for block in blocks])
        chain = self._chains[last] = Prefix(blocks, block_ids, num_known * entries[last].num_tokens)
        if len(self._chains) > MAX_CHAINS:
            self._chains.popitem(last=False)
        return chain

    def find_entry(self, block_hash: bytes) -> Entry | None:
        return self._entries.get(block_hash)

    def entry_of(self, block: Block) -> Entry | None:
        """By which the block is found as a full one."""
        for entry in self._of_block.get(block.block_id, ()):
            if isinstance(entry, Entry):
                return entry
        return None

    def has_children(self, block: Block) -> bool:
        """Something is found only behind the block."""
        entry = self.entry_of(block)
        return entry is not None and (entry.hash in self._children or entry.hash in self._tails)

    def find_tail(
        self, parent: bytes, scope: bytes, token_ids: Sequence[int], min_tokens: int, max_tokens: int
    ) -> Tail | None:
        """The longest tail of `[min_tokens, max_tokens]` tokens with which `token_ids` begin. Changes nothing."""
        best = None
        for tail in self._tails.get(parent, {}).get(scope, {}).values():
            num_tokens = len(tail.token_ids)
            if min_tokens <= num_tokens <= max_tokens and tail.token_ids == tuple(token_ids[:num_tokens]):
                best, min_tokens = tail, num_tokens + 1
        return best

    def publish(self, entry: Entry) -> bool:
        """Makes a written, full block findable. False if its content is findable already through another block."""
        if entry.hash in self._entries:
            return False
        of_block = self._of_block.setdefault(entry.block.block_id, [])
        assert self.entry_of(entry.block) is None, f"{entry.block} has an entry already"
        of_block.append(entry)
        self._entries[entry.hash] = entry
        self._children.setdefault(entry.parent, {})[entry.hash] = entry
        entry.block.is_cached = True
        return True

    def publish_tail(self, tail: Tail, *, replace: bool = False) -> list[Block]:
        """Makes the written beginning of a block findable; returns the blocks that nothing finds any more for it.

        With `replace` it stands in for the same tail of another block, unless that is pinned; else that one stays.
        """
        tails = self._tails.setdefault(tail.parent, {}).setdefault(tail.scope, {})
        known = tails.get(tail.token_ids)
        if known is not None and (known.block is tail.block or known.block.num_pins or not replace):
            self.touch(known)
            return []
        unreachable = self._remove_tails([known] if known is not None else [])
        # again, as the last one of a parent takes the place where it was kept with it
        tails = self._tails.setdefault(tail.parent, {}).setdefault(tail.scope, {})
        tails[tail.token_ids] = tail
        self._of_block.setdefault(tail.block.block_id, []).append(tail)
        tail.block.is_cached = True
        if len(tails) > MAX_TAILS:
            oldest = next((other for other in tails.values() if other.block.num_pins == 0), None)
            unreachable += self._remove_tails([oldest] if oldest is not None else [])
        return unreachable

    def touch(self, tail: Tail) -> None:
        """It was of use just now."""
        tails = self._tails[tail.parent][tail.scope]
        tails[tail.token_ids] = tails.pop(tail.token_ids)

    def evict(self, block: Block) -> list[Block]:
        """Forgets the block, and what hangs under it, as nothing could reach that any more. Returns the latter."""
        assert block.block_id in self._of_block, f"{block} has no entry"
        unreachable: list[Block] = []
        pending = list(self._of_block[block.block_id])
        while pending:
            entry = pending.pop()
            if isinstance(entry, Tail):
                unreachable += self._remove_tails([entry])
                continue
            if self._remove(entry):
                unreachable.append(entry.block)
            pending += self._children.get(entry.hash, {}).values()
            for tails in self._tails.get(entry.hash, {}).values():
                pending += tails.values()
        return [other for other in unreachable if other is not block]

    def _remove(self, entry: Entry) -> bool:
        """True if nothing finds its block any more."""
        del self._entries[entry.hash]
        self._chains.pop(entry.hash, None)
        siblings = self._children[entry.parent]
        del siblings[entry.hash]
        if not siblings:
            del self._children[entry.parent]
        return self._detach(entry)

    def _remove_tails(self, tails: Iterable[Tail]) -> list[Block]:
        """Their blocks, as far as nothing finds them any more."""
        unreachable = []
        for tail in tails:
            scopes = self._tails[tail.parent]
            del scopes[tail.scope][tail.token_ids]
            if not scopes[tail.scope]:
                del scopes[tail.scope]
            if not scopes:
                del self._tails[tail.parent]
            if self._detach(tail):
                unreachable.append(tail.block)
        return unreachable

    def _detach(self, entry: Entry | Tail) -> bool:
        of_block = self._of_block[entry.block.block_id]
        of_block.remove(entry)
        if not of_block:
            del self._of_block[entry.block.block_id]
            entry.block.is_cached = False
        return not entry.block.is_cached

    def check_integrity(self, root: bytes) -> None:
        """Raises AssertionError, with data, unless the indexes agree and every entry can be reached from `root`."""
        num_reached = num_tails = 0
        pending = list(self._children.get(root, {}).values())
        while pending:
            entry = pending.pop()
            num_reached += 1
            assert self._entries.get(entry.hash) is entry, f"{entry} is not what its hash finds"
            assert entry in self._of_block.get(entry.block.block_id, []), f"{entry} is not what its block has"
            pending += self._children.get(entry.hash, {}).values()
        assert num_reached == len(self._entries), (
            f"{num_reached} entries can be reached, there are {len(self._entries)}"
        )
        for parent, scopes in self._tails.items():
            assert parent == root or parent in self._entries, f"tails {scopes} hang under a block that cannot be found"
            for tail in (tail for tails in scopes.values() for tail in tails.values()):
                num_tails += 1
                assert tail.token_ids, f"{tail} vouches for nothing"
                assert tail in self._of_block.get(tail.block.block_id, []), f"{tail} is not what its block has"
        num_of_blocks = sum(map(len, self._of_block.values()))
        assert num_of_blocks == num_reached + num_tails, (num_of_blocks, num_reached, num_tails)
        for of_block in self._of_block.values():
            assert of_block[0].block.is_cached, f"{of_block[0]} has a block that does not know it"
            assert len({entry.parent for entry in of_block}) == 1, f"one block under two parents: {of_block}"
        for block_hash, chain in self._chains.items():
            for block in reversed(chain.blocks):
                entry = self._entries[block_hash]
                assert entry.block is block, f"{entry} has another block in a chain: {block}"
                block_hash = entry.parent
            assert block_hash == root, f"a chain of {len(chain.blocks)} blocks does not reach the root"
