"""Which gateways there are, and what runs on each: so that whatever a dead one left is found without being asked for.

    gateways            sorted set: until when each gateway is known to live, by the server's clock
    {g:<owner>}:runs    hash of what runs there, response id → tenant; kept for a day after its gateway spoke last

Nothing here decides anything: that is for the lease of each response. An entry of something that has ended does no
harm. Each command touches one key, so that keys may lie on any node of a cluster.
"""

from collections.abc import Sequence
from typing import Any

from app.redis_commands import RedisCommands

INDEX_TTL_S = 24 * 3600
FORGOTTEN_AFTER_S = 300
"""A gateway that has been silent for so long, and has left nothing."""
MAX_GONE = 1000
"""Gateways that are looked at together; there are that few as those that end in order say so."""

_BEAT = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZADD', KEYS[1], string.format('%.3f', now + ARGV[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
local gone = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.3f', now), 'LIMIT', 0, ARGV[4])
return {string.match(redis.call('INFO', 'server'), 'run_id:(%w+)'), gone}
"""
_FORGET = """
local time, score = redis.call('TIME'), redis.call('ZSCORE', KEYS[1], ARGV[1])
if score and tonumber(score) + ARGV[2] < tonumber(time[1]) then redis.call('ZREM', KEYS[1], ARGV[1]) end
"""


class RunningIndex:
    """Each method raises SessionsUnavailable. `owner` names this gateway's life, as for `Sessions`."""

    def __init__(self, commands: RedisCommands, *, owner: str, lease_s: float) -> None:
        self._commands = commands
        self._owner = owner
        self._lease_s = lease_s
        self.server_life = ""
        """Of the server as it was at the last beat: another one with each start of it. Empty before the first beat."""
        self._beat = commands.redis.register_script(_BEAT)
        self._forget = commands.redis.register_script(_FORGET)

    async def add(self, response_id: str, tenant: str) -> None:
        async def run() -> None:
            key = _key(self._owner)
            async with self._commands.redis.pipeline(transaction=False) as pipe:
                pipe.hset(key, response_id, tenant)
                pipe.expire(key, INDEX_TTL_S)
                await pipe.execute()

        await self._commands.run(run())

    async def remove(self, response_ids: Sequence[str], owner: str | None = None) -> None:
        """Of this gateway, or another one."""

        async def run() -> None:
            await self._commands.redis.hdel(_key(owner or self._owner), *response_ids)

        await self._commands.run(run())

    async def beat(self) -> list[str]:
        """Says that this gateway lives, for one lease; gives some of those that have not said so in time."""

        async def run() -> tuple[bytes, list[bytes]]:
            said: list[str | float] = [self._owner, self._lease_s, INDEX_TTL_S, MAX_GONE]
            server_life, gone = await self._beat(["gateways"], said)
            await self._commands.redis.expire(_key(self._owner), INDEX_TTL_S)
            return server_life, gone

        server_life, gone = await self._commands.run(run())
        self.server_life = server_life.decode()
        return [owner.decode() for owner in gone]

    async def some_of(self, owner: str, count: int) -> list[tuple[str, str]]:
        """Up to so many entries of a gateway, drawn at random: response id and tenant."""

        async def run() -> list[Any]:
            drawn: Any = await self._commands.redis.hrandfield(_key(owner), count, withvalues=True)
            return list(drawn or ())

        found = [value.decode() for value in await self._commands.run(run())]
        return list(zip(found[::2], found[1::2], strict=True))

    async def leave(self) -> None:
        """This gateway ends: what it has left is for the others, at once."""

        async def run() -> None:
            if await self._commands.redis.exists(_key(self._owner)):
                await self._commands.redis.zadd("gateways", {self._owner: 1.0})
            else:
                await self._commands.redis.zrem("gateways", self._owner)

        await self._commands.run(run())

    async def forget(self, owner: str) -> None:
        """A gateway that has left nothing, once that is certain."""
        await self._commands.run(self._forget(["gateways"], [owner, FORGOTTEN_AFTER_S]))


def _key(owner: str) -> str:
    return f"{{g:{owner}}}:runs"
