"""JSON from outside: bounded in size and depth before it is parsed, strict in what it accepts.

Strict: UTF-8 only, no NaN or Infinity (written out, or by overflow), no lone surrogates, nothing after the value. Of a
name that comes twice the last one counts. Integers of more than 64 bits become floats, which no integer field takes.
"""

import re
from typing import Any

import orjson
from starlette.requests import Request

from app.errors import BadRequest, PayloadTooLarge

MAX_BODY_BYTES = 1 << 20
MAX_DEPTH = 64

# A string, closed or cut off by the end: possessive and with an optional quote, so that it is linear on any input.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")
_SQUARE = bytes.maketrans(b"{}", b"[]")


def parse_json(data: bytes | str) -> dict[str, Any]:
    """The JSON object that `data` is. Raises BadRequest with one sentence; never a RecursionError."""
    try:
        raw = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError:
        raise BadRequest(
            "The body is not valid JSON: it holds half of a surrogate pair.", code="invalid_json"
        ) from None
    if exceeds_depth(raw, MAX_DEPTH):
        raise BadRequest(f"The JSON is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise BadRequest(f"The body is not valid JSON: {e}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest(f"The body must be a JSON object, got {_kind(value)}.", code="invalid_json")
    return value


def exceeds_depth(raw: bytes, max_depth: int) -> bool:
    """Whether arrays and objects are nested deeper than `max_depth` (strings do not count), in linear time.

    Brackets are reduced level by level: each round takes away the innermost pairs. Text that is not JSON may get
    through with up to twice the depth; the parser refuses it.
    """
    brackets = raw.translate(None, _NOT_BRACKETS)
    if brackets.count(b"[") + brackets.count(b"{") <= max_depth:
        return False
    brackets = _STRING.sub(b"", raw).translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(max_depth):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    return b"[]" in brackets or brackets.count(b"[") > max_depth


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. Raises PayloadTooLarge as soon as it is known to be longer than `max_bytes`."""
    length = request.headers.get("content-length", "0")
    digits = length.lstrip("0")[: len(str(max_bytes)) + 1]  # enough to tell: Python reads no number of thousands
    if not length.isdecimal() or int(digits or "0") > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


async def read_json(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The JSON object in the body. Raises BadRequest or PayloadTooLarge."""
    return parse_json(await read_body(request, max_bytes))


def _too_large(max_bytes: int) -> PayloadTooLarge:
    # The rest of the body is still on its way: closing is cheaper than reading it.
    return PayloadTooLarge(f"The body is larger than {max_bytes} bytes.", headers={"Connection": "close"})


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
