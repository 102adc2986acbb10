"""Slots of the host tier: found after the step that wrote them, never read and written in one step."""

import pytest

from engine.host_tier import HostTier
from engine.protocol import HostStats

A, B, C, D = b"a", b"b", b"c", b"d"


def filled(*block_hashes: bytes, num_blocks: int = 3) -> HostTier:
    host = HostTier(num_blocks)
    assert [host.try_write(block_hash) for block_hash in block_hashes] == list(range(len(block_hashes)))
    host.settle(has_succeeded=True)
    return host


def test_what_is_written_is_found_when_the_step_has_succeeded():
    host = HostTier(3)
    assert (host.try_write(A), host.try_write(B)) == (0, 1)
    assert A not in host
    assert host.count_known([A, B, C], 0) == 0
    host.check_integrity()
    host.settle(has_succeeded=True)
    assert (host.count_known([A, B, C], 0), host.count_known([A, B, C], 1), host.count_known([C, A], 0)) == (2, 1, 0)
    assert host.stats() == HostStats(total=3, used=2, swapped_out=2, swapped_in=0)
    host.check_integrity()


def test_a_failed_step_leaves_nothing_and_its_slots_are_free():
    host = filled(A)
    assert host.try_write(B) == 1
    host.settle(has_succeeded=False)
    assert (B in host, A in host, len(host)) == (False, True, 1)
    assert host.try_write(C) == 1
    host.check_integrity()


def test_the_one_used_longest_ago_makes_room_and_is_not_known_any_more():
    host = filled(A, B, C)
    assert host.read(A) == 0
    host.settle(has_succeeded=True)
    assert host.try_write(D) == 1
    assert (A in host, B in host, C in host) == (True, False, True)
    host.settle(has_succeeded=False)
    assert B not in host  # its slot may hold anything now
    assert host.stats() == HostStats(total=3, used=2, swapped_out=3, swapped_in=1)


def test_what_is_known_need_not_be_written_again():
    host = filled(A, B, C)
    assert host.try_write(A) is None
    host.settle(has_succeeded=True)
    assert host.try_write(D) == 1  # A was used just now
    assert host.try_write(D) is None


def test_a_slot_that_is_read_is_not_written_in_the_same_step():
    host = filled(A, B, num_blocks=2)
    assert (host.read(A), host.read(B)) == (0, 1)
    assert host.try_write(C) is None
    host.settle(has_succeeded=True)
    assert host.try_write(C) == 0


def test_a_slot_that_is_written_is_not_given_out_again_in_the_same_step():
    host = HostTier(1)
    assert host.try_write(A) == 0
    assert host.try_write(B) is None
    host.check_integrity()


def test_no_slots_hold_nothing():
    host = HostTier()
    assert host.try_write(A) is None
    assert host.count_known([A], 0) == 0
    assert host.stats() == HostStats()


def test_check_integrity_sees_a_lost_slot():
    host = filled(A)
    host._free.pop()
    with pytest.raises(AssertionError):
        host.check_integrity()
