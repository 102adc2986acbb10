"""Who waits for whose blocks."""

import pytest

from engine.followers import Followers
from tests.engine.sequences import make_sequence

LEADER, OTHER = make_sequence("leader", [1]), make_sequence("other", [1])
A, B, C = (make_sequence(name, [1]) for name in "abc")


def led() -> Followers:
    followers = Followers()
    followers.claim(LEADER, [b"1", b"2", b"3"])
    return followers


def test_blocks_are_claimed_as_far_as_there_is_no_gap():
    followers = led()
    assert followers.count_claimed([b"1", b"2", b"x", b"3"]) == 2
    assert followers.count_claimed([b"2", b"3"]) == 2
    assert followers.count_claimed([b"x", b"1"]) == 0
    assert followers.count_claimed([]) == 0


def test_followers_wake_when_their_block_is_published():
    followers = led()
    followers.park(A, b"1")
    followers.park(B, b"3")
    followers.park(C, b"3")
    assert (len(followers), list(followers)) == (3, [A, B, C])
    assert followers.publish([b"1", b"2"]) == [A]
    assert A not in followers
    assert not followers.is_claimed(b"1")
    assert followers.is_claimed(b"3")
    assert followers.publish([b"3"]) == [B, C]
    assert len(followers) == 0
    followers.check_integrity([])


def test_followers_wake_when_their_leader_gives_up():
    followers = led()
    followers.park(A, b"2")
    assert followers.give_up(LEADER, [b"1", b"2", b"3"]) == [A]
    followers.check_integrity([])


def test_the_first_claim_counts():
    followers = led()
    followers.claim(OTHER, [b"3", b"4"])
    followers.park(A, b"3")
    assert followers.give_up(OTHER, [b"3", b"4"]) == []
    followers.check_integrity([LEADER])
    assert followers.publish([b"3"]) == [A]


def test_one_that_is_aborted_no_longer_waits():
    followers = led()
    followers.park(A, b"1")
    followers.park(B, b"1")
    followers.discard(A)
    assert followers.publish([b"1"]) == [B]


def test_of_each_leader_one_follower_of_each_other_tenant_is_named():
    followers = led()
    parked = [make_sequence(f"{tenant}{i}", [1], tenant=tenant) for i in range(2) for tenant in ("", "t", "u")]
    for sequence in parked:
        followers.park(sequence, b"2")
    assert followers.leader(b"2") is LEADER
    assert sorted((follower.request_id, leader) for follower, leader in followers.of_other_tenants()) == [
        ("t0", LEADER),
        ("u0", LEADER),
    ]


def test_nobody_waits_for_what_nobody_computes():
    with pytest.raises(AssertionError, match="'a' would wait for a block that nobody computes"):
        led().park(A, b"x")


def test_check_integrity_sees_a_leader_that_has_gone():
    with pytest.raises(AssertionError, match="'leader' does not run"):
        led().check_integrity([OTHER])
