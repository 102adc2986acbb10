"""Who watches is woken by other gateways, and after any break, and leaves nothing behind."""

import asyncio

import pytest

from app import announcements as module
from app.announcements import Announcements
from app.redis_commands import RedisCommands


@pytest.fixture
async def redis(server):
    commands = RedisCommands.connect(server.url)
    yield commands.redis
    await commands.close()


class Watcher:
    def __init__(self, announcements, channel):
        self._news = asyncio.Event()
        self.stop = announcements.watch(channel, self._news.set)

    async def woken(self):
        async with asyncio.timeout(30):
            await self._news.wait()
        self._news.clear()


async def test_a_watcher_is_woken_when_it_is_heard_and_by_each_announcement(redis):
    announcements = Announcements(redis)
    a, b = Watcher(announcements, "a"), Watcher(announcements, "b")
    await asyncio.gather(a.woken(), b.woken())
    for _ in range(3):
        assert await redis.publish("a", "") == 1
        await a.woken()
    assert not b._news.is_set()
    late = Watcher(announcements, "c")
    await late.woken()
    for watcher in (a, b, late, late):
        watcher.stop()
    assert announcements.channels == []
    await announcements.close()


async def test_the_task_ends_with_its_last_watcher_and_comes_again_with_the_next(redis):
    announcements = Announcements(redis)
    for _ in range(2):
        watcher = Watcher(announcements, "a")
        await watcher.woken()
        watcher.stop()
        async with asyncio.timeout(30):
            while any(task.get_name() == "announcements" for task in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert await redis.pubsub_numsub("a") == [(b"a", 0)]


async def test_b39_after_a_restart_of_the_server_everybody_looks_again(server, redis, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    announcements = Announcements(redis)
    watcher = Watcher(announcements, "a")
    await watcher.woken()
    await server.kill()
    await server.start()
    await watcher.woken()
    assert await redis.publish("a", "") == 1
    await watcher.woken()
    watcher.stop()
    await announcements.close()
