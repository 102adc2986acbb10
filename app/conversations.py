"""/v1/conversations: a list of items that responses go on with and add to."""

import time
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.conversation_store import ConversationStore, StoredConversation, check_room, new_conversation, unknown_item
from app.errors import BadRequest
from app.events import Item, to_json
from app.ids import new_conversation_id
from app.json_body import read_json
from app.query_params import page_of, read_page
from app.request_params import RequestModel, parse_request
from app.response_input import parse_items
from app.response_plan import or_unavailable
from app.response_schema import Metadata
from app.services import Services
from app.tenants import Tenant

MAX_ITEMS_AT_ONCE = 20
"""As with OpenAI."""


class ConversationFields(RequestModel):
    metadata: Metadata | None = None


class NewItems(RequestModel):
    """Read by app/response_input.py."""

    items: Annotated[Any, WithJsonSchema({"type": "array", "maxItems": MAX_ITEMS_AT_ONCE, "items": {"type": "object"}})]


class NewConversation(ConversationFields):
    items: Annotated[Any, WithJsonSchema({"type": "array", "maxItems": MAX_ITEMS_AT_ONCE})] = None


class Conversations:
    """`now` gives seconds since 1970."""

    def __init__(self, services: Services, store: ConversationStore, *, now: Callable[[], float] = time.time) -> None:
        self._services = services
        self._store = store
        self._now = now

    def routes(self) -> list[Route]:
        one = "/v1/conversations/{conversation_id}"
        return [
            Route("/v1/conversations", self.create, methods=["POST"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.update, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/items", self.list_items, methods=["GET"]),
            Route(f"{one}/items", self.add_items, methods=["POST"]),
            Route(f"{one}/items/{{item_id}}", self.retrieve_item, methods=["GET"]),
            Route(f"{one}/items/{{item_id}}", self.delete_item, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        tenant = self._tenant(request)
        asked = parse_request(NewConversation, await self._body(request))
        items = () if asked.items in (None, []) else parse_items(asked.items, MAX_ITEMS_AT_ONCE, "items")
        conversation = new_conversation(new_conversation_id(), int(self._now()), asked.metadata or {}, items)
        await or_unavailable(self._store.create(tenant.id, conversation))
        return _json(_wire(conversation))

    async def retrieve(self, request: Request) -> Response:
        return _json(_wire(await self._find(request)))

    async def update(self, request: Request) -> Response:
        tenant = self._tenant(request)
        metadata = parse_request(ConversationFields, await self._body(request)).metadata
        if metadata is None:
            raise BadRequest(
                "Missing required parameter: 'metadata'.", code="missing_required_parameter", param="metadata"
            )
        await or_unavailable(self._store.update(tenant.id, _id(request), metadata))
        return _json(_wire(await self._find(request)))

    async def delete(self, request: Request) -> Response:
        await or_unavailable(self._store.delete(self._tenant(request).id, _id(request)))
        return _json({"id": _id(request), "object": "conversation.deleted", "deleted": True})

    async def list_items(self, request: Request) -> Response:
        return _json(read_page(request, (await self._find(request)).items))

    async def add_items(self, request: Request) -> Response:
        tenant = self._tenant(request)
        asked = parse_request(NewItems, await self._body(request))
        items = parse_items(asked.items, MAX_ITEMS_AT_ONCE, "items")
        held = (await or_unavailable(self._store.find(tenant.id, _id(request)))).items
        check_room(len(held) + len(items), self._services.current.limits.max_messages)
        await or_unavailable(self._store.add(tenant.id, _id(request), items))
        return _json(page_of(items, len(items), "asc", None))

    async def retrieve_item(self, request: Request) -> Response:
        item_id = request.path_params["item_id"]
        item = _find_item((await self._find(request)).items, item_id)
        return _json(item)

    async def delete_item(self, request: Request) -> Response:
        tenant, item_id = self._tenant(request), request.path_params["item_id"]
        return _json(_wire(await or_unavailable(self._store.delete_item(tenant.id, _id(request), item_id))))

    async def _find(self, request: Request) -> StoredConversation:
        return await or_unavailable(self._store.find(self._tenant(request).id, _id(request)))

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json(request, self._services.current.limits.max_body_bytes)

    def _tenant(self, request: Request) -> Tenant:
        return self._services.current.tenants.authenticate(request.headers.get("authorization"))


def _id(request: Request) -> str:
    conversation_id: str = request.path_params["conversation_id"]
    return conversation_id


def _find_item(items: list[Item], item_id: str) -> Item:
    for item in items:
        if item.id == item_id:
            return item
    raise unknown_item(item_id)


def _wire(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": str(conversation.id),
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
    }


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")
