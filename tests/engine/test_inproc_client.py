"""The core in a thread, behind the same protocol as in a process."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from engine.client import EngineClient
from engine.errors import EngineDeadError
from engine.inproc_client import InprocEngineClient
from engine.protocol import END, AddRequest, FinishReason, RequestOutput, Scope, TrunkPin, TrunkState
from engine.sampling_params import SamplingParams
from engine.token_stream import TokenStream
from tests.engine.fake_runner import Bench
from tests.scripted_engine import IM_END, Die, Pause, Script, ScriptedCore, byte_model_info, echo

SCOPES = [Scope(END, b"assistant")]
Make = Callable[..., Awaitable[InprocEngineClient]]


class CheckedCore(ScriptedCore):
    """Counts how often it was found idle."""

    num_checks = 0

    def check_integrity(self) -> None:
        super().check_integrity()
        self.num_checks += 1


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    clients: list[InprocEngineClient] = []

    async def start(script: Script = echo) -> InprocEngineClient:
        core = CheckedCore(byte_model_info(), script)
        client = InprocEngineClient(core, core.info)
        await client.start()
        clients.append(client)
        return client

    yield start
    for client in clients:
        await client.close()


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


async def test_many_streams_are_not_mixed_up(make: Make) -> None:
    client: EngineClient = await make()
    await client.wait_ready()
    texts = {f"r{i}": f"stream {i} " * (i + 1) for i in range(32)}
    streams = {i: client.submit(request(i, text)) for i, text in texts.items()}
    for i, stream in streams.items():
        with stream:
            assert (await read(stream)).token_ids == [*texts[i].encode(), IM_END]
    assert (await client.stats()).running == 0
    assert client.info == byte_model_info()


async def test_a_busy_loop_finds_everything_merged(make: Make) -> None:
    client = await make()
    last = client.submit(request("last", "x" * 200))
    core = client._core
    assert isinstance(core, ScriptedCore)
    while core.running or not core.requests:  # the loop is held here until the thread has done everything
        pass
    output = await last.next()
    assert (len(output.token_ids), output.finish_reason) == (201, FinishReason.STOP)


async def test_leaving_a_stream_aborts(make: Make) -> None:
    client = await make(lambda r: [1, Pause()])
    with client.submit(request("a")) as stream:
        await stream.next()
        assert (await client.stats()).running == 1
        with pytest.raises(ValueError, match="'a' is in use"):
            client.submit(request("a"))
    assert (await client.stats()).running == 0


async def test_a_refusal_comes_through_the_stream(make: Make) -> None:
    client = await make()
    with client.submit(request("a", max_tokens=0)) as stream:
        output = await read(stream)
    assert output.finish_reason == FinishReason.ERROR
    assert output.error is not None
    assert output.error.param == "max_tokens"


async def test_it_is_checked_once_when_it_has_rested(make: Make) -> None:
    client = await make()
    core = client._core
    assert isinstance(core, CheckedCore)
    for i in range(2):
        with client.submit(request(f"r{i}")) as stream:
            await read(stream)
        while core.num_checks <= i:  # noqa: ASYNC110 the thread tells nobody
            await asyncio.sleep(0)
    assert core.num_checks == 2


async def test_a_core_that_breaks_fails_everything(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    client = await make(lambda r: [1, Die("blocks are lost")] if r.request_id == "b" else [1, Pause()])
    with client.submit(request("a")) as a:
        await a.next()
        with client.submit(request("b")) as b, pytest.raises(EngineDeadError, match="blocks are lost"):
            await read(b)
        with pytest.raises(EngineDeadError, match="blocks are lost"):
            await a.next()
    assert not client.is_ready
    with pytest.raises(EngineDeadError, match=r"not ready: .*blocks are lost"):
        client.submit(request("c"))
    with pytest.raises(EngineDeadError):
        await client.stats()
    assert "the engine broke" in caplog.text


async def test_closing_fails_what_runs(make: Make) -> None:
    client = await make(lambda r: [1, Pause()])
    stream = client.submit(request("a"))
    await stream.next()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    await client.close()
    await client.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await waiting
    with pytest.raises(EngineDeadError):
        _ = client.info


async def test_pins_of_a_core_that_answers_at_once_or_after_a_step(make: Make) -> None:
    client = await make()
    assert (await client.pin("t", list(range(20)), SCOPES)).state is TrunkPin.PINNED
    await client.unpin("t")
    assert (await client.stats()).blocks.pinned == 0
    bench = Bench(20)
    real = InprocEngineClient(bench.core, bench.info)
    waiting = asyncio.create_task(real.pin("t", list(range(20)), SCOPES))
    await asyncio.sleep(0)
    await real.start()
    assert await waiting == TrunkState("t", TrunkPin.PINNED, 20, 3)
    await real.close()
    with pytest.raises(EngineDeadError):
        await real.pin("u", [1], SCOPES)


def test_torch_is_not_needed() -> None:
    program = "import sys, engine.inproc_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
