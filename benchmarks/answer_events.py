"""The events of one streamed answer: whether it has all of them, in order, and says the same thing everywhere."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DELTA = "response.output_text.delta"
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
OPENING = ("response.created", "response.in_progress")
ITEM_OPENING = ("response.output_item.added", "response.content_part.added")
ITEM_CLOSING = ("response.output_text.done", "response.content_part.done", "response.output_item.done")


class BrokenStream(Exception):
    """An event is missing, comes twice, stands in the wrong place or says something else than the others."""


def is_last(data: bytes) -> bool:
    """Whether this event ends its answer, or is an error in its place. Cheap: `data` is JSON as it was received."""
    if b'"delta"' in data:  # nearly all of them
        return False
    kind = json.loads(data).get("type")
    return kind in TERMINAL or kind == "error"


@dataclass(frozen=True)
class StreamedAnswer:
    """`events`: from event 0 to the last one. Raises BrokenStream."""

    events: Sequence[dict[str, Any]]

    def __post_init__(self) -> None:
        events = self.events
        if (error := next((e for e in events if e.get("type") == "error"), None)) is not None:
            raise BrokenStream(f"an error came: {json.dumps(error)[:300]}")
        _expect("sequence numbers", [e.get("sequence_number") for e in events], list(range(len(events))))
        kinds = [e["type"] for e in events]
        _expect("first events", tuple(kinds[:2]), OPENING)
        if not kinds or kinds[-1] not in TERMINAL:
            raise BrokenStream(f"expected an end, got {kinds[-1:]} as the last of {len(kinds)} events")
        between = kinds[2:-1]
        if between:
            _expect("events that open the text", tuple(between[:2]), ITEM_OPENING)
            _expect("events that close the text", tuple(between[-3:]), ITEM_CLOSING)
            _expect("events between them", set(between[2:-3]) - {DELTA}, set())
            _expect("texts of their last events", {events[-4]["text"], self.response_text}, {self.text})
        elif self.response_text:
            raise BrokenStream(f"no text was streamed, the response has {self.response_text[:100]!r}")
        _expect("ids", {e["response"]["id"] for e in (*events[:2], events[-1])}, {self.response["id"]})

    @property
    def deltas(self) -> list[str]:
        return [e["delta"] for e in self.events if e["type"] == DELTA]

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def response(self) -> dict[str, Any]:
        """At its end."""
        return dict(self.events[-1]["response"])

    @property
    def response_text(self) -> str:
        return "".join(part["text"] for item in self.response["output"] for part in item["content"])


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise BrokenStream(f"{what}: expected {str(expected)[:300]}, got {str(got)[:300]}")
