"""What each step computes: rows are (request id, number of new tokens), decodes first. Blocks hold 8 tokens."""

import pytest

from engine import scheduler
from engine.admission import MAX_BYPASSES
from engine.errors import EngineError
from engine.forest import find_shared_nodes
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import END, ErrorInfo, FinishReason, Scope
from engine.scheduled_batch import BlockCopy, SampledToken, StepResult
from engine.scheduler import Scheduler
from engine.tenant_shares import TenantShares
from tests.engine.fake_runner import Bench, continuation, ids, next_token

# ---- one token budget


def test_prompts_are_computed_in_chunks_beside_decodes():
    bench = Bench(20, max_num_batched_tokens=16)
    bench.add("a", ids(0, 5), 3)
    bench.step()
    bench.add("b", ids(100, 33), 2)
    bench.run()
    assert bench.runner.rows == [
        [("a", 5)],
        [("a", 1), ("b", 15)],
        [("a", 1), ("b", 15)],
        [("b", 3)],
        [("b", 1)],
    ]
    bench.assert_complete("a", ids(0, 5), 3)
    bench.assert_complete("b", ids(100, 33), 2)


def test_a_chunk_is_in_flight_before_the_next_prompt_begins():
    bench = Bench(20, max_num_batched_tokens=16)
    bench.add("a", ids(0, 20), 1)
    bench.add("b", ids(100, 20), 1)
    bench.run()
    assert bench.runner.rows == [[("a", 16)], [("a", 4), ("b", 12)], [("b", 8)]]


def test_decodes_come_first_however_long_a_prompt_is():
    bench = Bench(40, max_num_seqs=4, max_num_batched_tokens=4)
    for name, start in (("a", 100), ("b", 200), ("c", 300)):
        bench.add(name, [start], 3)
    bench.add("long", ids(0, 40), 1)
    bench.run()
    assert bench.runner.rows[:4] == [
        [("a", 1), ("b", 1), ("c", 1), ("long", 1)],
        [("a", 1), ("b", 1), ("c", 1), ("long", 1)],
        [("a", 1), ("b", 1), ("c", 1), ("long", 1)],
        [("long", 4)],
    ]
    bench.assert_complete("long", ids(0, 40), 1)


def test_no_more_sequences_run_than_there_are_places():
    bench = Bench(20, max_num_seqs=2)
    for i in range(3):
        bench.add(f"r{i}", ids(100 * i, 3), 2)
    bench.run()
    assert bench.runner.rows == [[("r0", 3), ("r1", 3)], [("r0", 1), ("r1", 1)], [("r2", 3)], [("r2", 1)]]


def test_a_budget_below_one_token_for_each_is_refused():
    kv = KVCacheManager(4, 8, b"root")
    with pytest.raises(EngineError, match=r"max_num_seqs must be from 1 to max_num_batched_tokens.*got 9 and 8"):
        Scheduler(kv, TenantShares(), max_num_seqs=9, max_num_batched_tokens=8)


def test_rows_of_one_token_are_decodes_when_it_is_the_last():
    bench = Bench(20)
    bench.add("first", ids(0, 17), 2)
    bench.run()
    bench.add("again", ids(0, 17), 1)
    bench.add("other", ids(500, 3), 1)
    bench.step()
    batch = bench.runner.batches[-1]
    assert bench.runner.rows[-1] == [("again", 1), ("other", 3)]
    assert (batch.num_decodes, batch.num_tokens) == (1, 4)
    assert [s.sequence.request_id for s in batch.extends] == ["other"]


def test_decode_rows_come_with_the_blocks_they_share():
    bench = Bench(30)
    trunk = ids(0, 34)
    bench.add("a", [*trunk, 901], 4)
    bench.step()
    bench.add("b", [*trunk, 902], 4)
    bench.add("c", [*trunk, 903], 4)
    bench.step(2)
    [node] = bench.runner.batches[-1].nodes
    assert bench.runner.rows[-1] == [("a", 1), ("b", 1), ("c", 1)]
    assert (node.block_ids, node.rows) == ((1, 2, 3, 4), (0, 1, 2))
    bench.core.abort(["a"])
    bench.step()
    [node] = bench.runner.batches[-1].nodes
    assert bench.runner.rows[-1] == [("b", 1), ("c", 1)]
    assert (node.block_ids, node.rows) == ((1, 2, 3, 4), (0, 1))


def test_shared_blocks_are_looked_for_only_when_a_row_joins_or_leaves(monkeypatch):
    """Rows fill blocks of their own meanwhile, and what was found still holds: the fake runner checks nodes."""
    looked = []
    monkeypatch.setattr(scheduler, "find_shared_nodes", lambda *args: looked.append(args) or find_shared_nodes(*args))
    bench = Bench(40)
    trunk = ids(0, 34)
    bench.add("a", [*trunk, 901], 40)
    bench.step()
    bench.add("b", [*trunk, 902], 40)
    bench.step(2)
    looked.clear()
    bench.step(20)
    assert looked == []
    assert bench.core.stats().blocks_not_read == 21 * 4
    bench.add("c", [*trunk, 903], 40)
    bench.step(2)
    assert len(looked) == 1
    bench.step(5)
    bench.core.abort(["a"])
    bench.step()
    assert len(looked) == 2


def test_never_reads_every_block_for_each_row():
    bench = Bench(40, shared_attention="never")
    for name in ("a", "b"):
        bench.add(name, [*ids(0, 34), 901], 10)
    bench.run()
    assert all(batch.nodes == () for batch in bench.runner.batches)
    assert bench.core.stats().blocks_not_read == 0


def test_deterministic_nodes_are_whole_pieces_of_256_tokens():
    bench = Bench(100, max_num_batched_tokens=1000, deterministic=True)
    for name in ("a", "b"):
        bench.add(name, ids(0, 540), 10)
        bench.step()
    bench.step()
    [node] = bench.runner.batches[-1].nodes
    assert len(node.block_ids) * 8 == 512


# ---- the prefix cache


@pytest.mark.parametrize("num_tokens", [7, 8, 9, 16, 24, 25])
def test_b03_a_prompt_that_is_wholly_cached_computes_its_last_token(num_tokens):
    bench = Bench(20)
    prompt = ids(0, num_tokens)
    cold, warm = bench.ask(prompt), bench.ask(prompt)
    assert warm.token_ids == cold.token_ids == continuation(prompt, 4)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, num_tokens - 1)
    assert bench.ask(prompt, prompt_logprobs=0).num_cached_tokens == 0


def test_the_next_turn_finds_prompt_and_answer():
    bench = Bench(20)
    answer = bench.ask(ids(0, 20), 12).token_ids
    # the answer's last token was drawn, but its KV never computed
    assert bench.ask([*ids(0, 20), *answer, 5]).num_cached_tokens == 31


def test_each_of_many_turns_computes_its_own_message_only():
    """And the last token of the answer before, which was drawn, but never computed."""
    bench = Bench(200, max_num_batched_tokens=512)
    token_ids: list[int] = []
    for turn in range(100):
        message = ids(50 * turn, 1 + turn % 11)
        before = bench.core.stats().prompt_tokens_computed
        answer = bench.ask([*token_ids, *message], 1 + turn % 7).token_ids
        assert bench.core.stats().prompt_tokens_computed - before == len(message) + (turn > 0)
        token_ids += [*message, *answer]


def test_b04_two_fingerprints_of_a_model_share_no_hash():
    one, other = Bench(8), Bench(8)
    other.core.scheduler.kv._hashes.root = b"of another model"
    one.ask(ids(0, 17))
    other.ask(ids(0, 17))
    assert not set(one.core.scheduler.kv.cache._entries) & set(other.core.scheduler.kv.cache._entries)


def test_b08_what_is_shared_up_to_mid_block_stays_apart():
    """A prefix of 20 tokens ends in the third block: each has its own third block."""
    bench = Bench(20)
    prompts = {name: [*ids(0, 20), 900 + i] for i, name in enumerate("abc")}
    bench.add("a", prompts["a"], 5)
    bench.step()
    bench.add("b", prompts["b"], 5)
    bench.add("c", prompts["c"], 5)
    bench.step()
    assert [bench.table(name) for name in "abc"] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    bench.run()
    for name, prompt in prompts.items():
        bench.assert_complete(name, prompt, 5)


def test_tenants_do_not_find_each_others_blocks():
    bench = Bench(20)
    bench.ask(ids(0, 30), tenant="a")
    assert bench.ask(ids(0, 30), tenant="b").num_cached_tokens == 0
    assert bench.ask(ids(0, 30), tenant="a").num_cached_tokens == 29
    for tenant, num_cached_tokens in (("a", 0), ("b", 20)):
        scopes = [Scope(20, b"assistant"), Scope(END, tenant.encode())]
        assert bench.ask(ids(0, 30), scopes=scopes).num_cached_tokens == num_cached_tokens


def test_cached_tokens_are_told_apart_by_trunk_and_history():
    bench = Bench(20)

    def cached(num_tokens: int, *scopes: Scope) -> tuple[int | None, int | None]:
        output = bench.ask([*ids(0, num_tokens), 900], 1, scopes=list(scopes))
        return output.num_cached_tokens, output.num_cached_trunk_tokens

    trunk, own = Scope(20, b"assistant"), Scope(END, b"a")
    assert cached(30, trunk, own) == (0, 0)
    assert cached(35, trunk, own) == (24, 20)
    assert cached(18, trunk, own) == (16, 16)
    assert cached(40, trunk, Scope(END, b"b")) == (20, 20)
    assert cached(30, own) == (0, 0)
    assert cached(35, own) == (24, 0)


@pytest.mark.parametrize("end", ["stop", "length", "abort"])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_b01_what_a_request_leaves_serves_the_next_one_right(num_tokens, end):
    """However it ends: the same prompt, the next turn and an edit of it are answered as from a cold cache."""
    bench = Bench(20, block_size=16)
    prompt = ids(0, num_tokens)
    answer = continuation(prompt, 6)
    if end == "abort":
        bench.add("first", prompt, 20)
        bench.step(6)
        bench.core.abort(["first"])
    else:
        bench.ask(prompt, 6, **({"stop_token_ids": (answer[-1],)} if end == "stop" else {}))
    for again, num_cached_tokens in (
        (prompt, num_tokens - 1),
        ([*prompt, *answer, 5], num_tokens + 5),
        ([*prompt, *answer[:2], 5], num_tokens),
        ([*prompt, 7, 7], num_tokens),
    ):
        output = bench.ask(again, 6)
        assert output.token_ids == continuation(again, 6)
        known = {num_cached_tokens, (num_tokens + 2) // 16 * 16} if again[num_tokens:-1] == answer[:2] else set()
        assert output.num_cached_tokens in (known or {num_cached_tokens})


# ---- followers


def test_followers_take_the_prompt_from_their_leader():
    bench = Bench(40, max_num_batched_tokens=16)
    prompts = {f"r{i}": [*ids(0, 40), 900 + i] for i in range(4)}
    for request_id, prompt in prompts.items():
        bench.add(request_id, prompt, 2)
    bench.run()
    assert bench.runner.rows == [
        [("r0", 16)],
        [("r0", 16)],
        [("r0", 9)],
        [("r0", 1), ("r1", 1), ("r2", 1), ("r3", 1)],
        [("r1", 1), ("r2", 1), ("r3", 1)],
    ]
    for request_id, prompt in prompts.items():
        bench.assert_complete(request_id, prompt, 2)
        assert bench.outputs[request_id].num_cached_tokens == (0 if request_id == "r0" else 40)


def test_a_follower_leaves_with_the_chunk_that_holds_its_last_common_block():
    bench = Bench(40, max_num_batched_tokens=16)
    bench.add("leader", ids(0, 80), 1)
    bench.add("follower", [*ids(0, 24), *ids(500, 4)], 1)
    bench.run()
    # blocks of 24 tokens are written after the second step; the leader's chunk goes first in the third
    assert bench.runner.rows[:3] == [[("leader", 16)], [("leader", 16)], [("leader", 16)]]
    assert bench.outputs["follower"].num_cached_tokens == 24


def test_followers_hold_nobody_up():
    bench = Bench(40, max_num_batched_tokens=32)
    bench.add("leader", ids(0, 40), 1)
    bench.step()
    bench.add("follower", ids(0, 41), 1)
    bench.add("other", ids(500, 4), 1)
    bench.step()
    assert bench.runner.rows[-1] == [("leader", 8), ("other", 4)]
    assert (bench.core.stats().running, bench.core.stats().waiting) == (0, 1)
    bench.run()


def test_a_follower_goes_on_from_what_an_aborted_leader_wrote():
    bench = Bench(40, max_num_batched_tokens=16)
    for name in ("leader", "first", "second"):
        bench.add(name, ids(0, 40), 1)
    bench.step()
    assert bench.core.stats().waiting == 2
    bench.core.abort(["leader"])
    bench.run()
    assert bench.runner.rows == [[("leader", 16)], [("first", 16)], [("first", 8)], [("second", 1)]]
    assert [bench.outputs[name].num_cached_tokens for name in ("first", "second")] == [16, 39]
    for name in ("first", "second"):
        bench.assert_complete(name, ids(0, 40), 1)


def test_an_aborted_follower_is_forgotten():
    bench = Bench(40, max_num_batched_tokens=16)
    bench.add("leader", ids(0, 40), 1)
    bench.add("follower", ids(0, 40), 1)
    bench.step()
    bench.core.abort(["follower"])
    bench.core.check_integrity()
    bench.run()
    assert "follower" not in bench.outputs


def test_of_a_herd_the_prompt_is_computed_once():
    bench = Bench(200, max_num_seqs=32, max_num_batched_tokens=64)
    for i in range(32):
        bench.add(f"r{i}", [*ids(0, 100), 900 + i], 3)
    bench.run()
    stats = bench.core.stats()
    assert stats.query_tokens == 32 * 101
    # 96 of the 101 tokens are full blocks; each computes the other five
    assert stats.query_tokens - stats.hit_tokens == stats.prompt_tokens_computed == 101 + 31 * 5


def test_of_a_herd_a_marked_beginning_is_computed_once_to_the_token():
    """As one private scope that ends and goes on: all 1,003 tokens are shared, and none is the assistant's."""
    bench = Bench(700, max_num_seqs=32, max_num_batched_tokens=256)
    scopes = [Scope(1003, b"private"), Scope(END, b"private")]
    for i in range(32):
        bench.add(f"r{i}", [*ids(0, 1003), *ids(31 * i, 20)], 3, scopes=scopes)
    bench.run()
    assert bench.core.stats().prompt_tokens_computed == 1003 + 32 * 20
    assert [bench.outputs[f"r{i}"].num_cached_tokens for i in (0, 1, 31)] == [0, 1003, 1003]
    assert bench.outputs["r1"].num_cached_trunk_tokens == 0
    for i in range(32):
        bench.assert_complete(f"r{i}", [*ids(0, 1003), *ids(31 * i, 20)], 3)


def test_without_prefix_caching_nobody_follows():
    bench = Bench(40, enable_prefix_caching=False)
    bench.add("a", ids(0, 20), 1)
    bench.add("b", ids(0, 20), 1)
    bench.run()
    assert bench.runner.rows == [[("a", 20), ("b", 20)]]
    assert bench.core.stats().hit_tokens == 0


def test_choices_share_the_prompt_to_the_token():
    bench = Bench(20)
    for choice in range(3):
        bench.add(f"c{choice}", ids(0, 20), 6, choice=choice)
    bench.step(2)
    assert bench.runner.rows == [[("c0", 20)], [("c0", 1), ("c1", 1), ("c2", 1)]]
    assert bench.runner.batches[1].transfers.copies == (BlockCopy(3, 4), BlockCopy(3, 5))
    assert [bench.table(f"c{choice}") for choice in range(3)] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    bench.run()
    for choice in range(3):
        bench.assert_complete(f"c{choice}", ids(0, 20), 6, choice)


def test_chats_that_arrive_together_share_a_cold_trunk_to_the_token():
    bench = Bench(60, max_num_batched_tokens=16)
    scopes = {name: [Scope(20, b"assistant"), Scope(END, name.encode())] for name in "abc"}
    for i, name in enumerate("abc"):
        bench.add(name, [*ids(0, 20), *ids(500 + 10 * i, 5)], 1, scopes=scopes[name])
    bench.run()
    assert bench.runner.rows == [[("a", 16)], [("a", 9)], [("b", 5), ("c", 5)]]
    assert [bench.outputs[name].num_cached_tokens for name in "abc"] == [0, 20, 20]


def test_a_sibling_starts_while_the_first_answer_is_still_written():
    """Regenerate in mid-answer: the prompt's last block has been filled further, its tail still stands."""
    bench = Bench(20)
    bench.add("first", ids(0, 20), 12)
    bench.step(6)
    bench.add("again", ids(0, 20), 12, choice=1)
    bench.step()
    assert bench.runner.rows[-1] == [("first", 1), ("again", 1)]
    assert (bench.table("first"), bench.table("again")) == ([1, 2, 3, 4], [1, 2, 5])
    bench.run()
    bench.assert_complete("first", ids(0, 20), 12)
    bench.assert_complete("again", ids(0, 20), 12, 1)


@pytest.mark.parametrize("num_blocks", [3, 4])
def test_a_request_that_needs_all_blocks_does_without_a_tail(num_blocks):
    bench = Bench(num_blocks)
    bench.ask(ids(0, 18), 4)
    warm = bench.ask(ids(0, 18), 6)
    assert warm.token_ids == continuation(ids(0, 18), 6)
    assert warm.num_cached_tokens == (17 if num_blocks == 4 else 16)


# ---- too few blocks


def test_the_newest_is_preempted_and_nobody_admitted_in_that_step():
    bench = Bench(4, max_num_seqs=3)
    bench.add("a", ids(0, 15), 8)
    bench.add("b", ids(100, 15), 8)
    bench.step()
    bench.add("c", ids(200, 3), 1)
    bench.step(2)
    assert bench.runner.rows[:3] == [[("a", 15), ("b", 15)], [("a", 1), ("b", 1)], [("a", 1)]]
    assert bench.running == ["a"]
    assert bench.core.stats().waiting == 2
    bench.step()
    # b needs three blocks, of which one is free; c passes it
    assert bench.runner.rows[3] == [("a", 1), ("c", 3)]
    bench.run()
    bench.assert_complete("a", ids(0, 15), 8)
    bench.assert_complete("b", ids(100, 15), 8)
    bench.assert_complete("c", ids(200, 3), 1)
    assert bench.core.stats().preemptions == 1


def test_what_was_preempted_takes_its_own_blocks_back():
    bench = Bench(6)
    bench.add("a", ids(0, 23), 3)
    bench.add("b", ids(100, 23), 3)
    bench.run()
    # in the third step both need a fourth block; a gets one of b's, b's tail
    assert bench.runner.rows == [
        [("a", 23), ("b", 23)],
        [("a", 1), ("b", 1)],
        [("a", 1)],
        [("b", 9)],
    ]


@pytest.mark.parametrize("num_blocks", range(10, 21))
def test_b09_preempted_requests_answer_as_in_a_large_pool(num_blocks):
    bench = Bench(num_blocks, max_num_seqs=4, max_num_batched_tokens=24)
    prompts = {f"r{i}": ids(200 * i, 37 + i) for i in range(4)}
    for request_id, prompt in prompts.items():
        bench.add(request_id, prompt, 40)
    bench.run()
    for request_id, prompt in prompts.items():
        bench.assert_complete(request_id, prompt, 40)
    stats = bench.core.stats()
    assert stats.preemptions > 0
    assert stats.query_tokens == sum(map(len, prompts.values()))
    assert stats.generation_tokens == 160


def test_of_a_tenant_the_least_urgent_is_preempted():
    bench = Bench(6, max_num_seqs=3)
    bench.add("urgent later", ids(0, 15), 4, priority=0)
    bench.add("not urgent", ids(100, 15), 4, priority=5)
    bench.add("urgent", ids(200, 15), 4, priority=0)
    bench.step(3)
    assert sorted(bench.running) == ["urgent", "urgent later"]
    bench.run()
    assert bench.core.stats().preemptions == 1


def test_priority_orders_admission_within_a_tenant():
    bench = Bench(20, max_num_seqs=1)
    bench.add("a", ids(0, 3), 1, tenant="t", priority=1)
    bench.add("b", ids(100, 3), 1, tenant="u")
    bench.add("c", ids(200, 3), 1, tenant="t", priority=0)
    bench.run()
    assert bench.runner.rows == [[("b", 3)], [("c", 3)], [("a", 3)]]


def test_b10_small_requests_pass_a_heavy_one_but_not_for_ever():
    bench = Bench(10, max_num_seqs=8)
    bench.add("early", ids(0, 20), 20)
    bench.step()
    heavy = ids(500, 72)
    bench.add("heavy", heavy, 1)
    num_added = 0
    for _ in range(5000):
        if "heavy" in bench.outputs:
            break
        # there are always small ones behind it, and for most of the time there is room for one of them
        while bench.core.stats().waiting < 4:
            bench.add(f"small {num_added}", [num_added % 1000], 40)
            num_added += 1
        bench.step()
    assert bench.outputs["heavy"].token_ids == continuation(heavy, 1)
    passed = {name for rows in bench.runner.rows[:-1] for name, _ in rows if name.startswith("small")}
    assert len(passed) == MAX_BYPASSES
    bench.run()


# ---- the end


def test_an_end_id_ends_it_and_is_the_last_id():
    prompt = ids(0, 5)
    tokens = continuation(prompt, 10)
    for kind in ("eos_token_ids", "stop_token_ids"):
        output = Bench(8).ask(prompt, 10, **{kind: (tokens[3], 999)})
        assert output.token_ids == tokens[:4]
        assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, tokens[3])


def test_ignored_end_ids_end_nothing():
    prompt = ids(0, 5)
    tokens = continuation(prompt, 6)
    output = Bench(8).ask(prompt, 6, eos_token_ids=(tokens[2],), ignore_eos=True)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == (tokens, FinishReason.LENGTH, None)
    output = Bench(8).ask(prompt, 6, stop_token_ids=(tokens[2],), ignore_eos=True)
    assert (len(output.token_ids), output.finish_reason) == (3, FinishReason.STOP)


def test_an_end_id_before_min_tokens_ends_nothing():
    prompt = ids(0, 5)
    tokens = continuation(prompt, 6)
    assert len(Bench(8).ask(prompt, 6, eos_token_ids=(tokens[2],), min_tokens=2).token_ids) == 3
    assert len(Bench(8).ask(prompt, 6, eos_token_ids=(tokens[2],), min_tokens=3).token_ids) == 6


def test_an_end_id_as_last_token_is_a_stop():
    prompt = ids(0, 5)
    tokens = continuation(prompt, 3)
    assert Bench(8).ask(prompt, 3, eos_token_ids=(tokens[2],)).finish_reason == FinishReason.STOP


@pytest.mark.parametrize("num_steps", range(6))
def test_b02_an_abort_after_any_chunk_poisons_nothing(num_steps):
    bench = Bench(12, max_num_batched_tokens=16)
    prompt = ids(0, 80)
    bench.add("cut", prompt, 5)
    bench.step(num_steps)
    bench.core.abort(["cut"])
    bench.core.check_integrity()
    assert bench.core.stats().blocks.referenced == 0
    assert bench.ask(prompt, 5).num_cached_tokens == min(16 * num_steps, 79)
    for start in (200, 300, 400):  # fills the pool with other work
        bench.ask(ids(start, 80), 5)
    again = bench.ask(prompt, 5)
    assert again.token_ids == continuation(prompt, 5)


def test_an_abort_while_a_step_runs_is_taken_in_after_it():
    bench = Bench(12)
    bench.add("a", ids(0, 5))
    bench.add("b", ids(100, 5))
    scheduler = bench.core.scheduler
    batch = scheduler.schedule()
    result = bench.runner.execute(batch)
    scheduler.abort("a")
    outputs = scheduler.update(batch, result)
    assert [output.request_id for output in outputs] == ["b"]
    assert outputs[0].token_ids == [next_token(ids(100, 5))]
    scheduler.check_integrity()


def test_an_abort_of_an_unknown_or_waiting_request():
    bench = Bench(12, max_num_seqs=1)
    bench.core.abort(["nobody"])
    bench.add("a", ids(0, 5))
    bench.add("b", ids(100, 5))
    bench.step()
    bench.core.abort(["b", "b"])
    bench.run()
    assert list(bench.outputs) == ["a"]


def test_a_failed_step_ends_its_sequences_and_publishes_nothing():
    bench = Bench(12, max_num_seqs=2)
    bench.add("a", ids(0, 20))
    bench.add("b", ids(0, 20))  # follows a
    scheduler = bench.core.scheduler
    batch = scheduler.schedule()
    [output] = scheduler.fail(batch, ErrorInfo("broken", "engine_error"))
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert scheduler.kv.stats().cached == 0
    scheduler.check_integrity()
    bench.run()
    bench.assert_complete("b", ids(0, 20), 4)


def test_a_runner_that_brings_too_few_tokens_is_an_error():
    bench = Bench(12)
    bench.add("a", ids(0, 5))
    batch = bench.core.scheduler.schedule()
    with pytest.raises(AssertionError, match="0 tokens from the runner, expected 1"):
        bench.core.scheduler.update(batch, StepResult([]))
    with pytest.raises(AssertionError, match="2 tokens from the runner, expected 1"):
        bench.core.scheduler.update(batch, StepResult([SampledToken(1), SampledToken(2)]))


# ---- steps ahead


def test_a_row_that_fills_its_block_gets_the_next_one_a_step_early():
    """So that the step behind can be launched before the token that fills it is known."""
    bench = Bench(6, runs_ahead=True)
    bench.add("a", ids(0, 6), 5)
    bench.step()  # seven tokens with the one drawn
    assert (len(bench.table("a")), bench.runner.batches[-1].may_come_again) == (1, False)
    bench.step()
    assert (len(bench.table("a")), bench.runner.batches[-1].may_come_again) == (1, True)
    bench.step()  # the eighth is computed
    assert len(bench.table("a")) == 2
    bench.run()
    bench.assert_complete("a", ids(0, 6), 5)


def test_nothing_comes_early_for_a_row_that_is_about_to_end_or_while_others_wait_or_compute_prompts():
    bench = Bench(6, runs_ahead=True, max_num_seqs=2)
    bench.add("ends", ids(0, 6), 3)
    bench.step(3)
    assert "ends" not in bench.running
    bench.add("a", ids(100, 7), 9)
    bench.add("b", ids(200, 3), 2)
    bench.add("waits", ids(300, 3), 2)
    bench.step(2)
    assert (len(bench.table("a")), bench.runner.batches[-1].may_come_again) == (1, False)
    bench.run()
    for name, start, num, tokens in (("a", 100, 7, 9), ("b", 200, 3, 2), ("waits", 300, 3, 2)):
        bench.assert_complete(name, ids(start, num), tokens)


def test_nobody_is_preempted_for_what_would_come_early():
    bench = Bench(2, runs_ahead=True)
    bench.add("a", ids(0, 6), 4)
    bench.add("b", ids(100, 6), 2)
    bench.step(2)
    assert bench.running == ["a"]
    assert bench.core.stats().preemptions == 0
    bench.run()
    bench.assert_complete("a", ids(0, 6), 4)
