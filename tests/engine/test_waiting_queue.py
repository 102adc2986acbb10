"""Who may be admitted before whom."""

import pytest

from engine.waiting_queue import WaitingQueue
from tests.engine.sequences import make_sequence


def queue_of(*rows: tuple[str, str, int, int]) -> WaitingQueue:
    """Rows: request id, tenant, priority, number of preemptions; they arrive in this order."""
    queue = WaitingQueue()
    for arrival, (request_id, tenant, priority, num_preemptions) in enumerate(rows):
        sequence = make_sequence(request_id, [1], tenant=tenant, priority=priority, arrival=arrival)
        sequence.num_preemptions = num_preemptions
        queue.add(sequence)
    return queue


def order(queue: WaitingQueue) -> list[str]:
    return [sequence.request_id for sequence in queue]


def test_first_come_first_served():
    queue = queue_of(("a", "t", 0, 0), ("b", "u", 0, 0), ("c", "t", 0, 0))
    assert order(queue) == ["a", "b", "c"]
    assert len(queue) == 3


def test_priority_orders_the_requests_of_one_tenant():
    assert order(queue_of(("a", "t", 5, 0), ("b", "t", 0, 0), ("c", "t", 5, 0), ("d", "t", -1, 0))) == list("dbac")


def test_priority_gains_nothing_over_other_tenants():
    queue = queue_of(("slow", "t", 9, 0), ("other", "u", 0, 0), ("urgent", "t", -9, 0))
    assert order(queue) == ["other", "urgent", "slow"]


def test_what_was_preempted_goes_first_within_its_priority():
    queue = queue_of(("a", "t", 0, 0), ("b", "u", 0, 0), ("c", "u", 0, 1), ("urgent", "u", -1, 0))
    assert order(queue) == ["a", "urgent", "c", "b"]
    assert order(queue_of(("a", "t", 0, 0), ("b", "u", 0, 1))) == ["b", "a"]


def test_removal_from_the_middle():
    queue = queue_of(("a", "t", 0, 0), ("b", "t", 0, 0), ("c", "t", 0, 0))
    _, b, _ = queue
    queue.remove(b)
    assert order(queue) == ["a", "c"]
    with pytest.raises(ValueError, match="'b' is not waiting"):
        queue.remove(b)


def test_an_empty_queue():
    queue = queue_of(("a", "t", 0, 0))
    queue.remove(next(iter(queue)))
    assert (order(queue), len(queue)) == ([], 0)
