"""One answer on its way to a websocket's client."""

from app.event_log import MemoryEventLog
from app.event_writer import EventWriter, LogCursor, Mailbox
from app.events import TextDelta, number_and_encode
from app.feed import Feed


def test_texts_are_the_events_as_they_were_logged_and_on_a_lane_they_name_it() -> None:
    events = [number_and_encode(TextDelta(item_id="m", delta=text), i) for i, text in enumerate(("a", "é"))]
    assert Feed(Mailbox(), None).texts(events) == [event.data for event in events]
    assert Feed(Mailbox(), "left").texts(events) == [event.data[:-1] + b',"stream_id":"left"}' for event in events]


async def test_what_its_source_cannot_say_at_once_is_left_to_be_read() -> None:
    log = MemoryEventLog(clock=lambda: 0.0)
    feed = Feed(LogCursor(log, "resp_1", -1), None)
    assert feed.read_now(8) is None, "nothing is held of it"
    writer = EventWriter(log)
    sink = await writer.open("resp_1")
    assert feed.read_now(8) == ([], False)
    sink.put(TextDelta(item_id="m", delta="a"))
    await writer.flush()
    events = [number_and_encode(TextDelta(item_id="m", delta="a"), 0)]
    assert feed.read_now(8) == (events, False)
    assert feed.read_now(8) == ([], False), "once"
