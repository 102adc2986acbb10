"""Chat Completions as clients see it, over the scripted engine."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config import AssistantConfig, FileConfig
from app.limits import Limits
from app.prompts import THREAD_FROM_CHARACTERS
from engine.protocol import AddRequest
from tests.app.serving import CHAT, Gateway, chat_body, finish_reasons, http_request, joined, serving, sse_data, until
from tests.byte_model import BYTE_VOCAB_SIZE, END_OF_TEXT, IM_END, OPTIONAL_THINKING, byte_model_info
from tests.scripted_engine import Die, Fail, Item, Pause, ScriptedEngineClient, say


def endless(request: AddRequest) -> Iterator[Item]:
    """Text up to max_tokens, with three tokens and a Pause before it goes on."""
    yield from b"abc"
    yield Pause()
    yield from itertools.cycle(b"x")


def silent(request: AddRequest) -> Iterator[Item]:
    """Stands before the first token."""
    yield Pause()
    yield from b"never"


# ---- shape


async def test_a_whole_answer(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=say("Hello"), num_cached_tokens=16)
    async with serving(tmp_path, engine) as gateway:
        answer = (await gateway.chat()).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len("<user\nhi>\n<assistant\n")
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,  # the end id counts once
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {
            "cached_tokens": 16,
            "cached_tokens_details": {"trunk": 0, "history": 16, "host": 0},
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_the_order_of_chunks(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say("Hey"))) as gateway:
        chunks = await gateway.stream_chat()
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "H"}, None),
        ({"content": "e"}, None),
        ({"content": "y"}, None),
        ({}, "stop"),
    ]


async def test_a_role_and_an_end_for_each_choice(tmp_path: Path) -> None:
    def script(request: AddRequest) -> bytes:
        return b"one" if request.choice == 0 else b"two!"

    async with serving(tmp_path, ScriptedEngineClient(script=script)) as gateway:
        chunks = await gateway.stream_chat(n=2, stream_options={"include_usage": True})
        whole = (await gateway.chat(n=2)).json()
        assert [r.choice for r in gateway.engine.requests] == [0, 1, 0, 1]
    assert [c["choices"][0]["index"] for c in chunks[:2]] == [0, 1]
    assert [c["choices"][0]["delta"].get("role") for c in chunks[:3]] == ["assistant", "assistant", None]
    for index, text in enumerate(["one", "two!"]):
        assert joined(chunks, index) == text == whole["choices"][index]["message"]["content"]
        assert finish_reasons(chunks, index) == ["stop"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 4 + 5
    assert whole["usage"]["prompt_tokens"] == len("<user\nhi>\n<assistant\n"), "the prompt counts once"


async def test_the_sdk_accepts_every_chunk(tmp_path: Path) -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    asked = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    async with serving(tmp_path, ScriptedEngineClient(script=say("Hé"))) as gateway:
        for chunk in await gateway.stream_chat(**asked):
            ChatCompletionChunk.model_validate(chunk)
        del asked["stream_options"]
        ChatCompletion.model_validate((await gateway.chat(**asked)).json())


async def test_token_ids_on_demand(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say("ab"))) as gateway:
        whole = (await gateway.chat(return_token_ids=True)).json()
        chunks = await gateway.stream_chat(return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == [*b"ab", IM_END]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in c for c in chunks[1:])
    ids = [t for c in chunks for choice in c["choices"] for t in choice.get("token_ids", [])]
    assert ids == [*b"ab", IM_END]


# ---- usage


@pytest.mark.parametrize(
    ("options", "num_usages"),
    [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)],
    ids=["absent", "empty", "false", "true"],
)
async def test_b17_usage_only_when_asked(tmp_path: Path, options: Any, num_usages: int) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say("Hey"), num_cached_tokens=7)) as gateway:
        chunks = await gateway.stream_chat(**({} if options is None else {"stream_options": options}))
        whole = (await gateway.chat()).json()
    assert sum(bool(c.get("usage")) for c in chunks) == num_usages
    if num_usages:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all("usage" in c for c in chunks), "OpenAI: null on every other chunk"
    else:
        assert all("usage" not in c for c in chunks)


async def test_b17_options_need_a_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        response = await gateway.chat(stream_options={"include_usage": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


async def test_running_usage(tmp_path: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(tmp_path, ScriptedEngineClient(script=say("abc"))) as gateway:
        chunks = await gateway.stream_chat(stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


# ---- a client that goes


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize(("script", "where"), [(silent, "before the first token"), (endless, "after three tokens")])
async def test_b11_the_work_ends_when_its_client_goes(tmp_path: Path, stream: bool, script: Any, where: str) -> None:
    engine = ScriptedEngineClient(script=script)
    async with serving(tmp_path, engine) as gateway:
        _, writer = await gateway.connect(http_request(CHAT, chat_body(stream=stream)))
        await engine.wait_paused()
        steps = engine.core.num_steps
        writer.close()
        await engine.wait_aborted()
        assert engine.core.num_steps == steps, "not one step more was computed"
        assert engine.num_running == 0


async def test_b11_a_neighbour_is_unharmed(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"ab", Pause(), b"cd"])
    async with serving(tmp_path, engine) as gateway:
        _, writer = await gateway.connect(http_request(CHAT, chat_body("one", stream=True)))
        neighbour = asyncio.create_task(gateway.chat("two"))
        await engine.wait_paused(2)
        writer.close()
        await engine.wait_aborted()
        engine.release()
        assert (await neighbour).json()["choices"][0]["message"]["content"] == "abcd"


async def test_b12_a_hundred_drops_leave_no_task(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=endless)
    async with serving(tmp_path, engine) as gateway:
        await gateway.client.get("/health")
        before = len(asyncio.all_tasks())
        for i in range(100):
            num_choices = 1 + i % 3
            num_submitted = len(engine.requests)
            request = http_request(CHAT, chat_body(stream=i % 2 == 0, n=num_choices))
            _, writer = await gateway.connect(request)
            if i % 4:  # the others go at once, wherever their request is by then
                await engine.wait_submitted(num_submitted + num_choices)
            writer.close()
            if i % 4:
                await engine.wait_idle()
        await until(lambda: not engine.num_running and len(asyncio.all_tasks()) <= before)


# ---- failures


async def test_b19_a_failure_after_the_first_bytes(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [*b"abc", Fail("the batch failed")])
    async with serving(tmp_path, engine) as gateway:
        response = await gateway.post(CHAT, chat_body(stream=True))
    events = list(sse_data(response.content))
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert error == {
        "message": "the batch failed",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert 'finish_reason":"' not in response.text


async def test_b19_a_failure_before_the_first_byte_has_a_status(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [Fail("the batch failed")])
    async with serving(tmp_path, engine) as gateway:
        for stream in (True, False):
            response = await gateway.chat(stream=stream)
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal_error"


async def test_b19_the_engine_dies(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [*b"abc", Die()])
    async with serving(tmp_path, engine) as gateway:
        answer = asyncio.create_task(gateway.post(CHAT, chat_body(stream=True)))
        await until(lambda: not engine.is_ready)
        response = await gateway.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert (await gateway.client.get("/ready")).status_code == 503
        assert (await gateway.client.get("/health")).status_code == 200
        engine.revive()  # and dies again behind the same token
        events = list(sse_data((await answer).content))
        error = json.loads(events[-2])["error"]
        assert (error["code"], error["type"]) == ("request_crashes_engine", "server_error")
        assert joined([json.loads(event) for event in events[:-2]]) == "abc"
        engine.revive()
        assert (await gateway.client.get("/ready")).status_code == 200


# ---- limits

CONTEXT = 64
HEAD = len("<user\n>\n<assistant\n")


def of_length(num_tokens: int) -> str:
    """A user text whose prompt has so many tokens."""
    return "x" * (num_tokens - HEAD)


@pytest.mark.parametrize("num_tokens", [CONTEXT - 2, CONTEXT - 1])
async def test_b20_within_the_context_the_rest_is_the_limit(tmp_path: Path, num_tokens: int) -> None:
    engine = ScriptedEngineClient(byte_model_info(max_model_len=CONTEXT), script=lambda r: itertools.cycle(b"y"))
    async with serving(tmp_path, engine) as gateway:
        for max_tokens in (None, 1, 2, 10**6, 10**15):
            choice = (await gateway.chat(of_length(num_tokens), max_tokens=max_tokens)).json()["choices"][0]
            assert choice["finish_reason"] == "length"
            assert len(choice["message"]["content"]) == min(CONTEXT - num_tokens, max_tokens or CONTEXT)


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 1])
async def test_b20_beyond_the_context_the_limit_and_both_counts_are_named(tmp_path: Path, num_tokens: int) -> None:
    async with serving(tmp_path, ScriptedEngineClient(byte_model_info(max_model_len=CONTEXT))) as gateway:
        for max_tokens in (None, 1, 10**6):
            for stream in (False, True):
                response = await gateway.chat(of_length(num_tokens), max_tokens=max_tokens, stream=stream)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
                assert error["param"] == "messages"
                numbers = [n for n in (CONTEXT, num_tokens, max_tokens) if n is not None]
                assert {str(n) for n in numbers} <= set(error["message"].replace(",", "").split())
        assert gateway.engine.requests == [], "it is refused before any work"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_b20_senseless_limits(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as gateway:
        for value in (0, -1, 1.5, 2.0, True, "3", [], {}, 10**30):
            response = await gateway.chat(**{name: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name), value


async def test_b20_a_prompt_beyond_the_pool(tmp_path: Path) -> None:
    info = byte_model_info(max_model_len=4096, num_blocks=4)
    async with serving(tmp_path, ScriptedEngineClient(info)) as gateway:
        assert (await gateway.chat(of_length(63), max_tokens=1)).status_code == 200
        response = await gateway.chat(of_length(64))
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_max_completion_tokens_wins(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say("abcdef"))) as gateway:
        answer = (await gateway.chat(max_tokens=5, max_completion_tokens=2)).json()
    assert answer["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"999999": 5}},
        {"logit_bias": {"-1": 5}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {str(BYTE_VOCAB_SIZE): 1}},
        {"logit_bias": {"1": 101}},
        {"stop_token_ids": [10**9]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [2**70]},
    ],
    ids=json.dumps,
)
async def test_b21_ids_outside_the_vocabulary(tmp_path: Path, fields: dict[str, Any]) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"solo", Pause(), b" run"])
    async with serving(tmp_path, engine) as gateway:
        neighbour = asyncio.create_task(gateway.chat())
        await engine.wait_paused()
        response = await gateway.chat(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(next(iter(fields)))
        engine.release()
        assert (await neighbour).json()["choices"][0]["message"]["content"] == "solo run"
        assert len(engine.requests) == 1


HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([], 400),
        ([{}], 400),
        ([{"role": "user"}], 400),
        ([{"role": "user", "content": None}], 400),
        ([{"role": "user", "content": ""}], 200),
        ([{"role": "user", "content": []}], 200),
        ([{"role": "user", "content": "   "}], 200),
        ([{"role": "system", "content": ""}, HI], 200),
        (
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "x"}],
            200,
        ),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant"}, {"role": "user", "content": "x"}], 200),
        ([{"role": "assistant", "content": "Hi"}], 200),
    ],
    ids=json.dumps,
)
async def test_b23_nothing_to_say(tmp_path: Path, messages: list[Any], status: int) -> None:
    async with serving(tmp_path) as gateway:
        response = await gateway.post(CHAT, {**chat_body(max_tokens=2), "messages": messages})
        assert response.status_code == status, response.text
        assert all(r.prompt_ids for r in gateway.engine.requests)
        assert (await gateway.chat(max_tokens=1)).status_code == 200


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("field", NUMBERS)
async def test_b26_numbers_that_are_none(tmp_path: Path, field: str) -> None:
    async with serving(tmp_path) as gateway:
        for value in ("NaN", "Infinity", "-Infinity", "1e400", "-3", '"1"', "true", "[]"):
            raw = json.dumps(chat_body(max_tokens=2))[:-1] + f', "{field}": {value}}}'
            response = await gateway.post(CHAT, raw.encode())
            assert response.status_code == 400, value
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert gateway.engine.requests == []


async def test_b26_temperatures_that_are_legal(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        for value in (0, -0.0, 1e-320, 1e-8, 1e-4, 2, 1e9):
            assert (await gateway.chat(max_tokens=2, temperature=value)).status_code == 200
            assert gateway.engine.requests[-1].params.is_greedy == (value < 1e-5)


# ---- ends


async def test_b45_every_end_id_ends_and_none_shows(tmp_path: Path) -> None:
    for end in (IM_END, END_OF_TEXT):
        engine = ScriptedEngineClient(script=lambda r, end=end: [*b"bye", end, *b"more"])
        async with serving(tmp_path / str(end), engine) as gateway:
            whole = (await gateway.chat()).json()
            chunks = await gateway.stream_chat(stream_options={"include_usage": True})
        assert set(gateway.engine.requests[0].params.eos_token_ids) == {IM_END, END_OF_TEXT}
        choice = whole["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("bye", "stop", None)
        assert whole["usage"]["completion_tokens"] == 4
        assert (joined(chunks), finish_reasons(chunks)) == ("bye", ["stop"])
        assert chunks[-1]["usage"] == whole["usage"]


async def test_b18_one_entry_a_token_streamed_or_not(tmp_path: Path) -> None:
    """The end id's entry comes last and has no bytes: what is joined is the text."""
    asked = {"logprobs": True, "top_logprobs": 2}
    async with serving(tmp_path, ScriptedEngineClient(script=say("a\u00e9!"))) as gateway:
        whole = (await gateway.chat(**asked)).json()
        chunks = await gateway.stream_chat(**asked)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"] == 5
    assert bytes(b for e in entries for b in e["bytes"]).decode() == "a\u00e9!"
    assert (entries[-1]["token"], entries[-1]["bytes"]) == ("<|im_end|>", [])
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [e for part in streamed for e in part["content"]] == entries


async def test_stop_ids_and_strings_name_themselves(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say("one.two"))) as gateway:
        by_id = (await gateway.chat(stop_token_ids=[ord(".")])).json()["choices"][0]
        by_string = (await gateway.chat(stop=".t")).json()["choices"][0]
        chunks = await gateway.stream_chat(stop=[".t"])
        assert len(gateway.engine.aborted) == 2, "a stop string ends the work, too"
    assert (by_id["message"]["content"], by_id["stop_reason"]) == ("one", ord("."))
    assert (by_string["message"]["content"], by_string["stop_reason"]) == ("one", ".t")
    assert joined(chunks) == "one"
    assert chunks[-1]["choices"][0]["stop_reason"] == ".t"


async def test_an_assistant_by_model_name(tmp_path: Path) -> None:
    config = FileConfig(assistants=(AssistantConfig(id="support", instructions="Be kind.", shared=True),))
    async with serving(tmp_path, file_config=config) as gateway:
        answer = await gateway.post(CHAT, {**chat_body("hi"), "model": "byte-model:support"})
        assert answer.json()["model"] == "byte-model:support"
        request = gateway.engine.requests[0]
        response = await gateway.post(CHAT, {**chat_body("hi"), "model": "byte-model:nobody"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    text = bytes(t for t in request.prompt_ids if t < 256).decode()
    assert text.startswith("system\nBe kind.\nuser\nhi")
    assert len(request.scopes) == 2
    assert request.prompt_ids[: request.scopes[0].end_token] == [256, *b"system\nBe kind.", 257, 10, 256, *b"user\n"]


async def test_template_options_of_a_request(tmp_path: Path) -> None:
    async with serving(tmp_path, chat_template=OPTIONAL_THINKING) as gateway:
        assert (await gateway.chat(chat_template_kwargs={"thinking": False})).status_code == 200
        for options in ({"thinking": None}, {"messages": "x"}, [], {"a b": 1}):
            error = (await gateway.chat(chat_template_kwargs=options)).json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", "chat_template_kwargs")
        (request,) = gateway.engine.requests
    assert bytes(t for t in request.prompt_ids if t < 256) == b"mode\nFalse\nuser\nhi\nassistant\n"


async def test_unknown_names_are_ignored_and_unbuilt_ones_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        assert (await gateway.chat(rid="x", vllm_xargs={"a": 1}, some_future_field={"deep": [None]})).status_code == 200
        for name, value in {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
            "guided_regex": "a*",
            "prompt_logprobs": 0,
            "chat_template": "{{ 1 }}",
        }.items():
            error = (await gateway.chat(**{name: value})).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", name)


# ---- the loop stays free


async def test_b34_long_texts_do_not_block_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long text is rendered and encoded everybody else is served."""
    engine = ScriptedEngineClient(script=lambda r: [b"ab", Pause(), b"cd"])
    async with serving(tmp_path, engine) as gateway:
        render, may_go_on, has_begun = gateway.services.template.render, threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def held(messages: Any, **options: Any) -> Any:
            if len(messages[0].content) > THREAD_FROM_CHARACTERS:
                loop.call_soon_threadsafe(has_begun.set)
                assert may_go_on.wait(60)
            return render(messages, **options)

        monkeypatch.setattr(gateway.services.template, "render", held)
        long = asyncio.create_task(gateway.chat("word " * 100_000))
        await has_begun.wait()
        assert (await gateway.client.get("/health")).status_code == 200
        short = asyncio.create_task(gateway.chat("word"))
        await engine.wait_paused()
        engine.release()
        assert (await short).json()["choices"][0]["message"]["content"] == "abcd"
        assert not long.done()
        may_go_on.set()
        assert (await long).json()["error"]["code"] == "context_length_exceeded"


async def test_a_body_that_is_too_large(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        response = await gateway.chat("x" * (1 << 20))
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


async def test_limits_of_the_configuration(tmp_path: Path) -> None:
    config = FileConfig(limits=Limits(max_choices=2, max_messages=3, max_body_bytes=2000))
    async with serving(tmp_path, file_config=config) as gateway:
        assert (await gateway.chat(n=2)).status_code == 200
        assert (await gateway.chat(n=3)).json()["error"]["param"] == "n"
        for num_messages, status in ((3, 200), (4, 400)):
            body = {**chat_body(), "messages": [HI] * num_messages}
            assert (await gateway.post(CHAT, body)).status_code == status
        assert (await gateway.chat("x" * 2000)).status_code == 413


async def test_many_streams_are_not_mixed_up(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [bytes([t]) for t in r.prompt_ids if t < 256])
    async with serving(tmp_path, engine) as gateway:

        async def one(gateway: Gateway, i: int) -> str:
            return joined(await gateway.stream_chat(f"number {i}"))

        texts = await asyncio.gather(*(one(gateway, i) for i in range(64)))
    assert texts == [f"user\nnumber {i}\nassistant\n" for i in range(64)]


async def test_b31_deep_json(tmp_path: Path) -> None:
    deep = "[" * 20_000 + "]" * 20_000
    body = json.dumps(chat_body())[:-1]
    async with serving(tmp_path) as gateway:
        for raw in (deep, f'{body}, "zzz": {deep}}}', '{"a":' * 20_000 + "1" + "}" * 20_000):
            response = await gateway.post(CHAT, raw.encode())
            assert response.status_code == 400, response.text
            assert response.json()["error"]["code"] == "invalid_json"
        assert (await gateway.chat()).status_code == 200
