"""Sampling fields: strict numbers, the field at fault, what is not built."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError

from app.chat_request import ChatRequest
from app.errors import BadRequest
from app.request_params import RequestModel, SamplingFields, check_text_format, parse_request
from engine.text.tokenizer import Tokenizer
from tests.byte_model import BYTE_VOCAB_SIZE, END_OF_TEXT, IM_END, make_byte_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_byte_model(tmp_path_factory.mktemp("model")))


def refused(body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_request(SamplingFields, body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": "two"}, "n"),
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": []}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": "a"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        pytest.param({"stop": ["x"] * 65}, "stop", id="many stops"),
        pytest.param({"stop": "x" * 1025}, "stop", id="long stop"),
        pytest.param({"stop": ["x" * 1024] * 5}, "stop", id="long stops"),
        pytest.param({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", id="many biases"),
        pytest.param({"tools": [{}] * 1025}, "tools", id="many tools"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids[1]"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
        ({"tools": 3}, "tools"),
    ],
    ids=str,
)
def test_b26_the_field_at_fault_is_named(body: dict[str, Any], param: str) -> None:
    error = refused(body)
    assert error.param is not None
    assert error.param.startswith(param)
    assert param.partition("[")[0] in error.message


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 3},
        {"messages": [{"role": "user", "content": [1] * 3}]},
        {"messages": [{"role": "user"}], "modalities": [1] * 3},
        {"messages": [{"role": "user"}], "stop": [1] * 3},
        {"messages": [{"role": "user"}], "stop_token_ids": ["x"] * 3},
        {"messages": [{"role": "user"}], "logit_bias": {str(i): "x" for i in range(1025)}},
    ],
    ids=lambda body: list(body)[-1],
)
def test_a_list_of_mistakes_is_left_at_the_first(body: dict[str, Any]) -> None:
    """Half a million of them in one body would hold up everybody else for seconds."""
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"model": "m", **body})
    in_lists = [e["loc"] for e in caught.value.errors() if len(e["loc"]) > 1 and isinstance(e["loc"][-1], int)]
    assert len(in_lists) <= 1, in_lists


class _Part(RequestModel):
    type: str


class _Message(RequestModel):
    content: str | list[_Part] | None = None


class _Body(RequestModel):
    messages: list[_Message] = Field(min_length=1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{}, {"content": 3}]}, "messages[1].content"),
        ({"messages": [{"content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"content": [{"type": "a"}, {"type": 3}]}]}, "messages[0].content[1].type"),
        ({"messages": [{"content": [{}]}]}, "messages[0].content[0].type"),
    ],
    ids=str,
)
def test_paths_are_those_of_the_body(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(_Body, body)
    assert caught.value.param == param


def test_long_values_are_not_sent_back() -> None:
    assert len(refused({"n": "x" * 100_000}).message) < 200


def test_parameters(tokenizer: Tokenizer) -> None:
    body = {"temperature": 0.5, "logit_bias": {"7": -3}, "stop": "x", "n": 2, "top_k": None, "unknown": {"a": 1}}
    fields = parse_request(SamplingFields, body).refuse_unbuilt()
    params = fields.to_params(tokenizer, {"temperature": 0.1, "top_k": 40}, 9, logprobs=0)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 40, 1.0)
    assert (params.logit_bias, params.stop, params.n, params.max_tokens) == ({7: -3.0}, ("x",), 2, 9)
    assert (params.logprobs, params.prompt_logprobs) == (0, None)
    assert set(params.eos_token_ids) == {IM_END, END_OF_TEXT}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 10}, "min_tokens"),
        ({"logit_bias": {str(BYTE_VOCAB_SIZE): 1}}, "logit_bias"),
        ({"stop_token_ids": [BYTE_VOCAB_SIZE]}, "stop_token_ids"),
    ],
    ids=str,
)
def test_b21_ranges(tokenizer: Tokenizer, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(SamplingFields, body).to_params(tokenizer, {}, 9)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function"}},
        {"functions": [{}]},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"json": {}}},
        {"guided_choice": ["a"]},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
        {"prompt_logprobs": 0},
        {"truncate_prompt_tokens": 5},
    ],
    ids=str,
)
def test_b46_what_is_not_built_is_refused_not_ignored(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(SamplingFields, body).refuse_unbuilt()
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", next(iter(body)))


def test_what_changes_nothing_is_taken() -> None:
    body = {
        **{"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        **{"bad_words": [], "guided_json": None, "functions": None, "function_call": "none"},
    }
    parse_request(SamplingFields, body).refuse_unbuilt()


@pytest.mark.parametrize("value", [3, {}, {"type": "nope"}, {"type": 3}, []], ids=str)
def test_formats_that_are_none(value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        check_text_format(value, "text.format")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "text.format")


def test_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.vocab_size == BYTE_VOCAB_SIZE
