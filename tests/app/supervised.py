"""The whole server as `trunkline serve` starts it, supervised by the test, with scripted engines."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from app import serve
from app.child import ChildSpec
from app.serve import ServeOptions, children, is_ready, listen, locked, runtime_dir
from engine.config import EngineConfig
from tests.scripted_engine import make_byte_model

REPOSITORY = Path(__file__).parent.parent.parent
GUARD_S = 600
"""Against hanging; on a busy machine everything may stand still for minutes."""


def options(tmp_path: Path, **changes: object) -> ServeOptions:
    model = make_byte_model(tmp_path / "model")
    engine = EngineConfig(model_dir="")
    return dataclasses.replace(ServeOptions(model.path, tmp_path / "state", engine, port=0), **changes)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    """Asks again and again: other processes tell nobody. The time only guards against hanging."""
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Running:
    """The whole server on a free port, supervised by this test."""

    def __init__(self, tmp_path: Path, stack: ExitStack, script: list[object], **changes: object) -> None:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        self.options = options(tmp_path, port=listener.getsockname()[1], **changes)
        self.folder = stack.enter_context(runtime_dir())
        lock_fd = stack.enter_context(locked(self.options.state_dir / "valkey"))
        script_path = tmp_path / "script.json"
        script_path.write_text(json.dumps(script))
        specs = children(self.options, listener, self.folder, lock_fd)
        self.specs = [self._scripted(spec, script_path) for spec in specs]
        self.reports: list[str] = []
        self.task = asyncio.create_task(serve.supervise(self.specs, self.options, self.reports.append, listener))
        self.client = httpx.AsyncClient(base_url=self.options.url, timeout=GUARD_S, trust_env=False)

    def _scripted(self, spec: ChildSpec, script: Path) -> ChildSpec:
        """The same child, but an engine is a scripted one."""
        if "gateway" in spec.name:
            return dataclasses.replace(spec, environment=environment(spec))
        if "engine" not in spec.name:
            return spec
        address = json.loads(spec.command[-1])["address"]
        command = [sys.executable, "-m", "tests.scripted_engine", "--address", address, "--script", str(script)]
        command += ["--model-dir", str(self.options.model_dir)]
        return dataclasses.replace(spec, command=command, environment=environment())

    async def ready(self) -> None:
        await until(lambda: any(r.startswith("ready: ") for r in self.reports) or self.task.done())
        assert not self.task.done(), self.reports
        async with asyncio.timeout(GUARD_S):
            while not await is_ready(self.options.url):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def chat(self) -> str:
        """Asks again as long as the gateway that it comes to says that no engine is there yet."""
        body = {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}]}
        async with asyncio.timeout(GUARD_S):
            while (response := await self.client.post("/v1/chat/completions", json=body)).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    def pids(self, word: str) -> list[int]:
        """Children of this process with this word in their command line."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                status, command = (entry / "stat").read_text(), (entry / "cmdline").read_text()
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == os.getpid() and word in command:
                found.append(int(entry.name))
        return found


def environment(spec: ChildSpec | None = None) -> dict[str, str]:
    """The scripted engine is a module of the tests, which are in no installed package."""
    base = os.environ if spec is None or spec.environment is None else spec.environment
    return {**base, "PYTHONPATH": str(REPOSITORY)}


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Running]]:
    with ExitStack() as stack:
        running: list[Running] = []

        def start(*script: object, **changes: object) -> Running:
            running.append(Running(tmp_path, stack, list(script), **changes))
            return running[-1]

        yield start
        for server in running:
            await server.client.aclose()
            if not server.task.done():
                os.kill(os.getpid(), signal.SIGTERM)  # as a user would end it
            assert await server.task == 0
