"""What the log of an answer says of it, for a gateway that has to go on with it or to end it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.events import (
    Item,
    ItemStatus,
    LoggedEvent,
    Logprob,
    OutputText,
    ResponseObject,
    TextDelta,
    number_and_encode,
)
from app.stored_events import events_of


class LogLost(Exception):
    """The log does not begin at the first event."""


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    next_number: int = 0
    has_ended: bool = False
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
        for event in events:
            if event.type == "response.output_item.added":
                item_id = msgspec.json.decode(event.data)["item"]["id"]
            elif event.type == "response.output_text.delta":
                delta: dict[str, Any] = msgspec.json.decode(event.data)
                texts.append(delta["delta"])
                logprobs += msgspec.convert(delta["logprobs"], list[Logprob])
        return cls(
            next_number=len(events),
            has_ended=bool(events) and events[-1].is_terminal,
            item_id=item_id,
            text="".join(texts),
            logprobs=tuple(logprobs),
            types=frozenset(event.type for event in events),
        )

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
