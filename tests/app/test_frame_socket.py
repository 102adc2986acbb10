"""Text frames sent without a turn of the event loop: to a client that reads, one that does not, one that has gone."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import connect

from app.frame_socket import FrameSocket, text_frame
from app.gateway import uvicorn_config

LENGTHS = (0, 1, 125, 126, 65535, 65536, 200_000)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(endpoint: Callable[[WebSocket], Awaitable[None]]) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = _Server(uvicorn_config(Starlette(routes=[WebSocketRoute("/", endpoint)]), shutdown_s=1))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        await task


async def fill(frames: FrameSocket) -> None:
    """All buffers on the way to a client."""
    while True:
        await frames.send_text(b"x" * 65536, 0.05)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_length_of_a_frame_is_said_as_the_rfc_says(length: int) -> None:
    frame = text_frame(b"x" * length)
    head = {True: 2, False: 4 if length < 65536 else 10}[length < 126]
    assert (frame[0], frame[head:]) == (0x81, b"x" * length)
    said = frame[1] if head == 2 else int.from_bytes(frame[2:head], "big")
    assert (said, frame[1] & 0x80) == (length, 0), "a server does not mask"


async def test_texts_of_any_length_arrive_in_order_beside_what_asgi_sends() -> None:
    texts = ["ä" * (length // 2) + "x" * (length % 2) for length in LENGTHS]

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        frames = FrameSocket.of(websocket)
        await websocket.send_text("first")
        for text in texts:
            await frames.send_text(text.encode(), 30)
        frames.send_now([b"one", b"two"])
        await websocket.send_text("last")
        await websocket.close()

    async with serving(endpoint) as url, connect(url, max_size=None, proxy=None) as client:
        assert [text async for text in client] == ["first", *texts, "one", "two", "last"]


async def test_a_client_that_does_not_read_is_not_written_to_and_is_waited_for_no_longer_than_told() -> None:
    told: asyncio.Queue[object] = asyncio.Queue()
    may_end = asyncio.Event()

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        frames = FrameSocket.of(websocket)
        with pytest.raises(TimeoutError):
            await fill(frames)
        told.put_nowait(frames.is_writable)
        await may_end.wait()

    async with serving(endpoint) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[-1].rstrip("/")), limit=1024)
        writer.write(
            b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert await told.get() is False
        may_end.set()
        writer.close()


async def test_a_client_that_has_gone_is_no_longer_written_to() -> None:
    told: asyncio.Queue[object] = asyncio.Queue()

    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept()
        frames = FrameSocket.of(websocket)
        told.put_nowait(frames.is_writable)
        with pytest.raises(WebSocketDisconnect):
            await websocket.receive_text()
        told.put_nowait(frames.is_writable)
        with pytest.raises(WebSocketDisconnect):
            await frames.send_text(b"too late", 30)
        told.put_nowait("ended")

    async with serving(endpoint) as url:
        async with connect(url, proxy=None):
            assert await told.get() is True
        assert [await told.get(), await told.get()] == [False, "ended"]
