"""Bytes of chunks."""

import json
from typing import Any, cast

from app.cached_tokens import CachedTokens
from app.chunks import AnswerHead, Chunks, GeneratingRequest, json_value
from app.generation import Generation
from app.request_params import parse_request


class Numbers:
    num_prompt_tokens, num_output_tokens, cached = 10, 4, CachedTokens(trunk=6, history=2, host=3)


USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 8, "cached_tokens_details": {"trunk": 6, "history": 2, "host": 3}},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
HEAD = AnswerHead(id="id-1", object="chunk", model="m\u2028", system_fingerprint="fp", created=7)


def chunks(**options: Any) -> Chunks:
    request = parse_request(GeneratingRequest, {"model": "m", "stream": True, "stream_options": options or None})
    return Chunks(HEAD, cast(Generation, Numbers()), request)


def data(frame: bytes) -> Any:
    assert frame.decode().splitlines()[1:] == [""], "one line and an empty one, for every reader"
    return json.loads(frame.removeprefix(b"data: "))


def test_a_chunk() -> None:
    assert data(chunks().chunk(b'{"index":0}', b',"extra":1')) == {
        **HEAD.as_dict(),
        "extra": 1,
        "choices": [{"index": 0}],
    }


def test_usage() -> None:
    assert data(chunks(include_usage=True).chunk(b"1"))["usage"] is None
    assert data(chunks(include_usage=True, continuous_usage_stats=True).chunk(b"1"))["usage"] == USAGE
    assert "usage" not in data(chunks(continuous_usage_stats=True).chunk(b"1")), "it needs include_usage"
    last = data(chunks(include_usage=True).usage_chunk())
    assert (last["choices"], last["usage"]) == ([], USAGE)


def test_json_on_one_line() -> None:
    assert json_value("a\u2028\u0085\n") == b'"a\\u2028\\u0085\\n"'
