"""What gateways that have gone left, also where nobody asks for it: living ones look for it, and each goes on with what
it gets the lease of."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from app.disconnect import cancel_and_wait
from app.ids import try_parse_response_id
from app.recovery import Recovery
from app.redis_commands import SessionsUnavailable
from app.running_index import RunningIndex
from app.sessions import Sessions

logger = logging.getLogger(__name__)

BATCH = 32


class Orphans:
    """Looks several times in the life of a lease, from `start` to `close`.

    While Redis was away, nobody could say that he lives: then, and after its own start, it waits for as long as a lease
    before it takes anybody for dead."""

    def __init__(
        self,
        index: RunningIndex,
        sessions: Sessions,
        recovery: Recovery,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._index = index
        self._sessions = sessions
        self._recovery = recovery
        self._monotonic = monotonic
        self._sleep = sleep
        self._judges_from = monotonic() + sessions.lease_s
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """When it returns this gateway has said that it lives, unless Redis is away."""
        await self._look()
        self._looking = asyncio.create_task(self._go_on_looking(), name="orphans")
        self._looking.add_done_callback(_report_failure)

    async def close(self) -> None:
        """What is left here then is for the others."""
        if self._looking is not None:
            await cancel_and_wait(self._looking)
        try:
            await self._index.leave()
        except SessionsUnavailable as e:
            logger.warning("others will only notice that this gateway has ended: %s", e.reason)

    async def _go_on_looking(self) -> None:
        while True:
            await self._sleep(self._sessions.lease_s / 3)
            await self._look()

    async def _look(self) -> None:
        try:
            gone = await self._index.beat()
            if self._monotonic() >= self._judges_from:
                for owner in gone:
                    await self._take_from(owner)
        except SessionsUnavailable as e:
            logger.warning("what other gateways left is not looked for: %s", e.reason)
            self._judges_from = self._monotonic() + self._sessions.lease_s

    async def _take_from(self, owner: str) -> None:
        """Until nothing is left there, or only what somebody holds."""
        while found := await self._index.some_of(owner, BATCH):
            seen_to = [name for name, tenant in found if await self._see_to(name, tenant)]
            if seen_to:
                await self._index.remove(seen_to, owner)
            if len(seen_to) < len(found):
                return
        await self._index.forget(owner)

    async def _see_to(self, response_id: str, tenant: str) -> bool:
        """Whether nothing is left to do for it: it has ended, or runs here."""
        parsed = try_parse_response_id(response_id)
        node = None if parsed is None else await self._sessions.find(tenant, parsed)
        if node is None:
            return True
        node = await self._recovery.recover(node)
        return not node.response.is_running or self._recovery.has_taken(node)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("what other gateways left is not looked for any more", exc_info=error)
