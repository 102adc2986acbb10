"""The benchmark of appends appends, in a server with the setting that it names."""

from redis.asyncio import Redis

from benchmarks.log_append import running, time_appends


async def test_appends_are_timed_in_a_server_with_the_setting() -> None:
    async with running("everysec") as url:
        took = await time_appends(url, 2, 3)
        async with Redis.from_url(url) as redis:
            assert await redis.config_get("appendfsync") == {"appendfsync": "everysec"}
            logs = [key async for key in redis.scan_iter("*:e:*")]
            assert [await redis.xlen(key) for key in logs] == [3, 3]
    assert len(took) == 3
    assert min(took) > 0
