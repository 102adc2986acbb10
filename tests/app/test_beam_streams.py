"""Beam searches over the scripted engine: their sequences as choices, and how they end."""

import asyncio
from typing import Any

import pytest

from app.beam_streams import BeamSearchEngine
from app.choice import ChoiceDelta
from app.errors import ApiError, BadRequest, EngineUnavailable
from app.generation import Generation
from app.prompts import BuiltPrompt
from app.tenants import Tenant
from engine.beam_search import BeamSearchParams
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.beam_script import STOP_ID, best_letter, expected_letters, say_letters, text_of
from tests.byte_model import IM_END, byte_model_info, make_byte_model
from tests.scripted_engine import Die, Fail, Item, Pause, ScriptedEngineClient

PROMPT = list(b"hi")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_byte_model(tmp_path_factory.mktemp("model")))


def start(
    engine: ScriptedEngineClient,
    tokenizer: Tokenizer,
    width: int = 4,
    n: int | None = None,
    prompts: list[list[int]] | None = None,
    length_penalty: float = 1.0,
    **params: Any,
) -> Generation:
    asked = {"max_tokens": 6, "stop_token_ids": (STOP_ID,), "eos_token_ids": (IM_END,), "temperature": 0, **params}
    return Generation(
        BeamSearchEngine(engine, BeamSearchParams(width, None, length_penalty=length_penalty)),
        tokenizer,
        [BuiltPrompt(ids, [Scope(1, b"trunk"), Scope(END, b"own")]) for ids in prompts or [PROMPT]],
        SamplingParams(n=n or width, **asked),
        Tenant("a"),
        priority=3,
        request_id="r",
    )


async def collect(generation: Generation) -> list[ChoiceDelta]:
    with generation:
        return [delta async for deltas in generation for delta in deltas]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("width", "n"), [(1, 1), (4, 4), (10, 10), (6, 2)])
async def test_the_choices_are_the_best_sequences(
    tokenizer: Tokenizer, width: int, n: int, length_penalty: float
) -> None:
    engine = ScriptedEngineClient(script=say_letters, num_cached_tokens=1)
    generation = start(engine, tokenizer, width, n, length_penalty=length_penalty)
    deltas = await collect(generation)
    found = expected_letters(PROMPT, width, 6, length_penalty)[:n]
    assert [d.index for d in deltas] == list(range(n)), "each of them whole, and at the end"
    assert [d.token_ids for d in deltas] == [list(f.token_ids) for f in found]
    assert [d.text for d in deltas] == [text_of(f) for f in found]
    assert [d.finish_reason for d in deltas] == ["stop" if f.has_ended else "length" for f in found]
    assert [d.stop_reason for d in deltas] == [STOP_ID if f.has_ended else None for f in found]
    assert [generation.output_ids(i) for i in range(n)] == [list(f.token_ids) for f in found]
    assert generation.kept_ids(0) == [t for t in found[0].token_ids if t != STOP_ID]
    assert (generation.num_prompt_tokens, generation.cached.total) == (2, 1)
    assert generation.num_output_tokens == sum(len(f.token_ids) for f in found)
    assert engine.num_running == 0


async def test_a_step_is_one_request_for_each_live_beam(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngineClient(script=say_letters)
    await collect(start(engine, tokenizer, width=3, max_tokens=4, stop_token_ids=()))
    requests = engine.requests
    assert [len(r.prompt_ids) for r in requests] == [2, *[3] * 3, *[4] * 3, *[5] * 3]
    assert all(r.prompt_ids[:2] == PROMPT for r in requests)
    assert len({tuple(r.prompt_ids) for r in requests}) == len({r.request_id for r in requests}) == 10
    assert [r.choice for r in requests] == [0, *[1] * 9], "the prompt counts once in the cache's counters"
    assert {(r.tenant, r.priority, tuple(r.scopes)) for r in requests} == {
        ("a", 3, (Scope(1, b"trunk"), Scope(END, b"own")))
    }
    assert {(r.params.max_tokens, r.params.temperature, r.params.logprobs) for r in requests} == {(1, 0.0, 6)}


async def test_several_prompts_are_searches_of_their_own(tokenizer: Tokenizer) -> None:
    prompts = [list(b"one"), list(b"another one")]
    generation = start(ScriptedEngineClient(script=say_letters), tokenizer, width=2, prompts=prompts)
    await collect(generation)
    for p, prompt in enumerate(prompts):
        found = expected_letters(prompt, 2, 6)
        assert [generation.output_ids(2 * p + i) for i in range(2)] == [list(f.token_ids) for f in found]


async def test_logprobs_of_the_sequences_and_of_the_prompt(tokenizer: Tokenizer) -> None:
    generation = start(ScriptedEngineClient(script=say_letters), tokenizer, width=2, logprobs=7, prompt_logprobs=1)
    deltas = await collect(generation)
    found = expected_letters(PROMPT, 2, 6)
    for delta, plain in zip(deltas, found, strict=True):
        entries = [*(delta.logprobs or []), *([] if delta.end_logprobs is None else [delta.end_logprobs])]
        assert [e.token_id for e in entries] == list(plain.token_ids)
        assert sum(e.logprob for e in entries) == plain.cum_logprob
        assert all(len(e.top) == 7 for e in entries)
        told = generation.prompt_logprobs(delta.index)
        assert told is not None
        assert [None if e is None else e.token_id for e in told] == [None, PROMPT[1]]


async def test_without_max_tokens_it_goes_on_to_the_end_of_the_context(tokenizer: Tokenizer) -> None:
    for max_tokens in (None, 1000):
        engine = ScriptedEngineClient(byte_model_info(max_model_len=9), say_letters)
        generation = start(engine, tokenizer, 2, max_tokens=max_tokens, stop_token_ids=())
        await collect(generation)
        assert [len(generation.output_ids(i)) for i in range(2)] == [7, 7]


# ---- leaving


@pytest.mark.parametrize("step", [1, 2, 4])
async def test_leaving_aborts_all_beams_and_leaves_no_task(tokenizer: Tokenizer, step: int) -> None:
    def pausing(request: AddRequest) -> list[Item]:
        pause = [Pause()] if len(request.prompt_ids) == len(PROMPT) + step - 1 else []
        return [*pause, best_letter(request.prompt_ids)]

    engine = ScriptedEngineClient(script=pausing)
    before = asyncio.all_tasks()
    reader = asyncio.create_task(collect(start(engine, tokenizer, 3, stop_token_ids=())))
    num_live = 1 if step == 1 else 3
    await engine.wait_paused(num_live)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert engine.num_running == 0
    assert engine.aborted == [r.request_id for r in engine.requests[-num_live:]]
    await engine.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


async def test_leaving_before_the_first_step(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngineClient(script=say_letters)
    with start(engine, tokenizer, 3):
        pass
    assert engine.aborted == ["r-0/1"]


# ---- failures


def failing(item: Item) -> Any:
    """The second of three beams of the third step comes to `item`; the other two never answer."""
    seen = 0

    def fails(request: AddRequest) -> list[Item]:
        nonlocal seen
        seen += 1
        others: list[Item] = [Pause()] if seen > 4 else [best_letter(request.prompt_ids)]
        return [item] if seen == 6 else others

    return fails


async def test_a_failure_of_one_beam_is_raised_and_ends_the_others(tokenizer: Tokenizer) -> None:
    for item, code in ((Fail("out of luck", "internal_error"), "internal_error"), (Die(), "engine_died")):
        engine = ScriptedEngineClient(script=failing(item))
        with pytest.raises(ApiError) as caught:
            await collect(start(engine, tokenizer, 3, stop_token_ids=()))
        assert caught.value.code == code
        assert engine.num_running == 0


async def test_a_step_that_cannot_be_submitted_ends_the_search(tokenizer: Tokenizer) -> None:
    class DiesAtTheThird(ScriptedEngineClient):
        def submit(self, request: AddRequest) -> Any:
            if len(self.requests) == 2:
                self.die()
            return super().submit(request)

    engine = DiesAtTheThird(script=say_letters)
    with pytest.raises(EngineUnavailable):
        await collect(start(engine, tokenizer, 3, stop_token_ids=()))
    assert engine.num_running == 0


async def test_an_engine_that_is_not_there(tokenizer: Tokenizer) -> None:
    with pytest.raises(EngineUnavailable):
        start(ScriptedEngineClient(ready=False), tokenizer)
    engine = ScriptedEngineClient(script=say_letters)
    generation = start(engine, tokenizer)
    engine.die()
    with pytest.raises(EngineUnavailable):
        await collect(generation)


async def test_what_the_engine_refuses_at_once_reaches_every_choice(tokenizer: Tokenizer) -> None:
    class Refuses(ScriptedEngineClient):
        def submit(self, request: AddRequest) -> Any:
            request.params = SamplingParams(logprobs=99)
            return super().submit(request)

    with pytest.raises(BadRequest, match="logprobs must be between 0 and 20"):
        await collect(start(Refuses(script=say_letters), tokenizer, 3))


async def test_choices_come_in_order(tokenizer: Tokenizer) -> None:
    beams = BeamSearchEngine(ScriptedEngineClient(script=say_letters), BeamSearchParams(2, None))
    second = AddRequest(request_id="x", prompt_ids=PROMPT, params=SamplingParams(), scopes=[Scope(END, b"")], choice=1)
    with pytest.raises(ValueError, match="'x' is choice 1, expected choice 0 first"):
        beams.submit(second)
