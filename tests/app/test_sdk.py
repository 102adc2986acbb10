"""The official SDK as a client of the Responses API: sync and async, over HTTP and websockets."""

import asyncio

import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from tests.app.session_store import session_server
from tests.app.stateful_gateway import KEY_A, assert_contiguous, running_gateway, validate_event
from tests.app.timers import Timers
from tests.scripted_engine import Pause, say

STORY = "Once there was a lighthouse."
MODEL = "byte-model"
FIELDS = {
    "instructions": "Be brief.",
    "metadata": {"topic": "x"},
    "truncation": "auto",
    "max_output_tokens": 500,
    "temperature": 0.5,
    "top_p": 0.9,
    "user": "u",
    "safety_identifier": "s",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "prompt": {"id": "support"},
}


@pytest.fixture
async def gateway():
    async with session_server() as store, running_gateway(store, say(STORY)) as gateway:
        yield gateway


def options(gateway):
    return {"base_url": f"{gateway.base_url}/v1", "api_key": KEY_A, "max_retries": 0}


def check_answer(response):
    assert (response.output_text, response.status) == (STORY, "completed")
    assert {name: getattr(response, name) for name in FIELDS if name not in ("include", "prompt")} == {
        name: value for name, value in FIELDS.items() if name not in ("include", "prompt")
    }
    assert response.prompt.id == "support"
    logprobs = response.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in logprobs).decode() == STORY
    assert {len(entry.top_logprobs) for entry in logprobs} == {2}


def check_events(events, *, is_websocket=False):
    for event in events:
        validate_event(event.model_dump(warnings=False), is_websocket=is_websocket)
    assert_contiguous([event.model_dump(warnings=False) for event in events])
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == STORY
    check_answer(events[-1].response)


def over_http(client):
    """What the async client does below."""
    response = client.responses.create(model=MODEL, input="Hi", **FIELDS)
    check_answer(response)
    check_answer(client.responses.retrieve(response.id))
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True, **FIELDS))
    check_events(events)
    resumed = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=4))
    assert resumed == events[5:]
    with client.responses.stream(model=MODEL, input="Hi", **FIELDS) as stream:
        for _ in stream:
            pass
        check_answer(stream.get_final_response())
    later = client.responses.create(model=MODEL, input="Hi", background=True, previous_response_id=response.id)
    ended = client.responses.cancel(later.id)
    assert ended.status in ("cancelled", "completed")
    (item,) = client.responses.input_items.list(later.id)
    assert item.content[0].text == "Hi"
    assert client.responses.input_tokens.count(model=MODEL, input="Hi").input_tokens > 2
    client.responses.delete(later.id)
    with pytest.raises(APIStatusError) as gone:
        client.responses.retrieve(later.id)
    assert (gone.value.status_code, gone.value.code) == (404, "response_not_found")


async def test_sync_over_http(gateway):
    with OpenAI(**options(gateway)) as client:
        await asyncio.to_thread(over_http, client)


async def test_async_over_http(gateway):
    async with AsyncOpenAI(**options(gateway)) as client:
        response = await client.responses.create(model=MODEL, input="Hi", **FIELDS)
        check_answer(response)
        check_answer(await client.responses.retrieve(response.id))
        events = [e async for e in await client.responses.create(model=MODEL, input="Hi", stream=True, **FIELDS)]
        check_events(events)
        after = await client.responses.retrieve(events[0].response.id, stream=True, starting_after=4)
        assert [event async for event in after] == events[5:]
        async with client.responses.stream(model=MODEL, input="Hi", **FIELDS) as stream:
            check_answer(await stream.get_final_response())
        later = await client.responses.create(
            model=MODEL, input="Hi", background=True, previous_response_id=response.id
        )
        ended = await client.responses.cancel(later.id)
        assert ended.status in ("cancelled", "completed")
        assert [item.content[0].text async for item in client.responses.input_items.list(later.id)] == ["Hi"]
        await client.responses.delete(later.id)
        with pytest.raises(APIStatusError) as gone:
            await client.responses.retrieve(later.id)
        assert (gone.value.status_code, gone.value.code) == (404, "response_not_found")


def over_websocket(client):
    with client.responses.connect() as connection:
        connection.response.create(model=MODEL, input="Hi", **FIELDS)
        events = []
        for event in connection:
            events.append(event)
            if event.type == "response.completed":
                break
        check_events(events, is_websocket=True)


@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")  # the SDK uses it the old way
async def test_sync_over_a_websocket(gateway):
    with OpenAI(**options(gateway)) as client:
        await asyncio.to_thread(over_websocket, client)


async def test_async_over_a_websocket(gateway):
    async with AsyncOpenAI(**options(gateway)) as client, client.responses.connect() as connection:
        await connection.response.create(model=MODEL, input="Hi", **FIELDS)
        events = []
        async for event in connection:
            events.append(event)
            if event.type == "response.completed":
                break
        check_events(events, is_websocket=True)


# ---- its reconnect option: the server closes in the midst of an answer, and when there is none

HALF = "Once there was "


def halting_once(request):
    yield HALF.encode()
    if b"More" not in bytes(token for token in request.prompt_ids if token < 256):
        yield Pause()
    yield STORY.removeprefix(HALF).encode()


class Talk:
    """What a client does that knows how to resume. `do` has something done on the gateway's event loop."""

    def __init__(self, gateway, timers, do, send):
        self.gateway = gateway
        self.timers = timers
        self.do = do
        self.send = send
        self.events = []
        self.reconnects = []
        self.closed_with = []

    def on_reconnecting(self, reconnecting):
        self.closed_with.append(reconnecting.close_code)
        if self.closed_with == [1012]:
            first, last = self.events[0], self.events[-1]
            self.send({"type": "response.resume", "response_id": first.response.id,
                       "starting_after": last.sequence_number})  # fmt: skip
            self.do(self.gateway.engine.release)
        else:
            self.send({"type": "response.create", "model": MODEL, "input": "More"})

    def take(self, event):
        """Whether more will come."""
        if event.type == "reconnect":
            self.reconnects.append(event.reason)
            return True
        self.events.append(event)
        if event.type == "response.output_text.delta" and not self.closed_with:
            self.do(self.timers.first, self.timers.first)  # told, and at once over
        if event.type == "response.completed" and self.closed_with == [1012]:
            self.do(self.timers.first)
        return event.type != "response.completed" or self.closed_with == [1012]

    def check(self):
        assert (self.closed_with, self.reconnects) == ([1012, 1001], ["lifetime", "lifetime"])
        second = [event.type for event in self.events].index("response.created", 1)
        for events in (self.events[:second], self.events[second:]):
            assert_contiguous([event.model_dump(warnings=False) for event in events])
            assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == STORY
            assert events[-1].response.output_text == STORY
        assert len(self.gateway.engine.requests) == 2


@pytest.fixture
def timers():
    return Timers()


@pytest.fixture
async def closing_gateway(timers):
    async with session_server() as store, running_gateway(store, halting_once, later=timers.later) as gateway:
        yield gateway


def talk_until_the_end(client, talk):
    with client.responses.connect(on_reconnecting=talk.on_reconnecting, initial_delay=0.0) as connection:
        talk.send = connection.send
        connection.response.create(model=MODEL, input="Hi")
        for event in connection:
            if not talk.take(event):
                return


@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")  # the SDK uses it the old way
async def test_sync_its_reconnect_option_resumes(closing_gateway, timers):
    loop = asyncio.get_running_loop()

    def do(*calls):
        for call in calls:
            loop.call_soon_threadsafe(call)

    talk = Talk(closing_gateway, timers, do, None)
    with OpenAI(**options(closing_gateway)) as client:
        await asyncio.to_thread(talk_until_the_end, client, talk)
    talk.check()


async def test_async_its_reconnect_option_resumes(closing_gateway, timers):
    sending = []

    def do(*calls):
        for call in calls:
            call()

    async with AsyncOpenAI(**options(closing_gateway)) as client:
        talk = Talk(closing_gateway, timers, do, lambda event: sending.append(asyncio.create_task(send(event))))
        connecting = client.responses.connect(on_reconnecting=talk.on_reconnecting, initial_delay=0.0)
        async with connecting as connection:
            send = connection.send
            await connection.response.create(model=MODEL, input="Hi")
            async for event in connection:
                if not talk.take(event):
                    break
        await asyncio.gather(*sending)
    talk.check()
