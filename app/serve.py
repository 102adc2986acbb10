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
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from app.child import ChildSpec
from app.config import FileConfig, GatewayConfig, check_open_mode, load_file_config
from app.embedded_redis import EmbeddedRedis, find_server_program
from app.heartbeat import until_hung
from app.supervisor import Supervisor
from engine.config import EngineConfig
from engine.machine import available_cpus

MAX_OPEN_FILES = 65536
MAX_RUNTIME_DIR_BYTES = 60
"""A unix socket's whole path may have 107 bytes."""
LOCK_WAIT_S = 10.0
READY_POLL_S = 0.02
END_S = 10.0
"""A gateway that has drained, or whose time for it is over, has this long to end."""


class ServeError(Exception):
    """The server cannot be started; the message is one sentence for a person."""


@dataclass(frozen=True)
class ServeOptions:
    model_dir: Path
    state_dir: Path
    engine: EngineConfig
    """Without model_dir, address, kernels_dir and runtime_dir, which are known only here."""
    host: str = "127.0.0.1"
    port: int = 8000
    config_path: Path | None = None
    redis_url: str | None = None
    num_gateways: int = 1
    """0: only engines, for gateways elsewhere."""
    num_engines: int = 1
    engine_addresses: tuple[str, ...] = ()
    """Of engines that others start: ZeroMQ endpoints."""
    drain_timeout_s: float = 20.0
    """At the end, running answers have this long."""
    engine_listen: str | None = None
    """Where the engines started here listen: tcp://host:port, each further one a port higher; None: for this machine
    alone."""

    def __post_init__(self) -> None:
        """Raises ServeError for what could not serve anybody."""
        if self.num_gateways and not self.num_engines and not self.engine_addresses:
            raise ServeError("gateways need an engine: --engines 1, or --engine-address of one elsewhere")
        if not self.num_gateways and (self.engine_listen is None or not self.num_engines):
            raise ServeError("without gateways there must be engines that others can reach: give --engine-listen")
        if self.engine_listen is not None:
            _ = self.own_engine_addresses(Path())

    def own_engine_addresses(self, folder: Path) -> list[str]:
        """Of the engines that are started here; `folder`: for unix sockets. Raises ServeError."""
        if self.engine_listen is None:
            return [f"ipc://{folder}/engine{i or ''}.sock" for i in range(self.num_engines)]
        scheme, _, rest = self.engine_listen.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) <= 65536 - self.num_engines:
            raise ServeError(f"engines listen at tcp://host:port, got {self.engine_listen!r}")
        return [f"tcp://{host}:{int(port) + i}" for i in range(self.num_engines)]

    @property
    def engine_threads(self) -> int | None:
        """Of each engine, or each of its ranks: cores are dealt out."""
        if self.engine.threads is not None or self.num_engines < 2:
            return self.engine.threads
        return max(1, available_cpus() // (self.num_engines * self.engine.tensor_parallel))

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


def children(
    options: ServeOptions, listener: socket.socket | None, folder: Path, lock_fd: int | None
) -> list[ChildSpec]:
    """The database (unless there is a --redis-url), the engines, the gateways. Raises NoRedisError.

    `listener`: None where there is no gateway, and then there is no database; `folder`: for unix sockets; `lock_fd`: of
    the database's folder.
    """
    specs = []
    redis_url = options.redis_url
    if redis_url is None and listener is not None:
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
    addresses = options.own_engine_addresses(folder)
    for i, address in enumerate(addresses):
        engine = options.engine.replace(
            model_dir=str(options.model_dir),
            address=address,
            threads=options.engine_threads,
            kernels_dir=str(options.state_dir / "kernels"),
            runtime_dir=str(folder),
        )
        command = python("engine", msgspec.json.encode(engine).decode())
        specs.append(
            ChildSpec(
                _name("engine", i, options.num_engines),
                command,
                ends_with="engines",
                until_hung=partial(until_hung, reachable(address)),
            )
        )
    if listener is None:
        return specs
    gateway = GatewayConfig(
        host=options.host,
        port=options.port,
        listen_fd=listener.fileno(),
        model_dir=options.model_dir,
        engine_addresses=(*map(reachable, addresses), *options.engine_addresses),
        redis_url=redis_url,
        state_dir=options.state_dir,
        config_path=options.config_path,
        drain_timeout_s=options.drain_timeout_s,
        has_siblings=options.num_gateways > 1,
    )
    specs += [
        ChildSpec(
            _name("gateway", i, options.num_gateways),
            python("app.gateway"),
            environment=gateway.environment(),
            pass_fds=(listener.fileno(),),
            stop_timeout_s=gateway.drain_timeout_s + END_S,
            ends_with="gateways",
            takes_hangup=True,
        )
        for i in range(options.num_gateways)
    ]
    return specs


def _name(what: str, index: int, count: int) -> str:
    return f"the {what}" if count == 1 else f"{what} {index + 1}"


def reachable(address: str) -> str:
    """An address to connect to, for one that is listened at."""
    for anywhere, here in (("tcp://0.0.0.0:", "tcp://127.0.0.1:"), ("tcp://*:", "tcp://127.0.0.1:")):
        if address.startswith(anywhere):
            return here + address.removeprefix(anywhere)
    return address


def check_configuration(host: str, config_path: Path | None) -> FileConfig:
    """Raises ConfigError: better before a model is downloaded than from a child that is started again and again."""
    file_config = load_file_config(config_path)
    check_open_mode(host, file_config)
    return file_config


def serve(options: ServeOptions, report: Callable[[str], None]) -> int:
    """Runs the server until a signal comes; the exit code. Raises ServeError, NoRedisError."""
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(options.host, options.port)) if options.num_gateways else None
        folder = stack.enter_context(runtime_dir())
        lock_fd = None
        if options.redis_url is None and listener is not None:
            lock_fd = stack.enter_context(locked(options.state_dir / "valkey"))
        specs = children(options, listener, folder, lock_fd)
        return asyncio.run(supervise(specs, options, report, listener))


async def supervise(
    specs: list[ChildSpec],
    options: ServeOptions,
    report: Callable[[str], None],
    listener: socket.socket | None = None,
) -> int:
    """Until a signal comes; the exit code. `listener` is closed when it comes: several gateways accept nothing from
    then on, and who connects should learn it at once."""
    supervisor = Supervisor(specs, report=report, on_stop=() if listener is None else (listener.close,))
    supervisor.handle_signals()
    ready = asyncio.create_task(_report_ready(options, report), name="ready")
    try:
        return await supervisor.run()
    finally:
        ready.cancel()
        await asyncio.wait([ready])


async def _report_ready(options: ServeOptions, report: Callable[[str], None]) -> None:
    if not options.num_gateways:
        report(f"engines listen at {', '.join(options.own_engine_addresses(Path()))} (Ctrl-C ends them)")
        return
    while not await is_ready(options.url):  # noqa: ASYNC110 another process, which tells nobody when it is ready
        await asyncio.sleep(READY_POLL_S)
    report(f"ready: {options.url} (Ctrl-C ends it)")


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
