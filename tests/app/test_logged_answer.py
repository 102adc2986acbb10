"""An answer is read back from any part of its log, and the events that it lacks follow from how it ended."""

import json

import msgspec
import pytest

from app.events import (
    Completed,
    ContentPartAdded,
    ContentPartDone,
    Created,
    IncompleteDetails,
    InProgress,
    Item,
    OutputItemAdded,
    OutputItemDone,
    OutputText,
    ResponseError,
    ResponseObject,
    TextDelta,
    TextDone,
    number_and_encode,
)
from app.logged_answer import LoggedAnswer, LogLost
from tests.app.stateful_gateway import validate_event

BEGUN = ResponseObject(id="resp_1", created_at=1, status="in_progress", model="m")


def item(text, status="completed"):
    return Item(id="msg_1", role="assistant", content=[OutputText(text=text)], status=status)


DONE = msgspec.structs.replace(BEGUN, status="completed", output=[item("Hello")], completed_at=2)


def whole():
    part = OutputText(text="Hello")
    events = [
        Created(response=BEGUN),
        InProgress(response=BEGUN),
        OutputItemAdded(item=Item(id="msg_1", role="assistant", content=[], status="in_progress")),
        ContentPartAdded(item_id="msg_1", part=OutputText(text="")),
        TextDelta(item_id="msg_1", delta="He"),
        TextDelta(item_id="msg_1", delta="llo"),
        TextDone(item_id="msg_1", text="Hello"),
        ContentPartDone(item_id="msg_1", part=part),
        OutputItemDone(item=item("Hello")),
        Completed(response=DONE),
    ]
    return [number_and_encode(event, number) for number, event in enumerate(events)]


@pytest.mark.parametrize("num_logged", range(len(whole()) + 1))
def test_a_log_that_ends_anywhere_is_completed_from_the_stored_answer(num_logged):
    logged = whole()[:num_logged]
    answer = LoggedAnswer.of(logged)
    assert answer.next_number == num_logged
    missing = answer.closing_events(DONE)
    assert missing == answer.closing_events(DONE), "whoever makes them, they are the same"
    events = [json.loads(event.data) for event in logged + missing]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        validate_event(event)
    assert "".join(event.get("delta", "") for event in events) == "Hello"
    kinds = [e["type"] for e in events if e["type"] != "response.output_text.delta"]
    assert kinds == [e.type for e in whole() if e.type != "response.output_text.delta"]
    assert events[-1] == json.loads(whole()[-1].data) | {"sequence_number": len(events) - 1}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"status": "failed", "error": ResponseError(message="gone")}, "response.failed"),
        ({"status": "incomplete", "incomplete_details": IncompleteDetails(reason="log_lost")}, "response.incomplete"),
        ({"status": "cancelled"}, "response.incomplete"),
    ],
)
def test_every_end_has_its_event(changes, kind):
    answer = LoggedAnswer.of(whole()[:5])
    ended = msgspec.structs.replace(BEGUN, output=[answer.item("incomplete")], **changes)
    events = answer.closing_events(ended)
    assert [e.type for e in events] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        kind,
    ]
    assert json.loads(events[0].data)["text"] == "He"


def test_before_the_first_text_there_is_no_item():
    assert LoggedAnswer.of(whole()[:2]).item("incomplete") is None
    assert LoggedAnswer.of(whole()[:4]).item("incomplete").text == ""


def test_a_log_that_lacks_its_beginning_tells_nothing():
    with pytest.raises(LogLost, match="begins at event 3"):
        LoggedAnswer.of(whole()[3:])
