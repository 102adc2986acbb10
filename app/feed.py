"""One answer on its way to a websocket's client: of a lane, or resumed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.event_log import CursorLost, EventsNotHeld
from app.event_writer import EventSource
from app.events import LoggedEvent, with_stream_id
from app.started import Started


@dataclass(eq=False, slots=True)
class Feed:
    source: EventSource
    stream_id: str | None
    lane: tuple[str | None] | None = None
    """The lane that waits for its end; None for a resumed answer."""
    started: Started | None = None
    """None also where the lane was given the answer to a message that had been sent before."""
    stop_watching: Callable[[], Any] = field(default=lambda: None)

    def read_now(self, limit: int) -> tuple[list[LoggedEvent], bool] | None:
        """None where only `source.read` can tell, or has an error to raise."""
        try:
            return self.source.read_now(limit)
        except (CursorLost, EventsNotHeld):
            return None

    def texts(self, events: Sequence[LoggedEvent]) -> list[bytes]:
        """As the client is to get them."""
        stream_id = self.stream_id
        return [event.data if stream_id is None else with_stream_id(event.data, stream_id) for event in events]
