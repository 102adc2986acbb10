"""Which blocks can be found again, and by what. Holds no references: the block pool does."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_pool import Block


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """A block whose KV is written, and what it vouches for."""

    hash: bytes
    """Of parent, scope and the token ids: two entries with one hash hold the same KV for the same readers."""
    parent: bytes
    """Hash of the block before it, or the root."""
    num_tokens: int
    block: Block


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest known beginning of some tokens."""

    blocks: tuple[Block, ...] = ()
    num_tokens: int = 0
    """KV there is: `blocks`, in this order, hold tokens `[0, num_tokens)`."""


class PrefixCache:
    """Entries by hash and by parent. A block has one entry at most, and a hash one block.

    Of two blocks with the same content the first published stays findable; the other serves its own sequence only.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._entry_of_block: dict[int, Entry] = {}
        self._children: dict[bytes, dict[bytes, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entry_of_block)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def find_longest_prefix(self, block_hashes: Sequence[bytes]) -> Prefix:
        """Walks a chain of full blocks, given by their hashes from the first on. Changes nothing."""
        blocks: list[Block] = []
        num_tokens = 0
        for block_hash in block_hashes:
            entry = self._entries.get(block_hash)
            if entry is None:
                break
            blocks.append(entry.block)
            num_tokens += entry.num_tokens
        return Prefix(tuple(blocks), num_tokens)

    def publish(self, entry: Entry) -> bool:
        """Makes a written block findable. False if its content is findable already through another block."""
        block = entry.block
        assert not block.is_cached, f"{block} has an entry already"
        if entry.hash in self._entries:
            return False
        self._entries[entry.hash] = self._entry_of_block[block.block_id] = entry
        self._children.setdefault(entry.parent, {})[entry.hash] = entry
        block.is_cached = True
        return True

    def evict(self, block: Block) -> list[Block]:
        """Forgets the block, and what hangs under it, as nothing could reach that any more. Returns the latter."""
        entry = self._entry_of_block.get(block.block_id)
        assert entry is not None, f"{block} has no entry"
        unreachable: list[Block] = []
        pending = [entry]
        while pending:
            entry = pending.pop()
            self._remove(entry)
            pending += self._children.get(entry.hash, {}).values()
            if entry.block is not block:
                unreachable.append(entry.block)
        return unreachable

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.hash]
        del self._entry_of_block[entry.block.block_id]
        siblings = self._children[entry.parent]
        del siblings[entry.hash]
        if not siblings:
            del self._children[entry.parent]
        entry.block.is_cached = False

    def check_integrity(self, root: bytes) -> None:
        """Raises AssertionError, with data, unless the indexes agree and every entry can be reached from `root`."""
        assert len(self._entries) == len(self._entry_of_block), (len(self._entries), len(self._entry_of_block))
        reached = 0
        pending = list(self._children.get(root, {}).values())
        while pending:
            entry = pending.pop()
            reached += 1
            assert self._entries.get(entry.hash) is entry, f"{entry} is not what its hash finds"
            assert self._entry_of_block.get(entry.block.block_id) is entry, f"{entry} is not what its block has"
            assert entry.block.is_cached, f"{entry} has a block that does not know it"
            pending += self._children.get(entry.hash, {}).values()
        assert reached == len(self._entries), f"{reached} entries can be reached, there are {len(self._entries)}"
