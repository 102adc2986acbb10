"""Conversations in Redis: one hash for each response, which outlives connections and processes.

    {s:<root>}:r:<id>   the node, see app/response_node.py; its TTL starts anew with every use
    {s:<root>}:o:<id>   lease of the gateway that runs it; without one a response that looks running is an orphan

All keys of a conversation share the hash tag `{s:<root>}`. An id is never a credential: each lookup names the tenant,
and what belongs to another one is not there. Commands run in tasks of their own, so that no connection to Redis is left
between a command and its reply when a client's connection ends. A command whose reply was lost runs once more, so
none may mean something else the second time.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from app.conversation_turns import ADD_TURN, conversation_key, turn_to_add
from app.events import ResponseError
from app.ids import ResponseId
from app.redis_commands import SessionsUnavailable
from app.response_node import TURN_FIELDS, ResponseNode, Turn, node_from_fields, turn_from_values

__all__ = ["Sessions", "SessionsUnavailable"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

NODE_TTL_S = 30 * 24 * 3600
LEASE_MS = 15_000
TIMEOUT_S = 5.0

_FIND = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return false end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HGETALL', KEYS[1])
"""
# The last argument is the turn for the conversation, whose name is the response's id; it may be empty.
_FINISH = (
    ADD_TURN
    + """
redis.call('DEL', KEYS[2])
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 3, #ARGV - 2))
redis.call('EXPIRE', KEYS[1], ARGV[2])
if ARGV[#ARGV] ~= '' then add_turn(KEYS[3], ARGV[1], ARGV[2], ARGV[#ARGV - 1], ARGV[#ARGV]) end
return 1
"""
)
_DELETE = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1], KEYS[2])
"""
_FAIL_ORPHAN = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'in_progress' or status == 'queued' then
    redis.call('HSET', KEYS[1], 'status', 'failed', 'error', ARGV[1])
end
return 1
"""

ORPHANED = ResponseError(message="The server that ran this response ended before it was finished.")


class Sessions:
    """Each command has `timeout_s` for everything: a free connection, connecting, the reply, a few quick retries. Then,
    or earlier when retries are of no use, SessionsUnavailable is raised."""

    def __init__(
        self,
        redis: Redis,
        *,
        owner: str,
        node_ttl_s: int = NODE_TTL_S,
        lease_ms: int = LEASE_MS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._redis = redis
        self._owner = owner
        self._timeout_s = timeout_s
        self._node_ttl_s = node_ttl_s
        self._lease_ms = lease_ms
        self._commands: set[asyncio.Task[Any]] = set()
        self._find = redis.register_script(_FIND)
        self._finish = redis.register_script(_FINISH)
        self._delete = redis.register_script(_DELETE)
        self._fail_orphan = redis.register_script(_FAIL_ORPHAN)

    @classmethod
    def connect(cls, url: str, *, owner: str, max_connections: int = 16, **options: Any) -> Self:
        """`url` is redis://, rediss:// or unix://; connections are made when they are needed. `owner` names this
        gateway's life: no other process, earlier or beside it, may use the same name."""
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,  # here and below: a command has one deadline for everything
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )
        return cls(Redis.from_pool(pool), owner=owner, **options)

    async def close(self) -> None:
        """Lets the commands under way end, then closes the connections."""
        if self._commands:
            await asyncio.wait(self._commands)
        await self._redis.aclose()

    async def create(self, node: ResponseNode) -> None:
        """Stores a new node together with this gateway's lease on it: when it returns, both are there."""

        async def run() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(_node_key(node.id), mapping=node.created_fields())  # type: ignore[arg-type]
                pipe.expire(_node_key(node.id), self._node_ttl_s)
                if node.response.is_running:
                    pipe.set(_lease_key(node.id), self._owner, px=self._lease_ms)
                await pipe.execute()

        await self._command(run())

    async def finish(self, node: ResponseNode) -> bool:
        """Writes a node's end, adds it to its conversation and gives up the lease. False: the node has been deleted
        meanwhile, and stays so."""
        fields = [part for pair in node.ended_fields().items() for part in pair]
        keys = [_node_key(node.id), _lease_key(node.id), conversation_key(node.id.root)]
        turn = (str(node.id), turn_to_add(node))
        return bool(await self._command(self._finish(keys, [node.tenant, self._node_ttl_s, *fields, *turn])))

    async def find(self, tenant: str, response_id: ResponseId) -> ResponseNode | None:
        """None when there is no such response of this tenant. A response whose gateway has gone is found failed."""
        node = await self._find_node(tenant, response_id)
        if node is None or not node.response.is_running:
            return node
        keys = [_node_key(response_id), _lease_key(response_id)]
        without_lease = await self._command(self._fail_orphan(keys, [msgspec.json.encode(ORPHANED)]))
        return await self._find_node(tenant, response_id) if without_lease else node

    async def _find_node(self, tenant: str, response_id: ResponseId) -> ResponseNode | None:
        values = await self._command(self._find([_node_key(response_id)], [tenant, self._node_ttl_s]))
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
                    pipe.hmget(_node_key(response_id), list(TURN_FIELDS))
                    pipe.expire(_node_key(response_id), self._node_ttl_s)
                return list(await pipe.execute())

        replies = await self._command(run())
        turns = []
        for tenant, *values in replies[::2]:
            if tenant is None or tenant.decode() != node.tenant:
                return None
            turns.append(turn_from_values(*values))
        return turns

    async def delete(self, tenant: str, response_id: ResponseId) -> bool:
        """False when there was no such response of this tenant. Of two deletes at once both may have deleted it."""

        async def find_tenant() -> bytes | str | None:
            return await self._redis.hget(_node_key(response_id), "tenant")

        # asked first: what the delete itself says is about its last attempt only
        if await self._command(find_tenant()) != tenant.encode():
            return False
        await self._command(self._delete([_node_key(response_id), _lease_key(response_id)], [tenant]))
        return True

    async def renew_leases(self, ids: Sequence[ResponseId]) -> None:
        async def run() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for response_id in ids:
                    pipe.set(_lease_key(response_id), self._owner, px=self._lease_ms)
                await pipe.execute()

        await self._command(run())

    @property
    def lease_s(self) -> float:
        return self._lease_ms / 1000

    async def _command(self, command: Coroutine[Any, Any, T]) -> T:
        """Runs it in a task of its own, which goes on when the caller is cancelled, but not beyond its deadline."""
        task = asyncio.create_task(self._in_time(command))
        self._commands.add(task)
        task.add_done_callback(self._command_ended)
        try:
            return await asyncio.shield(task)
        except RedisError as e:
            raise SessionsUnavailable(f"{type(e).__name__}: {e}") from e

    async def _in_time(self, command: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await command
        except TimeoutError:
            raise RedisTimeoutError(f"no reply within {self._timeout_s:g} s") from None

    def _command_ended(self, task: asyncio.Task[Any]) -> None:
        self._commands.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a command to Redis failed: %s: %s", type(error).__name__, error)


def _node_key(response_id: ResponseId) -> str:
    return f"{{s:{response_id.root}}}:r:{response_id}"


def _lease_key(response_id: ResponseId) -> str:
    return f"{{s:{response_id.root}}}:o:{response_id}"
