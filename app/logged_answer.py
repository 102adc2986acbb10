"""What the log of an answer says of it, for a gateway that has to go on with it or to end it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app import progress as progresses
from app.events import (
    TERMINAL_TYPES,
    Item,
    ItemStatus,
    LoggedEvent,
    Logprob,
    OutputText,
    ResponseObject,
    TextDelta,
    number_and_encode,
)
from app.progress import Midway, Progress
from app.stored_events import events_of

CLOSING = frozenset(["response.output_text.done", *TERMINAL_TYPES])
"""Events after which nothing is added to the text."""


NOTHING = Progress()


class LogLost(Exception):
    """The log does not begin at the first event."""


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    events: Sequence[LoggedEvent] = ()
    so_far: Progress | None = NOTHING
    """What its text stands for; None where that was not said of all of it."""
    item_id: str | None = None
    """None before the first text."""
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()
    types: frozenset[str] = frozenset()
    """Of the events that are logged."""

    @classmethod
    def of(cls, events: Sequence[LoggedEvent]) -> "LoggedAnswer":
        """Raises LogLost."""
        if events and events[0].number != 0:
            raise LogLost(f"the log begins at event {events[0].number}")
        item_id, texts, logprobs = None, [], []
        said: list[Progress | None] = []
        for event in events:
            if event.type == "response.output_item.added":
                item_id = msgspec.json.decode(event.data)["item"]["id"]
            elif event.type == "response.output_text.delta":
                delta: dict[str, Any] = msgspec.json.decode(event.data)
                texts.append(delta["delta"])
                logprobs += msgspec.convert(delta["logprobs"], list[Logprob])
                said.append(progresses.from_bytes(event.progress) if event.progress else None)
        stretches = [stretch for stretch in said if stretch is not None]
        return cls(
            events=events,
            so_far=progresses.joined([NOTHING, *stretches]) if len(stretches) == len(said) else None,
            item_id=item_id,
            text="".join(texts),
            logprobs=tuple(logprobs),
            types=frozenset(event.type for event in events),
        )

    @property
    def next_number(self) -> int:
        return len(self.events)

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and self.events[-1].is_terminal

    def midway(self, *, block_size: int, age_s: float) -> Midway | None:
        """For a generation that goes on with it; None where none can: it is closed, or its tokens are not known."""
        if self.so_far is None or self.types & CLOSING:
            return None
        return Midway(self.so_far, self.text, block_size, age_s)

    def item(self, status: ItemStatus) -> Item | None:
        """The answer as far as it is logged; None before its first text."""
        if self.item_id is None:
            return None
        part = OutputText(text=self.text, logprobs=list(self.logprobs))
        return Item(id=self.item_id, role="assistant", content=[part], status=status)

    def closing_events(self, response: ResponseObject) -> list[LoggedEvent]:
        """Those that are missing up to the end of this response, numbered. Always the same for the same log, so that
        it does not matter who appends them."""
        if self.has_ended:
            return []
        missing = events_of(response, self.text, len(self.logprobs))
        unsaid = [e for e in missing if isinstance(e, TextDelta) or e.__struct_config__.tag not in self.types]
        return [number_and_encode(event, self.next_number + i) for i, event in enumerate(unsaid)]
