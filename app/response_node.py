"""One response as it is stored: a node in the tree of a conversation, and its form as fields of a Redis hash.

A node holds its own input and output only, and the list of its ancestors; the conversation up to it is read from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from app.cache_report import CacheReport
from app.events import Item, ResponseObject
from app.ids import ResponseId

_json = msgspec.json.Encoder().encode

RESULT_FIELDS = ("output", "usage", "error", "incomplete_details", "completed_at")
"""What a response object learns at its end; everything else of it is written once, when it is created."""

TURN_FIELDS = ("tenant", "prefix", "input", "output", "kept_ids")


class HistoryMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the conversation, ready for a prompt.

    `token_ids` are those of an answer as the model gave it, up to the last token whose text lies wholly in `content`;
    None where the ids are to be made from the text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one node adds to the conversation. `prefix` is what came before it where no stored node tells that."""

    prefix: tuple[HistoryMessage, ...] = ()
    input: tuple[Item, ...]
    output: tuple[Item, ...] = ()
    kept_ids: tuple[int, ...] = ()

    @property
    def messages(self) -> list[HistoryMessage]:
        asked = [HistoryMessage(role=item.role, content=item.text) for item in self.input]
        answered = [
            HistoryMessage(role=item.role, content=item.text, token_ids=self.kept_ids or None) for item in self.output
        ]
        return [*self.prefix, *asked, *answered]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseNode:
    id: ResponseId
    tenant: str
    ancestors: tuple[str, ...] = ()
    """Node parts of the ids of its stored ancestors, the conversation's first response first, the parent last."""
    prefix: tuple[HistoryMessage, ...] = ()
    input: tuple[Item, ...]
    response: ResponseObject
    kept_ids: tuple[int, ...] = ()
    cache: CacheReport | None = None
    """None until its end, and for one that ended before its first token."""
    stream_id: str | None = None
    """The websocket lane that asked for it."""

    @property
    def turn(self) -> Turn:
        return Turn(prefix=self.prefix, input=self.input, output=tuple(self.response.output), kept_ids=self.kept_ids)

    @property
    def ancestor_ids(self) -> list[ResponseId]:
        return [self.id.relative(part) for part in self.ancestors]

    def ended(
        self, response: ResponseObject, kept_ids: tuple[int, ...], cache: CacheReport | None = None
    ) -> "ResponseNode":
        """The same node with its answer."""
        return replace(self, response=response, kept_ids=kept_ids, cache=cache)

    def created_fields(self) -> dict[str, bytes]:
        """All fields of the hash."""
        return {
            "tenant": self.tenant.encode(),
            "ancestors": " ".join(self.ancestors).encode(),
            "prefix": _json(self.prefix),
            "input": _json(self.input),
            "response": _json(self.response),
            "stream_id": _json(self.stream_id),
            **self.ended_fields(),
        }

    def ended_fields(self) -> dict[str, bytes]:
        """The fields that the end of the response writes."""
        results = {name: _json(getattr(self.response, name)) for name in RESULT_FIELDS}
        own = {"kept_ids": _json(self.kept_ids), "cache": _json(self.cache)}
        return {"status": self.response.status.encode(), **own, **results}


def node_from_fields(response_id: ResponseId, fields: Mapping[bytes, bytes]) -> ResponseNode:
    """Raises msgspec.MsgspecError, KeyError or ValueError when the hash was not written for this id."""
    response: dict[str, Any] = msgspec.json.decode(fields[b"response"])
    if response["id"] != str(response_id):
        raise ValueError(f"asked for {response_id}, got the node of {response['id']}")
    response |= {name: msgspec.json.decode(fields[name.encode()]) for name in RESULT_FIELDS}
    response["status"] = fields[b"status"].decode()
    return ResponseNode(
        id=response_id,
        tenant=fields[b"tenant"].decode(),
        ancestors=tuple(fields[b"ancestors"].decode().split()),
        prefix=msgspec.json.decode(fields[b"prefix"], type=tuple[HistoryMessage, ...]),
        input=msgspec.json.decode(fields[b"input"], type=tuple[Item, ...]),
        response=msgspec.convert(response, ResponseObject),
        kept_ids=msgspec.json.decode(fields[b"kept_ids"], type=tuple[int, ...]),
        # a node stored before there were reports has none
        cache=msgspec.json.decode(fields.get(b"cache", b"null"), type=CacheReport | None),
        stream_id=msgspec.json.decode(fields[b"stream_id"], type=str | None),
    )


def turn_from_values(prefix: bytes, input_: bytes, output: bytes, kept_ids: bytes) -> Turn:
    """From the values of the hash fields `prefix`, `input`, `output` and `kept_ids`."""
    return Turn(
        prefix=msgspec.json.decode(prefix, type=tuple[HistoryMessage, ...]),
        input=msgspec.json.decode(input_, type=tuple[Item, ...]),
        output=msgspec.json.decode(output, type=tuple[Item, ...]),
        kept_ids=msgspec.json.decode(kept_ids, type=tuple[int, ...]),
    )
