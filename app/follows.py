"""Answers of other gateways that are read here: those who run them are told so, and when one of them has gone, this
gateway does what is left."""

import asyncio
import logging

from app.ids import ResponseId
from app.recovery import Recovery
from app.sessions import Sessions, SessionsUnavailable
from app.shared_log import SharedEventLog

logger = logging.getLogger(__name__)


class Follows:
    """Looks after them several times in the life of a lease; the task lives while there are such answers."""

    def __init__(self, sessions: Sessions, log: SharedEventLog, recovery: Recovery) -> None:
        self._sessions = sessions
        self._log = log
        self._recovery = recovery
        self._tenants: dict[ResponseId, str] = {}
        self._new: set[ResponseId] = set()
        """Added since it looked last: whoever is about to watch one may not do so yet."""
        self._looking: asyncio.Task[None] | None = None

    def add(self, tenant: str, response_id: ResponseId) -> None:
        """Somebody may be about to watch it; once nobody does it is forgotten."""
        self._tenants[response_id] = tenant
        self._new.add(response_id)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_after(), name="followed answers")
            self._looking.add_done_callback(_report_failure)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_after(self) -> None:
        try:
            await self._look_until_nobody_follows()
        finally:
            self._looking = None

    async def _look_until_nobody_follows(self) -> None:
        while self._tenants:
            await asyncio.sleep(self._sessions.lease_s / 3)
            followed = set(self._log.followed)
            kept = {name for name in self._tenants if name in self._new or str(name) in followed}
            self._new.clear()
            self._tenants = {name: self._tenants[name] for name in kept}
            try:
                await self._sessions.say_read(list(self._tenants))
                for response_id in await self._sessions.find_without_lease(list(self._tenants)):
                    node = await self._sessions.find(self._tenants[response_id], response_id)
                    if node is not None:
                        await self._recovery.recover(node)
            except SessionsUnavailable as e:
                logger.warning("followed answers are not looked after: %s", e.reason)
            for name in followed:
                self._log.wake_followers(name)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("followed answers are not looked after any more", exc_info=error)
