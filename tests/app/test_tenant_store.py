"""What gateways know in common about a tenant, on the embedded server and on another one."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.config import FileConfig, hash_key
from app.errors import Unauthorized
from app.quota import Quota
from app.redis_commands import SessionsUnavailable
from app.tenant_store import TenantStore
from app.tenants import Tenants
from app.tickets import Tickets
from tests.app.session_store import SessionProxy, SessionServer

KEY = hash_key("key-a-one")
LEASE_S = 15.0
TENANTS = Tenants(FileConfig.model_validate({"tenants": [{"id": "a", "key": "key-a-one"}]}))


@asynccontextmanager
async def connected(url: str, **options: float) -> AsyncIterator[TenantStore]:
    store = TenantStore.connect(url, **options)
    try:
        yield store
    finally:
        await store.close()


async def test_a_ticket_is_used_at_one_gateway_of_all(server: SessionServer) -> None:
    async with connected(server.url) as one, connected(server.url) as other:
        gateways = [Tickets(b"s" * 32, store) for store in (one, other)]
        text = gateways[0].issue(KEY).text
        results = await asyncio.gather(*(g.redeem(text, TENANTS) for g in gateways), return_exceptions=True)
        assert sorted(map(type, results), key=str) == sorted([bytes, Unauthorized], key=str)


async def test_a_command_whose_reply_was_lost_is_not_sent_again(server: SessionServer) -> None:
    quota = Quota(tokens_per_minute=100)
    proxy = SessionProxy(server)
    async with proxy.running(), connected(proxy.url, timeout_s=30) as store:
        await store.reserve("a", quota, 10, 1000.0)
        proxy.loses_next_reply = True
        with pytest.raises(SessionsUnavailable):
            await store.reserve("a", quota, 10, 1000.0)
        assert (await store.reserve("a", quota, 10, 1000.0))[1].tokens == 70
        await store.settle("a", 5, 0)
        proxy.loses_next_reply = True
        with pytest.raises(SessionsUnavailable):
            await store.settle("a", 5, 0)
        assert (await store.reserve("a", quota, 0, 1000.0))[1].tokens == 80


async def test_without_a_reply_it_says_so_in_time(server: SessionServer) -> None:
    proxy = SessionProxy(server)
    async with proxy.running(), connected(proxy.url, timeout_s=0.05) as store:
        proxy.lets_replies_through.clear()
        with pytest.raises(SessionsUnavailable, match=r"no reply within 0\.05 s"):
            await store.try_use_ticket("a", "first")
        proxy.lets_replies_through.set()


async def test_while_the_store_is_away_a_ticket_is_used_once_at_each_gateway(server: SessionServer) -> None:
    async with connected(server.url) as store:
        await server.kill()
        tickets = Tickets(b"s" * 32, store)
        text = tickets.issue(KEY).text
        assert await tickets.redeem(text, TENANTS) == KEY
        with pytest.raises(Unauthorized):
            await tickets.redeem(text, TENANTS)
        await server.start()
        assert await store.try_use_ticket("a", "after"), "it comes back by itself"


async def test_b38_a_cancelled_command_leaves_no_reply_behind(server: SessionServer) -> None:
    proxy = SessionProxy(server)
    async with proxy.running(), connected(proxy.url, timeout_s=30) as store:
        assert await store.try_use_ticket("a", "used")
        proxy.lets_replies_through.clear()
        asking = [asyncio.create_task(store.try_use_ticket("a", f"n{i}")) for i in range(8)]
        await asyncio.sleep(0)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        proxy.lets_replies_through.set()
        for _ in range(16):
            assert not await store.try_use_ticket("a", "used")


async def test_b40_keys_carry_the_tenant_as_hash_tag_and_expire(server: SessionServer) -> None:
    async with connected(server.url) as store:
        await store.try_use_ticket("a", "one")
        keys = await store._commands.redis.keys("*")
        assert keys == [b"{t:a}:ticket:one"]
        assert await store._commands.redis.ttl(keys[0]) > 0


async def test_what_a_gateway_holds_counts_while_it_was_said_lately_whichever_way_the_clock_goes(
    server: SessionServer,
) -> None:
    """The script against a model of it. What was said in the future, before the clock went back, is forgotten too."""
    draw = random.Random(11)
    async with connected(server.url) as store:
        for trial in range(8):
            said: dict[str, tuple[float, int, int]] = {}
            now = 1_800_000_000.0
            for _ in range(40):
                now += draw.choice([0, 0.4, 5, 14.75, 15, 16, -0.5, -10, -7200])
                owner, own = draw.choice("abc"), (draw.randint(0, 3), draw.randint(0, 3))
                said = {who: held for who, held in said.items() if who == owner or 0 <= now - held[0] < LEASE_S}
                others = [held for who, held in said.items() if who != owner]
                expected = sum(held[1] for held in others), sum(held[2] for held in others)
                assert await store.hold(f"t{trial}", owner, own, LEASE_S, now) == expected
                said[owner] = (now, *own)
                if not any(own):
                    del said[owner]
