"""Several scripted engines behind one client: which gets what, and what is left when one of them dies."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from app.engine_pool import NUM_PINNED, EnginePool
from app.routing import CHUNK_TOKENS, RoutedPrompt, homes_of
from engine.errors import EngineDeadError
from engine.protocol import END, AddRequest, Scope, TenantShare, TrunkPin
from engine.sampling_params import SamplingParams
from tests.app.serving import until
from tests.scripted_engine import Pause, ScriptedEngineClient, byte_model_info

TRUNK = [7] * (2 * CHUNK_TOKENS)
TRUNK_SCOPES = [Scope(END, b"assistant")]


class Engines:
    """Each request runs until it is released."""

    def __init__(self, count: int) -> None:
        self.by_name = {f"engine-{i}": ScriptedEngineClient(script=lambda request: [Pause(), 65]) for i in range(count)}
        self.pool = EnginePool(self.by_name)
        self._num_requests = 0

    def submit(self, said: int, num_chunks: int = 1) -> str:
        """The name of the engine that got a chat in which these chunks were said after the trunk."""
        self._num_requests += 1
        request = AddRequest(
            request_id=str(self._num_requests),
            prompt_ids=[*TRUNK, *[said] * (num_chunks * CHUNK_TOKENS)],
            params=SamplingParams(),
            scopes=[Scope(len(TRUNK), b"assistant"), Scope(END, b"tenant")],
        )
        self.pool.submit(request)
        (name,) = (n for n, e in self.by_name.items() if e.requests and e.requests[-1] is request)
        return name

    async def finish_all(self) -> None:
        for engine in self.by_name.values():
            engine.release()
            await engine.wait_idle()


@pytest.fixture
async def three() -> AsyncIterator[Engines]:
    engines = Engines(3)
    yield engines
    await engines.pool.close()


HOMES = homes_of(RoutedPrompt.of(TRUNK, TRUNK_SCOPES).key, ("engine-0", "engine-1", "engine-2"))


async def test_a_chat_goes_on_where_it_began(three: Engines) -> None:
    first = three.submit(said=1)
    other = three.submit(said=2)
    assert other != first, "it has its share of the load"
    await three.finish_all()
    for num_chunks in (2, 3):
        assert three.submit(said=1, num_chunks=num_chunks) == first
        await three.finish_all()
        assert three.submit(said=2, num_chunks=num_chunks) == other
        await three.finish_all()


async def test_answers_come_through_and_load_is_counted(three: Engines) -> None:
    request = AddRequest(request_id="a", prompt_ids=[65], params=SamplingParams(), scopes=[Scope(END, b"tenant")])
    with three.pool.submit(request) as stream:
        assert three.pool.num_running == 1
        for engine in three.by_name.values():
            engine.release()
        outputs = [output async for output in stream]
    assert outputs[0].token_ids[0] == 65
    assert three.pool.num_running == 0


async def test_a_dead_engine_gets_nothing_and_what_it_held_is_forgotten(three: Engines) -> None:
    first = three.submit(said=1)
    await three.finish_all()
    three.by_name[first].die()
    assert (three.pool.is_ready, three.pool.num_ready) == (True, 2)
    second = three.submit(said=1, num_chunks=2)
    assert second != first
    await three.finish_all()
    three.by_name[first].revive()
    assert three.submit(said=1, num_chunks=3) == second


async def test_without_an_engine_nothing_is_ready(three: Engines) -> None:
    for engine in three.by_name.values():
        engine.die()
    assert not three.pool.is_ready
    for ask in (lambda: three.pool.info, lambda: three.submit(said=1)):
        with pytest.raises(EngineDeadError):
            ask()
    with pytest.raises(EngineDeadError):
        await three.pool.stats()
    waiting = asyncio.create_task(three.pool.wait_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    three.by_name["engine-1"].revive()
    await waiting


async def test_a_trunk_is_kept_by_the_engines_that_its_chats_go_to(three: Engines) -> None:
    state = await three.pool.pin("support@1.0", TRUNK, TRUNK_SCOPES)
    assert state.state is TrunkPin.PINNED
    keepers = [three.by_name[name] for name in HOMES[:NUM_PINNED]]
    await until(lambda: all(engine.trunks for engine in keepers))
    assert [engine for engine in three.by_name.values() if engine.trunks] == [
        engine for engine in three.by_name.values() if engine in keepers
    ]
    assert three.submit(said=1) in HOMES[:NUM_PINNED]
    await three.pool.unpin("support@1.0")
    assert not any(engine.trunks for engine in three.by_name.values())


async def test_a_trunk_waits_for_no_engine_that_is_gone(three: Engines) -> None:
    gone = three.by_name[HOMES[0]]
    gone.die()
    state = await three.pool.pin("support@1.0", TRUNK, TRUNK_SCOPES)
    assert state.state is TrunkPin.PINNED
    assert [bool(e.trunks) for e in three.by_name.values()].count(True) == 1
    gone.revive()
    assert gone.trunks, "it is asked for it when it is back"


async def test_a_pin_that_nobody_waits_for_any_more_ends(three: Engines) -> None:
    for engine in three.by_name.values():
        engine.die()
    pinning = asyncio.create_task(three.pool.pin("support@1.0", TRUNK, TRUNK_SCOPES))
    await asyncio.sleep(0)
    pinning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pinning
    assert [t for t in asyncio.all_tasks() if t.get_name() == "pin support@1.0"] == []


async def test_limits_are_those_that_every_engine_can_keep() -> None:
    big, small = byte_model_info(num_blocks=100, max_model_len=4096), byte_model_info(num_blocks=10, max_model_len=160)
    pool = EnginePool({"big": ScriptedEngineClient(big), "small": ScriptedEngineClient(small)})
    assert pool.info == msgspec.structs.replace(big, num_blocks=10, max_model_len=160)
    await pool.close()


async def test_every_engine_hears_of_tenants_and_all_are_counted(three: Engines) -> None:
    three.pool.set_tenants([TenantShare(tenant="a", weight=2.0)])
    assert all(engine.core.shares for engine in three.by_name.values())
    for said in range(3):
        three.submit(said)
    assert (await three.pool.stats()).running == 3


def test_a_pool_of_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EnginePool({})
