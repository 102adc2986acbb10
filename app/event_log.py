"""The events of an answer, numbered once when they are appended; every reader is a cursor in that log.

No event leaves the gateway before its log holds it, so the first socket, a second tab and a resumed stream all see the
same events with the same numbers. `MemoryEventLog` keeps them in this process; app/shared_log.py keeps them in Redis
too. Its bounds are

* a window for each answer: what is older than the window is dropped, and a cursor that points before it is lost;
* a total over all answers: ended answers go first, the oldest of them first, then the windows shrink;
* a time after an answer's end, in which it can still be replayed.

Room is made before an append, so that what is appended is held whole until the next one: a reader that keeps up loses
nothing, however large the events are. So each bound may be passed by one append.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.events import LoggedEvent

Wake = Callable[[], None]


class EventsNotHeld(Exception):
    """The log holds no events of this answer: it never had them, or they have expired."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"no events are held of {response_id}")
        self.response_id = response_id


class CursorLost(Exception):
    """The reader was so slow that events after its cursor have left the window."""

    def __init__(self, response_id: str, after: int, first_held: int) -> None:
        super().__init__(f"{response_id}: events after {after} were asked for, the window begins at {first_held}")
        self.response_id = response_id
        self.after = after
        self.first_held = first_held


class EventLog(Protocol):
    """Where events are kept. Appending is for the owner of an answer alone, and only in order."""

    async def open(self, response_id: str, logged: Sequence[LoggedEvent] = ()) -> None:
        """Starts the log of a new answer; or goes on with one of which `logged` is there, from its first event on."""

    async def append(self, batch: Sequence[tuple[str, Sequence[LoggedEvent]]]) -> Collection[str]:
        """Appends to several logs at once; when it returns, readers may see the events. After a terminal event
        nothing more can be appended. Answers whose log has been dropped are passed over.

        Gives the answers that are not ours any more: nothing was appended to them."""

    async def read(self, response_id: str, after: int, limit: int) -> tuple[list[LoggedEvent], bool]:
        """Up to `limit` events with numbers above `after`, and whether nothing will ever follow them.

        Does not wait. Raises EventsNotHeld or CursorLost."""

    def read_now(self, response_id: str, after: int, limit: int) -> tuple[list[LoggedEvent], bool] | None:
        """As `read`, from this process alone; None where others have to be asked. A `wake` may call it."""

    def watch(self, response_id: str, wake: Wake) -> Callable[[], None]:
        """Calls `wake` after each append to this answer, until the returned function is called. `wake` must not
        raise or append; an answer of which nothing is held never wakes anybody."""

    async def drop(self, response_id: str) -> None:
        """Forgets an answer's events. Readers that are not at its end get EventsNotHeld."""


@dataclass(eq=False, slots=True)
class _Answer:
    events: deque[LoggedEvent] = field(default_factory=deque)
    num_bytes: int = 0
    next_number: int = 0
    ended_at: float | None = None
    watchers: dict[object, Wake] = field(default_factory=dict)

    @property
    def first_held(self) -> int:
        return self.next_number - len(self.events)


_EVENT_OVERHEAD_BYTES = 160
"""What an event costs beside its data: the object, its number and its place in a deque."""


class MemoryEventLog:
    """Lives and dies with the process. `clock` gives seconds; all bounds are checked on each append."""

    def __init__(
        self,
        *,
        window_events: int = 65536,
        window_bytes: int = 16 * 2**20,
        total_bytes: int = 128 * 2**20,
        ttl_s: float = 600.0,
        clock: Callable[[], float],
    ) -> None:
        if min(window_events, window_bytes, total_bytes) < 1:
            raise ValueError(f"bounds must be positive, got {window_events}, {window_bytes}, {total_bytes}")
        self._window_events = window_events
        self._window_bytes = window_bytes
        self._total_bytes = total_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._running: OrderedDict[str, _Answer] = OrderedDict()
        self._ended: OrderedDict[str, _Answer] = OrderedDict()
        """In the order in which they ended."""
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_answers(self) -> int:
        return len(self._running) + len(self._ended)

    async def open(self, response_id: str, logged: Sequence[LoggedEvent] = ()) -> None:
        if response_id in self._running or response_id in self._ended:
            raise ValueError(f"{response_id} has a log already")
        self._running[response_id] = _Answer()
        if logged:
            await self.append([(response_id, logged)])

    def holds(self, response_id: str) -> bool:
        return self._find(response_id) is not None

    def first_held(self, response_id: str) -> int:
        """The number of the first event in the window; 0 for an answer of which nothing is held."""
        answer = self._find(response_id)
        return answer.first_held if answer is not None else 0

    async def append(self, batch: Sequence[tuple[str, Sequence[LoggedEvent]]]) -> Collection[str]:
        self._expire()
        self._fit_total()
        touched: list[_Answer] = []
        for response_id, events in batch:
            answer = self._running.get(response_id)
            if answer is None:
                if response_id in self._ended:
                    raise ValueError(f"{response_id} has ended, got more events")
                continue
            self._append(response_id, answer, events)
            touched.append(answer)
        for answer in touched:
            for wake in list(answer.watchers.values()):
                wake()
        return ()

    def _append(self, response_id: str, answer: _Answer, events: Sequence[LoggedEvent]) -> None:
        while len(answer.events) > self._window_events or answer.num_bytes > self._window_bytes:
            self._drop_oldest_event(answer)
        for event in events:
            if event.number != answer.next_number:
                raise ValueError(f"{response_id}: event {answer.next_number} is next, got {event.number}")
            if answer.ended_at is not None:
                raise ValueError(f"{response_id} has ended, got event {event.number}")
            answer.events.append(event)
            answer.next_number += 1
            self._count(answer, _size_bytes(event))
            if event.is_terminal:
                answer.ended_at = self._clock()
                self._ended[response_id] = self._running.pop(response_id)

    async def read(self, response_id: str, after: int, limit: int) -> tuple[list[LoggedEvent], bool]:
        self._expire()
        return self.read_now(response_id, after, limit)

    def read_now(self, response_id: str, after: int, limit: int) -> tuple[list[LoggedEvent], bool]:
        """What has expired since the last append may still be there."""
        answer = self._find(response_id)
        if answer is None:
            raise EventsNotHeld(response_id)
        if after + 1 < answer.first_held:
            raise CursorLost(response_id, after, answer.first_held)
        start = after + 1 - answer.first_held
        events = [answer.events[i] for i in range(start, min(start + limit, len(answer.events)))]
        return events, answer.ended_at is not None and start + len(events) >= len(answer.events)

    def watch(self, response_id: str, wake: Wake) -> Callable[[], None]:
        answer = self._find(response_id)
        if answer is None:
            return lambda: None
        key = object()
        watchers = answer.watchers
        watchers[key] = wake
        return lambda: watchers.pop(key, None) and None

    async def drop(self, response_id: str) -> None:
        self.forget(response_id)

    def forget(self, response_id: str) -> None:
        """`drop`, at once."""
        answer = self._running.pop(response_id, None) or self._ended.pop(response_id, None)
        if answer is not None:
            self._forget(answer)

    def _find(self, response_id: str) -> _Answer | None:
        return self._running.get(response_id) or self._ended.get(response_id)

    def _count(self, answer: _Answer, num_bytes: int) -> None:
        answer.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _drop_oldest_event(self, answer: _Answer) -> None:
        self._count(answer, -_size_bytes(answer.events.popleft()))

    def _expire(self) -> None:
        before = self._clock() - self._ttl_s
        while self._ended:
            answer = next(iter(self._ended.values()))
            assert answer.ended_at is not None
            if answer.ended_at > before:
                return
            self._ended.popitem(last=False)
            self._forget(answer)

    def _fit_total(self) -> None:
        while self._num_bytes > self._total_bytes and self._ended:
            _, answer = self._ended.popitem(last=False)
            self._forget(answer)
        for answer in self._running.values():
            while self._num_bytes > self._total_bytes and answer.events:
                self._drop_oldest_event(answer)

    def _forget(self, answer: _Answer) -> None:
        self._num_bytes -= answer.num_bytes
        for wake in list(answer.watchers.values()):
            wake()


def _size_bytes(event: LoggedEvent) -> int:
    return len(event.data) + len(event.progress) + _EVENT_OVERHEAD_BYTES
