"""A message that is sent twice under one key is one generation: the second sender gets the first one's answer."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.errors import ApiError, NotFound
from app.event_log import EventsNotHeld
from app.event_writer import EventSource, Waiter
from app.events import ResponseObject
from app.idempotency import Claim, Held, IdempotencyKeys, SentMessage, find_key
from app.live_config import Configured
from app.response_node import ResponseNode
from app.response_plan import Parent, or_unavailable
from app.response_service import ResponseService
from app.started import Started
from app.stored_events import StoredEvents
from app.tenants import Tenant


@dataclass(frozen=True, slots=True)
class Attached:
    """The answer to a message that had been sent before, from its first event."""

    response: ResponseObject
    source: EventSource


class _HeldByAnother(Exception):
    def __init__(self, held: Held) -> None:
        super().__init__("another sender was first")
        self.held = held


class SendOnce:
    """Creates responses; those with a key once."""

    def __init__(self, service: ResponseService, keys: IdempotencyKeys) -> None:
        self._service = service
        self._keys = keys
        self._sending: dict[tuple[str, str], asyncio.Task[Started | Attached]] = {}
        """By tenant and key: messages that are being taken on this gateway."""

    async def create(
        self,
        configured: Configured,
        tenant: Tenant,
        body: Mapping[str, Any],
        *,
        key: str | None = None,
        stream_id: str | None = None,
        unstored: Mapping[str, Parent] | None = None,
        wants_events: bool = True,
    ) -> Started | Attached:
        """As `ResponseService.create`; with a key, which may stand in the body too, the answer to the first message
        that came with it. Raises ApiError: 422 where that was another message, 409 while another gateway takes it."""
        sent = find_key(key, body)
        if sent is None:
            return await self._service.create(
                configured, tenant, body, stream_id=stream_id, unstored=unstored, wants_events=wants_events
            )
        name = (tenant.id, sent.key)
        while (earlier := self._sending.get(name)) is not None:
            await asyncio.wait({earlier})
        # its own task: a sender that goes leaves a message that was taken whole, or not at all
        task = asyncio.create_task(self._send(configured, tenant, body, sent, stream_id))
        self._sending[name] = task
        task.add_done_callback(lambda task: self._sent(name, task))
        return await asyncio.shield(task)

    def _sent(self, name: tuple[str, str], task: asyncio.Task[Started | Attached]) -> None:
        del self._sending[name]
        if not task.cancelled():
            task.exception()  # the caller has it, unless it was cancelled

    async def _send(
        self,
        configured: Configured,
        tenant: Tenant,
        body: Mapping[str, Any],
        sent: SentMessage,
        stream_id: str | None,
    ) -> Started | Attached:
        held = await or_unavailable(self._keys.find(tenant.id, sent.key))
        if held is not None and (attached := await self._try_attach(tenant, sent, held)) is not None:
            return attached
        claimed: list[Claim] = []

        async def claim(node: ResponseNode) -> None:
            own = Claim(sent.fingerprint, str(node.id))
            abandoned = held.claim if held is not None else None
            winner = await or_unavailable(self._keys.try_claim(tenant.id, sent.key, own, abandoned))
            if winner is not None:
                raise _HeldByAnother(winner)
            claimed.append(own)

        try:
            return await self._service.create(configured, tenant, body, stream_id=stream_id, before_start=claim)
        except _HeldByAnother as e:
            attached = await self._try_attach(tenant, sent, e.held)
            if attached is None:  # it was first, long ago, and has been deleted in this moment
                raise NotFound("The answer to this message was deleted.", code="response_not_found") from None
            return attached
        except ApiError:
            for own in claimed:
                await or_unavailable(self._keys.release(tenant.id, sent.key, own))
            raise

    async def _try_attach(self, tenant: Tenant, sent: SentMessage, held: Held) -> Attached | None:
        """None: the claim was abandoned. Raises ApiError."""
        held.check(sent)
        response_id = held.claim.response_id
        try:
            response = await self._service.get(tenant, response_id)
        except NotFound:
            held.check_abandoned(sent)
            return None
        try:
            followed = await self._service.follow(tenant, response_id, -1)
        except NotFound:
            response = await self._service.get(tenant, response_id)
            if response.is_running:
                raise
            return Attached(response, StoredEvents(response))
        return Attached(response, followed.source)

    async def wait(self, tenant: Tenant, attached: Attached) -> ResponseObject:
        """The answer at its end. Raises ApiError."""
        if not attached.response.is_running:
            return attached.response
        with suppress(EventsNotHeld), Waiter(attached.source) as waiter:
            async for _ in waiter:
                pass
        return await self._service.get(tenant, attached.response.id)
