"""The client against a scripted engine in another process, and against a ROUTER that says wrong things."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.asyncio

from engine.client import EngineClient, ZmqEngineClient
from engine.errors import EngineDeadError
from engine.protocol import (
    END,
    PROTOCOL_VERSION,
    AbortRequests,
    Acknowledge,
    AddRequest,
    EngineReady,
    FinishReason,
    FromEngine,
    Hello,
    LastWords,
    Lease,
    RequestOutput,
    Scope,
    StatsQuery,
    StepOutputs,
    TenantShare,
    ToEngine,
    TrunkPin,
    TrunkState,
    decode_to_engine,
    encode,
)
from engine.sampling_params import SamplingParams
from engine.token_stream import TokenStream
from tests.scripted_engine import IM_END, byte_model_info, release_request


def request(request_id: str, text: str = "abc", **params: object) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_ids=list(text.encode()),
        params=SamplingParams(**{"max_tokens": None, "eos_token_ids": (IM_END,), **params}),  # type: ignore[arg-type]
        scopes=[Scope(END, b"test")],
    )


async def read(stream: TokenStream) -> RequestOutput:
    whole = await stream.next()
    async for more in stream:
        whole.merge(more)
    return whole


# ---- another process


class Child:
    def __init__(self, tmp_path: Path) -> None:
        self.address = f"ipc://{tmp_path}/e"
        self._script = tmp_path / "script.json"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, script: str | None = None) -> None:
        command = [sys.executable, "-m", "tests.scripted_engine", "--address", self.address]
        if script is not None:
            self._script.write_text(script)
            command += ["--script", str(self._script)]
        self._process = subprocess.Popen(command)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[Child]:
    child = Child(tmp_path)
    yield child
    child.kill()


@pytest.fixture
async def client(child: Child) -> AsyncIterator[ZmqEngineClient]:
    # such a lease never ends in a test: what is noticed is noticed by the connection alone
    client = ZmqEngineClient(child.address, lease_s=3600.0)
    await client.start()
    yield client
    await client.close()


def test_it_is_an_engine_client() -> None:
    client: EngineClient = ZmqEngineClient("ipc:///nowhere")
    assert not client.is_ready


async def test_chats_with_a_process(child: Child, client: ZmqEngineClient) -> None:
    with pytest.raises(EngineDeadError, match="not ready"):
        client.submit(request("a"))
    with pytest.raises(EngineDeadError):
        _ = client.info
    child.start()
    await client.wait_ready()
    assert client.info == byte_model_info()
    texts = {f"r{i}": f"stream {i} " * (i + 1) for i in range(16)}
    streams = {i: client.submit(request(i, text)) for i, text in texts.items()}
    for i, stream in streams.items():
        with stream:
            assert (await read(stream)).token_ids == [*texts[i].encode(), IM_END]
    stats = await client.stats()
    assert (stats.running, stats.blocks.referenced) == (0, 0)


async def test_an_id_in_use_is_refused_here(child: Child, client: ZmqEngineClient) -> None:
    child.start('[1, {"pause": null}]')
    await client.wait_ready()
    with client.submit(request("a")), pytest.raises(ValueError, match="'a' is in use"):
        client.submit(request("a"))


async def test_leaving_a_stream_aborts_at_the_engine(child: Child, client: ZmqEngineClient) -> None:
    child.start('[1, {"pause": null}, 2]')
    await client.wait_ready()
    with client.submit(request("a")) as stream:
        await stream.next()
        assert (await client.stats()).running == 1
    assert (await client.stats()).running == 0


async def test_death_fails_streams_and_the_next_life_serves(child: Child, client: ZmqEngineClient) -> None:
    child.start('["hi", {"pause": null}]')
    await client.wait_ready()
    first_epoch = client.epoch
    with client.submit(request("a")) as a, client.submit(request("b")) as b:
        await a.next()
        child.kill()
        with pytest.raises(EngineDeadError, match="gone"):
            await read(a)
        with pytest.raises(EngineDeadError):
            await read(b)
    assert not client.is_ready
    with pytest.raises(EngineDeadError):
        client.submit(request("c"))
    with pytest.raises(EngineDeadError):
        await client.stats()
    child.start()
    await client.wait_ready()
    assert client.epoch != first_epoch
    with client.submit(request("c")) as c:
        assert (await read(c)).token_ids == [*b"abc", IM_END]


async def test_what_had_arrived_before_death_is_complete(child: Child, client: ZmqEngineClient) -> None:
    child.start('["hi", {"pause": null}, {"die": "now"}]')
    await client.wait_ready()
    complete = client.submit(request("a", max_tokens=2))
    cut = client.submit(request("b"))
    while (await client.stats()).running != 1:
        pass
    client.submit(release_request())
    with pytest.raises(EngineDeadError):
        await read(cut)
    assert (await read(complete)).finish_reason == FinishReason.LENGTH


async def test_a_killed_gateway_leaves_no_request_behind(child: Child, client: ZmqEngineClient) -> None:
    """The other gateway is killed with SIGKILL: it says nothing. The engine lives and aborts what it had."""
    child.start('[1, {"pause": null}, {"pause": 0.001}, 2, 3, 4, 5, 6, 7, 8, 9]')
    await client.wait_ready()
    source = Path(__file__).with_name("gateway_that_waits.py")
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, str(source), child.address, stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    assert await gateway.stdout.readline() == b"streaming\n"
    assert (await client.stats()).running == 1
    gateway.send_signal(signal.SIGKILL)
    await gateway.wait()
    # its request is sent on its way: the engine finds nobody to send outputs to
    with client.submit(release_request()) as released:
        await read(released)
    while (await client.stats()).running != 0:
        pass


async def test_a_client_that_waits_sleeps(child: Child, client: ZmqEngineClient) -> None:
    """Another process that waits for its stream uses no more processor time than its lease needs."""
    child.start('[1, {"pause": null}]')
    await client.wait_ready()
    source = Path(__file__).with_name("gateway_that_waits.py")
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, str(source), child.address, stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    assert await gateway.stdout.readline() == b"streaming\n"
    watched = psutil.Process(gateway.pid)
    await asyncio.sleep(0.2)  # let it come to rest
    before = sum(watched.cpu_times()[:2])
    await asyncio.sleep(1.0)
    assert sum(watched.cpu_times()[:2]) - before <= 0.02  # two ticks of the kernel's clock
    gateway.kill()
    await gateway.wait()


async def test_pins_are_sent_again_to_each_new_engine(child: Child, client: ZmqEngineClient) -> None:
    waiting = asyncio.create_task(client.pin("t", list(range(20)), [Scope(END, b"assistant")]))
    child.start()
    assert await waiting == TrunkState("t", TrunkPin.PINNED, 20, 2)
    assert (await client.stats()).blocks.pinned == 1
    child.kill()
    child.start()
    await client.wait_ready()
    while True:
        with contextlib.suppress(EngineDeadError):  # the dead one is not missed at once
            await client.wait_ready()
            if (await client.stats()).blocks.pinned == 1:
                break
    await client.unpin("t")
    assert (await client.stats()).blocks.pinned == 0


async def test_shares_of_tenants_are_said_again_to_each_new_engine(child: Child, client: ZmqEngineClient) -> None:
    client.set_tenants([TenantShare(tenant="acme", weight=2.0)])
    child.start()
    await client.wait_ready()
    assert [t.tenant for t in (await client.stats()).tenants] == ["acme"]
    client.set_tenants([TenantShare(tenant="acme"), TenantShare(tenant="tiny")])
    assert [t.tenant for t in (await client.stats()).tenants] == ["acme", "tiny"]
    child.kill()
    child.start()
    while True:
        with contextlib.suppress(EngineDeadError):  # the dead one is not missed at once
            await client.wait_ready()
            if len((await client.stats()).tenants) == 2:
                break


async def test_closing_aborts_and_fails_what_runs(child: Child, client: ZmqEngineClient) -> None:
    child.start('[1, {"pause": null}]')
    await client.wait_ready()
    other = ZmqEngineClient(child.address)
    await other.start()
    await other.wait_ready()
    stream = other.submit(request("a"))
    await stream.next()
    await other.close()
    await other.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await stream.next()
    while (await client.stats()).running != 0:
        pass


# ---- a ROUTER that says what the test says


class FakeEngine:
    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._router: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._router.bind(address)
        self.peer = b""

    async def expect(self, kind: type[ToEngine]) -> ToEngine:
        """The next message of this kind; others are passed over."""
        while True:
            self.peer, data = await self._router.recv_multipart()
            message = decode_to_engine(data)
            if isinstance(message, kind):
                return message

    async def say(self, *messages: FromEngine | bytes) -> None:
        for message in messages:
            data = message if isinstance(message, bytes) else encode(message)
            await self._router.send_multipart([self.peer, data])

    async def welcome(self, epoch: str = "1", version: int = PROTOCOL_VERSION) -> None:
        await self.expect(Hello)
        await self.say(EngineReady(version, epoch, byte_model_info()))

    def close(self) -> None:
        self._router.close(0)


Make = Callable[..., Awaitable[ZmqEngineClient]]


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[tuple[FakeEngine, Make]]:
    address = f"ipc://{tmp_path}/e"
    context = zmq.asyncio.Context()
    engine = FakeEngine(context, address)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(context.term)
        stack.callback(engine.close)

        async def make(**settings: object) -> ZmqEngineClient:
            client = ZmqEngineClient(address, pause_after_fault_s=0.01, **settings)  # type: ignore[arg-type]
            stack.push_async_callback(client.close)
            await client.start()
            return client

        yield engine, make


@pytest.mark.parametrize(
    "wrong", [StepOutputs(3, []), StepOutputs(1, []), b"junk", b""], ids=["gap", "repeated", "junk", "empty"]
)
async def test_a_fault_of_the_engine_ends_the_connection(
    fake: tuple[FakeEngine, Make], wrong: FromEngine | bytes
) -> None:
    engine, make = fake
    client = await make()
    await engine.welcome()
    await client.wait_ready()
    stream = client.submit(request("a"))
    await engine.expect(AddRequest)
    await engine.say(StepOutputs(1, [RequestOutput(request_id="a", token_ids=[7])]))
    assert (await stream.next()).token_ids == [7]
    await engine.say(wrong)
    with pytest.raises(EngineDeadError):
        await stream.next()
    aborted = await engine.expect(AbortRequests)
    assert isinstance(aborted, AbortRequests)
    assert aborted.request_ids == ["a"]
    await engine.welcome(epoch="2")  # and it comes again, on a fresh connection
    await client.wait_ready()
    assert client.epoch == "2"


async def test_a_gap_says_what_was_expected(fake: tuple[FakeEngine, Make]) -> None:
    engine, make = fake
    client = await make()
    await engine.welcome()
    await client.wait_ready()
    stream = client.submit(request("a"))
    await engine.expect(AddRequest)
    await engine.say(StepOutputs(2, []))
    with pytest.raises(EngineDeadError, match="expected step 1, got 2"):
        await stream.next()


async def test_another_epoch_fails_what_ran(fake: tuple[FakeEngine, Make]) -> None:
    engine, make = fake
    client = await make()
    await engine.welcome()
    await client.wait_ready()
    stream = client.submit(request("a"))
    await engine.expect(AddRequest)
    await engine.say(EngineReady(PROTOCOL_VERSION, "1", byte_model_info()))  # the same life: nothing happens
    await engine.say(EngineReady(PROTOCOL_VERSION, "2", byte_model_info()))
    with pytest.raises(EngineDeadError, match="epoch 1 ended, 2 began"):
        await stream.next()
    assert client.is_ready


async def test_last_words_are_passed_on(fake: tuple[FakeEngine, Make]) -> None:
    engine, make = fake
    client = await make()
    await engine.welcome()
    await client.wait_ready()
    stream = client.submit(request("a"))
    query = asyncio.create_task(client.stats())
    await engine.expect(StatsQuery)
    await engine.say(LastWords("blocks are lost", is_crash=True))
    with pytest.raises(EngineDeadError, match="blocks are lost"):
        await stream.next()
    with pytest.raises(EngineDeadError, match="blocks are lost"):
        await query
    with pytest.raises(EngineDeadError, match="not ready: blocks are lost"):
        client.submit(request("b"))


@pytest.mark.parametrize(
    ("settings", "version"), [({}, PROTOCOL_VERSION + 1), ({"fingerprint": "another"}, PROTOCOL_VERSION)]
)
async def test_another_protocol_or_model_never_becomes_ready(
    fake: tuple[FakeEngine, Make], settings: dict[str, object], version: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine, make = fake
    client = await make(**settings)
    for _ in range(2):  # it asks again, so it has refused the first answer
        await engine.welcome(version=version)
        assert not client.is_ready
    assert "expected" in caplog.text


async def test_each_step_is_acknowledged_and_the_lease_is_renewed(fake: tuple[FakeEngine, Make]) -> None:
    engine, make = fake
    client = await make(lease_s=0.003)
    await engine.welcome()
    await client.wait_ready()
    with client.submit(request("a")):
        await engine.expect(AddRequest)
        await engine.say(StepOutputs(1, []), StepOutputs(2, []))
        for step_id in (1, 2):
            assert await engine.expect(Acknowledge) == Acknowledge(step_id)
        await engine.expect(Lease)
        await engine.expect(Lease)


async def test_an_output_that_comes_after_its_abort_is_dropped(fake: tuple[FakeEngine, Make]) -> None:
    engine, make = fake
    client = await make()
    await engine.welcome()
    await client.wait_ready()
    with client.submit(request("a")):
        await engine.expect(AddRequest)
    await engine.say(StepOutputs(1, [RequestOutput(request_id="a", token_ids=[1])]))
    await engine.expect(Acknowledge)
    assert client.is_ready
