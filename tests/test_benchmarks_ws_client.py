"""The websocket client of the load generator, against the `websockets` package's server."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from websockets.sync.server import ServerConnection, serve

from benchmarks.ws_client import TEXT, Closed, WsClient, masked_frame

LENGTHS = (0, 125, 126, 65535, 65536, 300_000)


@contextmanager
def serving(endpoint: object) -> Iterator[int]:
    with serve(endpoint, "127.0.0.1", 0, compression=None, max_size=None) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.socket.getsockname()[1]
        server.shutdown()
        thread.join()


def receive_all(client: WsClient) -> tuple[list[bytes], int | None]:
    """Everything up to the close, and its code."""
    frames: list[bytes] = []
    try:
        while True:
            frames += client.receive()
    except Closed as e:
        return frames, e.code


def test_messages_of_any_length_come_back_and_pings_are_answered() -> None:
    def endpoint(connection: ServerConnection) -> None:
        for message in connection:
            connection.ping(b"are you there?").wait()
            connection.send(message)
            if not message:
                break
        connection.close(4000)

    texts = ["ü" * (length // 2) for length in LENGTHS if length]
    with serving(endpoint) as port:
        client = WsClient("127.0.0.1", port, source="127.0.0.2")
        got: list[bytes] = []
        for text in texts:
            client.send(text)
            while len(got) == 0 or got[-1] != text.encode():
                got += client.receive()
        client.send("")
        assert receive_all(client) == ([b""], 4000)
        client.close()
    assert [frame.decode() for frame in got] == texts


def test_what_is_no_websocket_is_refused_with_what_it_said() -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 5\r\n\r\nlater")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        with pytest.raises(RuntimeError, match=r"expected 101, got b'HTTP/1\.1 429"):
            await asyncio.to_thread(WsClient, "127.0.0.1", server.sockets[0].getsockname()[1])
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_the_example_of_a_masked_frame_in_the_rfc() -> None:
    frame = masked_frame(TEXT, b"Hello", bytes.fromhex("37fa213d"))
    assert frame.hex() == "818537fa213d7f9f4d5158"
