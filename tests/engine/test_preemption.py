"""Who gives way. Blocks hold 8 tokens; a step's budget, and so the quantum, is 64 tokens if nothing else is said."""

import pytest

from engine.protocol import FinishReason, TenantShare
from tests.engine.fake_runner import Bench, ids


class TenantBench(Bench):
    def __init__(self, num_blocks: int, **more: int) -> None:
        super().__init__(num_blocks, clock=lambda: 0.0, **more)
        self.prompts: dict[str, tuple[list[int], int]] = {}
        """And how many tokens were asked for."""


def bench_of(num_blocks: int, shares: tuple[TenantShare, ...] = (), **more: int) -> TenantBench:
    bench = TenantBench(num_blocks, **more)
    bench.core.set_tenants(shares)
    return bench


def add(
    bench: TenantBench, tenant: str, num_requests: int, num_tokens: int = 3, max_tokens: int = 40, **more: int
) -> None:
    """Requests `<tenant>0`, `<tenant>1`, ...: prompts that share nothing."""
    num_known = sum(name.startswith(tenant) for name in bench.prompts)
    for i in range(num_known, num_known + num_requests):
        prompt = ids(37 * len(bench.prompts), num_tokens)
        bench.prompts[f"{tenant}{i}"] = prompt, max_tokens
        assert bench.add(f"{tenant}{i}", prompt, max_tokens, tenant=tenant, **more) is None


def finish(bench: TenantBench) -> None:
    """All requests end, each with its own answer."""
    bench.run()
    for name, (prompt, max_tokens) in bench.prompts.items():
        bench.assert_complete(name, prompt, max_tokens)


# ---- a place


def test_a_tenant_that_runs_nothing_gets_a_place_of_the_newest_of_one_that_has_more_than_its_share():
    bench = bench_of(100, max_num_seqs=4)
    add(bench, "a", 10)
    bench.step(3)
    assert bench.running == ["a0", "a1", "a2", "a3"]
    add(bench, "b", 1)
    bench.step()
    assert bench.running == ["a0", "a1", "a2", "b0"]
    assert bench.core.stats().preemptions == 1
    finish(bench)


def test_it_gets_one_place_and_the_others_only_when_it_is_behind():
    bench = bench_of(100, max_num_seqs=4, max_num_batched_tokens=16)
    add(bench, "a", 10)
    bench.step(9)
    add(bench, "b", 10)
    bench.step()
    assert bench.running == ["a0", "a1", "a2", "b0"]
    # a has three rows and b one, so a gets 4 more a step; when it is ahead by more than 16 b takes a second place
    held = []
    while bench.core.stats().preemptions < 2:
        held.append(bench.running)
        bench.step()
    assert len(held) == 6
    assert bench.running == ["a0", "a1", "b0", "b1"]
    bench.step(10)
    assert bench.running == ["a0", "a1", "b0", "b1"]
    finish(bench)


def test_shares_of_places_go_by_weight():
    shares = (TenantShare(tenant="a", weight=3.0),)
    bench = bench_of(100, shares, max_num_seqs=8, max_num_batched_tokens=8)
    add(bench, "a", 10, max_tokens=70)
    bench.step(10)
    add(bench, "b", 10, max_tokens=70)
    bench.step(50)
    assert sorted(bench.running) == ["a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1"]
    finish(bench)


def test_the_least_urgent_of_the_most_served_tenant_goes_first():
    bench = bench_of(100, max_num_seqs=6, max_num_batched_tokens=64)
    add(bench, "a", 2)
    add(bench, "m", 1, num_tokens=30, priority=-1)
    add(bench, "m", 1, num_tokens=30, priority=2)
    add(bench, "m", 2)
    bench.step(3)
    assert sorted(bench.running) == ["a0", "a1", "m0", "m1", "m2", "m3"]
    add(bench, "b", 1)
    bench.step()
    assert sorted(bench.running) == ["a0", "a1", "b0", "m0", "m2", "m3"]
    finish(bench)


def test_with_more_tenants_than_places_they_take_turns_of_the_quantum():
    """A place is not taken from a tenant's only request before that has had the quantum more."""
    bench = bench_of(100, max_num_seqs=1, max_num_batched_tokens=20)
    add(bench, "a", 1)
    add(bench, "b", 1)
    order = []
    while bench.core.has_work:
        bench.step()
        order += [name for name in bench.running if order[-1:] != [name]]
    assert order == ["a0", "b0", "a0", "b0", "a0", "b0", "a0", "b0"]
    finish(bench)


def test_who_has_been_served_more_takes_no_place_from_who_has_been_served_less():
    bench = bench_of(100, max_num_seqs=2, max_num_batched_tokens=40)
    add(bench, "b", 1, num_tokens=39, max_tokens=1)
    add(bench, "a", 3)
    bench.step(3)
    assert bench.running == ["a0", "a1"]
    add(bench, "b", 1)  # b owes what its first prompt was more than those of a
    bench.step()
    assert bench.running == ["a0", "a1"]
    finish(bench)


# ---- blocks


def test_blocks_are_taken_from_who_has_more_than_its_share_and_no_more_than_needed():
    bench = bench_of(12, max_num_seqs=8)
    add(bench, "a", 8, num_tokens=20, max_tokens=5)
    bench.step(2)
    assert bench.running == ["a0", "a1", "a2", "a3"]
    add(bench, "b", 1, num_tokens=30, max_tokens=2)  # four blocks of twelve
    bench.step()
    assert bench.running == ["a0", "a1", "b0"]
    assert bench.core.stats().preemptions == 2
    finish(bench)


def test_nothing_is_taken_for_a_request_that_would_not_fit_all_the_same():
    bench = bench_of(12, max_num_seqs=8)
    add(bench, "a", 4, num_tokens=20, max_tokens=4)
    bench.step()
    add(bench, "b", 1, num_tokens=80, max_tokens=2)  # ten blocks: a keeps its half
    bench.step()
    assert (bench.running, bench.core.stats().preemptions) == (["a0", "a1", "a2", "a3"], 0)
    finish(bench)


def test_a_request_that_fills_the_pool_gives_way_and_comes_back():
    bench = bench_of(8, max_num_seqs=4, max_num_batched_tokens=64)
    add(bench, "a", 1, num_tokens=50, max_tokens=14)
    bench.step(2)
    add(bench, "b", 6, num_tokens=9, max_tokens=5)
    bench.step()
    assert bench.running == ["b0", "b1", "b2", "b3"]
    finish(bench)


def test_when_a_sequence_grows_the_tenant_with_more_than_its_share_loses_one():
    bench = bench_of(7, max_num_seqs=8)
    add(bench, "b", 1, num_tokens=7, max_tokens=20)
    add(bench, "a", 3, num_tokens=15, max_tokens=6)
    bench.step()
    assert bench.running == ["b0", "a0", "a1", "a2"]
    bench.step(2)  # all need a block more: b0 and a0 get those of a2, and a1 goes
    assert bench.running == ["b0", "a0"]
    finish(bench)


def test_a_tenant_at_its_own_limit_of_blocks_gives_way_to_itself():
    shares = (TenantShare(tenant="a", max_blocks=4),)
    bench = bench_of(20, shares, max_num_seqs=8)
    add(bench, "a", 3, num_tokens=15, max_tokens=6)
    add(bench, "b", 3, num_tokens=15, max_tokens=6)
    bench.step()
    assert sorted(bench.running) == ["a0", "a1", "b0", "b1", "b2"]
    bench.step(2)
    assert sorted(bench.running) == ["a0", "b0", "b1", "b2"]
    finish(bench)


# ---- urgency


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_running"), [(100, 2, None), (4, 8, None), (100, 8, 2)], ids=str
)
def test_an_urgent_request_takes_what_it_lacks_from_less_urgent_ones_of_its_tenant(
    num_blocks, max_num_seqs, max_running
):
    bench = bench_of(num_blocks, (TenantShare(tenant="a", max_running=max_running),), max_num_seqs=max_num_seqs)
    add(bench, "a", 1, num_tokens=10, max_tokens=5, priority=1)
    add(bench, "a", 1, num_tokens=10, max_tokens=5, priority=2)
    bench.step()
    add(bench, "a", 1, num_tokens=10, max_tokens=5, priority=2)
    bench.step()
    assert bench.running == ["a0", "a1"]
    add(bench, "a", 1, num_tokens=10, max_tokens=5, priority=0)
    bench.step()
    assert bench.running == ["a0", "a3"]
    finish(bench)


def test_an_urgent_request_of_a_tenant_that_is_far_behind_takes_the_place_of_who_has_had_most():
    bench = bench_of(40, (TenantShare(tenant="b", weight=0.001),), max_num_seqs=2, max_num_batched_tokens=8)
    add(bench, "b", 1, num_tokens=4)
    bench.step()
    add(bench, "a", 1, num_tokens=45, priority=1)
    bench.step(5)
    add(bench, "a", 1, num_tokens=4)
    bench.step(2)
    # nobody has looked at what others hold before: there was room for each
    assert bench.running == ["a0", "a1"]
    finish(bench)


def test_urgency_takes_nothing_from_other_tenants():
    bench = bench_of(100, max_num_seqs=2)
    add(bench, "a", 1, priority=5)
    add(bench, "b", 1, priority=5)
    bench.step()
    add(bench, "a", 1, priority=-5)
    bench.step()
    assert bench.running == ["b0", "a1"]
    finish(bench)


# ---- and then


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("which", ["a0", "a3", "b0"])
def test_preempted_work_survives_an_abort_at_any_point(which, num_steps):
    bench = bench_of(9, max_num_seqs=3)
    add(bench, "a", 5, num_tokens=12, max_tokens=10)
    bench.step(2)
    add(bench, "b", 1, num_tokens=12, max_tokens=10)
    bench.step(num_steps)
    if which not in bench.outputs or bench.outputs[which].finish_reason is None:
        bench.core.abort([which])
        del bench.prompts[which]
        bench.core.check_integrity()
    finish(bench)
    assert bench.core.stats().blocks.referenced == 0


def test_what_fails_in_the_step_that_preempted_for_it_leaves_the_others_whole():
    bench = bench_of(100, max_num_seqs=2)
    add(bench, "a", 4)
    bench.step(2)
    add(bench, "b", 1)
    bench.runner.failure = RuntimeError("out of luck")
    failed = {output.request_id for output in bench.step() if output.finish_reason == FinishReason.ERROR}
    assert failed == {"a0", "b0"}
    for name in failed:
        del bench.prompts[name]
    finish(bench)
