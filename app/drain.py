"""How a gateway ends without cutting an answer: after its signal it takes nothing new, and goes when all has ended."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ShuttingDown


class Drain:
    """`begin`, then `run`. One for each gateway."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_under_way = 0
        self._is_cut = False
        self._on_begin: dict[object, Callable[[], None]] = {}
        self._on_cut: dict[object, Callable[[], None]] = {}
        self._ends: list[Callable[[float], Awaitable[None]]] = []

    @property
    def is_draining(self) -> bool:
        return self._begun.is_set()

    @property
    def is_cut(self) -> bool:
        """The time is over: what still runs has to end now, and say why."""
        return self._is_cut

    @property
    def num_under_way(self) -> int:
        """HTTP requests and websockets."""
        return self._num_under_way

    def check(self) -> None:
        """Before something new begins. Raises ShuttingDown."""
        if self.is_draining:
            raise ShuttingDown

    def begin(self) -> None:
        self._begun.set()
        for call in list(self._on_begin.values()):
            call()

    async def wait_begun(self) -> None:
        await self._begun.wait()

    async def run(self, timeout_s: float) -> None:
        """From `begin` on: until nothing is under way, or `timeout_s` are over and what is left has been told."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        await asyncio.gather(*(end(timeout_s) for end in self._ends))
        try:
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()
        except TimeoutError:
            self._is_cut = True
            for call in list(self._on_cut.values()):
                call()

    @contextmanager
    def watched(self, call: Callable[[], None], at_cut: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Has it called when the gateway is told to end, or at once if it has been; and `at_cut` when the time is
        over."""
        key = object()
        forget_cut = self.at_cut(at_cut)
        self._on_begin[key] = call
        if self.is_draining:
            call()
        try:
            yield
        finally:
            del self._on_begin[key]
            forget_cut()

    def at_cut(self, call: Callable[[], None]) -> Callable[[], None]:
        """Has it called when the time is over, until the returned function is called."""
        key = object()
        self._on_cut[key] = call
        return lambda: self._on_cut.pop(key, None) and None

    @contextmanager
    def until_cut(self, interrupt: Callable[[Exception], None]) -> Iterator[None]:
        """Has ShuttingDown passed to it when the time is over."""
        forget = self.at_cut(lambda: interrupt(ShuttingDown("The server ends before the answer does: resume it.")))
        try:
            yield
        finally:
            forget()

    def add_end(self, end: Callable[[float], Awaitable[None]]) -> None:
        """`end(timeout_s)` ends a part of the gateway: at once what has nothing to do, all else within the time."""
        self._ends.append(end)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """While something is answered."""
        self._num_under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self._idle.set()


class UnderWay:
    """ASGI middleware: counts what is answered. A gateway that ends keeps no connection for a further request."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._drain.is_draining:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        with self._drain.under_way():
            await self._app(scope, receive, send_last)
