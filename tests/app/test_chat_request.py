"""The body of a chat: contents, roles, what is not built."""

from typing import Any

import pytest

from app.chat_request import ChatRequest
from app.errors import BadRequest
from app.limits import Limits
from app.request_params import parse_request
from engine.text.chat_template import Message


def chat(messages: list[Any] | None = None, **fields: Any) -> ChatRequest:
    hi = [{"role": "user", "content": "hi"}]
    return parse_request(ChatRequest, {"model": "m", "messages": hi if messages is None else messages, **fields})


def take(messages: list[Any] | None, fields: dict[str, Any]) -> list[Message]:
    request = chat(messages, **fields)
    request.check(Limits())
    return request.to_messages()


def refusal(*messages: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        take(list(messages) or None, fields)
    return caught.value


def test_contents() -> None:
    request = chat(
        [
            {"role": "developer", "content": "Be kind.", "name": "boss"},
            {"role": "user", "content": [{"type": "text", "text": "My name"}, {"type": "text", "text": " is Ada."}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "refusal": "Never."},
            {"role": "user", "content": []},
        ]
    )
    assert request.to_messages() == [
        Message("developer", "Be kind."),
        Message("user", "My name is Ada."),
        Message("assistant", ""),
        Message("assistant", "No."),
        Message("assistant", "Never."),
        Message("user", ""),
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": 3, "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "system", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [None]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "nope", "text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "name": 3}, "messages[0].name"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_taken(message: dict[str, Any], param: str) -> None:
    assert refusal(message).param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": True, "top_logprobs": "x"},
        {"logprobs": True, "top_logprobs": 1.5},
        {"top_logprobs": 3},
    ],
    ids=str,
)
def test_top_logprobs(fields: dict[str, Any]) -> None:
    assert refusal(**fields).param == "top_logprobs"


def test_logprobs() -> None:
    assert [chat(**f).num_logprobs for f in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 4})] == [
        *(None, 0, 4)
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 1 }}"},
        {"continue_final_message": True},
        {"echo": True},
        {"documents": [{}]},
        {"reasoning_effort": "high"},
        {"modalities": ["text", "audio"]},
        {"verbosity": "low"},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(fields: dict[str, Any]) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == ("unsupported_parameter", next(iter(fields)))


def test_what_changes_nothing_is_taken() -> None:
    chat(modalities=["text"], verbosity="medium", reasoning_effort="none", echo=False, store=True).check(Limits())
