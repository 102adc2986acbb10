"""The chat page: its document, its files, and the headers that keep what a model writes from running."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import PathLike, StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = Path(__file__).parent / "static"

# What may stand in a policy's host source. A Host header with anything else is left out of the policy.
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")

_POLICY: Mapping[str, str] = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Only DOMPurify's own policy may turn text into markup: a slip elsewhere throws instead of running.
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}


def content_policy(host: str) -> str:
    """The Content-Security-Policy for a page served as `host` (the Host header, "" when there is none).

    'self' covers ws: of the same origin in current browsers; older ones want it named, hence the host.
    """
    connect = "'self'"
    if _HOST.fullmatch(host):
        connect += f" ws://{host} wss://{host}"
    return "; ".join(f"{name} {value}" for name, value in {**_POLICY, "connect-src": connect}.items())


class PageHeaders:
    """Adds the page's headers to every answer of `app`, 304 and 404 included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        policy = content_policy(host.decode("latin-1"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = policy
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers["Permissions-Policy"] = "camera=(), geolocation=(), microphone=()"
                # The files have no hash in their names: a browser keeps them and asks with their ETag.
                headers["Cache-Control"] = "no-cache"
            await send(message)

        await self.app(scope, receive, send_with_headers)


class PageFiles(StaticFiles):
    """The page's folder. Modules have the one right type, whatever the machine's own table of types says."""

    def file_response(
        self, full_path: PathLike, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """The file, or 304 where the request's ETag or date still holds."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        if str(full_path).endswith(".js") and "content-type" in response.headers:
            response.headers["Content-Type"] = "text/javascript; charset=utf-8"
        return response


def routes() -> list[BaseRoute]:
    """`/` (the document) and `/static/*` (its modules and styles), each with the page's headers."""
    files = PageFiles(directory=STATIC)
    document = STATIC / "index.html"

    async def page(request: Request) -> Response:
        return files.file_response(document, document.stat(), request.scope)

    headers = [Middleware(PageHeaders)]
    return [
        Route("/", page, methods=["GET"], middleware=headers, include_in_schema=False),
        Mount("/static", files, middleware=headers),
    ]
