"""Who reads the stored answers that run here, on this gateway and elsewhere, and what becomes of those nobody reads.

A reader is a cursor that is watched, or a request that waits for the end. Readers at other gateways are heard of
through the session store (app/leases.py).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from app.disconnect import cancel_and_wait
from app.grace import Grace, GraceRules, Step
from app.response_run import ResponseRun

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between looks at the clock."""
MAX_PAUSED = 4096
"""Of one gateway; then the one that is paused for the longest time ends."""


@dataclass(eq=False, slots=True)
class _Kept:
    response_id: str
    run: ResponseRun
    grace: Grace


class Readers:
    """Answers that are not kept here may have readers too, which changes nothing. The task that looks at the clock
    lives while there are answers that nobody reads. `clock` gives seconds, and never jumps."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._num_readers: dict[str, int] = {}
        """Here, also of answers that are not kept: they may come here later."""
        self._kept: dict[str, _Kept] = {}
        self._unread: dict[str, _Kept] = {}
        """Paused ones too."""
        self._paused: dict[str, _Kept] = {}
        """In the order in which they were paused."""
        self._looking: asyncio.Task[None] | None = None

    @property
    def paused(self) -> list[str]:
        """Answers that are paused, by response id."""
        return list(self._paused)

    def is_paused(self, response_id: str) -> bool:
        return response_id in self._paused

    async def close(self) -> None:
        if self._looking is not None:
            await cancel_and_wait(self._looking)

    def keep(self, run: ResponseRun, rules: GraceRules) -> None:
        """From its start here on. One that is gone on with after another gateway may have readers already."""
        kept = _Kept(str(run.node.id), run, Grace(rules, self._clock()))
        kept.grace.num_readers = self._num_readers.get(kept.response_id, 0)
        self._kept[kept.response_id] = kept
        if not kept.grace.is_read:
            self._nobody_reads(kept)

    def release(self, run: ResponseRun) -> None:
        """At its end."""
        for answers in (self._kept, self._unread, self._paused):
            answers.pop(str(run.node.id), None)

    def enter(self, response_id: str) -> Callable[[], None]:
        """Somebody reads it, until the returned function is called; further calls of that do nothing."""
        self._count(response_id, 1)
        is_here = True

        def leave() -> None:
            nonlocal is_here
            if is_here:
                is_here = False
                self._count(response_id, -1)

        return leave

    def _count(self, response_id: str, change: int) -> None:
        num_readers = self._num_readers.pop(response_id, 0) + change
        if num_readers:
            self._num_readers[response_id] = num_readers
        kept = self._kept.get(response_id)
        if kept is None:
            return
        kept.grace.num_readers = num_readers
        if kept.grace.is_read:
            self._somebody_reads(kept)
        else:
            self._nobody_reads(kept)

    @contextlib.contextmanager
    def reading(self, response_id: str) -> Iterator[None]:
        leave = self.enter(response_id)
        try:
            yield
        finally:
            leave()

    def touch(self, response_id: str) -> None:
        """Somebody has looked at it once."""
        self.enter(response_id)()

    def read_elsewhere(self, response_id: str, *, is_read: bool) -> None:
        """Whether it has readers at other gateways, as far as is known now."""
        kept = self._kept.get(response_id)
        if kept is None or kept.grace.is_read_elsewhere == is_read:
            return
        was_read = kept.grace.is_read
        kept.grace.is_read_elsewhere = is_read
        if kept.grace.is_read:
            self._somebody_reads(kept)
        elif was_read:
            self._nobody_reads(kept)

    def look(self) -> None:
        """Does what is due."""
        for kept in list(self._unread.values()):
            self._take_step(kept)

    # ---- inside

    def _somebody_reads(self, kept: _Kept) -> None:
        self._unread.pop(kept.response_id, None)
        kept.run.watch_tokens(None)
        self._take_step(kept)

    def _nobody_reads(self, kept: _Kept) -> None:
        kept.grace.left(self._clock(), kept.run.num_output_tokens)
        kept.run.watch_tokens(partial(self._take_step, kept))
        self._unread[kept.response_id] = kept
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_at_the_clock(), name="unread answers")
            self._looking.add_done_callback(_report_failure)

    def _take_step(self, kept: _Kept) -> None:
        match kept.grace.next_step(self._clock(), kept.run.num_output_tokens):
            case Step.PAUSE:
                self._pause(kept)
            case Step.GO_ON:
                kept.grace.paused_at = None
                self._paused.pop(kept.response_id, None)
                kept.run.go_on()
            case Step.END:
                kept.run.stop("not_resumed")

    def _pause(self, kept: _Kept) -> None:
        if not kept.run.pause():
            return  # it has hardly begun, or is about to end
        logger.info("%s is paused: nobody reads it", kept.response_id)
        kept.grace.paused_at = self._clock()
        self._paused[kept.response_id] = kept
        if len(self._paused) > MAX_PAUSED:
            next(iter(self._paused.values())).run.stop("not_resumed")

    async def _look_at_the_clock(self) -> None:
        try:
            while self._unread:
                await self._sleep(LOOK_S)
                self.look()
        finally:
            self._looking = None


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("unread answers are not looked after any more", exc_info=error)
