"""What the gateways of one server keep in common about a tenant, in Redis.

    {t:<tenant>}:ticket:<id>   who used up a ticket; kept for longer than anybody's clock is wrong

Nothing here is waited for long: who asks can decide without it. Commands run in tasks of their own, so that no
connection is left between a command and its reply when a client goes.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

T = TypeVar("T")

TIMEOUT_S = 0.5
TICKET_MEMORY_S = 3600
"""Far more than a ticket lives, so that a clock that was put back does not make a used one valid again."""

# The first use is kept. One whose reply was lost may ask again: it is known by its name.
_USE_TICKET = """
local use = redis.call('GET', KEYS[1])
if use then return use == ARGV[1] and 1 or 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""


class TenantStoreAway(Exception):
    """Redis does not answer."""


class TenantStore:
    def __init__(self, redis: Redis, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: for everything that one command needs, a free connection included."""
        self._redis = redis
        self._timeout_s = timeout_s
        self._commands: set[asyncio.Task[Any]] = set()
        self._use_ticket = redis.register_script(_USE_TICKET)

    @classmethod
    def connect(cls, url: str, *, max_connections: int = 8, timeout_s: float = TIMEOUT_S) -> Self:
        """Connections are made when they are needed."""
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,  # here and below: a command has one deadline for everything
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 1),  # at once, on a new connection: the server may have been started again
        )
        return cls(Redis.from_pool(pool), timeout_s=timeout_s)

    async def close(self) -> None:
        """Lets the commands under way end, then closes the connections."""
        if self._commands:
            await asyncio.wait(self._commands)
        await self._redis.aclose()

    async def try_use_ticket(self, tenant: str, ticket_id: str, use: str) -> bool:
        """Whether the ticket was unused until the use of this name. Raises TenantStoreAway."""
        key = f"{{t:{tenant}}}:ticket:{ticket_id}"
        return bool(await self._command(self._use_ticket([key], [use, TICKET_MEMORY_S])))

    async def _command(self, command: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(self._in_time(command))
        self._commands.add(task)
        task.add_done_callback(self._command_ended)
        return await asyncio.shield(task)

    async def _in_time(self, command: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await command
        except TimeoutError:
            raise TenantStoreAway(f"no reply within {self._timeout_s:g} s") from None
        except RedisError as e:
            raise TenantStoreAway(f"{type(e).__name__}: {e}") from e

    def _command_ended(self, task: asyncio.Task[Any]) -> None:
        self._commands.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, unless it was cancelled
