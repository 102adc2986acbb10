"""Events of answers in Redis, for every gateway to read: a stream for each answer, with the events' own numbers.

    {s:<root>}:e:<id>   entry `<number + 1>-0`: t (type), d (the event as JSON), p (see app/progress.py; may be missing)

The stream is made, empty, together with the response: where there is none, events have been lost. An append says which
number comes next and who appends. It is refused when another gateway holds the answer's lease or has appended
meanwhile: so a gateway that was stopped and comes back cannot add to an answer that was taken over. The same append
once more, because its reply was lost, changes nothing.
"""

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from app.announcements import Announcements
from app.event_log import CursorLost, EventsNotHeld, Wake
from app.events import TERMINAL_TYPES, LoggedEvent
from app.ids import ResponseId, try_parse_response_id
from app.redis_commands import RedisCommands
from app.redis_keys import lease_key, log_key, node_key

LOG_TTL_S = 600.0
"""After the last event; while an answer runs its owner keeps the log alive with the lease."""
APPEND_TIMEOUT_S = 2.0
"""Then the answers go on from memory: their readers have waited long enough."""
HIGHEST_NUMBER = 2**62

_APPEND = """
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return 'taken' end
if redis.call('EXISTS', KEYS[1]) == 0 then return holder and 'lost' or 'taken' end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local next = last and tonumber(string.match(last[1], '^%d+')) or 0
local first, count = tonumber(ARGV[2]), (#ARGV - 4) / 3
if next == first + count then
    local held = redis.call('XRANGE', KEYS[1], (first + 1) .. '-0', '+')
    for i = 1, count do
        if not held[i] or held[i][2][4] ~= ARGV[3 + 3 * i] then return 'taken' end
    end
    return 'logged'
end
if next > first then return 'taken' end
if next < first then return holder and 'lost' or 'taken' end
if next > 0 then redis.call('XTRIM', KEYS[1], 'MINID', (tonumber(ARGV[3]) + 1) .. '-0') end
for i = 1, count do
    local fields = {'t', ARGV[2 + 3 * i], 'd', ARGV[3 + 3 * i]}
    if ARGV[4 + 3 * i] ~= '' then fields[5], fields[6] = 'p', ARGV[4 + 3 * i] end
    redis.call('XADD', KEYS[1], (first + i) .. '-0', unpack(fields))
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PUBLISH', KEYS[1], '')
return 'logged'
"""
_DROP_OWN = """
local other = redis.call('GET', KEYS[2]) or redis.call('HGET', KEYS[3], 'ended_by')
if other and other ~= ARGV[1] then return end
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', KEYS[1], '')
"""
_APPEND_SHA = hashlib.sha1(_APPEND.encode(), usedforsecurity=False).hexdigest()


class Outcome(enum.Enum):
    LOGGED = b"logged"
    TAKEN = b"taken"
    """The answer belongs to another gateway, or has been deleted."""
    LOST = b"lost"
    """It is still ours, but what was logged before is not there (any more), or Redis refused it."""


@dataclass(frozen=True, slots=True)
class Append:
    """At least one event of one answer. Events below `first_held` may be dropped before."""

    response_id: str
    events: Sequence[LoggedEvent]
    first_held: int = 0


class RedisEventLog:
    """`owner` names this gateway's life, as in its leases."""

    def __init__(
        self, commands: RedisCommands, announcements: Announcements, *, owner: str, ttl_s: float = LOG_TTL_S
    ) -> None:
        self._commands = commands
        self._announcements = announcements
        self._owner = owner
        self._ttl_ms = round(ttl_s * 1000)
        self._drop_own = commands.redis.register_script(_DROP_OWN)

    async def append(self, appends: Sequence[Append]) -> list[Outcome]:
        """All of them in one round trip. Raises SessionsUnavailable: then each may have been appended or not."""
        return await self._commands.run(self._append(appends), APPEND_TIMEOUT_S)

    async def _append(self, appends: Sequence[Append]) -> list[Outcome]:
        replies = await self._send(appends)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            await self._commands.redis.script_load(_APPEND)
            replies = await self._send(appends)
        return [Outcome.LOST if isinstance(reply, RedisError) else Outcome(reply) for reply in replies]

    async def _send(self, appends: Sequence[Append]) -> list[Any]:
        async with self._commands.redis.pipeline(transaction=False) as pipe:
            for append in appends:
                response_id = _parse(append.response_id)
                said: list[Any] = [self._owner, append.events[0].number, append.first_held, self._ttl_ms]
                for event in append.events:
                    said += (event.type, event.data, event.progress)
                pipe.evalsha(_APPEND_SHA, 2, log_key(response_id), lease_key(response_id), *said)
            return list(await pipe.execute(raise_on_error=False))

    async def read(self, response_id: str, after: int, limit: int) -> tuple[list[LoggedEvent], bool]:
        """As `EventLog.read`. Raises SessionsUnavailable too."""
        after = min(after, HIGHEST_NUMBER)
        events = await self._range(response_id, first=after + 1, count=max(limit, 1))
        if events and events[0].number > after + 1:
            raise CursorLost(response_id, after, events[0].number)
        if events:
            return events[:limit], limit > 0 and events[-1].is_terminal
        last = await self._last(response_id)
        return [], last is not None and last.is_terminal and after >= last.number

    async def read_all(self, response_id: str) -> list[LoggedEvent]:
        """Everything that is held, which need not begin with event 0. Raises EventsNotHeld or SessionsUnavailable."""
        return [] if await self._last(response_id) is None else await self._range(response_id)

    async def _range(self, response_id: str, first: int = 0, count: int | None = None) -> list[LoggedEvent]:
        async def run() -> list[Any]:
            key = log_key(_parse(response_id))
            return list(await self._commands.redis.xrange(key, min=f"{first + 1}-0", count=count) or ())

        return [_event(entry) for entry in await self._commands.run(run())]

    async def _last(self, response_id: str) -> LoggedEvent | None:
        """None in a log that is empty yet. Raises EventsNotHeld."""

        async def run() -> tuple[list[Any], int]:
            async with self._commands.redis.pipeline(transaction=True) as pipe:
                key = log_key(_parse(response_id))
                pipe.xrevrange(key, count=1)
                pipe.exists(key)
                last, is_held = await pipe.execute()
                return last, is_held

        last, is_held = await self._commands.run(run())
        if not is_held:
            raise EventsNotHeld(response_id)
        return _event(last[0]) if last else None

    def watch(self, response_id: str, wake: Wake) -> Callable[[], None]:
        """Calls `wake` after each append, whoever made it; now and then for nothing."""
        return self._announcements.watch(log_key(_parse(response_id)), wake)

    async def drop_own(self, response_id: str) -> None:
        """Unless another gateway has the answer now, or has ended it. Raises SessionsUnavailable."""
        parsed = _parse(response_id)
        keys = [log_key(parsed), lease_key(parsed), node_key(parsed)]
        await self._commands.run(self._drop_own(keys, [self._owner]))

    async def drop(self, response_id: str) -> None:
        """Raises SessionsUnavailable."""

        async def run() -> None:
            key = log_key(_parse(response_id))
            async with self._commands.redis.pipeline(transaction=False) as pipe:
                pipe.delete(key)
                pipe.publish(key, "")
                await pipe.execute()

        await self._commands.run(run())


def _event(entry: tuple[bytes, dict[bytes, bytes]]) -> LoggedEvent:
    entry_id, fields = entry
    event_type = fields[b"t"].decode()
    number, progress = int(entry_id.split(b"-")[0]) - 1, fields.get(b"p", b"")
    return LoggedEvent(number, event_type, fields[b"d"], event_type in TERMINAL_TYPES, progress)


def _parse(response_id: str) -> ResponseId:
    parsed = try_parse_response_id(response_id)
    if parsed is None:
        raise ValueError(f"an id of a response was expected, got {response_id!r}")
    return parsed
