"""The whole gateway over the scripted engine: uvicorn on loopback, everything on the test's own event loop."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.routing import BaseRoute

from app.asgi import create_app
from app.config import FileConfig, GatewayConfig, load_file_config
from app.gateway import build_services, following_configuration, uvicorn_config
from app.services import Services
from engine.client import EngineClient
from tests.scripted_engine import ScriptedEngineClient, make_byte_model

MODEL = "byte-model"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # signals are the test run's


@dataclass
class Gateway:
    services: Services
    engine: ScriptedEngineClient
    client: httpx.AsyncClient
    port: int

    async def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, content=data, headers=headers)

    async def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.post(CHAT, chat_body(content, **fields))

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The parsed data of a stream that must end with [DONE]."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        events = list(sse_data(response.content))
        assert events[-1] == "[DONE]"
        return [json.loads(e) for e in events[:-1]]

    async def stream_chat(self, content: Any = "hi", **fields: Any) -> list[Any]:
        return await self.stream(CHAT, chat_body(content, **fields))

    async def connect(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A plain socket that has sent `request`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        await writer.drain()
        return reader, writer


def chat_body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def http_request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def sse_data(raw: bytes) -> Iterator[str]:
    for event in raw.decode().split("\n\n"):
        for line in event.split("\n"):
            if line.startswith("data: "):
                yield line[6:]


def joined(chunks: Sequence[Any], index: int = 0) -> str:
    """The text of one choice of a chat stream."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") for c in choices)


def finish_reasons(chunks: Sequence[Any], index: int = 0) -> list[str]:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


def make_services(
    path: Path,
    engine: EngineClient,
    file_config: FileConfig | None = None,
    config_path: Path | None = None,
    **model: Any,
) -> Services:
    make_byte_model(path / "model", **model)
    config = GatewayConfig(
        model_dir=path / "model", engine_addresses=("inproc://none",), state_dir=path / "state", config_path=config_path
    )
    if file_config is None:
        file_config = FileConfig() if config_path is None else load_file_config(config_path)
    return build_services(config, file_config, engine)


@contextlib.asynccontextmanager
async def serving(
    path: Path,
    engine: ScriptedEngineClient | None = None,
    file_config: FileConfig | None = None,
    config_path: Path | None = None,
    routes: Sequence[BaseRoute] = (),
    send_buffer_bytes: int | None = None,
    **model: Any,
) -> AsyncIterator[Gateway]:
    """`path` is a folder of the test's own. Fails if the engine is not idle at the end.

    `config_path`: a file that the gateway follows.
    `send_buffer_bytes`: of the kernel, for each connection, so that a client that does not read is felt soon.
    """
    engine = engine or ScriptedEngineClient()
    services = make_services(path, engine, file_config, config_path, **model)
    server = _Server(uvicorn_config(create_app(services, routes), shutdown_s=5))
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.serve([listener]))
    try:
        following = following_configuration(services) if config_path else contextlib.nullcontext()
        async with (
            following,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
        ):
            yield Gateway(services, engine, client, port)
        await asyncio.wait_for(engine.wait_idle(), 30)
    finally:
        server.should_exit = True
        await task
        await engine.close()
        await services.close()


async def until(condition: Callable[[], bool], turns: int = 1_000_000) -> None:
    """Lets the event loop turn until the condition holds; the number only guards against hanging."""
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"not reached within {turns} turns of the loop")


@dataclass
class Recorder:
    """An ASGI `send` that keeps what it got."""

    messages: list[Any] = field(default_factory=list)

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)
