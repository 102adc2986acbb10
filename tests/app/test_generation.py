"""Generations over the scripted engine: text, numbers, and how they end."""

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import app.submission
import engine.text.stop_strings
from app.cached_tokens import CachedTokens
from app.errors import ApiError, BadRequest, EngineUnavailable
from app.generation import ChoiceDelta, Generation
from app.prompts import BuiltPrompt
from app.tenants import Tenant
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams
from engine.text.stop_strings import StopAutomaton
from engine.text.tokenizer import Tokenizer
from tests.byte_model import IM_END, make_byte_model
from tests.scripted_engine import Die, Fail, Item, Pause, ScriptedEngineClient, say

TENANT = Tenant("a")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_byte_model(tmp_path_factory.mktemp("model")))


def prompt(text: str = "hi") -> BuiltPrompt:
    return BuiltPrompt(list(text.encode()), [Scope(END, b"scope")])


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1000, "eos_token_ids": (IM_END,), **changes})


async def collect(generation: Generation) -> list[ChoiceDelta]:
    with generation:
        return [delta async for deltas in generation for delta in deltas]


def start(engine: ScriptedEngineClient, tokenizer: Tokenizer, **changes: Any) -> Generation:
    return Generation(engine, tokenizer, prompt(), params(**changes), TENANT)


async def test_deltas_join_to_the_text(tokenizer: Tokenizer) -> None:
    generation = start(ScriptedEngineClient(script=say("héllo")), tokenizer)
    deltas = await collect(generation)
    assert "".join(d.text for d in deltas) == generation.text() == "héllo"
    assert [d.text for d in deltas][:3] == ["h", "", "é"], "never half a character"
    assert deltas[-1].finish_reason == "stop"
    assert generation.output_ids() == [*"héllo".encode(), IM_END]
    assert generation.kept_ids() == list("héllo".encode())
    assert (generation.num_prompt_tokens, generation.num_output_tokens) == (2, 7)


async def test_choices_of_several_prompts(tokenizer: Tokenizer) -> None:
    def script(request: AddRequest) -> bytes:
        return bytes(request.prompt_ids) + str(request.choice).encode()

    engine = ScriptedEngineClient(script=script, num_cached_tokens=1)
    generation = Generation(engine, tokenizer, [prompt("ab"), prompt("cde")], params(n=2), TENANT, priority=3)
    await collect(generation)
    assert [generation.text(i) for i in range(4)] == ["ab0", "ab1", "cde0", "cde1"]
    assert generation.num_prompt_tokens == 5, "each prompt counts once"
    assert generation.cached == CachedTokens(history=2)
    assert [(r.choice, r.priority, r.tenant) for r in engine.requests] == [(0, 3, "a"), (1, 3, "a")] * 2
    assert len({r.request_id for r in engine.requests}) == 4


# ---- leaving


async def test_b11_leaving_aborts_what_has_not_ended(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngineClient(script=lambda r: b"done" if r.choice == 0 else [b"ab", Pause()])
    with start(engine, tokenizer, n=3) as generation:
        await engine.wait_paused(2)
        async for deltas in generation:
            if any(d.finish_reason for d in deltas):
                break
    assert sorted(engine.aborted) == sorted(r.request_id for r in engine.requests[1:])
    assert engine.num_running == 0


async def test_b12_a_cancelled_reader_leaves_no_task(tokenizer: Tokenizer) -> None:
    for num_choices in (1, 3):
        engine = ScriptedEngineClient(script=lambda r: [Pause()])
        before = asyncio.all_tasks()
        reader = asyncio.create_task(collect(start(engine, tokenizer, n=num_choices)))
        await engine.wait_paused(num_choices)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert len(engine.aborted) == num_choices
        await engine.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() <= before


async def test_leaving_before_the_first_delta(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngineClient(script=lambda r: [Pause()])
    with start(engine, tokenizer, n=2):
        pass
    assert len(engine.aborted) == 2


async def test_an_engine_that_dies_between_two_submissions_leaves_nothing(tokenizer: Tokenizer) -> None:
    class HalfDead(ScriptedEngineClient):
        def submit(self, request: AddRequest) -> Any:
            if request.choice == 1:
                self.die()
            return super().submit(request)

    engine = HalfDead(script=lambda r: [Pause()])
    with pytest.raises(EngineUnavailable), start(engine, tokenizer, n=2):
        pass
    assert engine.num_running == 0


async def test_choices_wait_without_tasks_and_come_by_index(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngineClient(script=lambda r: [str(r.choice).encode(), Pause(), b"."])
    with start(engine, tokenizer, n=128) as generation:
        before = asyncio.all_tasks()
        await engine.wait_paused(128)
        deltas = await anext(generation)
        assert [(d.index, d.text) for d in deltas if d.text] == [(i, str(i)) for i in range(128)]
        reader = asyncio.create_task(anext(generation))
        await asyncio.sleep(0)
        assert asyncio.all_tasks() - before <= {reader}
        engine.release(engine.requests[5].request_id)
        assert [(d.index, d.text) for d in await reader] == [(5, ".")]


async def test_choices_share_what_their_stop_strings_were_made_into(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    class Counted(StopAutomaton):
        def __init__(self, stops: Iterable[str]) -> None:
            made.append(self)
            super().__init__(stops)

    monkeypatch.setattr(app.submission, "StopAutomaton", Counted)
    monkeypatch.setattr(engine.text.stop_strings, "StopAutomaton", Counted)
    client = ScriptedEngineClient(script=lambda r: b"a" * (r.choice + 1) + b"STOP!")
    generation = start(client, tokenizer, n=3, stop=("STOP",))
    await collect(generation)
    assert [generation.text(i) for i in range(3)] == ["a", "aa", "aaa"]
    assert len(made) == 1


# ---- failures


async def test_b19_failures_are_raised_not_hidden(tokenizer: Tokenizer) -> None:
    for num_choices in (1, 2):
        for item, code in ((Fail("out of luck", "internal_error"), "internal_error"), (Die(), "engine_died")):
            engine = ScriptedEngineClient(script=lambda r, item=item: [*b"ab", item])
            with pytest.raises(ApiError) as caught:
                await collect(start(engine, tokenizer, n=num_choices))
            assert (caught.value.code, caught.value.status >= 500) == (code, True)
            assert engine.num_running == 0


async def test_a_refusal_of_the_engine_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngineClient(script=lambda r: [Fail("it cannot fit", "context_length_exceeded")])
    with pytest.raises(BadRequest) as caught:
        await collect(start(engine, tokenizer))
    assert caught.value.code == "context_length_exceeded"


def test_no_engine_no_generation(tokenizer: Tokenizer) -> None:
    with pytest.raises(EngineUnavailable):
        start(ScriptedEngineClient(ready=False), tokenizer)


# ---- merged deltas


def in_parts(data: bytes, size: int) -> Iterator[Item]:
    return (data[i : i + size] for i in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("stop", [(), ("!?",), ("é.",)])
async def test_b18_logprobs_belong_to_their_tokens(tokenizer: Tokenizer, size: int, stop: tuple[str, ...]) -> None:
    """One entry a token, in order, for text that is out: the same whatever arrives together."""
    text = "ab\U0001f600é.cd!"
    engine = ScriptedEngineClient(script=lambda r: in_parts(text.encode(), size))
    generation = start(engine, tokenizer, logprobs=2, stop=stop)
    deltas = await collect(generation)
    entries = [e for d in deltas for e in d.logprobs or []]
    want = text if stop != ("é.",) else "ab\U0001f600"
    assert generation.text() == want
    assert [e.token_id for e in entries] == list(want.encode())
    assert all(e.top[0] == (e.token_id, e.logprob) for e in entries)
    for k in range(len(deltas)):
        shown = "".join(d.text for d in deltas[: k + 1]).encode()
        assert bytes(e.token_id for d in deltas[: k + 1] for e in d.logprobs or []) == shown


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_tokens_count_up_to_the_one_that_completed_the_stop_string(tokenizer: Tokenizer, size: int) -> None:
    engine = ScriptedEngineClient(script=lambda r: in_parts(b"abcSTOPdefghijkl", size))
    generation = start(engine, tokenizer, stop=("STOP",))
    deltas = await collect(generation)
    assert "".join(d.text for d in deltas) == "abc"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "STOP")
    assert generation.num_output_tokens == len("abcSTOP")
    assert generation.kept_ids() == [*b"abc"]
    assert engine.num_running == 0


async def test_a_stop_string_wins_over_the_limit_it_is_met_at(tokenizer: Tokenizer) -> None:
    generation = start(ScriptedEngineClient(script=say("abST")), tokenizer, stop=("ST",), max_tokens=4)
    deltas = await collect(generation)
    assert (generation.text(), deltas[-1].finish_reason) == ("ab", "stop")


@pytest.mark.parametrize(("end", "reason"), [("", "stop"), ("STnever", "length")])
async def test_b16_what_was_held_back_is_released(tokenizer: Tokenizer, end: str, reason: str) -> None:
    engine = ScriptedEngineClient(script=say("What?" + end))
    generation = start(engine, tokenizer, stop=("?!", "STOP"), max_tokens=7)
    deltas = await collect(generation)
    assert "".join(d.text for d in deltas) == ("What?" + end)[:7]
    assert deltas[-1].finish_reason == reason


async def test_kept_ids_are_the_text_where_a_stop_string_cut_a_token(tmp_path: Path) -> None:
    """With tokens of several characters: what a cut left of one is encoded anew."""

    class TwoLetters(Tokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"cS" if token_id == 0 else super().token_bytes(token_id)

        first_token_bytes = token_bytes

        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            return b"".join(map(self.token_bytes, token_ids)).decode()

    tokenizer = TwoLetters.load(make_byte_model(tmp_path))
    engine = ScriptedEngineClient(script=lambda r: [*b"ab", 0, *b"TOP"])
    generation = start(engine, tokenizer, stop=("STOP",))
    await collect(generation)
    assert generation.text() == "abc"
    assert generation.kept_ids() == [*b"abc"]


async def test_included_stops(tokenizer: Tokenizer) -> None:
    for changes, text in (({"stop": ("!",)}, "hi!"), ({"stop_token_ids": (ord("!"),)}, "hi!"), ({}, "hi!x")):
        engine = ScriptedEngineClient(script=say("hi!x"))
        generation = start(engine, tokenizer, include_stop_str_in_output=True, logprobs=0, **changes)
        deltas = await collect(generation)
        assert generation.text() == text, "an end id never shows"
        assert bytes(e.token_id for d in deltas for e in d.logprobs or []) == text.encode()
