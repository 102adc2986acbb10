"""The events of an answer that is at its end, made anew from what was stored, for who comes when its log is gone.

All of its text is one delta. The numbers are not those of the log, so nobody can go on from the middle of these.
"""

from collections.abc import Callable, Iterator

import msgspec

from app.events import (
    Completed,
    ContentPartAdded,
    Created,
    Event,
    Failed,
    Incomplete,
    InProgress,
    LoggedEvent,
    OutputItemAdded,
    OutputText,
    ResponseObject,
    TextDelta,
    ends_of_item,
    number_and_encode,
)


class StoredEvents:
    """A source of events, for one reader."""

    def __init__(self, response: ResponseObject) -> None:
        """Raises ValueError for a response that is not at its end."""
        if response.is_running:
            raise ValueError(f"{response.id} is still running")
        self._events = [number_and_encode(event, number) for number, event in enumerate(events_of(response))]

    async def read(self, limit: int) -> tuple[list[LoggedEvent], bool]:
        return self.read_now(limit)

    def read_now(self, limit: int) -> tuple[list[LoggedEvent], bool]:
        events, self._events = self._events[:limit], self._events[limit:]
        return events, not self._events

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Everything is there already."""
        return lambda: None


def events_of(response: ResponseObject, text: str = "", num_logprobs: int = 0) -> Iterator[Event]:
    """All of an ended response; the one delta leaves out `text` and `num_logprobs`, which were told before."""
    opened = msgspec.structs.replace(
        response,
        status="in_progress",
        output=[],
        usage=None,
        error=None,
        incomplete_details=None,
        completed_at=None,
    )
    yield Created(response=opened)
    yield InProgress(response=opened)
    for item in response.output:
        part = item.content[0]
        assert isinstance(part, OutputText), part
        yield OutputItemAdded(item=msgspec.structs.replace(item, content=[], status="in_progress"))
        yield ContentPartAdded(item_id=item.id, part=OutputText(text=""))
        if len(part.text) > len(text):
            yield TextDelta(item_id=item.id, delta=part.text[len(text) :], logprobs=part.logprobs[num_logprobs:])
        yield from ends_of_item(item)
    ends = {"completed": Completed, "failed": Failed}
    yield ends.get(response.status, Incomplete)(response=response)
