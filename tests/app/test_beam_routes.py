"""Beam search over HTTP, in Chat Completions and Completions: choices best first, usage, refusals, leaving."""

from pathlib import Path

import openai
import pytest

from engine.protocol import AddRequest
from tests.app.serving import CHAT, COMPLETIONS, MODEL, Gateway, chat_body, http_request, serving
from tests.beam_script import STOP_ID, best_letter, expected_letters, say_letters, text_of
from tests.scripted_engine import Item, Pause, ScriptedEngineClient

BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 5, "stop_token_ids": [STOP_ID]}


def completion_body(prompt: object = "hi", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, **BEAMS, **fields}


async def test_completions_are_the_best_sequences_best_first(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say_letters, num_cached_tokens=1)) as gateway:
        answer = (await gateway.post(COMPLETIONS, completion_body(length_penalty=2, temperature=0))).json()
    found = expected_letters(list(b"hi"), 3, 5, 2.0)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, text_of(f)) for i, f in enumerate(found)]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop" if f.has_ended else "length" for f in found]
    num_output = sum(len(f.token_ids) for f in found)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        2,
        num_output,
        2 + num_output,
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1


async def test_best_of_is_the_width_of_which_the_n_best_are_shown(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say_letters)) as gateway:
        answer = (await gateway.post(COMPLETIONS, completion_body(n=1, best_of=6))).json()
        prompts = (await gateway.post(COMPLETIONS, completion_body(["hi", "you"], n=2))).json()
    [choice] = answer["choices"]
    best = expected_letters(list(b"hi"), 6, 5)[0]
    assert choice["text"] == text_of(best)
    assert answer["usage"]["completion_tokens"] == len(best.token_ids)
    found = [f for prompt in (b"hi", b"you") for f in expected_letters(list(prompt), 2, 5)]
    assert [c["text"] for c in prompts["choices"]] == [text_of(f) for f in found]


async def test_completions_with_echo_logprobs_and_ids(tmp_path: Path) -> None:
    fields = {"echo": True, "logprobs": 1, "return_token_ids": True, "stop_token_ids": []}
    async with serving(tmp_path, ScriptedEngineClient(script=say_letters)) as gateway:
        answer = (await gateway.post(COMPLETIONS, completion_body(n=2, **fields))).json()
    for choice in answer["choices"]:
        assert choice["text"].startswith("hi")
        assert choice["prompt_token_ids"] == list(b"hi")
        assert bytes(choice["token_ids"]).decode() == choice["text"][2:]
        assert choice["logprobs"]["tokens"] == list(choice["text"])
        assert all(len(top) in (1, 2) for top in choice["logprobs"]["top_logprobs"][1:])


async def test_chat_with_the_openai_client(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, ScriptedEngineClient(script=say_letters)) as gateway,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            n=3,
            max_tokens=5,
            logprobs=True,
            top_logprobs=2,
            extra_body={"use_beam_search": True, "length_penalty": 0.5, "stop_token_ids": [STOP_ID]},
        )
        prompt = gateway.engine.requests[0].prompt_ids
    found = expected_letters(prompt, 3, 5, 0.5)
    assert [c.message.content for c in answer.choices] == [text_of(f) for f in found]
    for choice, plain in zip(answer.choices, found, strict=True):
        assert choice.logprobs is not None
        assert sum(e.logprob for e in choice.logprobs.content or []) == plain.cum_logprob
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


async def test_an_answer_that_comes_back_as_history_finds_its_ids(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say_letters)) as gateway:
        answer = (await gateway.chat("hi", return_token_ids=True, **BEAMS)).json()
        first = gateway.engine.requests[0].prompt_ids
        text, ids = answer["choices"][1]["message"]["content"], answer["choices"][1]["token_ids"]
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
        await gateway.chat(messages=[*turns, {"role": "user", "content": "go on"}])
        kept = [t for t in ids if t != STOP_ID]
        assert gateway.engine.requests[-1].prompt_ids[: len(first) + len(kept)] == [*first, *kept]


async def test_without_max_tokens_a_chat_goes_on_to_the_end_of_the_context(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say_letters)) as gateway:
        limit = gateway.engine.info.max_model_len
        content = "x" * (limit - 60)
        answer = (await gateway.chat(content, use_beam_search=True, n=2)).json()
        assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
        num_prompt = answer["usage"]["prompt_tokens"]
        assert answer["usage"]["completion_tokens"] == 2 * (limit - num_prompt)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"temperature": 0.5}, "unsupported_parameter", "temperature"),
        ({"stop": ["x"]}, "unsupported_parameter", "stop"),
        ({"n": 11}, "invalid_value", "n"),
        ({"length_penalty": 99}, "invalid_value", "length_penalty"),
        ({"n": 2, "best_of": 1}, "invalid_value", "best_of"),
    ],
    ids=str,
)
async def test_refusals(tmp_path: Path, fields: dict[str, object], code: str, param: str) -> None:
    async with serving(tmp_path) as gateway:
        for path, body in ((CHAT, chat_body(**{**BEAMS, **fields})), (COMPLETIONS, completion_body(**fields))):
            response = await gateway.post(path, body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, code, param)
        assert gateway.engine.requests == []


async def test_prompts_times_beams_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        limit = gateway.services.live.current.limits.max_choices
        body = completion_body(["a"] * (limit // 10 + 1), n=1, best_of=10)
        error = (await gateway.post(COMPLETIONS, body)).json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "invalid_value")
        assert gateway.engine.requests == []


async def test_a_client_that_goes_ends_every_beam(tmp_path: Path) -> None:
    def pausing(request: AddRequest) -> list[Item]:
        is_second_step = request.choice == 1
        return [*([Pause()] if is_second_step else []), best_letter(request.prompt_ids)]

    engine = ScriptedEngineClient(script=pausing)
    async with serving(tmp_path, engine) as gateway:
        for path, body in ((CHAT, chat_body(**BEAMS)), (COMPLETIONS, completion_body())):
            await leave_at_the_second_step(gateway, path, body)
        assert len(engine.aborted) == 6


async def leave_at_the_second_step(gateway: Gateway, path: str, body: dict[str, object]) -> None:
    _, writer = await gateway.connect(http_request(path, body))
    await gateway.engine.wait_paused(3)
    writer.close()
    await gateway.engine.wait_idle()
