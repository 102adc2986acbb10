"""GET /openapi.json: the HTTP routes, made from the models that check requests and the structs that are sent."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.chat_request import ChatRequest
from app.completions import CompletionRequest
from app.conversations import ConversationFields, NewConversation, NewItems
from app.events import Item, ResponseObject, to_json
from app.idempotency import FIELD, HEADER
from app.response_schema import CreateResponse
from app.wire_schemas import ERROR, EVENTS, Schema, ref, request_schemas, struct_schemas

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")

QUERY: Mapping[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string", "description": "Items after the one with this id."},
    "stream": {"type": "boolean", "default": False, "description": "Its events, as an event stream."},
    "starting_after": {"type": "integer", "minimum": -1, "default": -1, "description": "Events after this number."},
}
PAGE = ("limit", "order", "after")


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    object: str
    input_tokens: int


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: str
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


class ConversationObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str
    created_at: int
    metadata: dict[str, str]


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str
    deleted: bool


@dataclass(frozen=True)
class Operation:
    summary: str
    answer: type[msgspec.Struct] | None = None
    """None: an object as OpenAI's API has it, or what the summary says."""
    body: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    may_stream: bool = False
    is_sent_once: bool = False
    needs_key: bool = True


_ONE, _CONVERSATION = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/health"): Operation("Whether this process answers.", needs_key=False),
    ("GET", "/ready"): Operation("Whether requests are taken.", needs_key=False),
    ("GET", "/metrics"): Operation("Prometheus metrics as text, for the admin key."),
    ("GET", "/admin/stats"): Operation("Counters of the engine, for the admin key."),
    ("GET", "/openapi.json"): Operation("This document.", needs_key=False),
    ("GET", "/v1/models"): Operation("The model, and a name for each assistant."),
    ("GET", "/v1/models/{model}"): Operation("One of them."),
    ("POST", "/v1/tickets"): Operation("A ticket with which a browser opens the websocket."),
    ("POST", "/v1/chat/completions"): Operation("Answer a chat.", body=ChatRequest, may_stream=True),
    ("POST", "/v1/completions"): Operation("Continue a text.", body=CompletionRequest, may_stream=True),
    ("POST", "/v1/responses"): Operation(
        "Create a response.", ResponseObject, CreateResponse, may_stream=True, is_sent_once=True
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "How many tokens the prompt of such a response has.", InputTokens, CreateResponse
    ),
    ("GET", _ONE): Operation(
        "A response as it is now, or its events.", ResponseObject, query=("stream", "starting_after"), may_stream=True
    ),
    ("DELETE", _ONE): Operation("Forget a response; one that runs is ended first.", Deleted),
    ("POST", f"{_ONE}/cancel"): Operation("End a running response.", ResponseObject),
    ("GET", f"{_ONE}/cache"): Operation("How much of its prompt was cached, and why no more."),
    ("GET", f"{_ONE}/input_items"): Operation("Its own input.", ItemList, query=PAGE),
    ("POST", "/v1/conversations"): Operation("Make a conversation.", ConversationObject, NewConversation),
    ("GET", _CONVERSATION): Operation("A conversation.", ConversationObject),
    ("POST", _CONVERSATION): Operation("Change its metadata.", ConversationObject, ConversationFields),
    ("DELETE", _CONVERSATION): Operation("Forget a conversation; its responses stay.", Deleted),
    ("GET", f"{_CONVERSATION}/items"): Operation("What is in it.", ItemList, query=PAGE),
    ("POST", f"{_CONVERSATION}/items"): Operation("Add items at its end.", ItemList, NewItems),
    ("GET", f"{_CONVERSATION}/items/{{item_id}}"): Operation("One item.", Item),
    ("DELETE", f"{_CONVERSATION}/items/{{item_id}}"): Operation("Take one item out.", ConversationObject),
}


class OpenApi:
    """The route; the document is made when it is first asked for."""

    def routes(self) -> list[Route]:
        return [Route("/openapi.json", self.get, methods=["GET"])]

    async def get(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    @cached_property
    def _document(self) -> bytes:
        return to_json(document())


def document() -> Schema:
    bodies = [op.body for op in OPERATIONS.values() if op.body is not None]
    answers = [op.answer for op in OPERATIONS.values() if op.answer is not None]
    paths: dict[str, Schema] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "trunkline",
            "version": "1",
            "description": "See docs/protocol.md.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                **request_schemas(list(dict.fromkeys(bodies))),
                **struct_schemas([*dict.fromkeys(answers), *EVENTS]),
                "Error": {"type": "object", "required": ["error"], "properties": {"error": ERROR}},
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def path_of(route: Route) -> str:
    """As the document writes it: without the kind of a parameter."""
    return _PARAMETER.sub(r"{\1}", route.path)


def _operation(method: str, path: str, operation: Operation) -> Schema:
    content: Schema = {"application/json": {"schema": ref(operation.answer.__name__) if operation.answer else {}}}
    if operation.may_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: Schema = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": operation.summary,
        "parameters": list(_parameters(path, operation)),
        "responses": {
            "200": {"description": "OK", "content": content},
            "default": {"description": "An error.", "content": {"application/json": {"schema": ref("Error")}}},
        },
    }
    if operation.needs_key:
        # without tenants in the configuration nobody needs a key
        described["security"] = [{"key": []}, {}]
    if operation.body is not None:
        schema: Any = {"application/json": {"schema": ref(operation.body.__name__)}}
        described["requestBody"] = {"required": True, "content": schema}
    return described


def _parameters(path: str, operation: Operation) -> Iterator[Schema]:
    for name in _PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name in operation.query:
        yield {"name": name, "in": "query", "schema": QUERY[name]}
    if operation.is_sent_once:
        yield {
            "name": HEADER,
            "in": "header",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255},
            "description": f"A message sent twice under one key is answered once; also `{FIELD}` in the body.",
        }
