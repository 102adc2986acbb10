"""The usage ledger in Redis: one record for each generation, kept by its response id, so that writing twice is once.

{t:<tenant>}:usage:<day>   hash, response id → record as JSON; forgotten some time after that day

A gateway that was taken over may be late with what it knows: a record with fewer takeovers changes nothing.
"""

import asyncio
import datetime
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from redis.exceptions import RedisError

from app.redis_commands import RedisCommands, SessionsUnavailable
from app.usage_record import UsageRecord, from_json, to_json

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000
"""Records kept while Redis is away; further ones are lost, which is logged."""
BATCH = 500
RETRY_S = 1.0
DAY_S = 86400


_WRITE = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and (cjson.decode(held).takeovers or 0) > tonumber(ARGV[3]) then return end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[4])
"""


class Ledger:
    """Nobody waits for it but who asks for `flush`: all that came meanwhile is written in one go."""

    def __init__(self, commands: RedisCommands, *, retention_days: Callable[[], int]) -> None:
        self._commands = commands
        self._retention_days = retention_days
        self._waiting: dict[str, UsageRecord] = {}
        self._attempt = asyncio.Event()
        """Set, and replaced, after each attempt to write."""
        self._has_failed = False
        """The last attempt."""
        self._writing: asyncio.Task[None] | None = None
        self._write_record = commands.redis.register_script(_WRITE)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, record: UsageRecord) -> None:
        if len(self._waiting) >= MAX_WAITING and record.id not in self._waiting:
            logger.error("the usage of %s is lost: %d records wait already", record.id, len(self._waiting))
            return
        self._waiting[record.id] = record
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="usage ledger")

    async def flush(self) -> bool:
        """Returns when all that was added has been written, or could not be written now: then it is tried again, and
        this is False."""
        wanted = self._waiting.copy()
        while self._writing is not None and any(self._waiting.get(i) is record for i, record in wanted.items()):
            await self._attempt.wait()
            if self._has_failed:
                return False
        return True

    async def close(self) -> None:
        """After a last attempt."""
        await self.flush()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        if self._waiting:
            logger.error("the usage of %d answers is lost: Redis does not answer", len(self._waiting))
        await self._commands.close()

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch = dict(list(self._waiting.items())[:BATCH])
                try:
                    await self._commands.run(self._write_batch(batch.values()))
                except SessionsUnavailable as e:
                    logger.warning("usage is not written yet: %s", e.reason)
                    self._has_failed = True
                else:
                    self._has_failed = False
                    for record_id, record in batch.items():
                        if self._waiting.get(record_id) is record:
                            del self._waiting[record_id]
                self._tell()
                if self._has_failed:
                    await asyncio.sleep(RETRY_S)
        finally:
            self._writing = None
            self._tell()

    def _tell(self) -> None:
        attempt, self._attempt = self._attempt, asyncio.Event()
        attempt.set()

    async def _write_batch(self, records: Iterable[UsageRecord]) -> None:
        ttl_s = self._retention_days() * DAY_S
        async with self._commands.redis.pipeline(transaction=False) as pipeline:
            for record in records:
                said: list[str | bytes | float] = [record.id, to_json(record), record.takeovers, ttl_s]
                await self._write_record([_key(record.tenant, record.day)], said, client=pipeline)
            await pipeline.execute()


async def read_usage(
    commands: RedisCommands, *, since: datetime.date, until: datetime.date, tenant: str | None = None
) -> AsyncIterator[UsageRecord]:
    """Records of these days, both included, day by day and in each by time; of one tenant, or of all.

    Raises SessionsUnavailable.
    """
    try:
        keys = await _find_keys(commands, since.isoformat(), until.isoformat(), tenant)
        for key in keys:
            rows = {bytes(name): bytes(value) async for name, value in commands.redis.hscan_iter(key, count=BATCH)}
            for record in sorted(map(from_json, rows.values()), key=lambda r: (r.created_at, r.id)):
                yield record
    except RedisError as e:
        raise SessionsUnavailable(f"{type(e).__name__}: {e}") from e


async def _find_keys(commands: RedisCommands, since: str, until: str, tenant: str | None) -> list[str]:
    found: set[str] = set()
    async for name in commands.redis.scan_iter("{t:*}:usage:*", count=1000):
        key = bytes(name).decode()
        day = key.rpartition(":")[2]
        if since <= day <= until and (tenant is None or key == _key(tenant, day)):
            found.add(key)
    return sorted(found, key=lambda key: (key.rpartition(":")[2], key))


def _key(tenant: str, day: str) -> str:
    return f"{{t:{tenant}}}:usage:{day}"
