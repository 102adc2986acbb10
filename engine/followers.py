"""Requests that wait for another one to compute the blocks they share.

Chats that arrive together with one cold prompt would otherwise all compute it. The first to be admitted, the leader,
claims the blocks it is going to fill, and the tails it is going to publish; the others are parked until the last of
those that they have in common is published, and take it from the prefix cache. A leader that ends early gives its
claims up: its followers wait in the queue again, and the first of them goes on from what is written.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequences

from engine.sequence import Sequence


class Followers:
    def __init__(self) -> None:
        self._leaders: dict[bytes, Sequence] = {}
        """Who is computing the block, or the tail, with this hash."""
        self._parked: dict[bytes, list[Sequence]] = {}
        self._block_of: dict[Sequence, bytes] = {}
        """What a parked sequence waits for."""

    def __len__(self) -> int:
        return len(self._block_of)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._block_of)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._block_of

    def claim(self, leader: Sequence, block_hashes: Iterable[bytes]) -> None:
        """`leader` is going to compute these, except those that another one already computes."""
        for block_hash in block_hashes:
            self._leaders.setdefault(block_hash, leader)

    def is_claimed(self, block_hash: bytes) -> bool:
        """Somebody is computing it."""
        return block_hash in self._leaders

    def count_claimed(self, missing_hashes: Sequences[bytes]) -> int:
        """How many of the missing blocks, from the first on without a gap, are being computed."""
        for count, block_hash in enumerate(missing_hashes):
            if block_hash not in self._leaders:
                return count
        return len(missing_hashes)

    def leader(self, block_hash: bytes) -> Sequence:
        """Raises KeyError if nobody is computing it."""
        return self._leaders[block_hash]

    def of_other_tenants(self) -> Iterator[tuple[Sequence, Sequence]]:
        """Of each leader one follower of each tenant that is not its own; and the leader."""
        for block_hash, parked in self._parked.items():
            leader = self._leaders[block_hash]
            first = {sequence.tenant: sequence for sequence in reversed(parked)}
            for tenant, sequence in first.items():
                if tenant != leader.tenant:
                    yield sequence, leader

    def park(self, sequence: Sequence, block_hash: bytes) -> None:
        assert sequence not in self._block_of, f"{sequence.request_id!r} is parked already"
        assert block_hash in self._leaders, f"{sequence.request_id!r} would wait for a block that nobody computes"
        self._parked.setdefault(block_hash, []).append(sequence)
        self._block_of[sequence] = block_hash

    def discard(self, sequence: Sequence) -> None:
        """It no longer waits."""
        block_hash = self._block_of.pop(sequence)
        parked = self._parked[block_hash]
        parked.remove(sequence)
        if not parked:
            del self._parked[block_hash]

    def publish(self, block_hashes: Iterable[bytes]) -> list[Sequence]:
        """These are findable now. Returns who waited for them and waits no longer."""
        woken: list[Sequence] = []
        for block_hash in block_hashes:
            self._leaders.pop(block_hash, None)
            woken += self._parked.pop(block_hash, [])
        for sequence in woken:
            del self._block_of[sequence]
        return woken

    def give_up(self, leader: Sequence, block_hashes: Iterable[bytes]) -> list[Sequence]:
        """`leader` will not compute these of its blocks. Returns who waited for them and waits no longer."""
        return self.publish([h for h in block_hashes if self._leaders.get(h) is leader])

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError, with data, unless whoever is parked waits for a sequence that runs."""
        assert sum(map(len, self._parked.values())) == len(self._block_of), (self._parked, self._block_of)
        leaders = set(running)
        for block_hash, leader in self._leaders.items():
            assert leader in leaders, f"{leader.request_id!r} does not run, but claims {block_hash.hex()}"
        for sequence, block_hash in self._block_of.items():
            assert sequence in self._parked[block_hash], f"{sequence.request_id!r} is not parked at its block"
            assert block_hash in self._leaders, f"{sequence.request_id!r} waits for a block that nobody computes"
