"""What the log of an answer says of it, for a gateway that has to go on with it or to end it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.events import (
    Completed,
    ContentPartAdded,
    ContentPartDone,
    Created,
    Event,
    Failed,
    Incomplete,
    InProgress,
    Item,
    ItemStatus,
    LoggedEvent,
    Logprob,
    OutputItemAdded,
    OutputItemDone,
    OutputText,
    ResponseObject,
    TextDelta,
    TextDone,
    number_and_encode,
)


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
        missing: list[Event] = []
        begun = msgspec.structs.replace(
            response, status="in_progress", output=[], usage=None, error=None, incomplete_details=None,
            completed_at=None,
        )  # fmt: skip
        missing += [Created(response=begun), InProgress(response=begun)]
        for item in response.output:
            part = item.content[0]
            assert isinstance(part, OutputText)
            opened = Item(id=item.id, role="assistant", content=[], status="in_progress")
            missing += [OutputItemAdded(item=opened), ContentPartAdded(item_id=item.id, part=OutputText(text=""))]
            if len(part.text) > len(self.text):
                rest, logprobs = part.text[len(self.text) :], part.logprobs[len(self.logprobs) :]
                missing.append(TextDelta(item_id=item.id, delta=rest, logprobs=logprobs))
            missing += [
                TextDone(item_id=item.id, text=part.text, logprobs=part.logprobs),
                ContentPartDone(item_id=item.id, part=part),
                OutputItemDone(item=item),
            ]
        match response.status:
            case "completed":
                missing.append(Completed(response=response))
            case "failed":
                missing.append(Failed(response=response))
            case _:
                missing.append(Incomplete(response=response))
        unsaid = [e for e in missing if isinstance(e, TextDelta) or e.__struct_config__.tag not in self.types]
        return [number_and_encode(event, self.next_number + i) for i, event in enumerate(unsaid)]
