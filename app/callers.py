"""Who is at the other end of a connection, and where a browser gets a ticket that says so."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.websockets import WebSocket

from app.errors import Unauthorized
from app.live_config import Configured
from app.models import json_response
from app.services import Services
from app.tenants import Tenant, Tenants, digest_of
from app.tickets import TICKET_S

SUBPROTOCOL = "trunkline"
"""A websocket that brings a ticket names this first, and the ticket second."""


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: Tenant
    key: bytes | None
    """The digest of the key that it has shown, itself or for its ticket; None where none was asked for."""
    subprotocol: str | None = None
    """To be named when its websocket is accepted."""

    def again(self, tenants: Tenants) -> "Caller":
        """The same caller under the tenants of now. Raises Unauthorized if its key is not its tenant's any more."""
        tenant = tenants.tenant_of(self.key)
        if tenant.id != self.tenant.id:
            raise Unauthorized("The API key belongs to another tenant now: connect again.")
        return Caller(tenant, self.key, self.subprotocol)


async def admit(services: Services, configured: Configured, websocket: WebSocket) -> Caller:
    """Who wants to open this websocket, by the Authorization header or else by a ticket. Raises Unauthorized."""
    tenants, authorization = configured.tenants, websocket.headers.get("authorization")
    offered = websocket.scope.get("subprotocols", [])
    subprotocol = SUBPROTOCOL if SUBPROTOCOL in offered[:1] else None
    if authorization is None and subprotocol is not None and len(offered) > 1:
        key = await services.tickets.redeem(offered[1], tenants)
    else:
        key = digest_of(authorization, is_needed=not tenants.is_open)
    return Caller(tenants.tenant_of(key), key, subprotocol)


class TicketRoutes:
    """POST /v1/tickets: a ticket for the key in the Authorization header, or without one on an open server."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [Route("/v1/tickets", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        tenants = self._services.current.tenants
        key = digest_of(request.headers.get("authorization"), is_needed=not tenants.is_open)
        tenants.tenant_of(key)
        ticket = self._services.tickets.issue(None if tenants.is_open else key)
        answer = json_response(
            {
                "object": "ticket",
                "ticket": ticket.text,
                "subprotocol": SUBPROTOCOL,
                "expires_in": TICKET_S,
                "expires_at": ticket.expires_at,
            }
        )
        answer.headers["Cache-Control"] = "no-store"
        return answer
