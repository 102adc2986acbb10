"""A time limit that counts only while this process runs.

A process that was stopped, by a signal or with its machine, has not waited: what it waits for may have come long ago
and only needs to be looked at. With a plain deadline everything under way would fail in the moment in which it goes on.
"""

import asyncio
from types import TracebackType

NUM_LOOKS = 4


class Patience:
    """`async with Patience(seconds)` raises TimeoutError as `asyncio.timeout` does. Once only.

    It looks at the clock several times; a look that comes late by as much as a look is apart is not counted.
    """

    def __init__(self, seconds: float) -> None:
        self._apart_s = seconds / NUM_LOOKS
        self._num_left = NUM_LOOKS
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._limit.__aenter__()
        self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._next.cancel()
        await self._limit.__aexit__(kind, error, traceback)

    def _wait(self) -> None:
        self._due = self._loop.time() + self._apart_s
        self._next = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._due < self._apart_s:
            self._num_left -= 1
        if self._num_left:
            self._wait()
        else:
            self._limit.reschedule(now)
