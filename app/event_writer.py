"""How events get into the log: at most one append is in flight, and it carries what all answers have brought.

While an append is in flight, deltas of one answer merge into one; then they are numbered and go out together. So an
idle system adds one round trip to the log and a loaded one adapts by itself; there is no timer. `Mailbox` is the same
for an answer that is not stored: its single reader takes the place of the log.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from app import progress as progresses
from app.event_log import EventLog, Wake
from app.events import TERMINAL, Event, LoggedEvent, can_merge, merge, number_and_encode
from app.progress import Progress
from app.redis_commands import SessionsUnavailable

MERGED_TOGETHER = 64


class EventSink(Protocol):
    """Where a run puts its events. Never waits; what is pending is bounded by the answer's own text."""

    def put(self, event: Event, progress: Progress | None = None) -> None:
        """`progress`: what its text stands for, where others may have to go on with it."""
        ...


class _Pending:
    """Events of one answer that have no number yet."""

    __slots__ = ("_groups", "next_number")

    def __init__(self, next_number: int = 0) -> None:
        self._groups: list[_Group] = []
        self.next_number = next_number

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, event: Event, progress: Progress | None = None) -> None:
        if not self._groups or not can_merge(self._groups[-1].events[-1], event):
            self._groups.append(_Group())
        self._groups[-1].add(event, progress)

    def take(self, limit: int | None = None) -> list[LoggedEvent]:
        """Numbers them and forgets them."""
        groups = self._groups[:limit]
        del self._groups[: len(groups)]
        logged = [group.number(self.next_number + i) for i, group in enumerate(groups)]
        self.next_number += len(logged)
        return logged


class _Group:
    """Becomes one event, when it is taken, or sooner where many wait: merging them one by one would copy the text again
    and again, and an event for each token of a long answer would take far more room than its text."""

    __slots__ = ("events", "progress")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.progress: list[Progress] = []

    def add(self, event: Event, progress: Progress | None) -> None:
        self.events.append(event)
        if progress is not None:
            self.progress.append(progress)
        if len(self.events) == MERGED_TOGETHER:
            self.events = [merge(self.events)]
            self.progress = [progresses.joined(self.progress)] if self.progress else []

    def number(self, number: int) -> LoggedEvent:
        said = progresses.to_bytes(progresses.joined(self.progress)) if self.progress else b""
        return number_and_encode(merge(self.events), number, said)


class EventWriter:
    """All stored answers of this gateway. The task that appends lives only while there is something to append.

    An answer that another gateway has taken over is told so by `on_taken`; what is put for it after that is dropped."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._answers: dict[str, _Pending] = {}
        self._on_taken: dict[str, Callable[[], None]] = {}
        self._dirty: dict[str, None] = {}
        self._pump: asyncio.Task[None] | None = None

    async def open(
        self, response_id: str, on_taken: Callable[[], None] = lambda: None, logged: Sequence[LoggedEvent] = ()
    ) -> "LogSink":
        """`logged`: as `EventLog.open` takes it."""
        await self._log.open(response_id, logged)
        self._answers[response_id] = _Pending(len(logged))
        self._on_taken[response_id] = on_taken
        return LogSink(self, response_id)

    def put(self, response_id: str, event: Event, progress: Progress | None = None) -> None:
        """Raises what the last append raised, if it did."""
        self._raise_failure()
        if response_id not in self._on_taken:
            return
        self._answers[response_id].add(event, progress)
        self._dirty[response_id] = None
        if self._pump is None:
            self._pump = asyncio.create_task(self._append_all(), name="event log writer")

    def forget(self, response_id: str) -> None:
        """Drops what is put for this answer from now on, and what has no number yet."""
        if self._on_taken.pop(response_id, None) is not None:
            del self._answers[response_id]
            self._dirty.pop(response_id, None)

    async def flush(self) -> None:
        """Returns when the log holds everything that had been put."""
        if self._pump is not None:
            await asyncio.shield(self._pump)

    async def _append_all(self) -> None:
        while self._dirty:
            batch = [(response_id, self._answers[response_id].take()) for response_id in self._dirty]
            self._dirty.clear()
            taken = await self._log.append(batch)
            for response_id, events in batch:
                if events[-1].is_terminal or response_id in taken:
                    on_taken = self._on_taken.get(response_id)
                    self.forget(response_id)
                    if response_id in taken and on_taken is not None:
                        on_taken()
        self._pump = None

    def _raise_failure(self) -> None:
        if self._pump is not None and self._pump.done():
            self._pump.result()


class LogSink:
    """The sink of one stored answer."""

    def __init__(self, writer: EventWriter, response_id: str) -> None:
        self._writer = writer
        self._response_id = response_id

    def put(self, event: Event, progress: Progress | None = None) -> None:
        self._writer.put(self._response_id, event, progress)


class EventSource(Protocol):
    """Where a reader takes its events from."""

    async def read(self, limit: int) -> tuple[list[LoggedEvent], bool]:
        """Up to `limit` further events and whether the stream has ended with them. Does not wait.

        Raises EventsNotHeld or CursorLost."""

    def read_now(self, limit: int) -> tuple[list[LoggedEvent], bool] | None:
        """As `read`; None where only that can tell. What `watch` calls may call this."""

    def watch(self, wake: Wake) -> Callable[[], None]: ...


class LogCursor:
    """A reader of a stored answer: its place in the log is all it has. `enter` is told that it reads, from the moment
    when it is watched; what that returns, that it does not any more."""

    def __init__(
        self, log: EventLog, response_id: str, after: int, enter: Callable[[str], Callable[[], None]] | None = None
    ) -> None:
        self._log = log
        self._enter = enter
        self._response_id = response_id
        self._after = after

    async def read(self, limit: int) -> tuple[list[LoggedEvent], bool]:
        try:
            events, ended = await self._log.read(self._response_id, self._after, limit)
        except SessionsUnavailable:
            return [], False  # whoever watches is woken when Redis is back
        if events:
            self._after = events[-1].number
        return events, ended

    def read_now(self, limit: int) -> tuple[list[LoggedEvent], bool] | None:
        found = self._log.read_now(self._response_id, self._after, limit)
        if found is not None and found[0]:
            self._after = found[0][-1].number
        return found

    def watch(self, wake: Wake) -> Callable[[], None]:
        stop_watching = self._log.watch(self._response_id, wake)
        if self._enter is None:
            return stop_watching
        leave = self._enter(self._response_id)

        def stop() -> None:
            stop_watching()
            leave()

        return stop


class Mailbox:
    """Sink and source of an answer that is not stored. It has one reader; while that is slow, deltas merge."""

    def __init__(self) -> None:
        self._pending = _Pending()
        self._wake: Wake | None = None
        self._ended = False

    def put(self, event: Event, progress: Progress | None = None) -> None:
        if self._ended:
            raise ValueError(f"the answer has ended, got {event!r}")
        self._pending.add(event)
        self._ended = isinstance(event, TERMINAL)
        if self._wake is not None:
            self._wake()

    async def read(self, limit: int) -> tuple[list[LoggedEvent], bool]:
        return self.read_now(limit)

    def read_now(self, limit: int) -> tuple[list[LoggedEvent], bool]:
        events = self._pending.take(limit)
        return events, self._ended and not self._pending

    def watch(self, wake: Wake) -> Callable[[], None]:
        if self._wake is not None:
            raise ValueError("a mailbox has one reader, got a second one")
        self._wake = wake

        def stop() -> None:
            self._wake = None

        return stop


class Unread:
    """Sink and source of an answer whose events nobody wants: none is kept."""

    def put(self, event: Event, progress: Progress | None = None) -> None:
        pass

    async def read(self, limit: int) -> tuple[list[LoggedEvent], bool]:
        return self.read_now(limit)

    def read_now(self, limit: int) -> tuple[list[LoggedEvent], bool]:
        return [], True

    def watch(self, wake: Wake) -> Callable[[], None]:
        return lambda: None


class Waiter:
    """Waits for a source: `with Waiter(source) as w: async for events in w` gives what there is, until the end."""

    def __init__(self, source: EventSource, limit: int = 64) -> None:
        self._source = source
        self._limit = limit
        self._news = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._stop = source.watch(self._news.set)

    def interrupt(self, error: Exception) -> None:
        """Whoever waits gets this in place of what would come."""
        self._error = error
        self._news.set()

    def __aiter__(self) -> "Waiter":
        return self

    async def __anext__(self) -> list[LoggedEvent]:
        while not self._ended:
            self._news.clear()
            events, self._ended = await self._source.read(self._limit)
            if events:
                return events
            if self._error is not None:
                raise self._error
            if not self._ended:
                await self._news.wait()
        raise StopAsyncIteration

    def __enter__(self) -> "Waiter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()
