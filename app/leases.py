"""The leases of the responses that run here, renewed as long as they do; so this gateway also learns that one of them
has been cancelled at another gateway, has readers there, or is not its own any more."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from app.announcements import Announcements
from app.readers import Readers
from app.response_run import ResponseRun
from app.sessions import Renewed, Sessions, SessionsUnavailable
from app.shared_log import SharedEventLog

logger = logging.getLogger(__name__)

LEASE_RETRY_S = 0.25
"""Between attempts to renew leases while Redis is away: once it is back, they must not be missing for long."""


class Leases:
    """A run whose lease another gateway has is abandoned. The task lives while stored responses run."""

    def __init__(self, sessions: Sessions, announcements: Announcements, log: SharedEventLog, readers: Readers) -> None:
        self._sessions = sessions
        self._log = log
        self._readers = readers
        self._announcements = announcements
        self._news = asyncio.Event()
        """Another gateway says that there is something to look at."""
        self._stop_listening: Callable[[], None] = lambda: None
        self._runs: set[ResponseRun] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[Renewed] | None = None
        """The last one. It arrives in Redis whether somebody waits for it or not."""

    def keep(self, run: ResponseRun) -> None:
        self._runs.add(run)
        if self._renewing is None:
            self._stop_listening = self._announcements.watch(self._sessions.channel, self._news.set)
            self._renewing = asyncio.create_task(self._renew(), name="lease renewal")
            self._renewing.add_done_callback(_report_failure)

    def look(self) -> None:
        """Renews them now, and hears what was said of them before they were this gateway's."""
        self._news.set()

    def release(self, run: ResponseRun) -> None:
        self._runs.discard(run)
        if self._renewing is not None and not self._runs:
            self._stop_listening()
            self._renewing.cancel()
            self._renewing = None

    async def settle(self) -> None:
        """Returns when no renewal is on its way: it would bring back a lease that is given up meanwhile."""
        if self._renewal is not None:
            await asyncio.wait({self._renewal})

    async def _renew(self) -> None:
        pause_s = self._sessions.lease_s / 3
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            self._news.clear()
            runs = {run.node.id: run for run in self._runs}
            try:
                broken = {name for name in runs if not self._log.is_shared(str(name))}
                self._renewal = asyncio.create_task(self._sessions.renew_leases(list(runs), broken=broken))
                self._renewal.add_done_callback(_retrieve_failure)
                renewed = await asyncio.shield(self._renewal)
            except SessionsUnavailable as e:
                logger.warning("leases are not renewed: %s", e.reason)
                pause_s = LEASE_RETRY_S
            else:
                pause_s = self._sessions.lease_s / 3
                for response_id in renewed.lost:
                    runs[response_id].abandon()
                for response_id in renewed.to_stop:
                    runs[response_id].stop()
                for response_id in runs:
                    self._readers.read_elsewhere(str(response_id), is_read=response_id in renewed.read)


def _retrieve_failure(task: asyncio.Task[Renewed]) -> None:
    """Who waits for it has it; nobody does once the last run has ended."""
    if not task.cancelled():
        task.exception()


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("leases are not renewed any more", exc_info=error)
