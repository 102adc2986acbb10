"""Commands to Redis, each in a task of its own with one deadline for everything.

So no connection to Redis is left between a command and its reply when a client's connection ends, and nobody waits for
longer than the deadline: for a free connection, connecting, the reply and a few quick retries together. Time in which
this process is stopped does not count: the reply may be there. A command whose reply was lost runs once more, so none
may mean something else the second time.
"""

import asyncio
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from app.patience import Patience

T = TypeVar("T")

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class SessionsUnavailable(Exception):
    """Redis does not answer. Nothing that was acknowledged is lost; nothing new can be taken."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the session store does not answer: {reason}")
        self.reason = reason


class RedisCommands:
    """The connections of one gateway. After `timeout_s`, or earlier when retries are of no use, a command raises
    SessionsUnavailable."""

    def __init__(self, redis: Redis, *, timeout_s: float = TIMEOUT_S) -> None:
        self.redis = redis
        self.timeout_s = timeout_s
        self.failed_at = -math.inf
        """When a command failed last, in seconds of the monotonic clock."""
        self._commands: set[asyncio.Task[Any]] = set()

    @classmethod
    def connect(cls, url: str, *, max_connections: int = 16, timeout_s: float = TIMEOUT_S) -> Self:
        """`url` is redis://, rediss:// or unix://; connections are made when they are needed."""
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,  # here and below: a command has one deadline for everything
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )
        return cls(Redis.from_pool(pool), timeout_s=timeout_s)

    @property
    def num_under_way(self) -> int:
        return len(self._commands)

    async def run(self, command: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Its result. It goes on when the caller is cancelled, but not beyond its deadline."""
        task = asyncio.create_task(_in_time(command, self.timeout_s if timeout_s is None else timeout_s))
        self._commands.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except RedisError as e:
            self.failed_at = time.monotonic()
            raise SessionsUnavailable(f"{type(e).__name__}: {e}") from e

    async def close(self) -> None:
        """Lets the commands under way end, then closes the connections."""
        if self._commands:
            await asyncio.wait(self._commands)
        await self.redis.aclose()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._commands.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a command to Redis failed: %s: %s", type(error).__name__, error)


async def _in_time(command: Coroutine[Any, Any, T], timeout_s: float) -> T:
    try:
        async with Patience(timeout_s):
            return await command
    except TimeoutError:
        raise RedisTimeoutError(f"no reply within {timeout_s:g} s") from None
