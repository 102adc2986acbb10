"""docs/protocol.md is enough to write a client: its own example works, and so does a client that knows nothing else."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.app.session_store import SessionServer
from tests.app.stateful_gateway import GUARD_S, KEY_A, Gateway, running_gateway
from tests.app.timers import Timers
from tests.scripted_engine import Pause, Script

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
IN_TWO: Script = lambda request: [b"It is on", Pause(), b" its way."]  # noqa: E731


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.fixture
async def gateway(store: SessionServer, timers: Timers) -> AsyncIterator[Gateway]:
    async with running_gateway(store, IN_TWO, later=timers.later) as gateway:
        yield gateway


# ---- the example


class Example:
    """The code of the document, as it stands; `at_half` is called when it has read the first half of the answer."""

    def __init__(self) -> None:
        code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
        assert code is not None
        self.names: dict[str, Any] = {}
        exec(compile(code[1], "protocol.md", "exec"), self.names)
        self.names["PAUSE_S"] = 0.0
        self.names["json"] = self
        self.names["connect"] = self._connect
        self.sockets: list[Any] = []
        self.at_half: Callable[[], None] = lambda: None
        self.dumps = json.dumps

    def _connect(self, *args: Any, **options: Any) -> Any:
        self.sockets.append(connect(*args, **options))
        return self.sockets[-1]

    def loads(self, frame: str) -> Any:
        event = json.loads(frame)
        if event.get("delta") == "It is on":
            self.at_half()
        return event

    async def ask(self, gateway: Gateway, key: str = KEY_A) -> Any:
        url = f"ws://127.0.0.1:{gateway.port}/v1/responses"
        return await self.names["ask"](url, key, "byte-model", "Where is my parcel?")


@pytest.mark.parametrize("way", ["the network breaks", "the connection is too old", "the server drains"])
async def test_the_example_goes_on_after_a_lost_connection(gateway: Gateway, timers: Timers, way: str) -> None:
    example = Example()

    def lose() -> None:
        if way == "the network breaks":
            example.sockets[0].connection.transport.abort()
        elif way == "the server drains":
            gateway.services.drain.begin()
        else:
            timers.first()
            timers.first()
        gateway.engine.release()

    example.at_half = lose
    assert await example.ask(gateway) == ("completed", "It is on its way.")
    assert len(gateway.engine.requests) == 1
    assert len(example.sockets) == (1 if way == "the server drains" else 2)


async def test_the_example_says_what_is_wrong_with_its_key(gateway: Gateway) -> None:
    with pytest.raises(InvalidStatus, match="401"):
        await Example().ask(gateway, key="none of ours")


# ---- a client that knows the document only


class PlainClient:
    """Lanes on one connection, which is opened again whenever it is lost; each answer goes on where it was."""

    ENDS = ("response.completed", "response.incomplete", "response.failed")

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key
        self._socket: ClientConnection | None = None
        self.answers: dict[str, list[dict[str, Any]]] = {}
        """Events by lane."""
        self.errors: list[dict[str, Any]] = []
        self.reconnects: list[str] = []
        self.closed_with: list[int | None] = []

    async def __aenter__(self) -> "PlainClient":
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def open(self) -> None:
        self._socket = await connect(self._url, additional_headers={"Authorization": f"Bearer {self._key}"}, proxy=None)

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def send(self, **message: Any) -> None:
        assert self._socket is not None
        await self._socket.send(json.dumps(message))

    async def ask(self, lane: str, text: str, **fields: Any) -> None:
        self.answers[lane] = []
        await self.send(type="response.create", model="byte-model", input=text, stream_id=lane, **fields)

    def text(self, lane: str) -> str:
        return "".join(e["delta"] for e in self.answers[lane] if e["type"] == "response.output_text.delta")

    def response(self, lane: str) -> dict[str, Any]:
        response: dict[str, Any] = self.answers[lane][-1]["response"]
        return response

    def has_ended(self, lane: str) -> bool:
        return bool(self.answers[lane]) and self.answers[lane][-1]["type"] in self.ENDS

    async def read_until(self, condition: Callable[[], bool]) -> None:
        """Takes in what comes; after a lost connection it opens another one and resumes what had begun."""
        while not condition():
            assert self._socket is not None
            try:
                event = json.loads(await self._socket.recv())
            except ConnectionClosed as e:
                self.closed_with.append(e.rcvd.code if e.rcvd else None)
                await self.open()
                for lane, events in self.answers.items():
                    if events and not self.has_ended(lane):
                        await self.send(
                            type="response.resume",
                            response_id=events[0]["response"]["id"],
                            starting_after=events[-1]["sequence_number"],
                            stream_id=lane,
                        )
                continue
            if event["type"] == "error":
                self.errors.append(event)
            elif event["type"] == "reconnect":
                self.reconnects.append(event["reason"])
            else:
                events = self.answers[event["stream_id"]]
                assert event["sequence_number"] == len(events), "each number once, and none is missing"
                events.append(event)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[PlainClient]:
    async with PlainClient(f"ws://127.0.0.1:{gateway.port}/v1/responses", KEY_A) as client:
        yield client


async def test_lanes_side_by_side_go_on_over_a_new_connection(
    gateway: Gateway, timers: Timers, client: PlainClient
) -> None:
    for lane in ("left", "right"):
        await client.ask(lane, "Where is my parcel?", client_message_id=f"message-{lane}")
    await client.read_until(lambda: all(client.text(lane) == "It is on" for lane in client.answers))
    timers.first()
    timers.first()
    await client.read_until(lambda: client.closed_with != [])
    assert (client.reconnects, client.closed_with) == (["lifetime"], [1012])
    gateway.engine.release()
    await client.read_until(lambda: all(map(client.has_ended, client.answers)))
    for lane in client.answers:
        assert (client.text(lane), client.response(lane)["status"]) == ("It is on its way.", "completed")
    # the same message once more is the same answer, from its first event
    before = client.answers["left"]
    await client.ask("left", "Where is my parcel?", client_message_id="message-left")
    await client.read_until(lambda: client.has_ended("left"))
    assert client.answers["left"] == before
    assert len(gateway.engine.requests) == 2


async def test_turns_branches_and_a_cancel(gateway: Gateway, client: PlainClient) -> None:
    gateway.engine.core.script = lambda request: [b"Yes."]
    await client.ask("chat", "One?")
    await client.read_until(lambda: client.has_ended("chat"))
    first = client.response("chat")["id"]
    for text in ("Two?", "Another two?"):  # the second one is a branch
        await client.ask("chat", text, previous_response_id=first)
        await client.read_until(lambda: client.has_ended("chat"))
        assert client.response("chat")["previous_response_id"] == first
    gateway.engine.core.script = IN_TWO
    await client.ask("chat", "Three?")
    await client.read_until(lambda: client.text("chat") != "")
    await client.send(type="response.cancel", response_id=client.answers["chat"][0]["response"]["id"])
    await client.read_until(lambda: client.has_ended("chat"))
    assert client.answers["chat"][-1]["type"] == "response.incomplete"
    assert client.response("chat")["status"] == "cancelled"


async def test_what_is_not_stored_goes_on_on_its_own_connection_only(gateway: Gateway, client: PlainClient) -> None:
    gateway.engine.core.script = lambda request: [b"Yes."]
    await client.ask("chat", "One?", store=False)
    await client.read_until(lambda: client.has_ended("chat"))
    first = client.response("chat")["id"]
    await client.ask("chat", "Two?", store=False, previous_response_id=first)
    await client.read_until(lambda: client.has_ended("chat"))
    second = client.response("chat")["id"]
    await client.close()
    await client.open()
    await client.ask("chat", "Three?", previous_response_id=second)
    await client.read_until(lambda: client.errors != [])
    assert client.errors[0]["error"]["code"] == "previous_response_not_found"


async def test_mistakes_are_told_and_the_connection_goes_on(gateway: Gateway, client: PlainClient) -> None:
    gateway.engine.core.script = lambda request: [b"Yes."]
    await client.ask("chat", "Hm?", temperature="hot")
    await client.send(type="response.resume", response_id="resp_unknown", stream_id="chat")
    await client.read_until(lambda: len(client.errors) == 2)
    told = sorted((e["status"], e["stream_id"], e["error"]["code"]) for e in client.errors)
    assert [(status, lane) for status, lane, _ in told] == [(400, "chat"), (404, "chat")]
    assert all(set(e["error"]) == {"message", "type", "param", "code"} for e in client.errors)
    await client.ask("chat", "One?")
    await client.read_until(lambda: client.has_ended("chat"))
    assert client.closed_with == []


async def test_frames_that_are_none_of_ours_end_the_connection(gateway: Gateway) -> None:
    url = f"ws://127.0.0.1:{gateway.port}/v1/responses"
    for frame, code in ((b"binary", 1003), ('"' + "x" * 300_000 + '"', 1009)):
        client = PlainClient(url, KEY_A)
        await client.open()
        assert client._socket is not None
        await client._socket.send(frame)
        await client.read_until(lambda client=client: client.closed_with != [])  # type: ignore[misc]
        assert client.closed_with == [code]
        await client.close()


async def test_a_browser_connects_with_a_ticket_that_is_good_once(gateway: Gateway) -> None:
    headers = {"Authorization": f"Bearer {KEY_A}"}
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=GUARD_S, trust_env=False) as http:
        ticket = (await http.post("/v1/tickets")).json()["ticket"]
    url = f"ws://127.0.0.1:{gateway.port}/v1/responses"
    async with connect(url, subprotocols=["trunkline", ticket], proxy=None) as socket:
        assert socket.subprotocol == "trunkline"
        await socket.send(json.dumps({"type": "response.create", "model": "byte-model", "input": "Hi", "store": False}))
        assert json.loads(await socket.recv())["type"] == "response.created"
    with pytest.raises(InvalidStatus, match="401"):
        await connect(url, subprotocols=["trunkline", ticket], proxy=None)
    await asyncio.wait_for(gateway.engine.wait_idle(), 30)
