"""What other gateways announce, over one connection to Redis for all that this gateway wants to hear of.

An announcement only says "look again": none is needed for what is true, so those that get lost with the connection cost
nothing but time, and after a break everybody is told to look again.
"""

import asyncio
import logging
from collections.abc import Callable

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from app.disconnect import cancel_and_wait
from app.event_log import Wake

logger = logging.getLogger(__name__)

RETRY_S = 0.25


class Announcements:
    """The task that listens lives while somebody watches a channel."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._watchers: dict[str, dict[object, Wake]] = {}
        self._news = asyncio.Event()
        """The channels that are wanted may be others now."""
        self._listening: asyncio.Task[None] | None = None

    @property
    def channels(self) -> list[str]:
        """Those that somebody watches."""
        return list(self._watchers)

    def watch(self, channel: str, wake: Wake) -> Callable[[], None]:
        """Calls `wake` as soon as the channel is heard, after each announcement and after each break, until the
        returned function is called. `wake` must not raise."""
        key = object()
        self._watchers.setdefault(channel, {})[key] = wake
        self._news.set()
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="announcements")

        def stop() -> None:
            watchers = self._watchers.get(channel, {})
            if watchers.pop(key, None) is not None and not watchers:
                del self._watchers[channel]
                self._news.set()

        return stop

    async def close(self) -> None:
        if self._listening is not None:
            await cancel_and_wait(self._listening)

    async def _listen(self) -> None:
        while self._watchers:
            pubsub = self._redis.pubsub()
            try:
                await self._hear(pubsub)
            except (RedisError, OSError) as e:
                logger.warning("announcements of other gateways are not heard: %s: %s", type(e).__name__, e)
                await asyncio.sleep(RETRY_S)
            finally:
                await pubsub.aclose()  # type: ignore[no-untyped-call]
        self._listening = None

    async def _hear(self, pubsub: PubSub) -> None:
        """Until nobody watches any more. Raises RedisError or OSError when the connection breaks for good."""
        heard: set[str] = set()
        reading: asyncio.Task[object] | None = None
        news = asyncio.create_task(self._news.wait())
        try:
            while self._watchers:
                self._news.clear()
                wanted = set(self._watchers)
                if wanted - heard:
                    await pubsub.subscribe(*wanted - heard)
                if heard - wanted:
                    await pubsub.unsubscribe(*heard - wanted)
                heard = wanted
                reading = reading or asyncio.create_task(pubsub.get_message(timeout=None))
                if news.done():
                    news = asyncio.create_task(self._news.wait())
                await asyncio.wait({reading, news}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    self._take(reading.result())
                    reading = None
        finally:
            await cancel_and_wait(news, *([reading] if reading is not None else []))

    def _take(self, message: object) -> None:
        """Also the reply to a subscription: what was announced before it was not heard."""
        if isinstance(message, dict) and message["type"] in ("message", "subscribe"):
            for wake in list(self._watchers.get(message["channel"].decode(), {}).values()):
                wake()
