"""Puts the operator's file in force again whenever it changes, or on demand (SIGHUP)."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from app.config import ConfigError
from app.disconnect import cancel_and_wait
from app.file_watch import watch_file
from app.live_config import Configured, LiveConfig

logger = logging.getLogger(__name__)


class Reloader:
    """One reload at a time, each of what the file says then: what is in force last is what it said last."""

    def __init__(self, path: Path, live: LiveConfig, put_in_force: Callable[[Configured], None]) -> None:
        """`path`: the file that `live` loads."""
        self._path = path
        self._live = live
        self._put_in_force = put_in_force
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Reads the file soon, however often this is called until then; and watches it again if that had failed."""
        self._requested.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        watching: asyncio.Task[None] | None = None
        try:
            while True:
                if watching is None or watching.done():
                    watching = asyncio.create_task(self._watch(), name="configuration watch")
                await self._requested.wait()
                self._requested.clear()
                await self._reload()
        finally:
            if watching is not None:
                await cancel_and_wait(watching)

    async def _watch(self) -> None:
        try:
            await watch_file(self._path, self.request)
        except OSError as e:
            logger.warning("%s is not watched: %s; after an edit send SIGHUP to the server", self._path, e)

    async def _reload(self) -> None:
        try:
            # in a thread: the trunks of new assistants are rendered and encoded here
            new = await asyncio.to_thread(self._live.load)
        except ConfigError as e:
            logger.error("the configuration stays as it was: %s", e)
            return
        old = self._live.current
        if new.says_the_same(old):
            return
        if new.file_config.redis_url != old.file_config.redis_url:
            logger.warning("%s: redis_url has changed, which needs a restart of the server", self._path)
        self._put_in_force(new)
        logger.info("%s is in force as it is now: %s", self._path, _summary(new))


def _summary(configured: Configured) -> str:
    said = configured.file_config
    return f"assistants: {len(said.assistants)}, tenants: {len(said.tenants)}"
