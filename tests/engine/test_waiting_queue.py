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


def test_first_come_first_served_within_a_tenant():
    queue = queue_of(("a", "t", 0, 0), ("b", "u", 0, 0), ("c", "t", 0, 0))
    assert order(queue) == ["a", "c", "b"]
    assert [s.request_id for s in queue.of("t")] == ["a", "c"]
    assert (len(queue), list(queue.tenants)) == (3, ["t", "u"])


def test_priority_orders_the_requests_of_one_tenant():
    assert order(queue_of(("a", "t", 5, 0), ("b", "t", 0, 0), ("c", "t", 5, 0), ("d", "t", -1, 0))) == list("dbac")


def test_what_was_preempted_goes_first_within_its_priority():
    assert order(queue_of(("b", "u", 0, 0), ("c", "u", 0, 1), ("urgent", "u", -1, 0))) == ["urgent", "c", "b"]


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
    assert (order(queue), len(queue), bool(queue), list(queue.tenants)) == ([], 0, False, [])
