"""The engine without processes: refusals, outputs, failures, counters. Blocks hold 8 tokens."""

import logging

import pytest

from engine.errors import EngineDeadError
from engine.protocol import END, AddRequest, FinishReason, Scope
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SampledToken, ScheduledBatch, StepResult
from tests.engine.fake_runner import VOCAB_SIZE, Bench, continuation, ids


def error_of(bench: Bench, *args, **more):
    output = bench.add("refused", *args, **more)
    assert output is not None
    assert (output.request_id, output.token_ids, output.finish_reason) == ("refused", [], FinishReason.ERROR)
    assert not bench.core.has_work
    return output.error


# ---- refusals


def test_b10_a_request_larger_than_the_pool_is_refused_at_once():
    bench = Bench(8, max_model_len=512)
    error = error_of(bench, ids(0, 200), 10)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "KV cache of this engine holds 64 tokens" in error.message
    assert "200 prompt tokens and asks for 10 output tokens" in error.message
    assert bench.ask(ids(0, 10), 4).token_ids == continuation(ids(0, 10), 4)


@pytest.mark.parametrize(("num_tokens", "fits"), [(39, True), (40, False), (41, False)])
def test_a_prompt_leaves_at_least_one_token_of_the_context(num_tokens, fits):
    bench = Bench(20, max_model_len=40)
    if fits:
        assert len(bench.ask(ids(0, num_tokens), 5).token_ids) == 1
    else:
        message = error_of(bench, ids(0, num_tokens), None).message
        assert "this model's context holds 40 tokens" in message
        assert f"{num_tokens} prompt tokens and asks for the rest" in message


def test_output_is_clamped_to_what_context_and_pool_leave():
    for bench in (Bench(20, max_model_len=24), Bench(3)):
        for max_tokens in (100, None):
            output = bench.ask(ids(0, 20), max_tokens)
            assert (output.token_ids, output.finish_reason) == (continuation(ids(0, 20), 4), FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt_ids", "params", "param", "message"),
    [
        ([], {}, "prompt", "at least one token, got none"),
        ([1, VOCAB_SIZE], {}, "prompt", "token ids from 0 to 999, got 1000"),
        ([1, -1], {}, "prompt", "token ids from 0 to 999, got -1"),
        ([1], {"top_p": 2.0}, "top_p", "top_p must be between 0 and 1, got 2.0"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids", "token ids from 0 to 999"),
        ([1], {"scopes": [Scope(8, b"a")]}, "scopes", "without an end"),
        ([1], {"scopes": [Scope(16, b"a"), Scope(8, b"b"), Scope(END, b"c")]}, "scopes", "must ascend"),
    ],
)
def test_wrong_values_are_refused_by_name(prompt_ids, params, param, message):
    error = error_of(Bench(8), prompt_ids, **params)
    assert error.param == param
    assert message in error.message


def test_a_request_without_scopes_is_refused():
    request = AddRequest(request_id="a", prompt_ids=[1], params=SamplingParams(), scopes=[])
    output = Bench(8).core.add(request)
    assert output is not None
    assert output.error.param == "scopes"


def test_a_request_id_is_used_once_at_a_time():
    bench = Bench(8)
    bench.add("a", ids(0, 3), 2)
    refusal = bench.core.add(
        AddRequest(request_id="a", prompt_ids=[1], params=SamplingParams(), scopes=[Scope(END, b"")])
    )
    assert "'a' is in use" in refusal.error.message
    bench.run()
    bench.assert_complete("a", ids(0, 3), 2)
    bench.outputs.clear()
    bench.add("a", ids(0, 3), 2)
    bench.run()
    bench.assert_complete("a", ids(0, 3), 2)


def test_as_many_requests_wait_as_may_wait():
    bench = Bench(8, max_num_seqs=1, max_waiting=2)
    for name in ("runs", "waits"):
        bench.add(name, ids(0, 3), 2)
    bench.step()
    bench.add("waits, too", ids(0, 3), 2)
    refusal = bench.add("refused", ids(0, 3), 2)
    assert (refusal.finish_reason, refusal.error.code) == (FinishReason.ERROR, "overloaded")
    assert bench.add("another tenant's", ids(0, 3), 2, tenant="other") is None
    bench.run()
    bench.assert_complete("waits, too", ids(0, 3), 2)
    bench.assert_complete("another tenant's", ids(0, 3), 2)
    assert bench.add("comes later", ids(0, 3), 2) is None
    bench.run()


# ---- outputs


def test_each_step_brings_a_token_for_each_that_caught_up():
    bench = Bench(8, max_num_batched_tokens=16)
    bench.add("a", ids(0, 20), 2)
    assert bench.step() == []
    [first] = bench.step()
    assert (first.token_ids, first.num_cached_tokens, first.finish_reason) == (continuation(ids(0, 20), 1), 0, None)
    [last] = bench.step()
    assert (last.num_cached_tokens, last.finish_reason) == (None, FinishReason.LENGTH)
    assert bench.core.step() == []


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 33])
def test_prompt_logprobs_come_once_with_the_first_output(num_tokens):
    bench = Bench(8, max_num_batched_tokens=16)
    for _ in range(2):
        output = bench.ask(ids(0, num_tokens), 3, prompt_logprobs=1)
        assert output.prompt_logprobs[0] is None
        assert [entry.token_id for entry in output.prompt_logprobs[1:]] == ids(0, num_tokens)[1:]
        assert output.num_cached_tokens == 0
    assert bench.ask(ids(0, 3)).prompt_logprobs is None


def test_prompt_logprobs_of_a_preempted_request_come_once():
    bench = Bench(6, max_num_batched_tokens=16)
    bench.add("a", ids(0, 14), 8)
    bench.step()
    bench.add("b", ids(500, 32), 8, prompt_logprobs=0)
    bench.run()
    assert bench.core.stats().preemptions > 0
    bench.assert_complete("b", ids(500, 32), 8)
    assert [entry.token_id for entry in bench.outputs["b"].prompt_logprobs[1:]] == ids(500, 32)[1:]


def test_an_unseeded_request_gets_a_seed():
    bench = Bench(8)
    for i in range(3):
        bench.add(f"r{i}", ids(0, 3), 1)
    bench.add("seeded", ids(0, 3), 1, seed=-5)
    seeds = [sequence.seed for sequence in bench.core.scheduler.waiting]
    assert len(set(seeds)) == 4
    assert seeds[3] == -5
    assert all(0 <= seed < 2**63 for seed in seeds[:3])


# ---- answers that go on


@pytest.mark.parametrize("num_there", [1, 4, 11, 12, 19])
@pytest.mark.parametrize("has_cache", [False, True])
def test_an_answer_goes_on_after_what_an_earlier_life_said(num_there, has_cache):
    prompt, whole = ids(0, 20), continuation(ids(0, 20), 20, choice=1)
    bench = Bench(16, max_num_batched_tokens=16)
    if has_cache:
        bench.ask([*prompt, *whole[:num_there]], 1)
    counted = bench.core.stats().query_tokens
    bench.add("a", prompt, 20, choice=1, output_ids=whole[:num_there])
    bench.run()
    output = bench.outputs["a"]
    assert (output.token_ids, output.finish_reason) == (whole[num_there:], FinishReason.LENGTH)
    assert (output.num_cached_tokens > 0) == has_cache
    assert output.num_cached_tokens <= len(prompt)
    assert bench.core.stats().query_tokens == counted


def test_the_prompt_of_one_that_goes_on_is_counted_by_the_life_that_began_it():
    bench = Bench(8)
    bench.add("a", ids(0, 20), 4, output_ids=[1])
    bench.run()
    assert bench.core.stats().query_tokens == 0


def test_min_tokens_and_prompt_logprobs_of_one_that_goes_on_belong_to_the_whole_answer():
    whole = continuation(ids(0, 9), 3)
    bench = Bench(8)
    bench.add("a", ids(0, 9), 8, output_ids=whole[:2], stop_token_ids=(whole[2],), min_tokens=2, prompt_logprobs=1)
    bench.run()
    output = bench.outputs["a"]
    assert (output.token_ids, output.finish_reason) == (whole[2:], FinishReason.STOP)
    assert output.prompt_logprobs is None


def test_one_that_goes_on_is_refused_where_nothing_is_left_to_say_and_not_for_those_that_wait():
    error = error_of(Bench(8), ids(0, 4), 2, output_ids=[1, 2])
    assert (error.code, error.param) == ("invalid_request", "output_ids")
    assert "of 2 output tokens 2 are there" in error.message
    assert error_of(Bench(8), ids(0, 4), 9, output_ids=[VOCAB_SIZE]).param == "output_ids"
    bench = Bench(8, max_waiting=1)
    assert bench.add("waits", ids(0, 4), 2) is None
    assert bench.add("comes later", ids(0, 4), 2) is not None
    assert bench.add("goes on", ids(0, 4), 2, output_ids=[1]) is None


def test_the_first_output_says_how_long_the_request_waited():
    now = [100.0]
    bench = Bench(16, max_num_seqs=1, clock=lambda: now[0])
    for name in ("runs", "waits"):
        bench.add(name, ids(0, 3), 2)
    while bench.core.has_work:
        bench.step()
        now[0] += 1.0
    assert [bench.outputs[name].queue_ms for name in ("runs", "waits")] == [0.0, 2000.0]


# ---- failures


def test_a_failed_step_ends_its_requests_and_no_other(caplog):
    bench = Bench(12, max_num_seqs=2)
    bench.add("done", ids(0, 20), 2)
    bench.run()
    for name, start in (("a", 0), ("b", 100), ("waits", 0)):
        bench.add(name, ids(start, 30), 2)
    bench.runner.failure = RuntimeError("out of luck")
    with caplog.at_level(logging.ERROR):
        outputs = bench.step()
    assert [output.request_id for output in outputs] == ["a", "b"]
    for output in outputs:
        assert output.finish_reason == FinishReason.ERROR
        assert output.error.code == "engine_error"
        assert "out of luck" not in output.error.message
    assert "out of luck" in caplog.text
    bench.run()
    bench.assert_complete("waits", ids(0, 30), 2)
    assert bench.outputs["waits"].num_cached_tokens == 20  # of what "done" wrote, not of what failed


def test_a_row_without_a_token_ends_its_request_and_not_its_neighbours():
    bench = Bench(16)
    bench.add("well", ids(0, 12), 3)
    bench.add("faulty", ids(100, 12), 3)
    bench.step()
    execute = bench.runner.execute

    def faulty(batch: ScheduledBatch) -> StepResult:
        result = execute(batch)
        rows = [s.sequence.request_id for s in batch.sequences if s.samples]
        result.tokens[rows.index("faulty")] = SampledToken(0, fault="not finite")
        return result

    bench.runner.execute = faulty
    outputs = {output.request_id: output for output in bench.step()}
    bench.runner.execute = execute
    assert outputs["faulty"].finish_reason == FinishReason.ERROR
    assert (outputs["faulty"].error.code, outputs["faulty"].error.message) == ("engine_error", "not finite")
    bench.run()
    bench.assert_complete("well", ids(0, 12), 3)
    assert bench.core.stats().generation_tokens == 4  # of "well" three, of "faulty" the first


def test_a_dead_runner_is_not_lived_with():
    bench = Bench(12)
    bench.add("a", ids(0, 3))
    bench.runner.failure = EngineDeadError("the device is lost")
    with pytest.raises(EngineDeadError, match="the device is lost"):
        bench.step()


def test_check_kv_finds_a_block_that_was_published_too_early(monkeypatch):
    bench = Bench(12, max_num_batched_tokens=16)
    bench.add("a", ids(0, 40), 1)
    scheduler = bench.core.scheduler

    def publish_at_once(batch: ScheduledBatch) -> StepResult:
        [(sequence, num_new_tokens, _)] = batch.sequences
        sequence.num_computed_tokens += num_new_tokens
        scheduler.kv.commit_full_blocks(sequence)
        sequence.num_computed_tokens -= num_new_tokens
        raise RuntimeError("the step fails after that")

    monkeypatch.setattr(bench.runner, "execute", publish_at_once)
    bench.core.step()
    monkeypatch.undo()
    bench.add("b", ids(0, 40), 1)
    with pytest.raises(AssertionError, match=r"'b' is about to read token 0 of 32 in block 1 at offset 0.* nothing"):
        bench.core.step()


# ---- counters


def test_stats_of_a_request_on_its_way():
    bench = Bench(12, max_num_seqs=1)
    bench.add("a", ids(0, 20), 2)
    bench.add("b", ids(100, 20), 2)
    stats = bench.core.stats()
    assert (stats.running, stats.waiting, stats.query_tokens, stats.steps) == (0, 2, 0, 0)
    bench.step()
    stats = bench.core.stats()
    assert (stats.running, stats.waiting, stats.query_tokens, stats.hit_tokens, stats.steps) == (1, 1, 20, 0, 1)
    assert (stats.blocks.total, stats.blocks.free, stats.blocks.referenced, stats.blocks.cached) == (12, 9, 3, 3)
    bench.run()
    stats = bench.core.stats()
    assert (stats.query_tokens, stats.prompt_tokens_computed, stats.generation_tokens) == (40, 40, 4)
    assert (stats.blocks.free, stats.blocks.referenced, stats.blocks.pinned) == (12, 0, 0)


def test_counters_equal_what_the_answers_say():
    bench = Bench(40)
    outputs = [bench.ask([*ids(0, 30), 900 + i], 2) for i in range(3)]
    outputs.append(bench.ask(ids(500, 9), 2, prompt_logprobs=0))
    stats = bench.core.stats()
    assert stats.query_tokens == 31 * 3 + 9
    assert stats.hit_tokens == sum(output.num_cached_tokens for output in outputs) == 48
    assert stats.prompt_tokens_computed == stats.query_tokens - stats.hit_tokens


def test_of_n_choices_the_prompt_counts_once():
    bench = Bench(40)
    prompt = ids(0, 30)
    for choice in range(4):
        bench.add(f"c{choice}", prompt, 5, choice=choice)
    bench.run()
    for choice in range(4):
        bench.assert_complete(f"c{choice}", prompt, 5, choice)
    stats = bench.core.stats()
    assert (stats.query_tokens, stats.hit_tokens) == (30, 0)
    assert stats.prompt_tokens_computed == 30 + 3


def test_a_preempted_request_counts_once():
    bench = Bench(6)
    bench.add("a", ids(0, 23), 8)
    bench.add("b", ids(100, 23), 8)
    bench.run()
    stats = bench.core.stats()
    assert stats.preemptions > 0
    assert (stats.query_tokens, stats.hit_tokens, stats.generation_tokens) == (46, 0, 16)


def test_what_was_never_admitted_is_not_counted():
    bench = Bench(12, max_num_seqs=1)
    bench.add("a", ids(0, 20), 2)
    bench.add("b", ids(100, 20), 2)
    bench.step()
    bench.core.abort(["b"])
    bench.run()
    assert bench.core.stats().query_tokens == 20


def test_check_integrity_sees_a_leak():
    bench = Bench(12)
    bench.core.scheduler.kv.pool.try_allocate(1)
    with pytest.raises(AssertionError, match=r"block_id=1, ref_count=1.* is held by \[\]"):
        bench.core.check_integrity()
