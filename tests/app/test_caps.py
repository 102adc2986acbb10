"""How much a tenant has at once: here, at all gateways, when one of them dies, and over HTTP and websocket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from websockets.exceptions import InvalidStatus

from app.caps import LEASE_S, Caps
from app.config import FileConfig
from app.errors import RateLimited
from app.quota import Quota
from app.tenant_store import TenantStore
from app.tenants import Tenant
from tests.app.clock import Clock
from tests.app.session_store import SessionProxy, SessionServer, session_server
from tests.app.stateful_gateway import body, receive, receive_until, running_gateway, send_create
from tests.scripted_engine import Pause

TWO = Tenant("a", quota=Quota(max_connections=2, max_answers=2))
KEY_A, KEY_B = "key-of-tenant-a", "key-of-tenant-b"


@contextlib.asynccontextmanager
async def gateway_of(url: str, *, timeout_s: float = 30.0, **options) -> AsyncIterator[Caps]:
    store = TenantStore.connect(url, timeout_s=timeout_s)
    caps = Caps(store, **options)
    try:
        yield caps
    finally:
        await caps.close()
        await store.close()


async def is_full(caps: Caps, tenant: Tenant = TWO, kind: str = "answers") -> bool:
    try:
        place = await caps.take(tenant, kind)
    except RateLimited:
        return True
    place.release()
    return False


async def test_so_many_and_no_more() -> None:
    caps = Caps(None)
    places = [await caps.take(TWO, "answers") for _ in range(2)]
    assert await is_full(caps)
    assert not await is_full(caps, kind="connections")
    assert not await is_full(caps, Tenant("b", quota=TWO.quota))
    places[0].release()
    places[0].release()
    assert not await is_full(caps)
    assert caps.num_held("a", "answers") == 1
    places[1].release()
    assert caps._held == {}, "nothing is kept of those that have nothing"


async def test_a_tenant_without_limits_is_counted_in_case_it_gets_one() -> None:
    caps = Caps(None)
    for _ in range(3):
        await caps.take(Tenant("a"), "answers")
    assert await is_full(caps)


async def test_those_that_come_together_do_not_stand_in_one_anothers_way(server: SessionServer) -> None:
    async with gateway_of(server.url) as one, gateway_of(server.url) as other:
        five = Tenant("a", quota=Quota(max_answers=5))
        for _ in range(2):
            await other.take(five, "answers")
        asked = await asyncio.gather(*(one.take(five, "answers") for _ in range(5)), return_exceptions=True)
        assert [isinstance(a, RateLimited) for a in asked] == [False, False, False, True, True]


async def test_gateways_count_together(server: SessionServer) -> None:
    async with gateway_of(server.url) as one, gateway_of(server.url) as other:
        here, there = await one.take(TWO, "answers"), await other.take(TWO, "answers")
        assert await is_full(one)
        assert await is_full(other)
        there.release()
        await other.close()
        assert not await is_full(one)
        here.release()
        await one.close()
        assert await one._store._commands.redis.keys("*") == []


async def test_a_dead_gateway_is_forgotten_and_a_live_one_is_not(server: SessionServer, clock: Clock) -> None:
    async with gateway_of(server.url, now=clock) as one, gateway_of(server.url, now=clock) as other:
        await other.take(TWO, "answers")
        await other.take(TWO, "answers")
        clock.now += LEASE_S - 1
        assert await is_full(one)
        await other._say("a", other._held["a"])
        clock.now += LEASE_S - 1
        assert await is_full(one)
        clock.now += 1
        assert not await is_full(one)


async def test_a_clock_that_is_put_back_keeps_no_dead_gateway_alive(server: SessionServer, clock: Clock) -> None:
    async with gateway_of(server.url, now=clock) as one, gateway_of(server.url, now=clock) as other:
        await other.take(TWO, "answers")
        await other.take(TWO, "answers")
        clock.now -= 3600
        assert not await is_full(one)
        await other._say("a", other._held["a"])
        assert await is_full(one)


async def test_what_is_held_is_said_again_and_again(server: SessionServer) -> None:
    async with gateway_of(server.url, lease_s=0.03) as caps:
        place = await caps.take(TWO, "connections")
        redis = caps._store._commands.redis
        await redis.flushall()
        async with asyncio.timeout(30):
            while not await redis.exists("{t:a}:held"):  # noqa: ASYNC110 only the gateway's own pace brings it back
                await asyncio.sleep(0.005)
        place.release()


async def test_while_redis_is_away_each_gateway_counts_for_itself(server: SessionServer) -> None:
    async with gateway_of(server.url) as one, gateway_of(server.url) as other:
        for _ in range(2):
            await other.take(TWO, "answers")
        await server.kill()
        places = [await one.take(TWO, "answers") for _ in range(2)]
        assert await is_full(one)
        for place in places:
            place.release()
        assert not await is_full(one)


async def test_one_whose_client_goes_while_it_is_asked_for_leaves_nothing(server: SessionServer) -> None:
    proxy = SessionProxy(server)
    async with proxy.running(), gateway_of(proxy.url) as caps:
        proxy.lets_replies_through.clear()
        asking = asyncio.create_task(caps.take(TWO, "answers"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert caps.num_held("a", "answers") == 0
        proxy.lets_replies_through.set()


async def test_b40_one_key_a_tenant_and_it_expires(server: SessionServer) -> None:
    async with gateway_of(server.url) as caps:
        await caps.take(TWO, "answers")
        redis = caps._store._commands.redis
        assert await redis.keys("*") == [b"{t:a}:held"]
        assert 0 < await redis.ttl("{t:a}:held") <= 2 * LEASE_S


# ---- over HTTP and websocket


@contextlib.asynccontextmanager
async def capped_gateway(**quota: int):
    config = FileConfig.model_validate(
        {"tenants": [{"id": "a", "key": KEY_A, **quota}, {"id": "b", "key": KEY_B, **quota}]}
    )

    def script(request):
        return [b"a", Pause(), b"b"]

    async with session_server() as store, running_gateway(store, script, file_config=config) as gateway:
        yield gateway


async def test_one_websocket_too_many_is_refused_before_it_is_accepted() -> None:
    async with capped_gateway(max_connections=1) as gateway:
        async with gateway.socket(KEY_A) as ws, gateway.socket(KEY_B):
            with pytest.raises(InvalidStatus) as caught:
                async with gateway.socket(KEY_A):
                    pass
            response = caught.value.response
            assert response.status_code == 429
            assert b"concurrency_limit_exceeded" in response.body
            assert response.headers["retry-after"] == "2"
            await send_create(ws, store=False)
            assert (await receive(ws))["type"] == "response.created", "the first one lives on"
        async with asyncio.timeout(30):
            while gateway.services.caps.num_held("a", "connections"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        async with gateway.socket(KEY_A):
            pass
        gateway.engine.release()


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/v1/chat/completions", {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}], "n": 2}),
        ("/v1/completions", {"model": "byte-model", "prompt": "hi"}),
        ("/v1/responses", body("hi")),
        ("/v1/responses", body("hi", store=False)),
    ],
)
async def test_one_answer_too_many_is_refused_until_one_has_ended(path, request_body) -> None:
    async with capped_gateway(max_answers=1) as gateway, gateway.http(KEY_A) as http, gateway.http(KEY_B) as other:
        caps = gateway.services.caps
        running = asyncio.create_task(http.post(path, json=request_body))
        async with asyncio.timeout(30):
            while not caps.num_held("a", "answers"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        answer = await http.post(path, json=request_body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
        assert answer.headers["retry-after"] == "2"
        background = await other.post("/v1/responses", json=body("hi", background=True))
        assert background.status_code == 200, "nobody else is held up"
        gateway.engine.release()
        assert (await running).status_code == 200
        async with asyncio.timeout(30):
            while caps.num_held("a", "answers") or caps.num_held("b", "answers"):
                gateway.engine.release()
                await asyncio.sleep(0.005)
        await gateway.wait_no_runs()


async def test_an_answer_whose_reader_left_still_counts_while_it_runs() -> None:
    async with capped_gateway(max_answers=1) as gateway, gateway.http(KEY_A) as http:
        async with gateway.socket(KEY_A) as ws:
            await send_create(ws)
            await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        assert (await http.post("/v1/responses", json=body("hi"))).status_code == 429
        async with gateway.socket(KEY_A) as ws:
            await send_create(ws, stream_id="lane")
            error = await receive(ws)
            assert (error["status"], error["error"]["code"]) == (429, "concurrency_limit_exceeded")
            assert (error["stream_id"], error["headers"]) == ("lane", {"Retry-After": "2"})
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert gateway.services.caps.num_held("a", "answers") == 0


async def test_what_a_dead_gateway_had_let_in_is_there_whatever_the_limit_is(server: SessionServer) -> None:
    async with gateway_of(server.url) as one, gateway_of(server.url) as other:
        places = [await one.take(TWO, "answers") for _ in range(2)]
        adopted = other.adopt(TWO, "answers")
        await other.close()
        assert await is_full(one)
        for place in places:
            place.release()
        await one.close()
        assert await is_full(one, Tenant("a", quota=Quota(max_answers=1)))
        adopted.release()
        await other.close()
        assert not await is_full(one, Tenant("a", quota=Quota(max_answers=1)))
        await one.close()
        assert await one._store._commands.redis.keys("*") == []
