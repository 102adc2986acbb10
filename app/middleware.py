"""What wraps every connection. Pure ASGI: nothing stands between a client's going and the work it asked for."""

import re
import uuid
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config import is_loopback, try_split
from app.errors import ApiError, Forbidden
from app.metrics import Metrics
from app.sse import error_response

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this (lower case) name."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


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
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                route = getattr(scope.get("route"), "path", "other")  # few labels: never the path as it was sent
                self._metrics.http_requests.labels(scope["method"], route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, send_with_id)


class OriginGuard:
    """Refuses browsers that come from a page of somebody else's, and requests whose Host header is no host.

    A page may speak to the host that served it, and a page of the configuration's origins may open a websocket: no CORS
    headers are sent, so that over HTTP a browser does not let it read the answers. On an open loopback server the Host
    header must name this machine too, or a foreign name that resolves to 127.0.0.1 would be let in.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str], *, is_open: bool) -> None:
        self._app = app
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed_origins)
        self._allowed_hosts = frozenset(urlsplit(origin).netloc for origin in self._allowed)
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.find_refusal(scope) if scope["type"] in ("http", "websocket") else None
        if error is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await error_response(error)(scope, receive, send)
        else:
            await receive()  # websocket.connect
            await _deny(scope, receive, send, error)

    def find_refusal(self, scope: Scope) -> ApiError | None:
        """Why this connection is refused; None if it is not."""
        host = (header(scope, b"host") or "").lower()
        parts = try_split(f"//{host}")
        if parts is None:
            return Forbidden("The Host header is no host.", code="host_not_allowed")
        if self._is_open and host and host not in self._allowed_hosts and not is_loopback(parts.hostname or ""):
            return Forbidden("An open server answers to loopback names only.", code="host_not_allowed")
        origin = header(scope, b"origin")
        if origin is None or origin.rstrip("/").lower() in self._allowed:
            return None
        origin_parts = try_split(origin)
        if origin_parts is not None and origin_parts.netloc.lower() == host and host:
            return None
        return Forbidden("This origin is not allowed here.", code="origin_not_allowed")


async def _deny(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """A websocket is refused before it is accepted: with the status where the server can send one."""
    extensions: dict[str, Any] = scope.get("extensions") or {}
    if "websocket.http.response" in extensions:
        await error_response(error)(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008})
