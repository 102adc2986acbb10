"""What runs on a gateway is known to the others while it does, and a gateway that ends takes nothing over."""

import asyncio

from tests.app.session_store import SessionServer
from tests.app.stateful_gateway import create, output_text, running_gateway
from tests.app.test_recovery import cut_at, gateways, gone
from tests.app.test_two_gateways import until
from tests.scripted_engine import Pause, say


async def test_what_runs_is_in_the_index_until_it_has_ended(store: SessionServer) -> None:
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        redis = gateway.sessions._redis
        made = [await create(http, background=True) for _ in range(3)]
        await create(http, store=False, max_output_tokens=1)
        running = {key.decode(): tenant for key, tenant in (await redis.hgetall("{g:gateway-1}:runs")).items()}
        assert running == {d["id"]: b"a" for d in made}
        assert sorted(gateway.service.runs.ids) == sorted(running)
        await gateway.engine.wait_paused(3)
        gateway.engine.release()
        await gateway.wait_no_runs()
        await gateway.service.runs.flush()
        assert await redis.exists("{g:gateway-1}:runs") == 0


async def test_ends_that_the_index_does_not_hear_of_do_no_harm(store: SessionServer) -> None:
    """As while Redis is away; here it is told of something that has ended, and of something that never was."""
    async with gateways(store, say("ab"), lease_ms=300) as (first, second, http, other):
        d = await create(http)
        for name in (d["id"], d["id"][:-22] + "0" * 22):
            await second.sessions._redis.hset("{g:dead}:runs", name, "a")
        await second.sessions._redis.zadd("gateways", {"dead": 1.0})

        async def is_cleared() -> bool:
            return not await second.sessions._redis.exists("{g:dead}:runs")

        await until(is_cleared)
        assert (await other.get(f"/v1/responses/{d['id']}")).json() == d
        assert [len(gateway.engine.requests) for gateway in (first, second)] == [1, 0]


async def test_a_gateway_that_ends_takes_nothing_over(store: SessionServer) -> None:
    async with gateways(store, cut_at(3)) as (first, second, http, other):
        d = await create(http, background=True)
        await first.engine.wait_paused()
        async with gone(first, second, d["id"]):
            second.services.drain.begin()
            assert (await other.get(f"/v1/responses/{d['id']}")).json()["status"] == "in_progress"
            assert second.service.runs.ids == []
            async with running_gateway(store, say("Störung: 灯台, 42"), owner="gateway-3") as third:
                async with third.http() as elsewhere:
                    await elsewhere.get(f"/v1/responses/{d['id']}")
                    await third.wait_no_runs()
                    stored = (await elsewhere.get(f"/v1/responses/{d['id']}")).json()
                assert (stored["status"], output_text(stored)) == ("completed", "Störung: 灯台, 42")


async def test_a_caller_that_goes_leaves_a_response_that_runs(store: SessionServer) -> None:
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway:
        tenant = gateway.services.current.tenants.of_id("a")
        gate, is_held = asyncio.Event(), asyncio.Event()
        store_node = gateway.sessions.create

        async def create_late(*arguments):  # type: ignore[no-untyped-def]
            is_held.set()
            await gate.wait()
            await store_node(*arguments)

        gateway.sessions.create = create_late  # type: ignore[method-assign]
        body = {"model": "byte-model", "input": "hi"}
        creating = asyncio.create_task(gateway.service.create(gateway.services.current, tenant, body))
        await is_held.wait()
        creating.cancel()
        gate.set()
        await gateway.engine.wait_paused()
        (response_id,) = gateway.service.runs.ids
        await gateway.service.cancel(tenant, response_id)
        assert gateway.service.num_running == 0
