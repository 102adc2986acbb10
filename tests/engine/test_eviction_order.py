"""In which order free blocks are used again when several tenants have them."""

import pytest

from engine.block import Block
from engine.eviction_order import EvictionOrder
from engine.protocol import TenantShare
from engine.tenant_shares import TenantShares


class Order:
    """Cached blocks of given owners, released one after the other; `parents`: those that others hang under."""

    def __init__(self, *owners: str | None, **guaranteed: int) -> None:
        shares = TenantShares()
        shares.set([TenantShare(tenant=tenant, guaranteed_blocks=num) for tenant, num in guaranteed.items()])
        self.num_owned: dict[str, int] = {}
        self.parents: set[int] = set()
        self.order = EvictionOrder(shares, self.num_owned, lambda block: block.block_id in self.parents)
        self.blocks: dict[int, Block] = {}
        for owner in owners:
            self.release(owner)

    def release(self, owner: str | None, *, is_cached: bool = True) -> None:
        block_id = len(self.blocks) + 1
        block = self.blocks[block_id] = Block(block_id, is_cached=is_cached, owner=owner)
        if owner is not None:
            self.num_owned[owner] = self.num_owned.get(owner, 0) + 1
        self.order.add(block)

    def pop(self, num_blocks: int) -> list[int]:
        return [self._pop() for _ in range(num_blocks)]

    def pop_all(self) -> list[int]:
        return self.pop(len(self.order))

    def _pop(self) -> int:
        block = self.order.pop_first()
        if block.owner is not None:
            self.num_owned[block.owner] -= 1
            if self.num_owned[block.owner] == 0:
                del self.num_owned[block.owner]
        return block.block_id


@pytest.mark.parametrize("owner", ["a", None])
def test_with_one_owner_it_is_the_order_of_release(owner):
    order = Order(owner, owner, owner)
    order.release(owner, is_cached=False)
    assert [block.block_id for block in order.order] == [4, 1, 2, 3]
    assert order.pop_all() == [4, 1, 2, 3]
    with pytest.raises(IndexError):
        order.order.pop_first()


def test_who_has_more_than_its_share_gives_first():
    order = Order("b", "a", "a", "a", "b", "a", "a")
    # five of seven, four of six, three of five; then both have two, and the longest free goes
    assert order.pop(3) == [2, 3, 4]
    assert order.pop_all() == [1, 6, 5, 7]


def test_among_many_tenants_a_look_at_all_is_good_for_some_blocks(monkeypatch):
    owners = [f"t{i}" for i in range(40)]
    order = Order(*owners, *["flood"] * 30, *owners, t0=2)
    looks = []
    look_at_all = EvictionOrder._look_at_all
    monkeypatch.setattr(EvictionOrder, "_look_at_all", lambda self: (looks.append(1), look_at_all(self)))
    assert order.pop(25) == list(range(41, 66))
    assert len(looks) == 5  # with 41 tenants one for each five blocks
    rest = order.pop_all()
    assert sorted(rest[:-2]) == sorted(set(range(2, 111)) - set(range(41, 66)) - {71})
    assert rest[-2:] == [1, 71]  # what is guaranteed, though its owner was looked at long before


def test_what_is_held_counts_too():
    order = Order("a", "a", "b")
    order.num_owned["b"] += 5
    assert order.pop_all() == [3, 1, 2]


def test_blocks_of_trunks_go_with_those_of_tenants_within_their_share():
    order = Order("a", None, "b", None, "c")
    assert order.pop_all() == [1, 2, 3, 4, 5]


def test_guaranteed_blocks_go_last():
    order = Order("a", "a", "a", None, "b", "b", "b", a=2)
    assert order.pop(1) == [1]  # more than the two that are guaranteed
    assert order.pop_all() == [5, 4, 6, 7, 2, 3]


def test_a_trunk_is_kept_as_long_as_what_is_guaranteed_hangs_under_it():
    order = Order("a", None, None, "b", a=1)  # block 2 hangs under block 3, and a's under block 2
    order.parents = {2, 3}
    assert order.pop(1) == [4]
    order.release("b")
    assert order.pop(1) == [5]
    # then what is guaranteed, and what it needed
    assert order.pop(1) == [1]
    order.parents = {3}
    assert order.pop(1) == [2]
    order.parents = set()
    assert order.pop(1) == [3]
    assert len(order.order) == 0


def test_a_trunk_is_kept_no_longer_than_what_hangs_under_it():
    order = Order("a", None, "b", "b", "b", a=1)
    order.parents = {2}
    assert order.pop(2) == [3, 4]
    order.parents = set()  # a took its block into a table and gave it back to nobody
    assert order.pop_all() == [2, 5, 1]


def test_a_tenants_own_go_in_their_order():
    order = Order("a", "b", "a")
    assert order.order.pop_first_of("a").block_id == 1
    assert order.order.pop_first_of("a").block_id == 3
    assert order.order.num_cached_of("a") == 0
    with pytest.raises(KeyError):
        order.order.pop_first_of("a")


def test_removed_ones_are_gone_from_every_list():
    order = Order("a", "a", "b", None)
    order.order.remove_all([order.blocks[2], order.blocks[3], order.blocks[4]])
    assert (len(order.order), order.order.num_cached_of("b")) == (1, 0)
    with pytest.raises(ValueError, match="block 4 is not free"):
        order.order.remove_all([order.blocks[4]])
    with pytest.raises(ValueError, match="block 3 is not free"):
        order.order.remove(order.blocks[3])
    assert order.pop_all() == [1]
