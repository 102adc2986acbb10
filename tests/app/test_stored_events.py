"""Events of an answer, made anew from what was stored of it."""

import json

import pytest

from app.events import IncompleteDetails, Item, OutputText, ResponseError, ResponseObject
from app.stored_events import StoredEvents
from tests.app.stateful_gateway import assert_contiguous, deltas, validate_event

ANSWER = Item(id="msg_1", role="assistant", content=[OutputText(text="Hällo\u2028!")])


def response(status, **fields):
    return ResponseObject(id="resp_1", created_at=1, status=status, model="m", **fields)


async def read_all(source, limit):
    events, has_ended = [], False
    while not has_ended:
        some, has_ended = await source.read(limit)
        assert len(some) <= limit
        events += some
    return [json.loads(event.data) for event in events], events[-1].is_terminal


@pytest.mark.parametrize("limit", [1, 3, 64])
@pytest.mark.parametrize(
    ("stored", "end"),
    [
        (response("completed", output=[ANSWER], completed_at=2), "response.completed"),
        (
            response("incomplete", output=[ANSWER], incomplete_details=IncompleteDetails(reason="max_output_tokens")),
            "response.incomplete",
        ),
        (response("cancelled", output=[ANSWER]), "response.incomplete"),
        (response("failed", error=ResponseError(message="x")), "response.failed"),
    ],
)
async def test_they_say_what_the_answer_says(stored, end, limit):
    events, is_terminal = await read_all(StoredEvents(stored), limit)
    for event in events:
        validate_event(event)
    assert_contiguous(events)
    assert is_terminal
    assert (events[-1]["type"], events[-1]["response"]["status"]) == (end, stored.status)
    assert deltas(events) == "".join(item.text for item in stored.output)
    assert {e["response"]["status"] for e in events[:2]} == {"in_progress"}
    assert all(e["response"]["output"] == [] and e["response"]["error"] is None for e in events[:2])


async def test_an_answer_that_still_runs_has_a_log():
    with pytest.raises(ValueError, match="still running"):
        StoredEvents(response("in_progress"))
