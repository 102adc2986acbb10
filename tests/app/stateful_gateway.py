"""A gateway on a real port with a scripted engine and a real session store, in the test's own event loop."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from app.asgi import create_app
from app.config import AssistantConfig, FileConfig, GatewayConfig, TenantConfig, hash_key
from app.conversations import Conversations
from app.event_log import MemoryEventLog
from app.gateway import build_services, uvicorn_config
from app.idempotency import IdempotencyKeys
from app.lifetime import Later
from app.readers import Readers
from app.redis_commands import RedisCommands
from app.response_service import ResponseService
from app.responses import Responses
from app.send_once import SendOnce
from app.services import Services
from app.sessions import LEASE_MS, Sessions
from app.shared_log import SharedEventLog
from app.stateful import response_service
from engine.client import EngineClient
from engine.prepared import PreparedModel
from tests.app.session_store import SessionServer
from tests.scripted_engine import Pause, Script, ScriptedEngineClient, byte_model_info, make_byte_model

KEY_A = "key-of-tenant-a"
KEY_B = "key-of-tenant-b"
GUARD_S = 600
"""Against hanging; on a busy machine everything may stand still for minutes."""
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
SUPPORT = "You are the support desk of a small shop. Be brief and kind."

FILE_CONFIG = FileConfig(
    tenants=(
        TenantConfig(id="a", key_hashes=(hash_key(KEY_A),)),
        TenantConfig(id="b", key_hashes=(hash_key(KEY_B),)),
    ),
    assistants=(
        AssistantConfig(id="support", tenant="a", instructions=SUPPORT),
        AssistantConfig(id="everyones", shared=True, instructions="You are everyone's helper."),
    ),
)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@dataclass
class Gateway:
    port: int
    services: Services
    engine: ScriptedEngineClient
    service: ResponseService
    readers: Readers
    sessions: Sessions
    log: SharedEventLog
    near: MemoryEventLog
    commands: RedisCommands
    holds: contextlib.ExitStack
    """Lets go what a test holds, before the gateway ends: it waits for that, also after a test that failed."""

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, key: str | None = KEY_A) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=GUARD_S, trust_env=False)

    def socket(self, key: str | None = KEY_A, **options) -> connect:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        options = {"max_size": None, "open_timeout": GUARD_S, **options}
        return connect(
            f"ws://127.0.0.1:{self.port}/v1/responses",
            additional_headers=headers,
            compression=None,
            proxy=None,
            **options,
        )

    async def wait_no_runs(self) -> None:
        """Until no response runs."""
        async with asyncio.timeout(GUARD_S):
            while self.service.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running_gateway(
    store: SessionServer,
    script: Script,
    *,
    file_config: FileConfig = FILE_CONFIG,
    engine: EngineClient | None = None,
    model: PreparedModel | None = None,
    state_dir: Path | None = None,
    owner: str = "gateway-1",
    num_cached_tokens: int = 0,
    max_model_len: int = 4096,
    send_buffer_bytes: int | None = None,
    lease_ms: int = LEASE_MS,
    later: Later | None = None,
    **log_bounds,
) -> AsyncIterator[Gateway]:
    """`model`: in place of the byte model. `state_dir`: kept, and with it the secret of the scopes."""
    engine = engine or ScriptedEngineClient(
        byte_model_info(max_model_len=max_model_len), script, num_cached_tokens=num_cached_tokens
    )
    clock = log_bounds.pop("clock", asyncio.get_running_loop().time)
    with tempfile.TemporaryDirectory() as folder:
        state_dir = state_dir or Path(folder)
        cleanup = contextlib.AsyncExitStack()
        model = model or make_byte_model(Path(folder) / "model", max_model_len=max_model_len)
        config = GatewayConfig(model_dir=model.path, engine_addresses=("",), state_dir=state_dir, redis_url=store.url)
        services = build_services(config, file_config, engine)
        if later is not None:
            services = dataclasses.replace(services, later=later)
        stateful = response_service(
            services, store.url, owner=owner, lease_ms=lease_ms, grace_s=0, clock=clock, **log_bounds
        )
        state = await cleanup.enter_async_context(stateful)
        sender = SendOnce(state.service, IdempotencyKeys(state.commands))
        responses = Responses(services, state.service, sender)
        app = create_app(services, [*responses.routes(), *Conversations(services, state.conversations).routes()])
        listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        server = _Server(uvicorn_config(app, shutdown_s=5))
        serving = asyncio.create_task(server.serve([listener]))
        holds = contextlib.ExitStack()
        try:
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            port, s = listener.getsockname()[1], state
            yield Gateway(port, services, engine, s.service, s.readers, s.sessions, s.log, s.near, s.commands, holds)
        finally:
            holds.close()
            server.should_exit = True
            async with asyncio.timeout(GUARD_S):
                await serving
                await cleanup.aclose()
                await engine.close()
                await services.close()
            listener.close()


@functools.cache
def _event_models(is_websocket):
    return TypeAdapter(ResponsesServerEvent if is_websocket else ResponseStreamEvent)


def validate_event(event, *, is_websocket=False):
    """The event passes the SDK's model of its type."""
    _event_models(is_websocket).validate_python(event)


def slowly(text):
    """A script that says it byte by byte, so slowly that each is an event of its own, or nearly."""
    return lambda request: [item for byte in text.encode() for item in (byte, Pause(0.001))]


def body(text="Hi", /, **fields):
    return {"model": "byte-model", "input": text, **fields}


async def create(http, text="Hi", /, **fields):
    answer = await http.post("/v1/responses", json=body(text, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(http, text="Hi", /, **fields):
    """All events of a streamed response."""
    async with http.stream("POST", "/v1/responses", json=body(text, stream=True, **fields)) as answer:
        return await sse_events(answer)


async def sse_events(answer, most=None):
    """Up to `most` events of an event stream; each `event:` line repeats the type."""
    if answer.status_code != 200:
        await answer.aread()
        raise AssertionError(f"{answer.status_code}: {answer.text}")
    events, name = [], None
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
            assert name == events[-1]["type"]
            if most is not None and len(events) >= most:
                break
    return events


async def resume(http, response_id, after):
    async with http.stream("GET", f"/v1/responses/{response_id}?stream=true&starting_after={after}") as answer:
        return await sse_events(answer)


async def send(ws: ClientConnection, **message):
    await ws.send(json.dumps(message))


async def send_create(ws, text="Hi", /, **fields):
    await send(ws, type="response.create", **body(text, **fields))


async def receive(ws):
    async with asyncio.timeout(GUARD_S):
        return json.loads(await ws.recv())


async def receive_until(ws, stop=lambda e: e["type"] in (*TERMINAL, "error")):
    events = []
    while not (events and stop(events[-1])):
        events.append(await receive(ws))
    return events


async def receive_until_closed(ws):
    """What still came, and the code that the server closed with; None where the connection was lost."""
    events = []
    try:
        while True:
            events.append(await receive(ws))
    except ConnectionClosed as e:
        return events, e.rcvd.code if e.rcvd else None


def output_text(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def deltas(events):
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


def assert_contiguous(events, first=0):
    assert [e["sequence_number"] for e in events] == list(range(first, first + len(events)))


def prompt_of(engine, index=-1):
    """What the engine was asked to continue, as text; control tokens as their names."""
    names = {256: "<|im_start|>", 257: "<|im_end|>", 258: "<|endoftext|>"}
    ids = engine.requests[index].prompt_ids
    return b"".join(names[i].encode() if i in names else bytes([i]) for i in ids).decode()
