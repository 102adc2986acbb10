"""The real gateway (routes, sessions, event log, page) over a scripted engine, in a thread of its own."""

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import uvicorn

from app import page
from app.asgi import create_app
from app.config import FileConfig, GatewayConfig, load_file_config
from app.gateway import build_services, stateful_routes, uvicorn_config
from app.services import Services
from engine.protocol import AddRequest
from tests.app.session_store import session_server
from tests.scripted_engine import Item, ScriptedEngineClient, byte_model_info, make_byte_model

T = TypeVar("T")
GUARD_S = 60
MAX_MODEL_LEN = 32_768  # the demo assistants have 5,000 bytes, each a token of the byte model
NUM_CACHED_TOKENS = 5000


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the test run's


class RealGateway:
    """`start` and `stop`; in between the public methods are the test thread's."""

    def __init__(self, file_config: FileConfig | None = None) -> None:
        """`file_config`: in place of the demo assistants for everybody."""
        self.port = 0
        self._file_config = file_config or load_file_config(None)
        self.engine: ScriptedEngineClient | None = None
        self._services: Services | None = None
        self._script: list[Item] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def say(self, *items: Item) -> None:
        """What every request from now on is answered with."""
        self._script = list(items)

    def prompt(self, index: int = -1) -> str:
        """What the engine was asked to continue, its control tokens left out."""
        assert self.engine is not None
        return bytes(token for token in self.engine.requests[index].prompt_ids if token < 256).decode()

    def release(self) -> None:
        """Lets every request pass one Pause."""
        self._call(lambda engine: engine.release())

    def kill_engine(self) -> None:
        """Every running answer waits for the next one."""
        self._call(lambda engine: engine.die())

    def put_in_force(self, file_config: FileConfig) -> None:
        """As a reload does."""
        assert self._loop is not None

        async def put() -> None:
            assert self._services is not None
            live = self._services.live
            live.current = live.build(file_config)

        asyncio.run_coroutine_threadsafe(put(), self._loop).result(GUARD_S)

    def revive_engine(self) -> None:
        self._call(lambda engine: engine.revive())

    def start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="real gateway")
        self._thread.start()
        assert started.wait(GUARD_S), "the gateway did not start"

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive(), "the gateway did not stop"

    def _call(self, act: Callable[[ScriptedEngineClient], T]) -> T:
        assert self._loop is not None

        async def call() -> T:
            assert self.engine is not None
            return act(self.engine)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(GUARD_S)

    def _next(self, request: AddRequest) -> Iterable[Item]:
        return list(self._script)

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        info = byte_model_info(max_model_len=MAX_MODEL_LEN)
        self.engine = ScriptedEngineClient(info, self._next, num_cached_tokens=NUM_CACHED_TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            async with session_server() as store:
                model = make_byte_model(Path(folder) / "model", max_model_len=MAX_MODEL_LEN)
                config = GatewayConfig(
                    model_dir=model.path,
                    engine_addresses=("inproc://none",),
                    state_dir=Path(folder),
                    redis_url=store.url,
                )
                services = self._services = build_services(config, self._file_config, self.engine)
                async with stateful_routes(services) as routes:
                    app = create_app(services, [*routes, *page.routes()])
                    listener = socket.create_server(("127.0.0.1", 0))
                    self.port = listener.getsockname()[1]
                    self._server = _Server(uvicorn_config(app, shutdown_s=5))
                    started.set()
                    await self._server.serve(sockets=[listener])
                await self.engine.close()
                await services.close()
