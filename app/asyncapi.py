"""The websocket as an AsyncAPI document: `python -m app.asyncapi` prints docs/asyncapi.json."""

import json
import sys

from app.conversation import MAX_STREAM_ID_CHARS
from app.idempotency import FIELD, MAX_KEY_CHARACTERS
from app.response_schema import CreateResponse
from app.wire_schemas import ERROR, EVENTS, Schema, event_name, ref, request_schemas, struct_schemas

_STREAM_ID: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STREAM_ID_CHARS}
_RESPONSE_ID: Schema = {"type": "string"}


def _client_message(kind: str, required: tuple[str, ...], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["type", *required],
        "properties": {"type": {"const": kind}, "stream_id": _STREAM_ID, **properties},
    }


CLIENT_MESSAGES: dict[str, Schema] = {
    "response.create": {
        "allOf": [
            _client_message(
                "response.create", (), **{FIELD: {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARACTERS}}
            ),
            ref("CreateResponse"),
        ]
    },
    "response.cancel": _client_message("response.cancel", ("response_id",), response_id=_RESPONSE_ID),
    "response.resume": _client_message(
        "response.resume",
        ("response_id",),
        response_id=_RESPONSE_ID,
        starting_after={"type": "integer", "minimum": -1, "default": -1},
    ),
}
ERROR_EVENT: Schema = {
    "type": "object",
    "required": ["type", "status", "error"],
    "properties": {
        "type": {"const": "error"},
        "status": {"type": "integer", "description": "What HTTP would have answered with."},
        "error": ERROR,
        "headers": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Those of the same answer over HTTP, where it has a Retry-After.",
        },
        "stream_id": _STREAM_ID,
    },
}
RECONNECT: Schema = {
    "type": "object",
    "required": ["type", "reason", "after_ms"],
    "properties": {
        "type": {"const": "reconnect"},
        "reason": {"type": "string"},
        "after_ms": {"type": "integer", "minimum": 0, "description": "Wait for so long, then connect again."},
    },
}


def document() -> Schema:
    server_events = {event_name(event): ref(event.__name__) for event in EVENTS} | {
        "error": ERROR_EVENT,
        "reconnect": RECONNECT,
    }
    both = CLIENT_MESSAGES | server_events
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "trunkline",
            "version": "1",
            "description": "The Responses API over a websocket. Every message is one JSON object in a text frame;"
            " server events carry the `stream_id` of their request. See docs/protocol.md.",
        },
        "channels": {
            "responses": {
                "address": "/v1/responses",
                "messages": {name: {"name": name, "payload": payload} for name, payload in both.items()},
            }
        },
        "operations": {
            "send": _operation("receive", list(CLIENT_MESSAGES)),
            "read": _operation("send", list(server_events)),
        },
        "components": {"schemas": {**request_schemas([CreateResponse]), **struct_schemas(EVENTS)}},
    }


def _operation(action: str, names: list[str]) -> Schema:
    """`action`: what the server does."""
    return {
        "action": action,
        "channel": {"$ref": "#/channels/responses"},
        "messages": [{"$ref": f"#/channels/responses/messages/{name}"} for name in names],
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1, sort_keys=True)
    print()
