"""Whatever a client puts on a websocket: it is answered as the protocol says, and nothing of it stays."""

import asyncio
import collections
import contextlib
import gc
import json
import logging
import random
import tracemalloc
from dataclasses import dataclass, field

import psutil
import pytest

from tests.app.clean_log import clean_log
from tests.app.hostile_frames import CLOSE, PING, PONG, TEXT, HostileClient, Sent, frame, in_pieces
from tests.app.session_store import session_server
from tests.app.stateful_gateway import (
    KEY_A,
    TERMINAL,
    receive_until,
    running_gateway,
    send_create,
    validate_event,
)
from tests.scripted_engine import Pause

NUM_CLIENTS = 8
"""At once."""
FRAMES_OF_A_CLIENT = 24
HANDSHAKE = (
    "GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    f"Authorization: Bearer {KEY_A}\r\n\r\n"
).encode()


def answer(request):
    """Short, or long enough to be cancelled while it runs."""
    if b"slow" in bytes(token for token in request.prompt_ids if token < 256):
        return [item for byte in b"As slow as this." for item in (byte, Pause(0.005))]
    return list(b"Hi.")


@dataclass
class Account:
    """Of all that was sent and what came back."""

    num_frames: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    errors: collections.Counter[tuple[int, str | None]] = field(default_factory=collections.Counter)
    events: collections.Counter[str] = field(default_factory=collections.Counter)


class Wire:
    """One connection: writes bytes as they are, and checks everything that comes."""

    def __init__(self, reader, writer, client, account):
        self._reader, self._writer, self._client, self._account = reader, writer, client, account
        self._pongs = collections.deque()
        self._marks = asyncio.Queue()
        self._num_marks = 0
        self._unended = set()
        self._ended = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def send(self, sent: Sent):
        self._account.num_frames += sent.num_frames
        self._account.kinds[sent.kind] += 1
        self._pongs.extend(sent.pongs)
        for piece in in_pieces(self._client.chance, sent.data):
            self._writer.write(piece)
            await self._writer.drain()

    async def until_all_is_read(self):
        """Messages are read in order: what answers this one comes after whatever was wrong with those before it."""
        mark = f"mark-{self._num_marks}"
        self._num_marks += 1
        message = {"type": "response.resume", "response_id": "resp_none", "stream_id": mark}
        self._writer.write(frame(TEXT, json.dumps(message).encode()))
        assert await self._marks.get() == mark
        assert not self._pongs, f"{len(self._pongs)} pings were not answered"

    async def until_all_have_ended(self):
        """All answers that have begun to come."""
        while self._unended:
            self._ended.clear()
            await self._ended.wait()

    async def closed(self):
        """The code that the server closed with."""
        return await self._reading

    async def cut(self):
        self._writer.transport.abort()
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def close(self):
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _read(self):
        while True:
            opcode, payload = await self._frame()
            if opcode == CLOSE:
                return int.from_bytes(payload[:2]) if payload else None
            if opcode == PONG:
                assert payload == self._pongs.popleft()
            elif opcode == PING:
                self._writer.write(frame(PONG, payload))
            else:
                assert opcode == TEXT
                self._check(json.loads(payload))

    async def _frame(self):
        first, length = await self._reader.readexactly(2)
        assert first & 0xF0 == 0x80, "the server sends each message in one frame"
        if length >= 126:
            length = int.from_bytes(await self._reader.readexactly(2 if length == 126 else 8))
        return first & 0x0F, await self._reader.readexactly(length)

    def _check(self, event):
        if event["type"] == "error":
            lane = event.get("stream_id")
            if isinstance(lane, str) and lane.startswith("mark-"):
                self._marks.put_nowait(lane)
                return
            assert 400 <= event["status"] < 500, event
            assert set(event) <= {"type", "status", "error", "stream_id", "headers"}, event
            assert set(event["error"]) == {"message", "type", "param", "code"}, event
            self._account.errors[event["status"], event["error"]["code"]] += 1
            return
        self._account.events[event["type"]] += 1
        assert event["type"] != "response.failed", event
        if event["type"] == "response.created":
            validate_event(event, is_websocket=True)
            self._client.remember(event["response"]["id"])
            self._unended.add(event["response"]["id"])
        elif event["type"] in TERMINAL:
            self._unended.discard(event["response"]["id"])
            self._ended.set()


async def connect(gateway, client, account):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(HANDSHAKE)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    return Wire(reader, writer, client, account)


async def one_connection(gateway, client, account):
    wire = await connect(gateway, client, account)
    for _ in range(client.chance.randint(0, 2 * FRAMES_OF_A_CLIENT)):
        await wire.send(client.harmless())
    if client.chance.random() < 0.1:
        half = client.harmless().data
        await wire.send(Sent("cut in mid-frame", half[: client.chance.randint(1, len(half) - 1)]))
        await wire.cut()
    else:
        await wire.until_all_is_read()
        if client.chance.random() < 0.5:
            await wire.until_all_have_ended()
        deadly = client.deadly()
        with contextlib.suppress(ConnectionError):  # it may be closed before all of it was sent
            await wire.send(deadly)
        assert (deadly.kind, await wire.closed()) == (deadly.kind, deadly.close)
    await wire.close()


async def fuzz(gateway, client, account, num_frames):
    async def connections():
        while account.num_frames < num_frames:
            await one_connection(gateway, client, account)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(connections())
    await settled(gateway)


async def settled(gateway):
    """Until nothing runs and nobody is connected. Without a limit: a machine may be slow."""
    caps = gateway.services.caps
    while gateway.service.num_running or gateway.engine.num_running or caps.num_held("a", "connections"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def run(num_frames, *, seed):
    """Sends so many and checks that nothing of them is left; what was sent, and bytes resident and allocated after
    each tenth."""
    sizes, account = [], Account()
    client = HostileClient(random.Random(seed))
    async with session_server() as store, running_gateway(store, answer, total_bytes=1 << 20) as gateway:
        # as the log: full within the first tenth, so that what is bounded is not mistaken for what grows
        gateway.services.history._max_tenant_tokens = 2000
        before = {task.get_name() for task in asyncio.all_tasks()}
        with clean_log():
            for tenth in range(1, 11):
                await fuzz(gateway, client, account, num_frames * tenth // 10)
                gateway.engine.requests.clear()
                gateway.engine.aborted.clear()
                gc.collect()
                sizes.append((psutil.Process().memory_info().rss, tracemalloc.get_traced_memory()[0]))
            async with gateway.socket() as ws:
                await send_create(ws)
                assert (await receive_until(ws))[-1]["type"] == "response.completed"
            await settled(gateway)
            assert (await gateway.engine.stats()).blocks.referenced == 0
            left = {task.get_name() for task in asyncio.all_tasks()} - before
            assert not [name for name in left if name.startswith(("response ", "websocket", "lease"))], left
    return account, sizes


async def test_two_thousand_frames_right_and_wrong_are_answered_as_the_protocol_says():
    account, _ = await run(2_000, seed=32)
    for kind, least in {
        "right": 50,
        "wrong types": 200,
        "truncated": 100,
        "mutated": 100,
        "misframed": 5,
        "ping": 50,
    }.items():
        assert account.kinds[kind] >= least, account.kinds
    assert account.events["response.completed"] > 0
    assert {status for status, _ in account.errors} == {400, 404}


@pytest.mark.slow
async def test_a_hundred_thousand_frames_leave_nothing_and_memory_stays_flat(caplog):
    """Sizes are compared after the first tenth, when all caches are full, and after the last one."""
    caplog.set_level(logging.ERROR, "asyncio")  # it would keep a record for each write to a socket that has gone
    tracemalloc.start()
    try:
        account, sizes = await run(100_000, seed=33)
    finally:
        tracemalloc.stop()
    print(account, [(resident >> 10, allocated >> 10) for resident, allocated in sizes])
    (first_resident, first_allocated), (last_resident, last_allocated) = sizes[0], sizes[-1]
    assert last_allocated - first_allocated < 1 << 20, sizes
    assert last_resident - first_resident < 32 << 20, sizes
