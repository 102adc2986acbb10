"""An answer that is asked for again while it still streams: both are right, the second computes one prompt token."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from tests.app.serving import until
from tests.app.session_store import SessionServer, session_server
from tests.app.stateful_gateway import Gateway, create, output_text, receive_until, running_gateway, send_create
from tests.engine.fake_runner import Bench, continuation, ids
from tests.held_engine import HeldRunner, WatchedClient
from tests.kernels_under_test import ORACLE
from tests.scripted_engine import say
from tests.tiny_model import make_tiny

# ---- in the engine


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("num_steps", [1, 2, 9])
def test_the_second_answer_computes_the_prompts_last_token_only(num_tokens, num_steps):
    bench = Bench(40)
    prompt = ids(0, num_tokens)
    bench.add("first", prompt, 20)
    bench.step(num_steps)
    for name in ("again", "once more"):
        bench.add(name, prompt, 20, choice=len(name))
    bench.step()
    assert bench.runner.rows[-1] == [("first", 1), ("again", 1), ("once more", 1)]
    bench.run()
    for name, choice in (("first", 0), ("again", 5), ("once more", 9)):
        bench.assert_complete(name, prompt, 20, choice)
    assert bench.outputs["again"].num_cached_tokens == bench.outputs["once more"].num_cached_tokens == num_tokens - 1


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_while_the_prompt_is_still_being_computed_the_second_waits_for_it(num_steps):
    bench = Bench(40, max_num_batched_tokens=16)
    prompt = ids(0, 60)
    bench.add("first", prompt, 20)
    bench.step(num_steps)
    bench.add("again", prompt, 20, choice=1)
    bench.run()
    prefilled = {name: 0 for name in ("first", "again")}
    for rows in bench.runner.rows:
        for name, num_new in rows:
            prefilled[name] += num_new
    # 19 tokens of the answer are read again, the last one is not
    assert prefilled == {"first": 60 + 19, "again": 1 + 19}
    bench.assert_complete("first", prompt, 20)
    bench.assert_complete("again", prompt, 20, 1)


def test_the_first_may_be_cancelled_once_the_second_runs():
    bench = Bench(12)
    prompt = ids(0, 20)
    bench.add("first", prompt, 60)
    bench.step(5)
    bench.add("again", prompt, 60, choice=1)
    bench.step()
    bench.core.abort(["first"])
    bench.core.check_integrity()
    bench.run()
    assert bench.outputs["first"].token_ids == continuation(prompt, 6)
    bench.assert_complete("again", prompt, 60, 1)


@pytest.mark.parametrize("num_blocks", [14, 40], ids=["tight pool", "large pool"])
@pytest.mark.parametrize("num_prompt_tokens", [39, 40, 41])
def test_b07_three_choices_of_differing_lengths_give_each_block_back_once(num_blocks, num_prompt_tokens):
    """A second release raises; that blocks and references agree is checked after every step."""
    bench = Bench(num_blocks)
    prompt = ids(0, num_prompt_tokens)
    lengths = {"a": 64, "b": 60, "c": 9}
    for choice, (name, num_tokens) in enumerate(lengths.items()):
        bench.add(name, prompt, num_tokens, choice=choice)
    bench.add("gone", prompt, 64, choice=3)
    bench.step(4)
    bench.core.abort(["gone", "gone"])
    bench.core.check_integrity()
    bench.run()
    for choice, (name, num_tokens) in enumerate(lengths.items()):
        bench.assert_complete(name, prompt, num_tokens, choice)
    stats = bench.core.stats()
    assert (stats.blocks.referenced, stats.preemptions > 0) == (0, num_blocks == 14)
    assert bench.ask(prompt).num_cached_tokens == num_prompt_tokens - 1


# ---- through the gateway


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path: Path = tmp_path_factory.mktemp("model")
    source = make_tiny(path / "byte-model", tie_word_embeddings=False)
    return prepare(str(source), path / "state", "float32", lambda *_: None)


def load(model: PreparedModel, **settings: Any) -> tuple[EngineCore, HeldRunner]:
    config = EngineConfig(
        model_dir=str(model.path), device="cpu", dtype="float32", num_blocks=100, threads=1, check_kv=True, **settings
    )
    runner = ModelRunner(model, config)
    held = HeldRunner(runner)
    return EngineCore(config, runner.info, held, runner.identity), held


NUM_TOKENS = 30
FIRST_TURN = {"max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
SECOND_TURN = {"max_output_tokens": NUM_TOKENS, "ignore_eos": True}
SECOND_TURNS = {
    "greedy": [{**SECOND_TURN, "temperature": 0}] * 2,
    "seeded": [{**SECOND_TURN, "temperature": 1, "seed": seed} for seed in (1, 2)],
}


@contextlib.asynccontextmanager
async def serving(core: EngineCore, store: SessionServer, model: PreparedModel) -> AsyncIterator[Gateway]:
    async with WatchedClient(core) as engine, running_gateway(store, say(""), engine=engine, model=model) as gateway:
        yield gateway


async def answers_of_an_engine_that_keeps_nothing(
    model: PreparedModel, store: SessionServer, turns: list[dict[str, Any]]
) -> list[str]:
    core, _ = load(model, enable_prefix_caching=False, **ORACLE)
    async with serving(core, store, model) as gateway, gateway.http() as http:
        parent = await create(http, "Hello", **FIRST_TURN)
        ends = [await create(http, "How are you?", previous_response_id=parent["id"], **turn) for turn in turns]
    assert [end["usage"]["input_tokens_details"]["cached_tokens"] for end in ends] == [0] * len(turns)
    return [output_text(end) for end in ends]


@pytest.mark.parametrize("kind", SECOND_TURNS)
async def test_regenerate_while_the_first_answer_still_streams(model, kind):
    turns = SECOND_TURNS[kind]
    core, runner = load(model)
    async with session_server() as store:
        expected = await answers_of_an_engine_that_keeps_nothing(model, store, turns)
        async with (
            serving(core, store, model) as gateway,
            gateway.http() as http,
            gateway.socket() as one,
            gateway.socket() as other,
        ):
            parent = await create(http, "Hello", **FIRST_TURN)
            before = await gateway.engine.stats()
            runner.hold(NUM_TOKENS // 2)
            await send_create(one, "How are you?", previous_response_id=parent["id"], **turns[0])
            begun = await receive_until(one, lambda event: event["type"] == "response.output_text.delta")
            await send_create(other, "How are you?", previous_response_id=parent["id"], **turns[1])
            await until(lambda: len(gateway.engine.requests) == 3)
            runner.release()
            ends = [(await receive_until(socket))[-1]["response"] for socket in (one, other)]
            after = await gateway.engine.stats()
    assert begun[0]["type"] == "response.created"
    assert [output_text(end) for end in ends] == expected
    assert [end["status"] for end in ends] == ["incomplete"] * 2  # as long as was asked for
    first, second = (end["usage"] for end in ends)
    assert first["output_tokens"] == second["output_tokens"] == NUM_TOKENS
    assert second["input_tokens_details"]["cached_tokens"] == second["input_tokens"] - 1 == first["input_tokens"] - 1
    num_computed = after.prompt_tokens_computed - before.prompt_tokens_computed
    assert num_computed == first["input_tokens"] - first["input_tokens_details"]["cached_tokens"] + 1
    assert any(len(rows) == 2 for rows in runner.rows), "they did not run at the same time"
