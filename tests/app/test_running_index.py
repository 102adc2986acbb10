"""Gateways and what runs on them, in a real server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app import running_index
from app.redis_commands import RedisCommands
from app.running_index import RunningIndex
from tests.app.session_store import SessionServer


@asynccontextmanager
async def index(server: SessionServer, owner: str, lease_s: float = 15.0) -> AsyncIterator[RunningIndex]:
    commands = RedisCommands.connect(server.url)
    yield RunningIndex(commands, owner=owner, lease_s=lease_s)
    await commands.close()


async def test_what_runs_on_a_gateway_is_known_to_all(server: SessionServer) -> None:
    async with index(server, "1") as one, index(server, "2") as two:
        await one.add("resp_a", "tenant a")
        await one.add("resp_b", "b")
        await two.add("resp_c", "c")
        assert sorted(await two.some_of("1", 10)) == [("resp_a", "tenant a"), ("resp_b", "b")]
        assert len(await two.some_of("1", 1)) == 1
        await two.remove(["resp_a", "unknown"], "1")
        assert await two.some_of("1", 10) == [("resp_b", "b")]
        await one.remove(["resp_b"])
        assert await two.some_of("1", 10) == []
        assert await two.some_of("2", 10) == [("resp_c", "c")]


async def test_a_gateway_that_says_nothing_is_gone_until_it_speaks(
    server: SessionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with index(server, "1", lease_s=-1.0) as one, index(server, "2") as two:
        assert await one.beat() == ["1"], "its own lease is over at once"
        assert await two.beat() == ["1"]
        await two.forget("1")
        assert await two.beat() == ["1"], "it may come back, and have begun something"
        monkeypatch.setattr(running_index, "FORGOTTEN_AFTER_S", -10)
        await two.forget("1")
        assert await two.beat() == []
    async with index(server, "1") as one, index(server, "2") as two:
        assert await one.beat() == []
        assert await two.beat() == []


async def test_every_key_is_kept_for_a_time(server: SessionServer) -> None:
    async with index(server, "1") as one:
        await one.add("resp_a", "a")
        await one.beat()
        redis = one._commands.redis
        for key in await redis.keys("*"):
            assert 86_000 < await redis.ttl(key) <= 86_400


async def test_who_ends_leaves_nothing_or_leaves_it_to_the_others_at_once(server: SessionServer) -> None:
    async with index(server, "1") as one, index(server, "2") as two:
        for gateway in (one, two):
            await gateway.beat()
        await one.leave()
        assert await one._commands.redis.zrange("gateways", 0, -1) == [b"2"]
        await two.add("resp_a", "a")
        await two.leave()
        assert await one.beat() == ["2"]
