"""The description of the websocket says what comes over it."""

import json
from pathlib import Path

import jsonschema
import pytest

from app.asyncapi import document
from app.conversation import reconnect_event
from tests.app.session_store import session_server
from tests.app.stateful_gateway import receive, receive_until, running_gateway, send, send_create
from tests.scripted_engine import Pause

DOCS = Path(__file__).parents[2] / "docs"
IN_TWO = [b"It is on", Pause(), b" its way."]


@pytest.fixture
async def gateway():
    async with session_server() as store, running_gateway(store, lambda request: IN_TWO) as gateway:
        yield gateway


def validator(name):
    described = document()
    schema = described["channels"]["responses"]["messages"][name]["payload"]
    return jsonschema.Draft202012Validator({**schema, "components": described["components"]})


def test_the_file_is_what_the_code_says():
    """If not: python -m app.asyncapi > docs/asyncapi.json"""
    assert json.loads((DOCS / "asyncapi.json").read_text()) == json.loads(json.dumps(document()))


async def test_events_are_as_described(gateway):
    async with gateway.socket() as ws:
        await send_create(ws, stream_id="left")
        await gateway.engine.wait_paused()
        gateway.engine.release()
        for event in (events := await receive_until(ws)):
            validator(event["type"]).validate(event)
        assert {event["type"] for event in events} >= {"response.created", "response.completed"}
        await send(ws, type="response.create", stream_id="left")
        validator("error").validate(await receive(ws))


def test_a_wish_to_reconnect_is_as_described():
    validator("reconnect").validate(json.loads(reconnect_event("shutting_down")))


def test_messages_of_clients_are_as_described():
    good = [
        {"type": "response.create", "model": "m", "input": "Hi", "client_message_id": "k", "stream_id": "left"},
        {"type": "response.cancel", "response_id": "resp_1"},
        {"type": "response.resume", "response_id": "resp_1", "starting_after": 4},
    ]
    for message in good:
        validator(message["type"]).validate(message)
    bad = [good[0] | {"stream_id": ""}, good[0] | {"model": 3}, {"type": "response.cancel"}]
    for message in [*bad, good[2] | {"starting_after": -2}]:
        assert not validator(message["type"]).is_valid(message)
