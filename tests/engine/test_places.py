"""Where sequences are. Ten blocks of eight tokens, two places."""

import pytest

from engine.fair_share import FairShare
from engine.kv_cache_manager import NO_PREFIX, KVCacheManager
from engine.places import Places
from engine.protocol import FinishReason
from engine.sequence import Sequence, SequenceStatus
from engine.tenant_shares import TenantShares
from tests.engine.sequences import make_sequence


class Bench:
    def __init__(self) -> None:
        self.kv = KVCacheManager(10, 8, b"root")
        self.fair_share = FairShare(TenantShares(), self.kv, lambda: 0.0)
        self.places = Places(self.kv, self.fair_share, 2)

    def add(self, request_id: str, num_tokens: int, tenant: str = "") -> Sequence:
        sequence = make_sequence(request_id, list(range(num_tokens)), tenant=tenant, arrival=len(self.places.sequences))
        self.places.add(sequence)
        return sequence

    def start(self, request_id: str, num_tokens: int, tenant: str = "") -> Sequence:
        sequence = self.add(request_id, num_tokens, tenant)
        assert self.kv.try_start(sequence, NO_PREFIX)
        self.places.start(sequence)
        self.places.check_integrity()
        return sequence

    def where(self) -> tuple[list[str], list[str], list[str]]:
        """Running, waiting, parked."""
        self.places.check_integrity()
        places = self.places.running, self.places.waiting, self.places.followers
        running, waiting, parked = ([sequence.request_id for sequence in place] for place in places)
        return running, waiting, parked


def test_a_sequence_waits_runs_and_ends():
    bench = Bench()
    sequence = bench.start("a", 20)
    assert bench.where() == (["a"], [], [])
    assert (sequence.status, bench.kv.num_free_blocks, bench.fair_share[""].num_running) == (
        SequenceStatus.RUNNING,
        7,
        1,
    )
    bench.places.finish(sequence, FinishReason.STOP)
    assert bench.where() == ([], [], [])
    assert (sequence.finish_reason, bench.kv.num_free_blocks) == (FinishReason.STOP, 10)
    assert (len(bench.places.sequences), list(bench.fair_share.accounts)) == (0, [])


def test_what_is_preempted_waits_without_blocks_and_its_prompt_counts_once():
    bench = Bench()
    sequence = bench.start("a", 20)
    sequence.num_computed_tokens = 16
    bench.places.preempt(sequence)
    assert bench.where() == ([], ["a"], [])
    assert (sequence.num_served_tokens, sequence.num_preemptions, bench.kv.num_free_blocks) == (16, 1, 10)
    assert bench.kv.try_start(sequence, NO_PREFIX)
    bench.places.start(sequence)
    counters = bench.places.counters
    assert (counters.query_tokens, counters.hit_tokens, counters.preemptions) == (20, 0, 1)
    assert bench.places.num_moves == 3


@pytest.mark.parametrize("how", ["preempt", "finish"])
def test_followers_wait_again_when_their_leader_leaves(how):
    bench = Bench()
    leader = bench.start("leader", 20)
    follower = bench.add("follower", 20, "t")
    bench.places.park(follower, leader.block_hashes[1])
    assert bench.where() == (["leader"], [], ["follower"])
    assert bench.places.num_waiting == 1
    if how == "preempt":
        bench.places.preempt(leader)
        assert bench.where() == ([], ["follower", "leader"], [])  # tenant by tenant
    else:
        bench.places.finish(leader, FinishReason.ABORT)
        assert bench.where() == ([], ["follower"], [])


def test_one_that_waits_or_is_parked_can_end():
    bench = Bench()
    leader = bench.start("leader", 20)
    follower, other = bench.add("follower", 20), bench.add("other", 3)
    bench.places.park(follower, leader.block_hashes[0])
    for sequence in (follower, other):
        bench.places.finish(sequence, FinishReason.ABORT)
        assert sequence.is_finished
    assert bench.where() == (["leader"], [], [])


def test_there_are_so_many_places():
    bench = Bench()
    bench.start("a", 3)
    assert not bench.places.is_full
    bench.start("b", 30)
    assert bench.places.is_full


def test_check_integrity_sees_one_that_waits_with_blocks():
    bench = Bench()
    sequence = bench.add("a", 3)
    assert bench.kv.try_start(sequence, NO_PREFIX)
    with pytest.raises(AssertionError):
        bench.places.check_integrity()
