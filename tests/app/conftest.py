"""Fixtures that many of the gateway's tests share. A module that wants them otherwise has its own of the same name."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests import needs
from tests.app.clock import Clock
from tests.app.session_store import SessionServer, session_server
from tests.app.stateful_gateway import Gateway


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["embedded", "redis-server"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[SessionServer]:
    """The server that comes with us, and a real Redis: for what is sent to it."""
    async with session_server(needs.redis_server() if request.param == "redis-server" else None) as server:
        yield server


@pytest.fixture
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SessionServer]:
    """For a gateway. The embedded server, where a test is not marked `on_both_servers`."""
    is_other = getattr(request, "param", "embedded") == "redis-server"
    async with session_server(needs.redis_server() if is_other else None) as server:
        yield server


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the module's gateway."""
    async with gateway.http() as client:
        yield client
