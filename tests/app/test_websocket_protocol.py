"""A websocket's bytes: whatever a client sends and does not read, what is kept of it is bounded."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from app import websocket_protocol
from app.gateway import MAX_FRAME_BYTES, uvicorn_config
from app.websocket_protocol import MAX_PIECES, WebSocketProtocol
from tests.app.hostile_frames import CONTINUATION, PING, PONG, TEXT, frame

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Transport(asyncio.Transport):
    """Keeps what is written until it is read, as a socket does whose client is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def take(self) -> bytes:
        written, self.written = self.written, b""
        return written

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Connection:
    """An accepted connection, and what the application was given."""

    def __init__(self) -> None:
        self.received: list[str] = []

        async def app(scope, receive, send) -> None:
            assert (await receive())["type"] == "websocket.connect"
            await send({"type": "websocket.accept"})
            while (message := await receive())["type"] == "websocket.receive":
                self.received.append(message["text"])

        config = uvicorn_config(app)
        config.load()
        self.transport = Transport()
        self.protocol = WebSocketProtocol(config, ServerState(), {})
        self.protocol.connection_made(self.transport)

    async def open(self) -> "Connection":
        self.protocol.data_received(HANDSHAKE)
        await self.turn()
        assert self.transport.take().startswith(b"HTTP/1.1 101 ")
        return self

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def connection():
    connection = await Connection().open()
    yield connection
    connection.protocol.connection_lost(None)
    await connection.turn()


def pong(payload: bytes) -> bytes:
    return frame(PONG, payload, mask=None)


def closed_with(written: bytes) -> int:
    assert written[0] == 0x88
    return int.from_bytes(written[2:4])


async def test_of_pings_that_come_while_nothing_is_read_the_last_ones_are_answered(connection):
    connection.protocol.data_received(frame(PING, b"before"))
    assert connection.transport.take() == pong(b"before")
    connection.protocol.pause_writing()
    for number in range(1000):
        connection.protocol.data_received(frame(PING, b"%d" % number) + frame(PONG, b"unasked"))
    assert connection.transport.take() == b""
    assert connection.protocol.late_pong == pong(b"999")
    connection.protocol.resume_writing()
    assert connection.transport.take() == pong(b"999")
    connection.protocol.data_received(frame(PING, b"after"))
    assert connection.transport.take() == pong(b"after")


async def test_pings_of_one_read_are_answered_together(connection):
    connection.protocol.pause_writing()
    connection.protocol.data_received(frame(PING, b"1") + frame(PING, b"2"))
    connection.protocol.resume_writing()
    assert connection.transport.take() == pong(b"1") + pong(b"2")


async def test_a_message_has_so_many_pieces_and_no_more(connection):
    begin, empty = frame(TEXT, b"{", fin=False), frame(CONTINUATION, b"", fin=False)
    connection.protocol.data_received(begin + empty * (MAX_PIECES - 2) + frame(CONTINUATION, b"}"))
    await connection.turn()
    assert connection.received == ["{}"]
    connection.protocol.data_received(begin + empty * (MAX_PIECES - 1))
    assert connection.transport.take() == b""
    connection.protocol.data_received(empty * 2)
    assert closed_with(connection.transport.take()) == 1009
    connection.protocol.data_received(begin + empty * 10 + frame(PING, b""))
    assert connection.protocol.frames == []
    assert connection.transport.take() == b""


async def test_what_is_no_utf8_is_one_line_in_the_log(connection, caplog):
    caplog.set_level("INFO", websocket_protocol.__name__)
    smile = "😀".encode()
    connection.protocol.data_received(frame(TEXT, smile[:2], fin=False) + frame(CONTINUATION, smile[2:]))
    await connection.turn()
    assert connection.received == ["😀"], "a character may lie in two pieces"
    connection.protocol.data_received(frame(TEXT, b"abc" + smile[:2]))
    assert closed_with(connection.transport.take()) == 1007
    (record,) = [record for record in caplog.records if record.name == websocket_protocol.__name__]
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert record.getMessage().endswith("1007 no UTF-8: unexpected end of data at byte 3")


@pytest.mark.parametrize("is_quiet", [True, False])
async def test_who_is_refused_can_read_why_before_the_connection_is_closed(connection, monkeypatch, is_quiet):
    """What it still sends is thrown away; the connection is closed once it sends nothing, or at last."""
    timers = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        loop, "call_later", lambda delay, call, *args: timers.append((call, args)) or loop.call_soon(id, 0)
    )
    large = frame(TEXT, b"x" * (MAX_FRAME_BYTES + 1))
    connection.protocol.data_received(large[:100])
    assert closed_with(connection.transport.take()) == 1009
    for _ in range(3):
        connection.protocol.data_received(large[100:] + frame(TEXT, b"{}"))
        call, args = timers.pop()
        call(*args)
        assert not connection.transport.is_closed
    call, (latest,) = timers.pop()
    if is_quiet:
        call(latest)
    else:
        connection.protocol.data_received(b"more")
        call(loop.time())
    assert connection.transport.is_closed
    assert connection.received == []


async def test_a_message_of_the_largest_size_is_taken(connection):
    connection.protocol.data_received(frame(TEXT, b"x" * MAX_FRAME_BYTES))
    await connection.turn()
    assert connection.received == ["x" * MAX_FRAME_BYTES]


def test_the_gateway_is_served_with_it() -> None:
    config: uvicorn.Config = uvicorn_config(None)
    config.load()
    assert issubclass(config.ws_protocol_class, WebSocketProtocol)
