"""The websocket's logic without a socket: what each message makes happen."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import conversation
from app.conversation import Cancel, Close, Conversation, Resume, SendError, Start
from app.errors import NotFound
from tests.app.stateful_gateway import validate_event


def create(lane=None, text="Hi", **fields):
    message = {"type": "response.create", "model": "m", "input": text, **fields}
    return json.dumps(message | ({} if lane is None else {"stream_id": lane}), ensure_ascii=False)


def started(commands):
    """The one command, as lane and input."""
    (command,) = commands
    assert isinstance(command, Start)
    return command.lane, command.body["input"]


def error_in(commands):
    """The one error event, as the SDK reads it."""
    (command,) = commands
    assert isinstance(command, SendError)
    event = json.loads(command.data)
    validate_event(event, is_websocket=True)
    return event


def test_a_create_starts_at_once_with_the_body_of_a_request():
    (command,) = Conversation().receive_text(create("lane", metadata={"a": "b"}, stream=True))
    assert command == Start("lane", {"model": "m", "input": "Hi", "metadata": {"a": "b"}})


def test_a_lane_is_answered_in_order_and_lanes_side_by_side():
    c = Conversation()
    assert started(c.receive_text(create("a", "a1"))) == ("a", "a1")
    assert c.receive_text(create("a", "a2")) == ()
    assert started(c.receive_text(create("b", "b1"))) == ("b", "b1")
    assert started(c.receive_text(create(None, "n1"))) == (None, "n1")
    assert c.receive_text(create(None, "n2")) == ()
    assert c.receive_text(create("a", "a3")) == ()
    assert (c.num_lanes, c.num_waiting) == (3, 3)
    assert started(c.sent("a")) == ("a", "a2")
    assert c.sent("b") == ()
    assert started(c.sent("a")) == ("a", "a3")
    assert started(c.sent(None)) == (None, "n2")
    assert c.sent("a") == ()
    assert c.sent(None) == ()
    assert (c.num_lanes, c.num_waiting) == (0, 0)


def test_a_request_that_waited_starts_as_it_was_sent():
    c = Conversation()
    c.receive_text(create("a"))
    c.receive_text(create("a", [{"role": "user", "content": "🙂\u2028"}], metadata={"k": "ä"}, stream=True))
    body = {"model": "m", "input": [{"role": "user", "content": "🙂\u2028"}], "metadata": {"k": "ä"}}
    assert c.sent("a") == (Start("a", body),)


def test_a_refused_request_gives_an_error_on_its_lane_and_the_next_one_starts():
    c = Conversation()
    c.receive_text(create("a", "a1"))
    c.receive_text(create("a", "a2"))
    error, start = c.refused("a", NotFound("The model 'm' does not exist.", code="model_not_found", param="model"))
    assert error_in([error]) == {
        "type": "error",
        "status": 404,
        "stream_id": "a",
        "error": {
            "type": "not_found_error",
            "code": "model_not_found",
            "message": "The model 'm' does not exist.",
            "param": "model",
        },
    }
    assert started([start]) == ("a", "a2")


def test_cancel_and_resume():
    c = Conversation()
    assert c.receive_text('{"type": "response.cancel", "response_id": "resp_1"}') == (Cancel("resp_1", None),)
    assert c.receive_text('{"type": "response.resume", "response_id": "r"}') == (Resume("r", -1, None),)
    message = '{"type": "response.resume", "response_id": "r", "starting_after": 7, "stream_id": "tab"}'
    assert c.receive_text(message) == (Resume("r", 7, "tab"),)


BAD = {
    "empty": "",
    "brace": "{",
    "null": "null",
    "list": "[]",
    "number": "3",
    "string": '"x"',
    "nan": '{"type": NaN}',
    "no type": "{}",
    "unknown type": '{"type": "response.nope"}',
    "type is a list": '{"type": []}',
    "type is a number": '{"type": 1}',
    "stream_id is a number": '{"type": "response.create", "stream_id": 3, "input": "x"}',
    "stream_id is empty": '{"type": "response.create", "stream_id": "", "input": "x"}',
    "stream_id is long": create("x" * 257),
    "cancel without id": '{"type": "response.cancel"}',
    "cancel a list": '{"type": "response.cancel", "response_id": ["x"]}',
    "resume without id": '{"type": "response.resume", "starting_after": 0}',
    "resume from a string": '{"type": "response.resume", "response_id": "r", "starting_after": "0"}',
    "resume from true": '{"type": "response.resume", "response_id": "r", "starting_after": true}',
    "resume from -2": '{"type": "response.resume", "response_id": "r", "starting_after": -2}',
    "resume from null": '{"type": "response.resume", "response_id": "r", "starting_after": null}',
    "deep": "[" * 20000 + "]" * 20000,
    "deep in a field": '{"type": "response.create", "x": ' + '{"a":' * 20000 + "1" + "}" * 20001,
    "steer": '{"type": "response.steer", "previous_response_id": "resp_0", "input": "x"}',
    "background": create(background=True),
    "lone surrogate": '{"type": "response.create", "user": "\\ud800"}',
    "raw surrogate": "\ud800",
}


@pytest.mark.parametrize("name", BAD)
def test_b31_b32_a_bad_message_is_one_error_and_changes_nothing(name):
    c = Conversation()
    c.receive_text(create("busy"))
    error = error_in(c.receive_text(BAD[name]))
    assert error["error"]["message"]
    assert error["status"] == 400
    assert (c.num_lanes, c.num_waiting) == (1, 0)
    assert started(c.receive_text(create("next"))) == ("next", "Hi")


def test_an_error_names_the_lane_that_the_message_named():
    c = Conversation()
    assert error_in(c.receive_text('{"type": "response.cancel", "stream_id": "a"}'))["stream_id"] == "a"
    assert "stream_id" not in error_in(c.receive_text('{"type": "response.cancel"}'))


def test_b32_a_binary_message_is_an_error_and_the_end():
    c = Conversation()
    error, close = c.receive_bytes()
    assert error_in([error])["error"]["code"] == "invalid_frame"
    assert close == Close(1003, "text frames only")
    assert c.receive_text(create()) == ()
    assert c.receive_bytes() == ()


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(conversation, "MAX_WAITING", 3)
    monkeypatch.setattr(conversation, "MAX_LANES", 2)
    c = Conversation()
    c.receive_text(create("a"))
    for _ in range(3):
        assert c.receive_text(create("a")) == ()
    error = error_in(c.receive_text(create("a")))
    assert (error["status"], error["error"]["code"], error["stream_id"]) == (429, "too_many_requests", "a")
    c.receive_text(create("b"))
    assert error_in(c.receive_text(create("c")))["error"]["code"] == "too_many_requests"
    c.sent("a")
    assert c.receive_text(create("a")) == ()


@pytest.mark.parametrize("character", ["x", "ä", "字", "🙂"])
def test_what_waits_is_bounded_in_bytes(character):
    c = Conversation()
    c.receive_text(create())
    big = create(text=character * 60_000)
    taken = 0
    while c.receive_text(big) == ():
        taken += 1
    assert taken == conversation.MAX_WAITING_BYTES // len(big.encode())
    for _ in range(taken):
        c.sent(None)
    assert c.receive_text(big) == ()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["create", "sent", "refused", "bad"]), st.sampled_from([None, "a", "b"]))))
def test_each_lane_is_first_in_first_out_and_never_twice_at_work(steps):
    c = Conversation()
    asked: dict[str | None, list[int]] = {None: [], "a": [], "b": []}
    begun: dict[str | None, list[int]] = {None: [], "a": [], "b": []}
    at_work: set[str | None] = set()

    def take(commands):
        for command in commands:
            if isinstance(command, Start):
                assert command.lane not in at_work
                at_work.add(command.lane)
                begun[command.lane].append(command.body["input"])

    for number, (step, lane) in enumerate(steps):
        if step == "create":
            asked[lane].append(number)
            take(c.receive_text(create(lane, number)))
        elif step == "bad":
            error_in(c.receive_text("{"))
        elif lane in at_work:
            at_work.discard(lane)
            take(c.sent(lane) if step == "sent" else c.refused(lane, NotFound("no")))
    while at_work:
        lane = at_work.pop()
        take(c.sent(lane))
    assert begun == asked
    assert (c.num_lanes, c.num_waiting) == (0, 0)
