"""What the load generator takes for a whole answer, and what it does not."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from app.events import Completed, Item, OutputText, ResponseObject, TextDelta, number_and_encode
from app.stored_events import events_of
from benchmarks.answer_events import BrokenStream, StreamedAnswer, is_last

Events = list[dict[str, Any]]


def events(*deltas: str) -> Events:
    """As the gateway writes them."""
    text = "".join(deltas)
    item = Item(id="msg_1", role="assistant", content=[OutputText(text=text)])
    response = ResponseObject(id="resp_1", created_at=1, status="completed", model="m", output=[item] if deltas else [])
    made = []
    for event in events_of(response):
        if isinstance(event, TextDelta):
            made += [TextDelta(item_id="msg_1", delta=delta) for delta in deltas]
        else:
            made.append(event)
    return [json.loads(number_and_encode(event, i).data) for i, event in enumerate(made)]


def test_whole_answers() -> None:
    answer = StreamedAnswer(events("He", "llo"))
    assert (answer.deltas, answer.text, answer.response["id"]) == (["He", "llo"], "Hello", "resp_1")
    assert StreamedAnswer(events()).text == ""


def swap(found: Events) -> None:
    found[4]["delta"], found[5]["delta"] = found[5]["delta"], found[4]["delta"]


def twice(found: Events) -> None:
    found.insert(5, copy.deepcopy(found[4]))


def unnumbered(found: Events) -> None:
    del found[4]
    for number, event in enumerate(found):
        event["sequence_number"] = number


def other_id(found: Events) -> None:
    found[-1]["response"]["id"] = "resp_2"


def other_text(found: Events) -> None:
    found[-1]["response"]["output"][0]["content"][0]["text"] = "Hallo"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (swap, "texts of their last events"),
        (twice, "sequence numbers"),
        (lambda found: found.pop(4), "sequence numbers"),
        (unnumbered, "texts of their last events"),
        (lambda found: found.pop(), "expected an end"),
        (lambda found: found.pop(0), "sequence numbers"),
        (other_id, "ids"),
        (other_text, "texts of their last events"),
        (lambda found: found.append({"type": "error", "error": {"code": "x"}}), "an error came"),
    ],
)
def test_a_stream_that_is_not_whole(spoil: Callable[[Events], object], said: str) -> None:
    found = events("He", "llo")
    spoil(found)
    with pytest.raises(BrokenStream, match=said):
        StreamedAnswer(found)


def test_the_last_event_is_known_without_reading_the_others() -> None:
    response = ResponseObject(id="resp_1", created_at=1, status="completed", model="m")
    assert is_last(number_and_encode(Completed(response=response), 0).data)
    assert is_last(b'{"type":"error","error":{}}')
    assert not is_last(number_and_encode(TextDelta(item_id="m", delta="response.completed"), 0).data)
