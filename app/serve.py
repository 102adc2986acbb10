"""What `trunkline serve` starts: which processes, with which settings, on which socket."""

import asyncio
import contextlib
import fcntl
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from app.child import ChildSpec
from app.config import FileConfig, GatewayConfig, check_open_mode, load_file_config
from app.embedded_redis import EmbeddedRedis, find_server_program
from app.supervisor import Supervisor
from engine.config import EngineConfig

MAX_OPEN_FILES = 65536
MAX_RUNTIME_DIR_BYTES = 60
"""A unix socket's whole path may have 107 bytes."""
LOCK_WAIT_S = 10.0
READY_POLL_S = 0.02


class ServeError(Exception):
    """The server cannot be started; the message is one sentence for a person."""


@dataclass(frozen=True)
class ServeOptions:
    model_dir: Path
    state_dir: Path
    engine: EngineConfig
    """Without model_dir, address and kernels_dir, which are known only here."""
    host: str = "127.0.0.1"
    port: int = 8000
    config_path: Path | None = None
    redis_url: str | None = None

    @property
    def url(self) -> str:
        """Where this machine itself reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def python(module: str, *arguments: str) -> list[str]:
    """-P: a folder named `app` or `engine` where the user happens to stand must not be taken for ours."""
    return [sys.executable, "-P", "-m", module, *arguments]


def listen(host: str, port: int) -> socket.socket:
    """Held by the supervisor and inherited by each gateway, so that clients of a gateway that restarts wait.

    Raises ServeError.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as e:
        raise ServeError(
            f"cannot listen on {host} port {port}: {e.strerror or e}; choose another with --port"
        ) from None
    listener.set_inheritable(True)
    return listener


@contextlib.contextmanager
def runtime_dir() -> Iterator[Path]:
    """A private folder for unix sockets, with a short path; removed at the end."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > MAX_RUNTIME_DIR_BYTES:
        base = "/tmp"
    path = Path(tempfile.mkdtemp(prefix="trunkline-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait_s: float = LOCK_WAIT_S) -> Iterator[int]:
    """Yields a file descriptor: whoever holds it (the database inherits it) keeps others out of `folder`.

    A database that is just ending is waited for. Raises ServeError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ServeError(
                        f"another trunkline uses {folder}: stop it, or give another folder with --state-dir"
                    ) from None
                time.sleep(0.05)
        yield fd
    finally:
        os.close(fd)


def children(options: ServeOptions, listener: socket.socket, folder: Path, lock_fd: int | None) -> list[ChildSpec]:
    """The database (unless there is a --redis-url), the engine, the gateway. Raises NoRedisError.

    `folder`: for unix sockets; `lock_fd`: of the database's folder.
    """
    specs = []
    redis_url = options.redis_url
    if redis_url is None:
        redis = EmbeddedRedis(find_server_program(), options.state_dir / "valkey", folder)
        redis_url = redis.url
        specs.append(
            ChildSpec(
                "the database",
                redis.command,
                pass_fds=() if lock_fd is None else (lock_fd,),
                log_path=options.state_dir / "valkey.log",
                before_start=redis.prepare,
                stop_timeout_s=10.0,
            )
        )
    engine = options.engine.replace(
        model_dir=str(options.model_dir),
        address=f"ipc://{folder}/engine.sock",
        kernels_dir=str(options.state_dir / "kernels"),
    )
    specs.append(ChildSpec("the engine", python("engine", msgspec.json.encode(engine).decode())))
    gateway = GatewayConfig(
        host=options.host,
        port=options.port,
        listen_fd=listener.fileno(),
        model_dir=options.model_dir,
        engine_address=engine.address,
        redis_url=redis_url,
        state_dir=options.state_dir,
        config_path=options.config_path,
    )
    specs.append(
        ChildSpec(
            "the gateway",
            python("app.gateway"),
            environment=gateway.environment(),
            pass_fds=(listener.fileno(),),
            stop_timeout_s=gateway.shutdown_s + 10.0,
            takes_hangup=True,
        )
    )
    return specs


def check_configuration(host: str, config_path: Path | None) -> FileConfig:
    """Raises ConfigError: better before a model is downloaded than from a child that is started again and again."""
    file_config = load_file_config(config_path)
    check_open_mode(host, file_config)
    return file_config


def serve(options: ServeOptions, report: Callable[[str], None]) -> int:
    """Runs the server until a signal comes; the exit code. Raises ServeError, NoRedisError."""
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(options.host, options.port))
        folder = stack.enter_context(runtime_dir())
        lock_fd = None
        if options.redis_url is None:
            lock_fd = stack.enter_context(locked(options.state_dir / "valkey"))
        specs = children(options, listener, folder, lock_fd)
        return asyncio.run(supervise(specs, options, report))


async def supervise(specs: list[ChildSpec], options: ServeOptions, report: Callable[[str], None]) -> int:
    supervisor = Supervisor(specs, report=report)
    supervisor.handle_signals()
    ready = asyncio.create_task(_report_ready(options.url, report), name="ready")
    try:
        return await supervisor.run()
    finally:
        ready.cancel()
        await asyncio.wait([ready])


async def _report_ready(url: str, report: Callable[[str], None]) -> None:
    while not await is_ready(url):  # noqa: ASYNC110 another process, which tells nobody when it is ready
        await asyncio.sleep(READY_POLL_S)
    report(f"ready: {url} (Ctrl-C ends it)")


async def is_ready(url: str) -> bool:
    """Whether the gateway at this address answers /ready with 200."""
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:
        return False
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


def _raise_file_limit() -> None:
    """Each chat is an open file; the usual soft limit of 1,024 would be the limit of chats."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
