"""What wraps every connection. Pure ASGI: nothing stands between a client's going and the work it asked for."""

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError
from app.live_config import LiveConfig
from app.metrics import Metrics
from app.sse import error_response

_EXTRAS = "trunkline.extras"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this (lower case) name."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


@dataclass(eq=False, slots=True)
class Extras:
    """What a route wants beside its answer."""

    headers: dict[str, str] = field(default_factory=dict)
    """To be sent with the answer, whatever it is."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when the request is over: answered, broken off, or failed."""


def extras_of(request: Request) -> Extras:
    extras = request.scope[_EXTRAS]
    assert isinstance(extras, Extras)
    return extras


class RequestContext:
    """Gives each HTTP request an id (the client's, if it is harmless), echoes it and counts the answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id") or ""
        extras = scope[_EXTRAS] = Extras()
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = {"x-request-id": request_id, **extras.headers}
                encoded = [(name.encode(), value.encode()) for name, value in more.items()]
                message["headers"] = [*message.get("headers", ()), *encoded]
                route = getattr(scope.get("route"), "path", "other")  # few labels: never the path as it was sent
                self._metrics.http_requests.labels(scope["method"], route, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            for act in extras.at_end:
                act()


class OriginGuard:
    """Refuses browsers that come from a page of somebody else's, and requests whose Host header is no host."""

    def __init__(self, app: ASGIApp, live: LiveConfig) -> None:
        self._app = app
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] in ("http", "websocket"):
            error = self._live.current.origins.find_refusal(header(scope, b"host"), header(scope, b"origin"))
        if error is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await error_response(error)(scope, receive, send)
        else:
            await receive()  # websocket.connect
            await _deny(scope, receive, send, error)


async def _deny(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """A websocket is refused before it is accepted: with the status where the server can send one."""
    extensions: dict[str, Any] = scope.get("extensions") or {}
    if "websocket.http.response" in extensions:
        await error_response(error)(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008})
