"""The Responses API: /v1/responses over HTTP, a thin shell over ResponseService, and the websocket beside it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from app.disconnect import until_disconnect
from app.errors import ApiError, BadRequest
from app.event_log import CursorLost, EventsNotHeld
from app.event_writer import EventSource, Waiter
from app.events import to_json
from app.idempotency import HEADER
from app.json_body import read_json
from app.limits import Limits
from app.lookup_errors import events_not_held
from app.middleware import extras_of
from app.query_params import read_flag, read_integer, read_page
from app.response_service import ResponseService
from app.send_once import Attached, SendOnce
from app.services import Services
from app.sse import SseResponse, SseWriter, frame
from app.started import Started
from app.tenants import Tenant
from app.websocket import Websockets


class Responses:
    """All routes of the Responses API, the websocket's included."""

    def __init__(self, services: Services, service: ResponseService, sender: SendOnce) -> None:
        self._services = services
        self._service = service
        self._sender = sender

    def routes(self) -> list[BaseRoute]:
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/cache", self.cache_report, methods=["GET"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
            *Websockets(self._services, self._service, self._sender).routes(),
        ]

    async def create(self, request: Request) -> Response:
        configured = self._services.current
        tenant = configured.tenants.authenticate(request.headers.get("authorization"))
        body = await read_json(request, configured.limits.max_body_bytes)
        is_stream = bool(body.get("stream"))
        key = request.headers.get(HEADER)
        started = await self._sender.create(configured, tenant, body, key=key, wants_events=is_stream)
        if isinstance(started, Attached):
            return await self._attached(tenant, started, configured.limits, body, request.receive)
        extras_of(request).headers.update(started.headers)
        if not started.run.is_stored:
            return await self._create_unstored(tenant, started, configured.limits, is_stream, request.receive)
        if is_stream:
            return self._stream(started.source, configured.limits)
        if body.get("background"):
            return _json(started.run.response)
        return _json(await until_disconnect(request.receive, self._service.wait(tenant, started.run)))

    async def _attached(
        self, tenant: Tenant, attached: Attached, limits: Limits, body: Mapping[str, Any], receive: Receive
    ) -> Response:
        if body.get("stream"):
            answer = self._stream(attached.source, limits)
        elif body.get("background"):
            answer = _json(attached.response)
        else:
            answer = _json(await until_disconnect(receive, self._sender.wait(tenant, attached)))
        answer.headers["Idempotent-Replayed"] = "true"
        return answer

    async def input_tokens(self, request: Request) -> Response:
        configured = self._services.current
        tenant = configured.tenants.authenticate(request.headers.get("authorization"))
        body = await read_json(request, configured.limits.max_body_bytes)
        num_tokens = await self._service.count_input_tokens(configured, tenant, body)
        return _json({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def _create_unstored(
        self, tenant: Tenant, started: Started, limits: Limits, is_stream: bool, receive: Receive
    ) -> Response:
        """Nobody can come back to it: it ends when its client goes, whatever it was doing."""
        if is_stream:
            return self._stream(started.source, limits, started)
        try:
            return _json(await until_disconnect(receive, self._service.wait(tenant, started.run)))
        finally:
            started.run.stop()

    async def retrieve(self, request: Request) -> Response:
        limits, tenant = self._services.current.limits, self._tenant(request)
        response_id = request.path_params["response_id"]
        if not read_flag(request, "stream"):
            return _json(await self._service.get(tenant, response_id))
        after = read_integer(request, "starting_after", default=-1, lowest=-1, highest=2**64)
        followed = await self._service.follow(tenant, response_id, after)
        return self._stream(followed.source, limits)

    async def delete(self, request: Request) -> Response:
        tenant, response_id = self._tenant(request), request.path_params["response_id"]
        await self._service.delete(tenant, response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        tenant, response_id = self._tenant(request), request.path_params["response_id"]
        return _json(await self._service.cancel(tenant, response_id))

    async def cache_report(self, request: Request) -> Response:
        tenant, response_id = self._tenant(request), request.path_params["response_id"]
        return _json(await self._service.cache_report(tenant, response_id))

    async def input_items(self, request: Request) -> Response:
        tenant, response_id = self._tenant(request), request.path_params["response_id"]
        items = await self._service.input_items(tenant, response_id)
        return _json(read_page(request, items))

    def _stream(self, source: EventSource, limits: Limits, unstored: Started | None = None) -> Response:
        """The events of a source as SSE."""

        async def produce(writer: SseWriter) -> None:
            try:
                with Waiter(source) as waiter, self._services.drain.until_cut(waiter.interrupt):
                    async for events in waiter:
                        await writer.write(b"".join(frame(e.data, e.type) for e in events))
            except EventsNotHeld as e:
                raise events_not_held(e.response_id) from e
            except CursorLost as e:
                raise BadRequest("The reader is too slow, its next events are not held any more.") from e

        return _EventStream(
            produce,
            unstored,
            ping_interval_s=limits.ping_interval_s,
            send_timeout_s=limits.send_timeout_s,
            on_error=_error_event,
        )

    def _tenant(self, request: Request) -> Tenant:
        return self._services.current.tenants.authenticate(request.headers.get("authorization"))


class _EventStream(SseResponse):
    """An answer that is not stored ends with its reader."""

    def __init__(
        self, produce: Callable[[SseWriter], Awaitable[None]], unstored: Started | None, **options: Any
    ) -> None:
        super().__init__(produce, **options)
        self._unstored = unstored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._unstored is not None:
                self._unstored.run.stop()


def _error_event(error: ApiError) -> bytes:
    """On SSE an error event is flat, and it stands outside the numbering."""
    event = {"type": "error", "sequence_number": 0, "code": error.code, "message": error.message, "param": error.param}
    return frame(to_json(event), "error")


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")
