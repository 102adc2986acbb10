"""Completions: forms of prompts, echo, logprobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import AddRequest
from tests.app.serving import COMPLETIONS, MODEL, http_request, serving
from tests.byte_model import BYTE_VOCAB_SIZE, IM_END, byte_model_info
from tests.scripted_engine import Pause, ScriptedEngineClient, say


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def echo_prompt(request: AddRequest) -> bytes:
    return bytes(request.prompt_ids).upper()


async def test_a_prompt_that_is_too_long_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(byte_model_info(max_model_len=64))) as gateway:
        error = (await gateway.post(COMPLETIONS, body("x" * 64))).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("prompt", "texts", "num_tokens"),
    [
        ("ab", ["AB"], 2),
        (["ab", "cde"], ["AB", "CDE"], 5),
        ([97, 98], ["AB"], 2),
        ([[97, 98], [99]], ["AB", "C"], 3),
    ],
    ids=json.dumps,
)
async def test_all_forms_of_a_prompt(tmp_path: Path, prompt: Any, texts: list[str], num_tokens: int) -> None:
    from openai.types import Completion

    async with serving(tmp_path, ScriptedEngineClient(script=echo_prompt)) as gateway:
        answer = (await gateway.post(COMPLETIONS, body(prompt))).json()
        chunks = await gateway.stream(COMPLETIONS, body(prompt, stream_options={"include_usage": True}))
    Completion.model_validate(answer)
    assert answer["object"] == "text_completion"
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (i, text, "stop") for i, text in enumerate(texts)
    ]
    assert answer["usage"]["prompt_tokens"] == num_tokens
    for i, text in enumerate(texts):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert "".join(c["text"] for c in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
    assert chunks[-1]["usage"] == answer["usage"]


async def test_n_choices_of_each_prompt(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: bytes(r.prompt_ids) + str(r.choice).encode())
    async with serving(tmp_path, engine) as gateway:
        answer = (await gateway.post(COMPLETIONS, body(["a", "b"], n=2))).json()
    assert [c["text"] for c in answer["choices"]] == ["a0", "a1", "b0", "b1"]
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("prompt", ["", [""], [], None, [[]], {}, [None], [1, "a"], [True], [1.5], 3], ids=json.dumps)
async def test_b23_no_prompt(tmp_path: Path, prompt: Any) -> None:
    async with serving(tmp_path) as gateway:
        response = await gateway.post(COMPLETIONS, body(prompt))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        assert gateway.engine.requests == []


@pytest.mark.parametrize("prompt", [[1, -1], [BYTE_VOCAB_SIZE], [10**9], [2**70], [[1], [-1]]], ids=json.dumps)
async def test_b21_prompt_ids_outside_the_vocabulary(tmp_path: Path, prompt: Any) -> None:
    async with serving(tmp_path) as gateway:
        response = await gateway.post(COMPLETIONS, body(prompt))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        assert gateway.engine.requests == []


async def test_echo_is_exact(tmp_path: Path) -> None:
    prompt = "a\u2028b \u0085 c\n\ndata: x<|im_end|>"
    async with serving(tmp_path, ScriptedEngineClient(script=say("!"))) as gateway:
        answer = (await gateway.post(COMPLETIONS, body(prompt, echo=True))).json()
        chunks = await gateway.stream(COMPLETIONS, body(prompt, echo=True))
        assert IM_END not in gateway.engine.requests[0].prompt_ids, "typed control strings are text"
    assert answer["choices"][0]["text"] == prompt + "!"
    assert "".join(c["choices"][0]["text"] for c in chunks) == prompt + "!"


async def test_echo_with_logprobs(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say("xé"))) as gateway:
        fields = {"echo": True, "logprobs": 1, "max_tokens": 3}
        answer = (await gateway.post(COMPLETIONS, body("ab", **fields))).json()
        chunks = await gateway.stream(COMPLETIONS, body("ab", **fields))
        assert gateway.engine.requests[0].params.prompt_logprobs == 1
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b", "x", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5}, {"x": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}],
        "text_offset": [0, 1, 2, 3, 3],
    }
    lists = [c["choices"][0]["logprobs"] for c in chunks]
    assert {name: [v for part in lists for v in part[name]] for name in logprobs} == logprobs


async def test_sixteen_tokens_unless_told(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedEngineClient(script=say("x" * 50))) as gateway:
        answer = (await gateway.post(COMPLETIONS, body("a"))).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_character_that_the_prompt_began(tmp_path: Path) -> None:
    """The prompt ends with the first byte of a character, the answer brings the second."""
    first, second = "é".encode()
    async with serving(tmp_path, ScriptedEngineClient(script=lambda r: [second, ord("!")])) as gateway:
        answer = (await gateway.post(COMPLETIONS, body([ord("a"), first]))).json()
    assert answer["choices"][0]["text"] == "é!"


async def test_refusals(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        for fields, param in (
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 3}, "best_of"),
            ({"logprobs": True}, "logprobs"),
            ({"logprobs": 21}, "logprobs"),
            ({"stream_options": {}}, "stream_options"),
            ({"n": 128, "prompt": ["a"] * 2}, "prompt"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"model": MODEL + ":nobody"}, "model"),
        ):
            error = (await gateway.post(COMPLETIONS, {**body("a"), **fields})).json()["error"]
            assert error["param"] == param, error
        assert gateway.engine.requests == []


async def test_b11_a_client_that_goes_ends_all_choices(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [*b"ab", Pause()])
    async with serving(tmp_path, engine) as gateway:
        for stream in (True, False):
            request = http_request(COMPLETIONS, body(["a", "b"], n=2, stream=stream))
            _, writer = await gateway.connect(request)
            await engine.wait_paused(4)
            writer.close()
            await engine.wait_idle()
        assert len(engine.aborted) == 8
