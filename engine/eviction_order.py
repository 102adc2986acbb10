"""In which order free blocks are used again, and so whose cached ones are evicted first."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from engine.block import Block, FreeList
from engine.tenant_shares import TenantShares

TENANTS_A_BLOCK = 8
"""Tenants looked at for each block that is evicted, on average."""

HasChildren = Callable[[Block], bool]
"""Whether something that is cached hangs under the block, so that nobody could find it without the block."""


class EvictionOrder:
    """All free blocks. Those that nobody can find come first; then cached ones, the longest free first, of

    1. tenants over their share: who has more of the tenants' blocks than its weight's part of their weights,
    2. tenants within their share, and nobody's, which are those of trunks that are not pinned,
    3. tenants that have no more free ones than they are guaranteed,
    4. nobody's blocks without which such a guaranteed one could not be found.

    A block is released before those that it hangs under, and so within one list goes before them; the fourth kind keeps
    that true between lists. With one tenant all of this is one list in the order of release.

    `num_owned`: blocks of each tenant, free or not.
    """

    def __init__(self, shares: TenantShares, num_owned: Mapping[str, int], has_children: HasChildren) -> None:
        self._shares = shares
        self._num_owned = num_owned
        self._has_children = has_children
        self._useless = FreeList()
        self._cached: dict[str | None, FreeList] = {}
        """By owner; none of them is empty."""
        self._kept = FreeList()
        self._ranked: list[tuple[int, int, str | None]] = []
        """Heap of owners: kind, when its longest free block was released, and who it is, as of the last look at all."""
        self._num_until_look = 0
        self._num_blocks = 0
        self._num_releases = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        """In the order of their next use, as far as that does not depend on who is over its share by then."""
        yield from self._useless
        yield from heapq.merge(*self._cached.values(), key=attrgetter("released"))
        yield from self._kept

    def num_cached_of(self, owner: str) -> int:
        """Free ones that are cached for this tenant."""
        free_list = self._cached.get(owner)
        return len(free_list) if free_list is not None else 0

    def add(self, block: Block) -> None:
        """It was released just now."""
        if not block.is_cached:
            self.put_first(block)
            return
        self._num_blocks += 1
        self._num_releases += 1
        block.released = self._num_releases
        free_list = self._cached.get(block.owner)
        if free_list is None:
            free_list = self._cached[block.owner] = FreeList()
        free_list.append(block)

    def put_first(self, block: Block) -> None:
        """It is of no more use."""
        self._num_blocks += 1
        self._useless.prepend(block)

    def remove(self, block: Block) -> None:
        """Raises ValueError if it is not free."""
        free_list = block.free_list
        if free_list is None:
            raise ValueError(f"block {block.block_id} is not free")
        free_list.remove(block)
        self._num_blocks -= 1
        self._drop_if_empty(free_list, block.owner)

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """As `remove` for each: those of a chain may be hundreds, most of them in one list."""
        for free_list, members in groupby(blocks, key=attrgetter("free_list")):
            run = list(members)
            if free_list is None:
                raise ValueError(f"block {run[0].block_id} is not free")
            free_list.remove_all(run)
            self._num_blocks -= len(run)
            self._drop_if_empty(free_list, run[0].owner)

    def pop_first(self) -> Block:
        """Raises IndexError if there is none."""
        if self._useless:
            self._num_blocks -= 1
            return self._useless.pop_first()
        block = self._find_first()
        self.remove(block)
        return block

    def pop_first_of(self, owner: str) -> Block:
        """Of those that are cached for this tenant. Raises KeyError if there is none."""
        block = self._cached[owner].first
        self.remove(block)
        return block

    def _drop_if_empty(self, free_list: FreeList, owner: str | None) -> None:
        if not free_list and self._cached.get(owner) is free_list:
            del self._cached[owner]

    def _find_first(self) -> Block:
        """Of those that can be found."""
        if len(self._cached) == 1 and not self._kept:
            [only] = self._cached.values()
            return only.first
        while self._cached:
            kept = self._find_kept_in_vain()
            if kept is not None:
                return kept
            owner = self._find_owner()
            block = self._cached[owner].first
            if owner is not None or len(self._cached) == 1 or not self._has_children(block):
                return block
            # all that are older have gone, so that what hangs under it is guaranteed to somebody
            self.remove(block)
            self._kept.append(block)
            self._num_blocks += 1
        return next((block for block in self._kept if not self._has_children(block)), self._kept.first)

    def _find_kept_in_vain(self) -> Block | None:
        """Looks at one block of the fourth kind, another each time: whether what it was kept for has gone."""
        if not self._kept:
            return None
        block = self._kept.first
        if not self._has_children(block):
            return block
        self._kept.remove(block)
        self._kept.append(block)
        return None

    def _find_owner(self) -> str | None:
        """Whose longest free block comes first.

        A look at all tenants costs as much as there are of them. So with many one is good for some blocks, in which
        nobody's share can change by much.
        """
        if self._num_until_look == 0 or not self._ranked:
            self._look_at_all()
        self._num_until_look -= 1
        while True:
            kind, released, owner = self._ranked[0]
            free_list = self._cached.get(owner)
            if free_list is None:
                heapq.heappop(self._ranked)
                if not self._ranked:
                    self._look_at_all()
                continue
            now = (max(kind, 3 if self._is_guaranteed(owner) else 0), free_list.first.released, owner)
            if now == (kind, released, owner):
                return owner
            heapq.heapreplace(self._ranked, now)

    def _look_at_all(self) -> None:
        num_owned = sum(self._num_owned.values())
        weights = {tenant: self._shares.of(tenant).weight for tenant in self._num_owned}
        all_weights = sum(weights.values())
        self._num_until_look = max(len(weights) // TENANTS_A_BLOCK, 1)
        self._ranked = []
        for owner, free_list in self._cached.items():
            is_over = owner is not None and self._num_owned[owner] * all_weights > weights[owner] * num_owned
            kind = 3 if self._is_guaranteed(owner) else 1 if is_over else 2
            self._ranked.append((kind, free_list.first.released, owner))
        heapq.heapify(self._ranked)

    def _is_guaranteed(self, owner: str | None) -> bool:
        """It has no more free blocks than that."""
        return owner is not None and len(self._cached[owner]) <= self._shares.of(owner).guaranteed_blocks
