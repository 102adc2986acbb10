"""Sequences that wait for admission, in the order in which they may have it."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.sequence import Sequence


def _order_within_tenant(sequence: Sequence) -> tuple[int, bool, int]:
    return sequence.priority, sequence.num_preemptions == 0, sequence.arrival


def _order_of_heads(sequence: Sequence) -> tuple[bool, int]:
    return sequence.num_preemptions == 0, sequence.arrival


class WaitingQueue:
    """A queue for each tenant, by priority and then arrival; the tenants' heads go by arrival.

    So a priority orders the requests of its own tenant only. What was preempted has been answering somebody and goes
    before what has not begun.
    """

    def __init__(self) -> None:
        self._queues: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile."""
        return heapq.merge(*self._queues.values(), key=_order_of_heads)

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
