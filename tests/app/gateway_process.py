"""A gateway as a process of its own, whose leases may be short, and which may kill itself at one chosen place:

    python -m tests.app.gateway_process '{"lease_ms": 1000, "failpoint": {"place": "append", "text": "lamp"}}'

with the gateway's settings in the environment, as always. It is `app.gateway` but for what is put around the methods
named in `Place`; production has no such places.
"""

import asyncio
import contextlib
import enum
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import uvloop

from app.config import GatewayConfig
from app.gateway import serve
from app.ids import ResponseId
from app.response_node import ResponseNode
from app.services import Services
from app.sessions import LEASE_MS
from app.stateful import Stateful, response_service


class Place(enum.StrEnum):
    APPEND = "append"
    """Events get into the log in Redis; `text` is of one of them."""
    FINISH = "finish"
    """The end of a response is stored; `text` is of its answer."""
    TAKE = "take"
    """A response whose lease has run out is taken; without a text."""


class Failpoint(msgspec.Struct, frozen=True):
    place: Place
    text: str = ""
    is_after: bool = False
    """When Redis has done it and nobody knows yet; else before Redis hears of it."""
    waits_for_signal: bool = False
    """It is nothing before SIGUSR1 has come."""


class Settings(msgspec.Struct, frozen=True):
    lease_ms: int = LEASE_MS
    failpoint: Failpoint | None = None


def dying(
    method: Callable[..., Awaitable[Any]], failpoint: Failpoint, is_armed: asyncio.Event
) -> Callable[..., Awaitable[Any]]:
    """The method, but it kills this process when it is called about the failpoint's text."""

    async def run(argument: Any) -> Any:
        is_meant = is_armed.is_set() and failpoint.text in _text(argument)
        if is_meant and not failpoint.is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await method(argument)
        if is_meant:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return run


def _text(argument: Any) -> str:
    """Of appends or of a node; a response's id has none."""
    if isinstance(argument, ResponseNode):
        return "".join(item.text for item in argument.response.output)
    if isinstance(argument, ResponseId):
        return ""
    return "".join(event.data.decode() for append in argument for event in append.events)


def install(failpoint: Failpoint, state: Stateful) -> None:
    owner, name = {
        Place.APPEND: (state.log._far, "append"),
        Place.FINISH: (state.sessions, "finish"),
        Place.TAKE: (state.sessions, "try_take"),
    }[failpoint.place]
    is_armed = asyncio.Event()
    if failpoint.waits_for_signal:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, is_armed.set)
    else:
        is_armed.set()
    setattr(owner, name, dying(getattr(owner, name), failpoint, is_armed))


def opener(settings: Settings) -> Any:
    @contextlib.asynccontextmanager
    async def open_stateful(services: Services, redis_url: str, *, owner: str) -> AsyncIterator[Stateful]:
        async with response_service(services, redis_url, owner=owner, lease_ms=settings.lease_ms) as state:
            if settings.failpoint is not None:
                install(settings.failpoint, state)
            yield state

    return open_stateful


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(GatewayConfig.from_environment(), opener(settings)))


if __name__ == "__main__":
    main()
