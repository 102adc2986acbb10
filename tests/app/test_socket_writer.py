"""Frames to clients that read, that take nothing, and that have gone."""

import asyncio

import pytest
from starlette.websockets import WebSocketDisconnect

from app import socket_writer
from app.conversation import Close
from app.socket_writer import SocketWriter


class Socket:
    """`error`: what each call raises; with None it takes what it is given; `is_stuck`: it takes nothing."""

    def __init__(self, error: Exception | None = None, *, is_stuck: bool = False) -> None:
        self.taken: list[str | tuple[int, str]] = []
        self.error = error
        self.is_stuck = is_stuck

    async def _take(self, what: str | tuple[int, str]) -> None:
        if self.is_stuck:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        self.taken.append(what)

    async def send_text(self, text: str) -> None:
        await self._take(text)

    async def close(self, code: int, reason: str) -> None:
        await self._take((code, reason))


def over(socket: Socket, timeout_s: float = 60.0) -> SocketWriter:
    return SocketWriter(socket, timeout_s)  # type: ignore[arg-type]


async def test_it_sends_text_and_closes() -> None:
    socket = Socket()
    writer = over(socket)
    await writer.send("ä".encode())
    await writer.close(Close(1001, "bye"))
    assert socket.taken == ["ä", (1001, "bye")]


async def test_a_client_that_takes_nothing_is_waited_for_no_longer_than_that() -> None:
    with pytest.raises(TimeoutError):
        await over(Socket(is_stuck=True), timeout_s=0.0).send(b"x")


@pytest.mark.parametrize("error", [WebSocketDisconnect(1005), RuntimeError("Unexpected ASGI message")])
async def test_a_client_that_has_gone(error: Exception) -> None:
    writer = over(Socket(error))
    with pytest.raises(WebSocketDisconnect):
        await writer.send(b"x")
    await writer.close(Close(1001, "bye"))


async def test_nobody_waits_long_for_a_close_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_writer, "CLOSE_TIMEOUT_S", 0.0)
    await over(Socket(is_stuck=True)).close(Close(1001, "bye"))
