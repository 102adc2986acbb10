"""Sequences that wait for admission, in the order in which they may have it."""

from bisect import bisect_left, insort
from collections.abc import Iterator, KeysView

from engine.sequence import Sequence


def _order_within_tenant(sequence: Sequence) -> tuple[int, bool, int]:
    return sequence.priority, sequence.num_preemptions == 0, sequence.arrival


class WaitingQueue:
    """A queue for each tenant, by priority and then arrival; whose turn it is is not said here (engine.fair_share).

    So a priority orders the requests of its own tenant only. What was preempted has been answering somebody and goes
    before what has not begun.
    """

    def __init__(self) -> None:
        self._queues: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Sequence]:
        """One tenant after the other."""
        for queue in self._queues.values():
            yield from queue

    @property
    def tenants(self) -> KeysView[str]:
        """Of which something waits."""
        return self._queues.keys()

    def of(self, tenant: str) -> list[Sequence]:
        """In order; not to be changed. Raises KeyError if nothing of it waits."""
        return self._queues[tenant]

    def add(self, sequence: Sequence) -> None:
        insort(self._queues.setdefault(sequence.tenant, []), sequence, key=_order_within_tenant)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if it does not wait here."""
        queue = self._queues.get(sequence.tenant, [])
        index = bisect_left(queue, _order_within_tenant(sequence), key=_order_within_tenant)
        if index == len(queue) or queue[index] is not sequence:
            raise ValueError(f"{sequence.request_id!r} is not waiting")
        del queue[index]
        if not queue:
            del self._queues[sequence.tenant]
