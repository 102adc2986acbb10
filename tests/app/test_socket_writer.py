"""Frames to clients that read, that take nothing, and that have gone."""

import asyncio
from collections.abc import Iterable

import pytest
from starlette.websockets import WebSocketDisconnect

from app import socket_writer
from app.conversation import Close
from app.socket_writer import SocketWriter


class Socket:
    """What a websocket and the frames under it are to the writer. `error`: what closing raises; with None it takes what
    it is given; `is_stuck`: it takes nothing."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, *, is_stuck: bool = False
    ) -> None:
        self.taken: list[bytes | tuple[int, str]] = []
        self.error = error
        self.is_stuck = is_stuck
        monkeypatch.setattr(socket_writer.FrameSocket, "of", lambda websocket: websocket)

    @property
    def is_writable(self) -> bool:
        return not self.is_stuck

    def send_now(self, texts: Iterable[bytes]) -> None:
        self.taken += texts

    async def send_text(self, text: bytes, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            if self.is_stuck:
                await asyncio.get_running_loop().create_future()
        self.taken.append(text)

    async def close(self, code: int, reason: str) -> None:
        if self.is_stuck:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        self.taken.append((code, reason))


def over(socket: Socket, timeout_s: float = 60.0) -> SocketWriter:
    return SocketWriter(socket, timeout_s)  # type: ignore[arg-type]


async def test_it_sends_text_at_once_and_in_its_turn_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = Socket(monkeypatch)
    writer = over(socket)
    assert writer.can_send
    writer.send_now([b"1", b"2"])
    await writer.send("ä".encode())
    await writer.close(Close(1001, "bye"))
    assert socket.taken == [b"1", b"2", "ä".encode(), (1001, "bye")]


async def test_a_client_that_takes_nothing_is_waited_for_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = over(Socket(monkeypatch, is_stuck=True), timeout_s=0.0)
    assert not writer.can_send
    with pytest.raises(TimeoutError):
        await writer.send(b"x")


@pytest.mark.parametrize("error", [WebSocketDisconnect(1005), RuntimeError("Unexpected ASGI message")])
async def test_a_client_that_has_gone(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    socket = Socket(monkeypatch, error)
    await over(socket).close(Close(1001, "bye"))
    assert socket.taken == []


async def test_nobody_waits_long_for_a_close_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_writer, "CLOSE_TIMEOUT_S", 0.0)
    await over(Socket(monkeypatch, is_stuck=True)).close(Close(1001, "bye"))
