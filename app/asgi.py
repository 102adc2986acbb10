"""The gateway as an ASGI application: routes, middleware, and what becomes of errors."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from app.admin import Admin
from app.callers import TicketRoutes
from app.chat_completions import ChatCompletions
from app.completions import Completions
from app.drain import UnderWay
from app.errors import ApiError, from_status
from app.middleware import OriginGuard, RequestContext
from app.models import Models
from app.openapi import OpenApi
from app.services import Services
from app.sse import error_response

CLIENT_CLOSED_REQUEST = 499
"""Never seen by anybody but the counters."""


def create_app(services: Services, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """`routes`: those of the stateful APIs and of the page, which bring services of their own."""
    parts = (
        Admin(services),
        Models(services),
        TicketRoutes(services),
        ChatCompletions(services),
        Completions(services),
        OpenApi(),
    )
    app = Starlette(
        routes=[*(route for part in parts for route in part.routes()), *routes],
        middleware=[
            Middleware(UnderWay, drain=services.drain),
            Middleware(RequestContext, metrics=services.metrics),
            Middleware(OriginGuard, live=services.live),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_exception,
            ClientDisconnect: _client_disconnect,
            Exception: _bug,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return error_response(error)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    if error.status_code == 404:
        message = f"There is no {request.method} {request.url.path[:200]} here."
    else:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    answer = from_status(error.status_code, message)
    answer.headers |= dict(error.headers or {})
    return error_response(answer)


async def _client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _bug(request: Request, error: Exception) -> Response:
    """The client learns nothing of it; the server logs it with its traceback, since Starlette raises it again."""
    return error_response(ApiError("The server failed to answer this request."))
