"""Server-sent events for the load generator, however they are cut on their way."""

import asyncio

import pytest

from benchmarks.sse_client import SseClient

EVENTS = [b'{"type":"a"}', b'{"type":"b","text":"x"}', b'{"type":"c"}']
STREAM = (
    b"".join(b"event: e\ndata: %b\n\n" % event for event in EVENTS[:2])
    + b": ping\n\n"
    + b"data: "
    + EVENTS[2]
    + b"\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(size: int) -> bytes:
    parts = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


async def received(said: bytes, piece: int) -> list[bytes]:
    """What the client makes of it when it comes in pieces."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        for i in range(0, len(said), piece):
            writer.write(said[i : i + piece])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)

    def read() -> list[bytes]:
        client = SseClient("127.0.0.1", server.sockets[0].getsockname()[1])
        client.send("{}")
        events: list[bytes] = []
        try:
            while len(events) < len(EVENTS):
                events += client.receive()
        finally:
            client.close()
        return events

    try:
        return await asyncio.to_thread(read)
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("piece", [1, 11, 10_000])
async def test_events_come_out_whole(size: int, piece: int) -> None:
    assert await received(HEAD + chunked(size), piece) == EVENTS


async def test_another_status_is_an_error_with_its_body() -> None:
    with pytest.raises(RuntimeError, match="429"):
        await received(b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater", 1000)
