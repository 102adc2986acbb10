"""What whoever asks for a response is given: its events, and what is known of it then."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.event_writer import EventSource
from app.response_node import HistoryMessage
from app.response_plan import Parent
from app.response_run import ResponseRun


@dataclass(frozen=True, slots=True)
class Started:
    """A response under way and all its events."""

    run: ResponseRun
    source: EventSource
    history: tuple[HistoryMessage, ...]
    """Everything said before its own input."""
    headers: Mapping[str, str]
    """Of the limits that it was let in under."""

    def as_parent(self) -> Parent:
        """For children on the socket that asked for it. The response has to be at its end."""
        return Parent(self.run.node, (*self.history, *self.run.node.turn.messages))


@dataclass(frozen=True, slots=True)
class Followed:
    source: EventSource
    stream_id: str | None
    """The websocket lane that asked for the response."""
