"""Answers of other gateways that are read here: when the gateway that runs one has gone, this one does what is left."""

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
        self._looking: asyncio.Task[None] | None = None

    def add(self, tenant: str, response_id: ResponseId) -> None:
        """Somebody may be about to watch it; once nobody does it is forgotten."""
        self._tenants[response_id] = tenant
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_after(), name="followed answers")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_after(self) -> None:
        while self._tenants:
            await asyncio.sleep(self._sessions.lease_s / 3)
            followed = set(self._log.followed)
            self._tenants = {name: tenant for name, tenant in self._tenants.items() if str(name) in followed}
            try:
                for response_id in await self._sessions.find_without_lease(list(self._tenants)):
                    node = await self._sessions.find(self._tenants[response_id], response_id)
                    if node is not None:
                        await self._recovery.recover(node)
            except SessionsUnavailable as e:
                logger.warning("followed answers are not looked after: %s", e.reason)
            for name in followed:
                self._log.wake_followers(name)
        self._looking = None
