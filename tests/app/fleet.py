"""Gateways, engines and a Redis as real processes, each of which a test may kill, stop and start again by its name.

    async with fleet(tmp_path, script=[...], num_gateways=2, lease_ms=1000) as fleet:
        await fleet.kill("gateway-1")
        await fleet.start("gateway-1")

Names are gateway-1, gateway-2, …, engine-1, …. Unlike under the supervisor each gateway has a port of its own, so that
a test can say on which one something happens, and nothing is started again that the test did not start.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from websockets.asyncio.client import connect

from app.child import ChildSpec, send_signal, start_child
from app.config import GatewayConfig
from app.serve import is_ready, runtime_dir
from engine.protocol import EngineStats
from engine.zmq_client import ZmqEngineClient
from tests import needs
from tests.app.gateway_process import Failpoint, Settings
from tests.app.session_store import SessionServer, session_server
from tests.app.supervised import environment
from tests.scripted_engine import make_byte_model, release_request

GUARD_S = 600
"""Against hanging; other processes may be kept waiting for minutes on a busy machine."""


@dataclass
class Fleet:
    folder: Path
    """For logs, the model and what gateways share."""
    sockets: Path
    """Of engines: their paths must be short."""
    store: SessionServer
    num_gateways: int
    num_engines: int
    lease_ms: int
    engine_lease_s: float
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    num_lives: dict[str, int] = field(default_factory=dict)
    clients: dict[str, httpx.AsyncClient] = field(default_factory=dict)

    @property
    def gateways(self) -> list[str]:
        return [f"gateway-{i + 1}" for i in range(self.num_gateways)]

    @property
    def engines(self) -> list[str]:
        return [f"engine-{i + 1}" for i in range(self.num_engines)]

    # ---- lives

    async def start(self, name: str, failpoint: Failpoint | None = None) -> None:
        """Returns when it answers."""
        assert name not in self.processes, f"{name} runs"
        self.num_lives[name] = self.num_lives.get(name, 0) + 1
        spec = self._gateway(name, failpoint) if name in self.gateways else self._engine(name)
        self.processes[name] = await start_child(spec)
        if name in self.gateways:
            async with asyncio.timeout(GUARD_S):
                while not await is_ready(self.url(name)):
                    assert self.processes[name].returncode is None, self.log(name)
                    await asyncio.sleep(0.01)

    async def kill(self, name: str) -> None:
        """kill -9; nothing, if it has just ended."""
        send_signal(self.processes[name], signal.SIGKILL)
        await self.ended(name)

    async def ended(self, name: str) -> int:
        """Its exit code, when it has gone by itself."""
        async with asyncio.timeout(GUARD_S):
            code = await self.processes[name].wait()
        del self.processes[name]
        return code

    async def end(self, name: str) -> int:
        """SIGTERM; the exit code."""
        os.kill(self.processes[name].pid, signal.SIGTERM)
        return await self.ended(name)

    def stop(self, name: str) -> None:
        """SIGSTOP, until `go_on`."""
        os.kill(self.processes[name].pid, signal.SIGSTOP)

    def arm(self, name: str) -> None:
        """Its failpoint counts from now on."""
        os.kill(self.processes[name].pid, signal.SIGUSR1)

    def go_on(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGCONT)

    # ---- what a test asks of them

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def http(self, name: str) -> httpx.AsyncClient:
        """One for each gateway, of the fleet; each request has a connection of its own."""
        if name not in self.clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self.clients[name] = httpx.AsyncClient(
                base_url=self.url(name), timeout=GUARD_S, limits=limits, trust_env=False
            )
        return self.clients[name]

    def socket(self, name: str) -> connect:
        url = self.url(name).replace("http", "ws") + "/v1/responses"
        return connect(url, max_size=None, open_timeout=GUARD_S, ping_interval=None, compression=None, proxy=None)

    @contextlib.asynccontextmanager
    async def engine_client(self, name: str) -> AsyncIterator[ZmqEngineClient]:
        client = ZmqEngineClient(self._address(name))
        await client.start()
        try:
            async with asyncio.timeout(GUARD_S):
                await client.wait_ready()
            yield client
        finally:
            await client.close()

    async def stats(self, name: str) -> EngineStats:
        async with self.engine_client(name) as client:
            return await client.stats()

    async def release(self, name: str) -> None:
        """All that runs in this engine may pass one Pause."""
        async with self.engine_client(name) as client:
            number = self.num_lives[f"release of {name}"] = self.num_lives.get(f"release of {name}", 0) + 1
            with client.submit(release_request(number)) as stream:
                async for _ in stream:
                    pass

    @contextlib.asynccontextmanager
    async def releasing(self, name: str) -> AsyncIterator[None]:
        """Meanwhile nothing stands still in this engine for long."""

        is_over = asyncio.Event()

        async def release() -> None:
            while not is_over.is_set():
                await self.release(name)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_over.wait(), 0.05)

        task = asyncio.create_task(release())
        try:
            yield
        finally:
            is_over.set()
            await task  # not cancelled: a connection that is just being closed would be left half open

    def log(self, name: str) -> str:
        """Of all its lives."""
        lives = range(1, self.num_lives.get(name, 0) + 1)
        return "".join(self._log_path(name, life).read_text(errors="replace") for life in lives)

    # ---- inside

    def _log_path(self, name: str, life: int) -> Path:
        return self.folder / f"{name}.{life}.log"

    def _address(self, name: str) -> str:
        return f"ipc://{self.sockets}/{name}"

    def _engine(self, name: str) -> ChildSpec:
        command = [sys.executable, "-m", "tests.scripted_engine", "--address", self._address(name)]
        command += ["--script", str(self.folder / "script.json"), "--model-dir", str(self.folder / "model")]
        command += ["--lease-s", str(self.engine_lease_s)]
        return ChildSpec(name, command, environment(), log_path=self._log_path(name, self.num_lives[name]))

    def _gateway(self, name: str, failpoint: Failpoint | None) -> ChildSpec:
        config = GatewayConfig(
            port=self.ports[name],
            model_dir=self.folder / "model",
            engine_addresses=tuple(map(self._address, self.engines)),
            redis_url=self.store.url,
            state_dir=self.folder,
            has_siblings=True,
        )
        settings = msgspec.json.encode(Settings(self.lease_ms, failpoint)).decode()
        return ChildSpec(
            name,
            [sys.executable, "-m", "tests.app.gateway_process", settings],
            {**environment(), **config.environment(), "PYTHONPATH": environment()["PYTHONPATH"]},
            log_path=self._log_path(name, self.num_lives[name]),
        )


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [s.getsockname()[1] for s in sockets]


@contextlib.asynccontextmanager
async def fleet(
    folder: Path,
    script: Sequence[object],
    *,
    num_gateways: int = 2,
    num_engines: int = 1,
    lease_ms: int = 1500,
    engine_lease_s: float = 10.0,
    failpoints: dict[str, Failpoint] | None = None,
) -> AsyncIterator[Fleet]:
    """`script`: what every answer is, as `tests.scripted_engine` reads it."""
    make_byte_model(folder / "model")
    (folder / "script.json").write_text(json.dumps(list(script)))
    async with session_server(needs.redis_server()) as store:
        with runtime_dir() as sockets:
            all_of_it = Fleet(folder, sockets, store, num_gateways, num_engines, lease_ms, engine_lease_s)
            all_of_it.ports = dict(zip(all_of_it.gateways, _free_ports(num_gateways), strict=True))
            try:
                for name in all_of_it.engines:
                    await all_of_it.start(name)
                given = failpoints or {}
                await asyncio.gather(*(all_of_it.start(name, given.get(name)) for name in all_of_it.gateways))
                yield all_of_it
            finally:
                for client in all_of_it.clients.values():
                    await client.aclose()
                for name in list(all_of_it.processes):
                    await all_of_it.kill(name)
