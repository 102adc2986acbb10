"""The log of a gateway among others: its own answers in memory for its own readers, and in Redis for everybody.

Events are seen here only after Redis holds them. Readers of answers that run here, or ended here a short while ago,
read from memory; everybody else reads from Redis and is woken by announcements. When an answer has gone to another
gateway its readers here go on in Redis where they are: they have seen nothing that is not there.

While Redis is away events go on from memory. Then what Redis holds of these answers is not all that was seen, so it is
dropped when Redis is back, and nobody can resume them on another gateway. Where another gateway has gone on with one
meanwhile, whoever has read it here is told that its events are not held: they would not be those that it has seen.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from app.disconnect import cancel_and_wait
from app.event_log import EventsNotHeld, MemoryEventLog, Wake
from app.events import LoggedEvent
from app.redis_commands import SessionsUnavailable
from app.redis_log import Append, Outcome, RedisEventLog

logger = logging.getLogger(__name__)

DROP_RETRY_S = 1.0
MAX_UNSHARED = 65536


class SharedEventLog:
    """An EventLog. `read` and `drop` raise SessionsUnavailable too."""

    def __init__(self, near: MemoryEventLog, far: RedisEventLog) -> None:
        self._near = near
        self._far = far
        self._own: set[str] = set()
        """Answers that run here and are logged in Redis."""
        self._unshared: OrderedDict[str, None] = OrderedDict()
        """Answers of which Redis does not hold all that was seen; the oldest are forgotten first."""
        self._to_drop: set[str] = set()
        """Those of them that Redis still has."""
        self._dropping: asyncio.Task[None] | None = None
        self._watchers: dict[str, dict[object, Wake]] = {}
        self._far_watchers: dict[object, Callable[[], None]] = {}
        """How each that watches in Redis stops it; likewise for those that watch here."""
        self._near_watchers: dict[object, Callable[[], None]] = {}

    @property
    def followed(self) -> list[str]:
        """Answers of other gateways that somebody here watches."""
        return [name for name, wakes in self._watchers.items() if any(key in self._far_watchers for key in wakes)]

    def is_near(self, response_id: str) -> bool:
        """Whether its events are read from memory."""
        return self._near.holds(response_id)

    def is_shared(self, response_id: str) -> bool:
        """Whether it runs here, and Redis holds all that was seen of it."""
        return response_id in self._own

    def wake_followers(self, response_id: str) -> None:
        """They look again, as after a time in which Redis did not answer."""
        for wake in list(self._watchers.get(response_id, {}).values()):
            wake()

    async def close(self) -> None:
        if self._dropping is not None:
            await cancel_and_wait(self._dropping)

    async def open(self, response_id: str, logged: Sequence[LoggedEvent] = ()) -> None:
        await self._near.open(response_id, logged)
        self._own.add(response_id)
        for key, wake in self._watchers.get(response_id, {}).items():
            self._far_watchers.pop(key, _nothing_to_stop)()
            self._near_watchers[key] = self._near.watch(response_id, wake)
        self.wake_followers(response_id)

    async def append(self, batch: Sequence[tuple[str, Sequence[LoggedEvent]]]) -> Collection[str]:
        taken = await self._append_far([pair for pair in batch if pair[0] in self._own])
        await self._near.append([pair for pair in batch if pair[0] not in taken])
        for response_id in taken:
            self.give_up(response_id)
        self._own.difference_update(response_id for response_id, events in batch if events[-1].is_terminal)
        return taken

    async def _append_far(self, batch: Sequence[tuple[str, Sequence[LoggedEvent]]]) -> set[str]:
        if not batch:
            return set()
        appends = [Append(name, events, self._near.first_held(name)) for name, events in batch]
        try:
            outcomes = await self._far.append(appends)
        except SessionsUnavailable as e:
            logger.warning("%d answers go on without a log in Redis: %s", len(self._own), e.reason)
            self._drop_later(self._own)
            return set()
        said = {append.response_id: outcome for append, outcome in zip(appends, outcomes, strict=True)}
        self._drop_later({name for name, outcome in said.items() if outcome is Outcome.LOST})
        return {name for name, outcome in said.items() if outcome is Outcome.TAKEN}

    def give_up(self, response_id: str) -> None:
        """Another gateway has the answer: its readers go on in Redis."""
        self._own.discard(response_id)
        for key, wake in self._watchers.get(response_id, {}).items():
            if key not in self._far_watchers:
                self._far_watchers[key] = self._far.watch(response_id, wake)
            self._near_watchers.pop(key, _nothing_to_stop)()
        self._near.forget(response_id)
        self.wake_followers(response_id)

    def _drop_later(self, response_ids: set[str]) -> None:
        if not response_ids:
            return
        self._to_drop |= response_ids
        self._unshared |= dict.fromkeys(response_ids)
        while len(self._unshared) > MAX_UNSHARED:
            self._unshared.popitem(last=False)
        self._own = self._own - response_ids
        if self._dropping is None:
            self._dropping = asyncio.create_task(self._drop_stale(), name="stale event logs")

    async def _drop_stale(self) -> None:
        while self._to_drop:
            response_id = next(iter(self._to_drop))
            try:
                await self._far.drop_own(response_id)
            except SessionsUnavailable:
                await asyncio.sleep(DROP_RETRY_S)
            else:
                self._to_drop.discard(response_id)
        self._dropping = None

    async def read(self, response_id: str, after: int, limit: int) -> tuple[list[LoggedEvent], bool]:
        try:
            return await self._near.read(response_id, after, limit)
        except EventsNotHeld:
            if response_id in self._unshared:
                raise
        return await self._far.read(response_id, after, limit)

    def read_now(self, response_id: str, after: int, limit: int) -> tuple[list[LoggedEvent], bool] | None:
        return self._near.read_now(response_id, after, limit) if self._near.holds(response_id) else None

    def watch(self, response_id: str, wake: Wake) -> Callable[[], None]:
        key = object()
        self._watchers.setdefault(response_id, {})[key] = wake
        if self._near.holds(response_id):
            self._near_watchers[key] = self._near.watch(response_id, wake)
        else:
            self._far_watchers[key] = self._far.watch(response_id, wake)

        def stop() -> None:
            watchers = self._watchers.get(response_id, {})
            if watchers.pop(key, None) is not None and not watchers:
                del self._watchers[response_id]
            self._near_watchers.pop(key, _nothing_to_stop)()
            self._far_watchers.pop(key, _nothing_to_stop)()

        return stop

    async def drop(self, response_id: str) -> None:
        self._own.discard(response_id)
        await self._near.drop(response_id)
        await self._far.drop(response_id)


def _nothing_to_stop() -> None:
    pass
