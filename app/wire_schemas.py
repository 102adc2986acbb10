"""JSON schemas of what goes over the wire, from the models that check requests and the structs that are sent."""

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app import events

Schema = dict[str, Any]

EVENTS = (
    *(events.Created, events.InProgress, events.OutputItemAdded, events.ContentPartAdded, events.TextDelta),
    *(events.TextDone, events.ContentPartDone, events.OutputItemDone, events.Completed, events.Incomplete),
    events.Failed,
)
"""In the order in which an answer has them; the last three end it."""

ERROR: Schema = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "The field at fault, such as `input[0].content`."},
        "code": {"type": ["string", "null"]},
    },
}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def request_schemas(models: Sequence[type[BaseModel]]) -> dict[str, Schema]:
    """By name of the class."""
    modes: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in models]
    _, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    found: dict[str, Schema] = schemas["$defs"]
    return found


def struct_schemas(structs: Sequence[type[msgspec.Struct]]) -> dict[str, Schema]:
    """By name of the struct, with all that they hold."""
    _, found = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    return dict(found)


def event_name(event: type[msgspec.Struct]) -> str:
    """Its `type`."""
    tag = event.__struct_config__.tag
    assert isinstance(tag, str), event
    return tag
