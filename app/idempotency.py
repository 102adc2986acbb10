"""Keys under which a message is answered once, however often it is sent.

    {t:<tenant>}:i:<digest of the key>   which response answers it, and a fingerprint of what was asked; 24 h

A key is claimed before its response is stored. So there may be a claim without a response: for a moment, or for good if
the gateway died between the two. A claim that is old enough for that may be taken over.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from app.errors import BadRequest, Conflict, Unprocessable
from app.redis_commands import RedisCommands

HEADER = "Idempotency-Key"
FIELD = "client_message_id"
MAX_KEY_CHARACTERS = 255
KEY_TTL_MS = 24 * 3600 * 1000
ABANDONED_MS = 15_000
"""A claim so old has its response stored, unless its gateway died or the response was deleted."""

_NOT_ASKED = (FIELD, "stream", "stream_options", "background")
"""How an answer is delivered: a message may be sent again another way."""

_FIND = """
local held = redis.call('GET', KEYS[1])
return held and {held, redis.call('PTTL', KEYS[1])}
"""
# The claim that holds already is given back, unless it is this one or the one that may be replaced.
_CLAIM = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] and held ~= ARGV[2] then return {held, redis.call('PTTL', KEYS[1])} end
if held ~= ARGV[1] then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3]) end
return false
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message with a key of its own."""

    key: str
    """A digest: keys may hold anything."""
    fingerprint: str
    param: str


class Claim(msgspec.Struct, frozen=True):
    fingerprint: str
    response_id: str


@dataclass(frozen=True, slots=True)
class Held:
    """A claim as it is found."""

    claim: Claim
    age_ms: int

    def check(self, sent: SentMessage) -> None:
        """Raises Unprocessable where this key was used for another message."""
        if self.claim.fingerprint != sent.fingerprint:
            raise Unprocessable(
                f"This {sent.param} was used for a message with another body: a key is for one message.",
                code="idempotency_key_reused",
                param=sent.param,
            )

    def check_abandoned(self, sent: SentMessage) -> None:
        """Its response is not there. Raises Conflict while it may still come."""
        if self.age_ms < ABANDONED_MS:
            raise Conflict(
                "This message is being taken right now; send it again in a moment.",
                code="idempotency_key_in_use",
                param=sent.param,
                headers={"Retry-After": "1"},
            )


def find_key(header: str | None, body: Mapping[str, Any]) -> SentMessage | None:
    """The key that a request brings, as a header or in its body. Raises BadRequest."""
    given = body.get(FIELD)
    if header is not None and given is not None and header != given:
        raise BadRequest(
            f"'{HEADER}' and '{FIELD}' are two keys for one message: give one.", code="invalid_value", param=FIELD
        )
    key, param = (given, FIELD) if given is not None else (header, HEADER)
    if key is None:
        return None
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        shown = repr(key)[:80]
        raise BadRequest(
            f"'{param}' must be a string of 1 to {MAX_KEY_CHARACTERS} characters, got {shown}.",
            code="invalid_value",
            param=param,
        )
    if body.get("store") is False:
        raise BadRequest(
            f"'{param}' needs 'store': an answer that is not stored cannot be come back to.",
            code="invalid_value",
            param=param,
        )
    asked = {name: value for name, value in body.items() if name not in _NOT_ASKED and value is not None}
    fingerprint = hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS))
    return SentMessage(hashlib.sha256(key.encode()).hexdigest(), fingerprint.hexdigest(), param)


class IdempotencyKeys:
    """The claims, in Redis. Each method raises SessionsUnavailable."""

    def __init__(self, commands: RedisCommands) -> None:
        self._commands = commands
        self._find = commands.redis.register_script(_FIND)
        self._claim = commands.redis.register_script(_CLAIM)
        self._release = commands.redis.register_script(_RELEASE)

    async def find(self, tenant: str, key: str) -> Held | None:
        return _held(await self._commands.run(self._find([_key(tenant, key)])))

    async def try_claim(self, tenant: str, key: str, claim: Claim, abandoned: Claim | None = None) -> Held | None:
        """None: the key is ours, in place of `abandoned` if that held it. Otherwise the claim that holds it."""
        values: list[bytes | int] = [_encode(claim), b"" if abandoned is None else _encode(abandoned), KEY_TTL_MS]
        return _held(await self._commands.run(self._claim([_key(tenant, key)], values)))

    async def release(self, tenant: str, key: str, claim: Claim) -> None:
        """Gives up a claim that is ours; any other stays."""
        await self._commands.run(self._release([_key(tenant, key)], [_encode(claim)]))


def _key(tenant: str, key: str) -> str:
    return f"{{t:{tenant}}}:i:{key}"


def _encode(claim: Claim) -> bytes:
    return msgspec.json.encode(claim)


def _held(reply: Any) -> Held | None:
    if not reply:
        return None
    value, ttl_ms = reply
    return Held(msgspec.json.decode(value, type=Claim), KEY_TTL_MS - ttl_ms)
