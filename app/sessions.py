"""Conversations in Redis: one hash for each response, which outlives connections and processes.

    {s:<root>}:r:<id>   the node, see app/response_node.py; its TTL starts anew with every use
    {s:<root>}:o:<id>   lease of the gateway that runs it; without one a response that looks running is an orphan, and
                        belongs to the gateway that takes it first
    {s:<root>}:w:<id>   somebody reads it at another gateway; said again and again, forgotten after a lease's time
    {s:<root>}:q:<id>   while it runs: how to submit it again, see app/recipe.py; kept as long as its log

All keys of a conversation share the hash tag `{s:<root>}`. An id is never a credential: each lookup names the tenant,
and what belongs to another one is not there. A gateway that has lost its lease to another one changes nothing any more.
A command whose reply was lost runs once more, so none may mean something else the second time.
"""

import enum
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from app.conversation_turns import ADD_TURN, conversation_key, turn_to_add
from app.ids import ResponseId
from app.redis_commands import TIMEOUT_S, RedisCommands, SessionsUnavailable
from app.redis_keys import lease_key, log_key, node_key, readers_key, recipe_key
from app.redis_log import LOG_TTL_S
from app.response_node import TURN_FIELDS, ResponseNode, Turn, node_from_fields, turn_from_values

__all__ = ["Finished", "Orphan", "Sessions", "SessionsUnavailable", "Untaken"]

NODE_TTL_S = 30 * 24 * 3600
LEASE_MS = 15_000

_FIND = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return false end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HGETALL', KEYS[1])
"""
_IS_RUNNING = """
local status = redis.call('HGET', KEYS[1], 'status')
local is_running = status == 'in_progress' or status == 'queued'
local holder = redis.call('GET', KEYS[2])
"""
# The last argument is the turn for the conversation, whose name is the response's id; it may be empty.
_FINISH = (
    ADD_TURN
    + _IS_RUNNING
    + """
if holder and holder ~= ARGV[3] then return 'taken' end
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then
    redis.call('DEL', KEYS[2], KEYS[4])
    return 'deleted'
end
if not is_running then return redis.call('HGET', KEYS[1], 'ended_by') == ARGV[3] and 'stored' or 'taken' end
redis.call('DEL', KEYS[2], KEYS[4])
redis.call('HSET', KEYS[1], 'ended_by', unpack(ARGV, 3, #ARGV - 2))
redis.call('EXPIRE', KEYS[1], ARGV[2])
if ARGV[#ARGV] ~= '' then add_turn(KEYS[3], ARGV[1], ARGV[2], ARGV[#ARGV - 1], ARGV[#ARGV]) end
return 'stored'
"""
)
# Whether anything was logged since it was taken last tells who is of no use to it: a gateway, or it to all gateways.
# Whoever runs it may have gone on from memory since the server was started, as long as he has not spoken to this one.
_TAKE = (
    _IS_RUNNING
    + """
if not is_running then return {'ended'} end
if holder and holder ~= ARGV[1] then return {'held'} end
if not holder then
    local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)[1]
    last = last and last[1] or ''
    local is_stalled = redis.call('HGET', KEYS[1], 'taken_at') == last
    local num_stalled = is_stalled and redis.call('HINCRBY', KEYS[1], 'num_stalled', 1) or 0
    redis.call('HSET', KEYS[1], 'taken_at', last, 'num_stalled', num_stalled)
    redis.call('HINCRBY', KEYS[1], 'takeovers', 1)
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
local known = redis.call('HMGET', KEYS[1], 'takeovers', 'num_stalled', 'server_life')
local server_life = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local is_whole = (known[3] or server_life) == server_life and 1 or 0
return {'taken', known[1] or '0', known[2] or '0', is_whole, redis.call('GET', KEYS[4]) or ''}
"""
)
_RENEW = (
    _IS_RUNNING
    + """
if not is_running or (holder and holder ~= ARGV[1]) then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('PEXPIRE', KEYS[5], ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'server_life', ARGV[4]) end
return 1 + redis.call('HEXISTS', KEYS[1], 'stop') + 2 * redis.call('EXISTS', KEYS[4])
"""
)
_SAY_READ = """
redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
local holder = redis.call('GET', KEYS[2])
if holder then redis.call('PUBLISH', 'g:' .. holder, '') end
"""
_ASK_TO_STOP = (
    _IS_RUNNING
    + """
if not is_running then return end
redis.call('HSET', KEYS[1], 'stop', '1')
if holder then redis.call('PUBLISH', 'g:' .. holder, '') end
"""
)
_GIVE_UP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    redis.call('DEL', KEYS[1])
    redis.call('HDEL', KEYS[3], 'taken_at')
end
redis.call('PUBLISH', KEYS[2], '')
"""
_DELETE = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return 0 end
redis.call('DEL', unpack(KEYS))
redis.call('PUBLISH', KEYS[3], '')
return 1
"""


class Finished(enum.Enum):
    STORED = b"stored"
    DELETED = b"deleted"
    """The node was deleted meanwhile, and stays so."""
    TAKEN = b"taken"
    """Another gateway has the response, or has ended it."""


class Untaken(enum.Enum):
    HELD = b"held"
    """Another gateway runs it."""
    ENDED = b"ended"


@dataclass(frozen=True, slots=True)
class Orphan:
    """What nobody ran, and is ours now."""

    takeovers: int
    """How often it was taken over, this time included."""
    num_stalled: int
    """How often in a row nothing had been logged since the time before."""
    is_whole: bool
    """Whether its log is known to hold all that was seen of it."""
    recipe: bytes
    """As it was given to `create`; empty where it is gone."""


@dataclass(frozen=True, slots=True)
class Renewed:
    lost: list[ResponseId]
    """Not ours any more: ended by another gateway, taken over or deleted."""
    to_stop: list[ResponseId]
    """Somebody has asked another gateway to cancel them."""
    read: set[ResponseId]
    """They have readers at other gateways."""


class Sessions:
    """Each command has `timeout_s` for everything: a free connection, connecting, the reply, a few quick retries. Then,
    or earlier when retries are of no use, SessionsUnavailable is raised."""

    def __init__(
        self,
        commands: RedisCommands,
        *,
        owner: str,
        node_ttl_s: int = NODE_TTL_S,
        lease_ms: int = LEASE_MS,
        server_life: Callable[[], str] = str,
    ) -> None:
        """`server_life`: of the server that was spoken to last, with which answers are marked; empty if not known."""
        self._commands = commands
        self._redis = redis = commands.redis
        self._owner = owner
        self._node_ttl_s = node_ttl_s
        self._lease_ms = lease_ms
        self._server_life = server_life
        self._find = redis.register_script(_FIND)
        self._finish = redis.register_script(_FINISH)
        self._take = redis.register_script(_TAKE)
        self._renew = redis.register_script(_RENEW)
        self._say_read = redis.register_script(_SAY_READ)
        self._ask_to_stop = redis.register_script(_ASK_TO_STOP)
        self._give_up = redis.register_script(_GIVE_UP)
        self._delete = redis.register_script(_DELETE)

    @classmethod
    def connect(
        cls, url: str, *, owner: str, max_connections: int = 16, timeout_s: float = TIMEOUT_S, **options: Any
    ) -> Self:
        """`owner` names this gateway's life: no other process, earlier or beside it, may use the same name."""
        commands = RedisCommands.connect(url, max_connections=max_connections, timeout_s=timeout_s)
        return cls(commands, owner=owner, **options)

    async def close(self) -> None:
        """Lets the commands under way end, then closes the connections."""
        await self._commands.close()

    async def create(self, node: ResponseNode, recipe: bytes = b"") -> None:
        """Stores a new node together with this gateway's lease on it, its log and how to submit it again: when it
        returns, all are there."""

        async def run() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(node_key(node.id), mapping=node.created_fields())  # type: ignore[arg-type]
                pipe.expire(node_key(node.id), self._node_ttl_s)
                if node.response.is_running:
                    pipe.delete(log_key(node.id))
                    pipe.xadd(log_key(node.id), {"empty": ""}, id="0-1", maxlen=0, approximate=False)
                    pipe.pexpire(log_key(node.id), round(LOG_TTL_S * 1000))
                    pipe.set(recipe_key(node.id), recipe, px=round(LOG_TTL_S * 1000))
                    if server_life := self._server_life():
                        pipe.hset(node_key(node.id), "server_life", server_life)
                    pipe.set(lease_key(node.id), self._owner, px=self._lease_ms)
                await pipe.execute()

        await self._commands.run(run())

    async def finish(self, node: ResponseNode) -> Finished:
        """Writes a node's end, adds it to its conversation and gives up the lease."""
        fields = [part for pair in node.ended_fields().items() for part in pair]
        keys = [node_key(node.id), lease_key(node.id), conversation_key(node.id.root), recipe_key(node.id)]
        said = [node.tenant, self._node_ttl_s, self._owner, *fields, str(node.id), turn_to_add(node)]
        return Finished(await self._commands.run(self._finish(keys, said)))

    async def try_take(self, response_id: ResponseId) -> Orphan | Untaken:
        """Makes a response that nobody runs this gateway's own."""
        keys = [node_key(response_id), lease_key(response_id), log_key(response_id), recipe_key(response_id)]
        said, *orphan = await self._commands.run(self._take(keys, [self._owner, self._lease_ms]))
        if not orphan:
            return Untaken(said)
        takeovers, num_stalled, is_whole, recipe = orphan
        return Orphan(int(takeovers), int(num_stalled), bool(is_whole), recipe)

    async def find_without_lease(self, ids: Sequence[ResponseId]) -> list[ResponseId]:
        """Those of `ids` that no gateway runs."""

        async def run() -> list[int]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for response_id in ids:
                    pipe.exists(lease_key(response_id))
                return list(await pipe.execute())

        held = await self._commands.run(run())
        return [response_id for response_id, is_held in zip(ids, held, strict=True) if not is_held]

    async def find(self, tenant: str, response_id: ResponseId) -> ResponseNode | None:
        """None when there is no such response of this tenant. One that looks running may be an orphan."""
        values = await self._commands.run(self._find([node_key(response_id)], [tenant, self._node_ttl_s]))
        if not values:
            return None
        return node_from_fields(response_id, dict(zip(values[::2], values[1::2], strict=True)))

    async def find_history(self, node: ResponseNode) -> list[Turn] | None:
        """The turns of a node's stored ancestors, the first one first, in one pipeline that refreshes their TTL.

        None when one of them has been deleted or has expired."""
        ids = node.ancestor_ids
        if not ids:
            return []

        async def run() -> list[Any]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for response_id in ids:
                    pipe.hmget(node_key(response_id), list(TURN_FIELDS))
                    pipe.expire(node_key(response_id), self._node_ttl_s)
                return list(await pipe.execute())

        replies = await self._commands.run(run())
        turns = []
        for tenant, *values in replies[::2]:
            if tenant is None or tenant.decode() != node.tenant:
                return None
            turns.append(turn_from_values(*values))
        return turns

    async def delete(self, tenant: str, response_id: ResponseId) -> bool:
        """With its log. False when there was no such response of this tenant. Of two deletes at once both may have
        deleted it."""

        async def find_tenant() -> bytes | str | None:
            return await self._redis.hget(node_key(response_id), "tenant")

        # asked first: what the delete itself says is about its last attempt only
        if await self._commands.run(find_tenant()) != tenant.encode():
            return False
        names = (node_key, lease_key, log_key, recipe_key, readers_key)
        await self._commands.run(self._delete([name(response_id) for name in names], [tenant]))
        return True

    @property
    def may_judge(self) -> bool:
        """Whether who has no lease has gone. While Redis was away nobody could renew his: he is left time for it."""
        return time.monotonic() >= self._commands.failed_at + self.lease_s

    @property
    def channel(self) -> str:
        """On which this gateway is told to look at its leases again."""
        return f"g:{self._owner}"

    async def ask_to_stop(self, response_id: ResponseId) -> None:
        """Has the gateway that runs it, now or later, cancel it."""
        await self._commands.run(self._ask_to_stop([node_key(response_id), lease_key(response_id)]))

    async def renew_leases(self, ids: Sequence[ResponseId], *, broken: Collection[ResponseId] = ()) -> Renewed:
        """Of responses that run here, and keeps their logs. `broken`: those of which more was seen than is logged."""
        server_life = self._server_life()

        async def run() -> list[int]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for response_id in ids:
                    names = (node_key, lease_key, log_key, readers_key, recipe_key)
                    said: list[str | int] = [self._owner, self._lease_ms, round(LOG_TTL_S * 1000)]
                    said.append("" if response_id in broken else server_life)
                    await self._renew([name(response_id) for name in names], said, client=pipe)
                return list(await pipe.execute())

        said = list(zip(ids, await self._commands.run(run()), strict=True))
        return Renewed(
            lost=[name for name, code in said if code == 0],
            to_stop=[name for name, code in said if code in (2, 4)],
            read={name for name, code in said if code in (3, 4)},
        )

    async def give_up_leases(self, ids: Sequence[ResponseId]) -> None:
        """Of responses that ran here and have not ended: they belong to who takes them first. That nothing was added to
        them here counts against nobody."""
        await self._run_for_each(ids, self._give_up, (lease_key, log_key, node_key), self._owner)

    async def say_read(self, ids: Sequence[ResponseId]) -> None:
        """Tells the gateways that run them, now or later, that they have readers here. It holds for a lease's time."""
        await self._run_for_each(ids, self._say_read, (readers_key, lease_key), self._lease_ms)

    async def _run_for_each(
        self, ids: Sequence[ResponseId], script: Any, keys: Sequence[Callable[[ResponseId], str]], said: str | int
    ) -> None:
        async def run() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for response_id in ids:
                    await script([key(response_id) for key in keys], [said], client=pipe)
                await pipe.execute()

        await self._commands.run(run())

    @property
    def lease_s(self) -> float:
        return self._lease_ms / 1000
