"""JSON from outside: bounded, strict, never an exception of another kind."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from app.errors import BadRequest, PayloadTooLarge
from app.json_body import MAX_DEPTH, exceeds_depth, parse_json, read_json

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(alphabet='ab"\\[]{}é\n')),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(alphabet='a"[\\'), inner, max_size=3)),
    max_leaves=20,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(JSON, st.integers(0, 6))
def test_depth_is_exact_for_json(value: Any, max_depth: int) -> None:
    assert exceeds_depth(json.dumps(value).encode(), max_depth) == (depth(value) > max_depth)


@given(st.text(alphabet='[]{}"\\a', max_size=40), st.integers(0, 6))
def test_depth_never_lets_deep_text_through(text: str, max_depth: int) -> None:
    exceeds_depth(text.encode(), max_depth)
    with pytest.raises(BadRequest):
        parse_json("[" * (2 * MAX_DEPTH + 1) + text)


@pytest.mark.parametrize(
    "raw",
    [
        "[" * 20_000 + "]" * 20_000,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
        '{"zzz": ' + "[" * 65 + "]" * 65 + "}",
        "[" * 1_000_000,
        '{"a": "' + '\\"' * 300_000 + '", "b": ' + "[" * 70,
    ],
    ids=["arrays", "objects", "just too deep", "never closed", "after a long string"],
)
def test_b31_deep_json(raw: str) -> None:
    for data in (raw, raw.encode()):
        with pytest.raises(BadRequest) as caught:
            parse_json(data)
        assert caught.value.code == "invalid_json"


def test_b31_the_deepest_that_is_allowed() -> None:
    assert parse_json('{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH)
    assert parse_json('{"a": "' + "[{" * 10_000 + '"}')["a"] == "[{" * 10_000, "brackets in strings do not count"


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b"",
            b"{",
            b"hello",
            b"null",
            b"[]",
            b"3",
            b'"x"',
            b"true",
            b'{"a":"\xff\xfe"}',
            b'{"a":1} x',
            b"\xef\xbb\xbf{}",
        ),
        *('{"m":"n"}'.encode("utf-16"), b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":1e400}'),
        *(b'{"a":"\\ud800"}', b'{"\\udc00":1}', b"{'a':1}", b'{"a":01}', b'{"a":1,}', b'"\\', b"\x00"),
    ],
)
def test_what_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_json(raw)
    assert caught.value.code == "invalid_json"


def test_a_text_with_half_a_surrogate_pair() -> None:
    with pytest.raises(BadRequest):
        parse_json('{"a":"\ud800"}')


def test_the_last_of_two_equal_names_counts() -> None:
    assert parse_json('{"a":1,"a":2}') == {"a": 2}


def request(parts: list[bytes], **headers: str) -> Request:
    messages = [{"type": "http.request", "body": p, "more_body": i < len(parts) - 1} for i, p in enumerate(parts)]

    async def receive() -> Any:
        return messages.pop(0)

    raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


async def test_bodies_in_parts() -> None:
    assert await read_json(request([b'{"a"', b":1}"])) == {"a": 1}
    assert await read_json(request([b"{}"], content_length="0" * 5000 + "2")) == {}


async def test_too_large_by_its_own_word_or_in_fact() -> None:
    for big in (
        request([b""], content_length="101"),
        request([b"x" * 60, b"x" * 60]),
        request([b""], content_length="-"),
        request([b""], content_length="9" * 5000),
    ):
        with pytest.raises(PayloadTooLarge) as caught:
            await read_json(big, max_bytes=100)
        assert caught.value.headers["Connection"] == "close", "the rest is not read"
