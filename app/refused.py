"""Responses that were refused because Redis did not say that it has them, and that it may have nevertheless."""

import asyncio
import logging

from app.ids import ResponseId
from app.sessions import Sessions, SessionsUnavailable

logger = logging.getLogger(__name__)

RETRY_S = 1.0
MAX_WAITING = 10_000
"""While Redis is away; further ones are left, which is logged."""


class Refused:
    """Deletes them as soon as Redis answers: nobody knows their ids, and whoever found one without a lease would go on
    with it, at the cost of a tenant who was told to send the message again. The task lives while there are any."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._waiting: dict[ResponseId, str] = {}
        self._deleting: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, tenant: str, response_id: ResponseId) -> None:
        if len(self._waiting) >= MAX_WAITING:
            logger.error("%s was refused and may be stored: %d such wait already", response_id, len(self._waiting))
            return
        self._waiting[response_id] = tenant
        if self._deleting is None:
            self._deleting = asyncio.create_task(self._delete(), name="refused responses")

    async def close(self) -> None:
        """After a last attempt."""
        if self._deleting is not None:
            self._deleting.cancel()
            await asyncio.gather(self._deleting, return_exceptions=True)
        try:
            await self._delete_waiting()
        except SessionsUnavailable as e:
            logger.error("%d refused responses may be stored: %s", len(self._waiting), e.reason)

    async def _delete(self) -> None:
        try:
            while self._waiting:
                try:
                    await self._delete_waiting()
                except SessionsUnavailable:
                    await asyncio.sleep(RETRY_S)
        finally:
            self._deleting = None

    async def _delete_waiting(self) -> None:
        for response_id, tenant in list(self._waiting.items()):
            await self._sessions.delete(tenant, response_id)
            self._waiting.pop(response_id, None)
