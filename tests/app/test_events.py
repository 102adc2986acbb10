import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter

from app.cached_tokens import CachedTokens
from app.events import (
    Completed,
    ContentPartAdded,
    ContentPartDone,
    Created,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputText,
    Item,
    Logprob,
    OutputItemAdded,
    OutputItemDone,
    OutputText,
    Prompt,
    ResponseError,
    ResponseObject,
    TextDelta,
    TextDone,
    TopLogprob,
    Usage,
    can_merge,
    merge,
    number_and_encode,
    to_json,
    with_stream_id,
)

ANSWER = Item(id="msg_1", role="assistant", content=[OutputText(text="Hello")])
LOGPROB = Logprob(token="H", logprob=-0.5, bytes=[72], top_logprobs=[TopLogprob(token="H", logprob=-0.5, bytes=[72])])


def response(**changes):
    return ResponseObject(**{"id": "resp_1", "created_at": 1, "status": "in_progress", "model": "m", **changes})


EVENTS = [
    Created(response=response()),
    InProgress(response=response(prompt=Prompt(id="support"), metadata={"a": "b"}, instructions="Be brief.")),
    OutputItemAdded(item=Item(id="msg_1", role="assistant", content=[], status="in_progress")),
    ContentPartAdded(item_id="msg_1", part=OutputText(text="")),
    TextDelta(item_id="msg_1", delta="Hello"),
    TextDelta(item_id="msg_1", delta="H", logprobs=[LOGPROB]),
    TextDone(item_id="msg_1", text="Hello"),
    ContentPartDone(item_id="msg_1", part=OutputText(text="Hello", logprobs=[LOGPROB])),
    OutputItemDone(item=ANSWER),
    Completed(
        response=response(
            status="completed",
            output=[ANSWER],
            usage=Usage.of(20, CachedTokens(trunk=10, history=6), 3),
            completed_at=2,
        )
    ),
    Incomplete(
        response=response(status="incomplete", incomplete_details=IncompleteDetails(reason="max_output_tokens"))
    ),
    Incomplete(response=response(status="cancelled")),
    Failed(response=response(status="failed", error=ResponseError(message="the engine died"))),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__struct_config__.tag)
def test_each_event_passes_the_sdks_strict_models(event):
    logged = number_and_encode(event.__class__(**{f: getattr(event, f) for f in event.__struct_fields__}), 7)
    plain = TypeAdapter(ResponseStreamEvent).validate_json(logged.data)
    assert plain.type == logged.type == event.__struct_config__.tag
    assert plain.sequence_number == logged.number == 7
    on_a_lane = TypeAdapter(ResponsesServerEvent).validate_json(with_stream_id(logged.data, 'lane "ä"'))
    assert on_a_lane.stream_id == 'lane "ä"'


def test_a_response_object_passes_the_sdks_model():
    done = response(status="completed", output=[ANSWER], usage=Usage.of(20, CachedTokens(trunk=10, history=6), 3))
    parsed = Response.model_validate_json(to_json(done))
    assert parsed.output_text == "Hello"
    assert parsed.usage.total_tokens == 23
    assert parsed.usage.input_tokens_details.cached_tokens == 16
    extra = parsed.usage.input_tokens_details.model_extra
    assert extra == {"cached_tokens_details": {"trunk": 10, "history": 6, "host": 0}}, "ours, beside the SDK's"


def test_terminal_events_are_those_that_end_a_stream():
    ends = [number_and_encode(type(e)(**{f: getattr(e, f) for f in e.__struct_fields__}), 0) for e in EVENTS]
    assert {e.type for e in ends if e.is_terminal} == {"response.completed", "response.incomplete", "response.failed"}


def test_an_event_is_numbered_once():
    event = TextDelta(item_id="m", delta="x")
    number_and_encode(event, 4)
    with pytest.raises(ValueError, match="has number 4 already, got 5"):
        number_and_encode(event, 5)


def test_only_deltas_of_one_part_merge():
    first = TextDelta(item_id="m", delta="He", logprobs=[LOGPROB])
    assert can_merge(first, TextDelta(item_id="m", delta="llo"))
    assert not can_merge(first, TextDelta(item_id="other", delta="x"))
    assert not can_merge(first, TextDone(item_id="m", text="Hello"))
    assert not can_merge(TextDone(item_id="m", text="Hello"), first)


def test_merged_deltas_say_all_in_order_and_stay_as_they_were():
    other = Logprob(token="l", logprob=-1.5, bytes=[108], top_logprobs=[])
    deltas = [
        TextDelta(item_id="m", delta="He", logprobs=[LOGPROB]),
        TextDelta(item_id="m", delta="l"),
        TextDelta(item_id="m", delta="lo", logprobs=[other]),
    ]
    assert merge(deltas) == TextDelta(item_id="m", delta="Hello", logprobs=[LOGPROB, other])
    assert [delta.delta for delta in deltas] == ["He", "l", "lo"]
    assert merge(deltas[:1]) is deltas[0]


def test_items_come_back_from_json():
    item = Item(id="msg_2", role="user", content=[InputText(text="Say "), InputText(text="hello.")])
    assert msgspec.json.decode(to_json(item), type=Item) == item
    assert item.text == "Say hello."
