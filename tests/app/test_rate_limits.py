"""Who is let in, with the account in Redis and without; what is said to those who are not, over HTTP and websocket."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import openai
import pytest

from app.caps import Caps
from app.config import FileConfig
from app.errors import RateLimited
from app.quota import DAY_S, Levels, Quota, reserve, settle
from app.rate_limits import RateLimits
from app.tenant_store import TenantStore
from app.tenants import Tenant
from tests.app.clock import Clock
from tests.app.session_store import SessionProxy, SessionServer, session_server
from tests.app.stateful_gateway import body, receive_until, running_gateway, send_create
from tests.scripted_engine import Pause, say

START = 20_000 * DAY_S + 3600.0
KEY_A, KEY_B = "key-of-tenant-a", "key-of-tenant-b"


@pytest.fixture
def clock() -> Clock:
    return Clock(START)


@contextlib.asynccontextmanager
async def connected(url: str, timeout_s: float = 30.0) -> AsyncIterator[TenantStore]:
    store = TenantStore.connect(url, timeout_s=timeout_s)
    try:
        yield store
    finally:
        await store.close()


def tenant(name: str = "a", **quota: int) -> Tenant:
    return Tenant(name, quota=Quota(**quota))


async def refused(limits: RateLimits, who: Tenant, num_tokens: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        await limits.reserve(who, num_tokens)
    return caught.value


async def test_redis_counts_as_the_gateway_does(server: SessionServer) -> None:
    """The script and the Python, step by step, under a clock that goes both ways."""
    draw = random.Random(7)
    async with connected(server.url) as store:
        for trial in range(30):
            name, now, ours = f"t{trial}", START, None
            days: list[tuple[int, int]] = []
            for _ in range(25):
                now += draw.choice([0, 0.37, 5, 61, -3, -7200, DAY_S / 3])
                limits = [draw.choice([None, draw.randint(1, 40)]) for _ in range(2)]
                quota = Quota(*limits, draw.choice([None, draw.randint(1, 300)]))
                wanted = draw.randint(0, 30)
                if days and draw.random() < 0.4:
                    back, day = days.pop()
                    ours = settle(ours, back, day)
                    await store.settle(name, back, day)
                before = ours or Levels(at=now)
                refusal, after = reserve(before, quota, wanted, now)
                assert await store.reserve(name, quota, wanted, now) == (refusal, after)
                if refusal is None:
                    days.append((draw.randint(-5, wanted), after.day))
                if refusal is None or now < before.at:  # else it writes nothing
                    ours = after


async def test_two_gateways_have_one_account(server: SessionServer, clock: Clock) -> None:
    async with connected(server.url) as one, connected(server.url) as other:
        gateways = [RateLimits(store, Caps(None), now=clock) for store in (one, other)]
        who = tenant(requests_per_minute=10)
        asked = await asyncio.gather(*(g.reserve(who, 1) for g in gateways * 10), return_exceptions=True)
        assert sum(not isinstance(a, RateLimited) for a in asked) == 10
        assert not any(isinstance(a, Exception) and not isinstance(a, RateLimited) for a in asked)
        assert (await gateways[0].reserve(tenant("b", requests_per_minute=10), 1)).headers[
            "x-ratelimit-remaining-requests"
        ] == "9", "another tenant has its own"


async def test_the_servers_clock_is_used_where_none_is_given(server: SessionServer) -> None:
    async with connected(server.url) as store:
        limits = RateLimits(store, Caps(None))
        await limits.reserve(tenant(tokens_per_minute=6_000_000), 6_000_000)
        levels = (await store.reserve("a", Quota(tokens_per_minute=6_000_000), 0, None))[1]
        assert levels.tokens is not None
        assert 0 <= levels.tokens < 6_000_000
        assert abs(levels.at - (await store._commands.redis.time())[0]) < 60


async def test_b40_one_key_a_tenant_and_it_expires(server: SessionServer) -> None:
    async with connected(server.url) as store:
        await store.reserve("a", Quota(requests_per_minute=5), 1, None)
        assert await store._commands.redis.keys("*") == [b"{t:a}:limits"]
        assert await store._commands.redis.ttl("{t:a}:limits") > DAY_S


async def test_without_redis_the_gateway_counts_on_from_what_it_knew(server: SessionServer, clock: Clock) -> None:
    quiet = Clock()
    async with connected(server.url) as store:
        limits = RateLimits(store, Caps(None), now=clock, monotonic=quiet)
        who = tenant(requests_per_minute=4)
        await limits.reserve(who, 1)
        await limits.reserve(who, 1)
        await server.kill()
        await limits.reserve(who, 1)
        await limits.reserve(who, 1)
        assert (await refused(limits, who)).headers["Retry-After"] == "15"
        await server.start()
        assert (await refused(limits, who)).headers["Retry-After"] == "15", "it is not asked again at once"
        quiet.now += 2
        await limits.reserve(who, 1)  # of which Redis knows that two are left
        await limits.close()


async def test_a_store_that_hangs_holds_nobody_up(server: SessionServer, clock: Clock) -> None:
    proxy = SessionProxy(server)
    async with proxy.running(), connected(proxy.url, timeout_s=0.05) as store:
        proxy.lets_replies_through.clear()
        limits = RateLimits(store, Caps(None), now=clock, monotonic=Clock())
        for _ in range(3):
            await limits.reserve(tenant(requests_per_minute=3), 1)
        await refused(limits, tenant(requests_per_minute=3))
        proxy.lets_replies_through.set()


async def test_a_request_whose_client_went_while_it_was_let_in_gives_back(server: SessionServer, clock: Clock) -> None:
    proxy = SessionProxy(server)
    async with proxy.running(), connected(proxy.url) as store:
        limits = RateLimits(store, Caps(None), now=clock)
        who = tenant(tokens_per_minute=100)
        (await limits.reserve(who, 1)).settle(0)
        await limits.close()
        proxy.lets_replies_through.clear()
        asking = asyncio.create_task(limits.reserve(who, 90))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        proxy.lets_replies_through.set()
        await limits.close()
        await limits.reserve(who, 100)


async def test_a_reservation_is_settled_once(clock: Clock) -> None:
    limits = RateLimits(None, Caps(None), now=clock)
    who = tenant(tokens_per_minute=100)
    reservation = await limits.reserve(who, 60)
    reservation.settle(10)
    reservation.settle(0)
    assert (await limits.reserve(who, 0)).headers["x-ratelimit-remaining-tokens"] == "90"


async def test_what_is_said(clock: Clock) -> None:
    limits = RateLimits(None, Caps(None), now=clock)
    who = tenant(requests_per_minute=2, tokens_per_minute=100, tokens_per_day=150)
    await limits.reserve(who, 70)
    error = await refused(limits, who, 40)
    assert error.message == (
        "Rate limit reached on tokens per minute: limit 100, left 30, requested 40. Please try again in 6s."
    )
    assert error.error()["code"] == "rate_limit_exceeded"
    assert error.headers["Retry-After"] == "6"
    assert error.headers["x-ratelimit-remaining-tokens"] == "30"
    clock.now += 60
    await limits.reserve(who, 60)
    clock.now += 60
    error = await refused(limits, who, 60)
    assert error.error()["code"] == "insufficient_quota"
    assert error.headers["Retry-After"] == str(DAY_S - 3600 - 120)
    assert error.headers["x-should-retry"] == "false"
    error = await refused(limits, who, 101)
    assert error.message.startswith("The request is too large for the limit on tokens per minute: limit 100")


async def test_an_unlimited_tenant_asks_nobody() -> None:
    reservation = await RateLimits(None, Caps(None)).reserve(Tenant("a"), 10**9)
    assert reservation.headers == {}
    reservation.settle(5)


# ---- over HTTP and websocket


def configuration(**quota: int) -> FileConfig:
    return FileConfig.model_validate(
        {"tenants": [{"id": "a", "key": KEY_A, **quota}, {"id": "tenant-b", "key": KEY_B, "requests_per_minute": 77}]}
    )


@contextlib.asynccontextmanager
async def limited_gateway(clock: Clock, script=None, **quota: int):
    async with (
        session_server() as store,
        running_gateway(store, script or say("Hello."), file_config=configuration(**quota)) as gateway,
    ):
        gateway.services.rate_limits._now = clock
        yield gateway


def chat(text: str = "hi", **fields):
    return {"model": "byte-model", "messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_headers_and_429_on_every_route(clock: Clock, is_stream: bool) -> None:
    requests = [
        ("/v1/chat/completions", chat(stream=is_stream)),
        ("/v1/completions", {"model": "byte-model", "prompt": "hi", "stream": is_stream}),
        ("/v1/responses", body("hi", stream=is_stream)),
        ("/v1/responses", body("hi", stream=is_stream, store=False)),
    ]
    gateway_with_limits = limited_gateway(clock, requests_per_minute=4, tokens_per_minute=100_000)
    async with gateway_with_limits as gateway, gateway.http(KEY_A) as http, gateway.http(KEY_B) as other:
        for left, (path, sent) in zip((3, 2, 1, 0), requests, strict=True):
            answer = await http.post(path, json=sent)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ratelimit-limit-requests"] == "4"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert "x-ratelimit-reset-tokens" in answer.headers
        for path, sent in requests:
            answer = await http.post(path, json=sent)
            assert answer.status_code == 429
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert answer.headers["retry-after"] == "15"
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
            assert "tenant-b" not in answer.text
            assert "77" not in answer.text
            assert (await other.post(path, json=sent)).status_code == 200, "nobody else is held up"
        assert (await http.get("/v1/models")).status_code == 200, "what computes nothing is not counted"
        clock.now += 15
        assert (await http.post(*requests[0][:1], json=requests[0][1])).status_code == 200


async def test_what_was_not_used_is_given_back(clock: Clock) -> None:
    """After each route's answer what is left is the limit without the tokens that its usage names."""
    async with limited_gateway(clock, tokens_per_minute=100_000) as gateway, gateway.http(KEY_A) as http:
        used = 0
        for path, sent in (
            ("/v1/chat/completions", chat(n=2, max_tokens=3)),
            ("/v1/completions", {"model": "byte-model", "prompt": ["hi", "you"]}),
            ("/v1/responses", body("hi")),
            ("/v1/responses", body("hi", store=False, max_output_tokens=2)),
        ):
            answer = (await http.post(path, json=sent)).json()
            used += answer["usage"]["total_tokens"]
            await gateway.wait_no_runs()
            await gateway.services.rate_limits.close()
            levels = (await gateway.services.tenant_store.reserve("a", Quota(tokens_per_minute=100_000), 0, clock()))[1]
            assert (levels.tokens, levels.used) == (100_000 - used, used)


async def test_a_client_that_leaves_pays_for_what_was_computed(clock: Clock) -> None:
    def script(request):
        return [b"ab", Pause(), b"never"]

    async with limited_gateway(clock, script, tokens_per_minute=100_000) as gateway, gateway.http(KEY_A) as http:
        async with http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    break
        await gateway.engine.wait_idle()
        prompt = len(gateway.engine.requests[-1].prompt_ids)
        async with asyncio.timeout(30):
            while True:
                levels = (await gateway.services.tenant_store.reserve("a", Quota(), 0, clock()))[1]
                if levels.used < prompt + 512:
                    break
                await asyncio.sleep(0.005)
        assert prompt < levels.used <= prompt + 2


async def test_a_refused_request_is_not_counted(clock: Clock) -> None:
    async with limited_gateway(clock, requests_per_minute=1) as gateway, gateway.http(KEY_A) as http:
        assert (await http.post("/v1/chat/completions", json=chat(temperature=-1))).status_code == 400
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_on_a_websocket_the_socket_lives_and_the_event_has_the_headers(clock: Clock) -> None:
    async with limited_gateway(clock, requests_per_minute=1) as gateway, gateway.socket(KEY_A) as ws:
        await send_create(ws)
        assert (await receive_until(ws))[-1]["type"] == "response.completed"
        await send_create(ws, stream_id="lane")
        (error,) = await receive_until(ws)
        assert (error["type"], error["status"], error["stream_id"]) == ("error", 429, "lane")
        assert error["error"]["code"] == "rate_limit_exceeded"
        assert error["headers"]["Retry-After"] == "60"
        assert error["headers"]["x-ratelimit-limit-requests"] == "1"
        clock.now += 60
        await send_create(ws)
        assert (await receive_until(ws))[-1]["type"] == "response.completed"


async def test_the_official_client_sees_its_own_error(clock: Clock) -> None:
    async with limited_gateway(clock, requests_per_minute=1) as gateway:
        client = openai.AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key=KEY_A, max_retries=0)
        async with client:
            await client.responses.create(model="byte-model", input="hi")
            with pytest.raises(openai.RateLimitError) as caught:
                await client.responses.create(model="byte-model", input="hi")
            assert caught.value.code == "rate_limit_exceeded"
            assert caught.value.response.headers["x-ratelimit-limit-requests"] == "1"


async def test_what_is_refused_after_it_was_let_in_gives_all_back(clock: Clock) -> None:
    """As a message does that another gateway has taken in the same moment."""

    class TakenElsewhere(Exception):
        pass

    async def refuse(node):
        raise TakenElsewhere

    async with limited_gateway(clock, tokens_per_minute=100_000, max_answers=1) as gateway:
        live, limits = gateway.services.live, gateway.services.rate_limits
        a = live.current.tenants.authenticate(f"Bearer {KEY_A}")
        for store in (True, False):
            with pytest.raises(TakenElsewhere):
                await gateway.service.create(live.current, a, body("hi", store=store), before_start=refuse)
        await limits.close()
        assert gateway.services.caps.num_held("a", "answers") == 0
        assert (await gateway.services.tenant_store.reserve("a", a.quota, 0, clock()))[1].tokens == 100_000
        assert gateway.engine.requests == []


async def test_what_a_dead_gateway_had_reserved_is_settled_once_by_the_one_that_goes_on(
    server: SessionServer, clock: Clock
) -> None:
    """The first one was not dead but slow: it leaves what it had to the other."""
    who = tenant(tokens_per_day=1000)
    async with connected(server.url) as one, connected(server.url) as other:
        first, second = (RateLimits(store, Caps(None), now=clock) for store in (one, other))
        reserved = await first.reserve(who, 600)
        assert (reserved.num_tokens, reserved.day) == (600, START // DAY_S)
        adopted = second.adopt(who, reserved.num_tokens, reserved.day)
        reserved.settle(None)
        adopted.settle(150)
        adopted.settle(0)
        for limits in (first, second):
            await limits.close()
        assert (await one.reserve("a", who.quota, 0, START))[1].used == 150
        free = Tenant("b")
        second.adopt(free, 600, (await second.reserve(free, 600)).day).settle(10)
        await second.close()
        assert await one._commands.redis.keys("*") == [b"{t:a}:limits"]
