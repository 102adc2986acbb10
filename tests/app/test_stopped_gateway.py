"""A gateway that is stopped for a while (SIGSTOP) and goes on: what its answers were given meanwhile is not lost, the
engine holds no more for it than the answers themselves, and the other gateway does not notice."""

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.app.answer_reader import Reader, check_whole
from tests.app.fleet import Fleet, fleet
from tests.app.stateful_gateway import body, output_text
from tests.app.supervised import until
from tests.app.test_failpoints import assert_at_rest, begin, read_usage_of

NUM_STREAMS = 64
LINES = [f"line {i} of an answer that goes on and on\n" for i in range(60)]
SCRIPT = ["begun\n", {"pause": None}, *LINES]
TEXT = "begun\n" + "".join(LINES)
MIB = 2**20


async def ask(gateways: Fleet, name: str) -> str:
    """A whole answer of another gateway."""
    answer = await gateways.http(name).post("/v1/responses", json=body())
    assert answer.status_code == 200, answer.text
    return output_text(answer.json())


async def stop_for(folder: Path, seconds: float, lease_ms: int, engine_lease_s: float) -> None:
    async with fleet(folder, SCRIPT, lease_ms=lease_ms, engine_lease_s=engine_lease_s) as gateways:
        ids = await asyncio.gather(*(begin(gateways) for _ in range(NUM_STREAMS)))
        readers = [Reader(gateways, response_id) for response_id in ids]
        far = [Reader(gateways, response_id) for response_id in ids[:8]]
        reading = [asyncio.create_task(reader.read_on("gateway-1")) for reader in readers]
        reading += [asyncio.create_task(reader.read_on("gateway-2")) for reader in far]
        await until(lambda: all(reader.text == "begun\n" for reader in (*readers, *far)))
        engine = psutil.Process(gateways.processes["engine-1"].pid)
        before_bytes = engine.memory_info().rss
        gateways.stop("gateway-1")
        await gateways.release("engine-1")
        stopped_at = asyncio.get_running_loop().time()
        async with gateways.releasing("engine-1"):
            assert await ask(gateways, "gateway-2") == TEXT
            while (await gateways.stats("engine-1")).running:  # noqa: ASYNC110 another process tells nobody
                await asyncio.sleep(0.01)
            await asyncio.sleep(stopped_at + seconds - asyncio.get_running_loop().time())
            assert await ask(gateways, "gateway-2") == TEXT
            grown_bytes = engine.memory_info().rss - before_bytes
            assert grown_bytes < 4 * MIB + 4 * NUM_STREAMS * len(TEXT), f"{grown_bytes / MIB:.1f} MiB"
            gateways.go_on("gateway-1")
            assert all(await asyncio.gather(*reading))
        for reader in readers:
            others = [other for other in far if other.response_id == reader.response_id]
            stored = await check_whole(gateways, reader, *others)
            assert (stored["status"], output_text(stored)) == ("completed", TEXT)
        for name in gateways.gateways:
            assert await gateways.end(name) == 0
            assert "Traceback" not in gateways.log(name), gateways.log(name)
        await assert_at_rest(gateways)
        assert len(await read_usage_of(gateways)) == NUM_STREAMS + 2


async def test_a_stopped_gateway_goes_on_where_it_was(tmp_path: Path) -> None:
    """Within its leases."""
    await stop_for(tmp_path, 0.0, lease_ms=60_000, engine_lease_s=60.0)


@pytest.mark.slow
async def test_a_gateway_stopped_for_twenty_seconds(tmp_path: Path) -> None:
    """Longer than its leases: the engine gives its requests up, and the other gateway takes what is read there."""
    await stop_for(tmp_path, 20.0, lease_ms=15_000, engine_lease_s=10.0)
