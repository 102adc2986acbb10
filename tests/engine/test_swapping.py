"""Evicted blocks go to the host tier and come back: a pool of 8 blocks of 8 tokens, a host of 6."""

import itertools

import pytest

from engine.protocol import END, HostStats, Scope
from engine.scheduled_batch import NO_TRANSFERS, SwapIn, SwapOut
from engine.swap_cost import SwapTime
from tests.engine.fake_runner import Bench, continuation, ids

PROMPT = ids(0, 33)
"""Four full blocks, and one token."""
OTHER = ids(500, 50)


def make_bench(num_blocks: int = 8, num_host_blocks: int = 6, **more) -> Bench:
    return Bench(num_blocks, num_host_blocks=num_host_blocks, **more)


def swapped_out(bench: Bench) -> Bench:
    """PROMPT was answered, and then evicted by OTHER."""
    bench.ask(PROMPT, 2)
    bench.ask(OTHER, 2)
    return bench


def transfers(bench: Bench, index: int = -1):
    return bench.runner.batches[index].transfers


def test_an_evicted_block_goes_to_the_host_in_the_step_that_needs_its_room():
    bench = make_bench()
    bench.ask(PROMPT, 2)
    assert bench.free_ids == [6, 7, 8, 5, 4, 3, 2, 1]
    bench.add("other", OTHER, 2)
    bench.step()
    # the block in which the prompt ends holds a tail, which is forgotten; the others in the order of eviction
    assert transfers(bench).swap_outs == (SwapOut(4, 0), SwapOut(3, 1), SwapOut(2, 2))
    bench.run()
    assert bench.core.stats().host == HostStats(total=6, used=3, swapped_out=3, swapped_in=0)


def test_what_comes_back_from_the_host_is_read_as_if_it_had_been_computed():
    bench = swapped_out(make_bench())
    output = bench.ask(PROMPT, 6)
    assert output.token_ids == continuation(PROMPT, 6)
    # block 1 is on the device still
    assert (output.num_cached_tokens, output.num_cached_host_tokens) == (32, 24)
    assert bench.core.stats().host.swapped_in == 3
    assert bench.core.stats().hit_tokens == 32


def test_a_request_without_a_host_tier_says_that_nothing_came_from_there():
    assert Bench(8).ask(PROMPT).num_cached_host_tokens == 0


def test_what_is_swapped_in_is_on_the_device_again():
    bench = swapped_out(make_bench())
    bench.ask(PROMPT, 2)
    output = bench.ask([*PROMPT, 7], 2)
    assert (output.num_cached_tokens, output.num_cached_host_tokens) == (33, 0)
    # and evicting it again costs nothing
    before = bench.core.stats().host.swapped_out
    bench.ask(ids(700, 20), 2)
    assert bench.core.stats().host.swapped_out == before + 2  # of OTHER


def test_several_that_want_the_same_blocks_share_one_swap():
    bench = swapped_out(make_bench(14, num_host_blocks=8))
    bench.ask(ids(800, 90), 2)
    for name in "abc":
        bench.add(name, [*PROMPT, ord(name)], 3)
    bench.step()
    assert bench.running == ["a"]
    assert len(transfers(bench).swap_ins) == 4
    bench.run()
    for name in "abc":
        bench.assert_complete(name, [*PROMPT, ord(name)], 3)
    assert [bench.outputs[name].num_cached_tokens for name in "abc"] == [32, 32, 32]
    assert [bench.outputs[name].num_cached_host_tokens for name in "abc"] == [32, 0, 0]
    assert bench.core.stats().host.swapped_in == 4


def test_who_waits_for_a_swap_that_was_aborted_goes_on_by_itself():
    bench = swapped_out(make_bench(14, num_host_blocks=8))
    bench.ask(ids(800, 90), 2)
    for name in "ab":
        bench.add(name, [*PROMPT, ord(name)], 3)
    scheduler = bench.core.scheduler
    batch = scheduler.schedule()
    assert len(batch.transfers.swap_ins) == 4
    bench.core._shadow.execute(batch)
    result = bench.runner.execute(batch)
    bench.core.abort(["a"])
    scheduler.check_integrity()
    scheduler.update(batch, result)
    bench.core.check_integrity()
    bench.run()
    bench.assert_complete("b", [*PROMPT, ord("b")], 3)
    assert bench.outputs["b"].num_cached_host_tokens == 32


@pytest.mark.parametrize("has_succeeded", [True, False])
def test_an_abort_in_a_step_that_swaps_both_ways_leaks_nothing(has_succeeded):
    bench = swapped_out(make_bench())
    bench.add("a", PROMPT, 6)
    scheduler = bench.core.scheduler
    batch = scheduler.schedule()
    assert batch.transfers.swap_ins
    assert batch.transfers.swap_outs
    bench.core._shadow.execute(batch)
    result = bench.runner.execute(batch)
    bench.core.abort(["a"])
    scheduler.check_integrity()
    if has_succeeded:
        scheduler.update(batch, result)
    else:
        bench.core.fail_batch(batch, RuntimeError("on purpose"))
    bench.core.check_integrity()
    assert bench.core.stats().blocks.referenced == 0
    for prompt_ids in (PROMPT, OTHER, PROMPT):
        assert bench.ask(prompt_ids, 5).token_ids == continuation(prompt_ids, 5)


def test_a_failed_step_leaves_nothing_findable_of_what_it_swapped():
    bench = make_bench()
    bench.ask(PROMPT, 2)
    bench.runner.failure = RuntimeError("on purpose")
    bench.add("other", OTHER, 2)
    bench.step()
    assert bench.core.stats().host == HostStats(total=6, used=0, swapped_out=0, swapped_in=0)
    output = bench.ask(PROMPT, 5)
    assert output.token_ids == continuation(PROMPT, 5)
    assert (output.num_cached_tokens, output.num_cached_host_tokens) == (8, 0)


def test_a_failed_swap_in_leaves_the_host_as_it_was():
    bench = swapped_out(make_bench())
    bench.add("a", PROMPT, 2)
    bench.runner.failure = RuntimeError("on purpose")
    bench.step()
    bench.runner.slots[8:] = [-7] * (len(bench.runner.slots) - 8)  # whatever the device holds now
    bench.core.scheduler.kv.pool.check_integrity()
    output = bench.ask([*PROMPT[8:]], 1)
    assert output.token_ids == continuation(PROMPT[8:], 1)


def test_tenants_do_not_find_each_other_on_the_host():
    bench = swapped_out(make_bench())
    output = bench.ask(PROMPT, 2, scopes=[Scope(END, b"another")])
    assert (output.num_cached_tokens, output.num_cached_host_tokens) == (0, 0)
    assert output.token_ids == continuation(PROMPT, 2)


def test_the_host_forgets_what_was_used_longest_ago():
    bench = make_bench(num_host_blocks=2)
    bench.ask(PROMPT, 2)
    bench.ask(OTHER, 2)
    # of blocks 4, 3 and 2 there was no room for the third: what a step writes stays until it is over
    assert bench.core.stats().host == HostStats(total=2, used=2, swapped_out=2, swapped_in=0)
    output = bench.ask(PROMPT, 2)
    assert (output.num_cached_tokens, output.num_cached_host_tokens) == (8, 0)  # the chain is broken at block 2


def test_prompt_logprobs_take_nothing_from_the_host():
    bench = swapped_out(make_bench())
    output = bench.ask(PROMPT, 2, prompt_logprobs=0)
    assert (output.num_cached_tokens, output.num_cached_host_tokens) == (0, 0)


def test_where_computing_is_cheaper_nothing_is_swapped():
    """A clock that says one second a step: 33 tokens a second, so that a block of 8 costs a quarter of a second."""
    for block_s, is_swapped in ((0.15, True), (0.3, False)):
        bench = swapped_out(make_bench(swap_time=SwapTime(0.0, block_s), clock=itertools.count().__next__))
        assert bench.core.stats().prefill_tokens_per_s == pytest.approx(41, abs=9)
        assert (bench.ask(PROMPT, 2).num_cached_host_tokens > 0) == is_swapped
        assert (bench.core.stats().host.swapped_out > 0) == is_swapped


def test_a_step_that_is_not_worth_its_swap_computes():
    bench = swapped_out(make_bench(swap_time=SwapTime(5.0, 0.0), clock=itertools.count().__next__))
    assert bench.core.stats().host.swapped_out == 3
    output = bench.ask(PROMPT, 2)
    assert (output.num_cached_tokens, output.num_cached_host_tokens) == (8, 0)


def test_b09_preempted_requests_come_back_from_the_host():
    bench = make_bench(12, num_host_blocks=60, max_num_batched_tokens=200)
    prompts = {name: ids(100 * i, 40) for i, name in enumerate("abcd")}
    for name, prompt_ids in prompts.items():
        bench.add(name, prompt_ids, 40)
    bench.run()
    for name, prompt_ids in prompts.items():
        bench.assert_complete(name, prompt_ids, 40)
    stats = bench.core.stats()
    assert stats.preemptions > 0
    assert stats.host.swapped_in > 0
    # less than a block for each time: what was swapped is not computed again
    assert stats.prompt_tokens_computed == 160


def test_a_trunk_comes_back_from_the_host_too():
    bench = make_bench(pin_budget=0.0)
    assert bench.pinned("t", ids(0, 32))[0] == "over_budget"
    bench.ask(OTHER, 2)
    bench.core.unpin("t")
    before = bench.core.stats().prompt_tokens_computed
    assert bench.pinned("t", ids(0, 32))[0] == "over_budget"
    assert bench.core.stats().host.swapped_in == 2
    assert bench.core.stats().prompt_tokens_computed == before + 8


def test_steps_without_eviction_move_nothing():
    bench = make_bench()
    bench.ask(PROMPT, 6)
    assert all(batch.transfers is NO_TRANSFERS for batch in bench.runner.batches)


def test_blocks_are_swapped_into_new_blocks_in_the_order_of_the_table():
    bench = swapped_out(make_bench())
    bench.add("a", PROMPT, 2)
    bench.step()
    table = bench.table("a")
    assert transfers(bench).swap_ins == (SwapIn(2, table[1]), SwapIn(1, table[2]), SwapIn(0, table[3]))
