"""A message that is sent more than once under one key, over HTTP and websockets, on one gateway and on two."""

import asyncio

import pytest
from openai import AsyncOpenAI, OpenAI

from app.idempotency import ABANDONED_MS, Claim, find_key
from app.ids import new_response_id
from tests.app.session_store import on_both_servers
from tests.app.stateful_gateway import (
    KEY_A,
    assert_contiguous,
    body,
    create,
    deltas,
    output_text,
    receive,
    receive_until,
    running_gateway,
    send_create,
    sse_events,
    validate_event,
)
from tests.app.test_responses import error_of
from tests.scripted_engine import Pause, say

HELLO = "Hello there!"
IN_TWO = lambda request: [b"Hel", Pause(), b"lo"]  # noqa: E731
KEY = {"Idempotency-Key": "message-1"}


@pytest.fixture
async def gateway(store):
    async with running_gateway(store, say(HELLO)) as gateway:
        yield gateway


async def post(http, text="Hi", /, headers=KEY, **fields):
    return await http.post("/v1/responses", json=body(text, **fields), headers=headers)


async def post_stream(http, text="Hi", /, **fields):
    async with http.stream("POST", "/v1/responses", json=body(text, stream=True, **fields), headers=KEY) as answer:
        return await sse_events(answer)


async def test_b50_the_second_of_two_is_given_the_first_ones_answer(gateway, http):
    first, second = await post(http), await post(http)
    assert first.json() == second.json()
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"
    assert len(gateway.engine.requests) == 1


@on_both_servers
async def test_b50_a_double_click_is_one_generation(store):
    async with running_gateway(store, IN_TWO) as gateway, gateway.http() as http:
        sends = [asyncio.create_task(post(http)) for _ in range(8)]
        streams = [asyncio.create_task(post_stream(http)) for _ in range(8)]
        await gateway.engine.wait_paused()
        gateway.engine.release()
        answers = [answer.json() for answer in await asyncio.gather(*sends)]
        assert {answer["id"] for answer in answers} == {answers[0]["id"]}
        assert {output_text(answer) for answer in answers} == {"Hello"}
        for events in await asyncio.gather(*streams):
            assert_contiguous(events)
            assert deltas(events) == "Hello"
            assert events[-1]["response"]["id"] == answers[0]["id"]
        assert len(gateway.engine.requests) == 1


async def test_a_sender_whose_connection_was_lost_sends_again_and_gets_all_of_it(store):
    async with running_gateway(store, IN_TWO) as gateway, gateway.http() as http:
        async with http.stream("POST", "/v1/responses", json=body(stream=True), headers=KEY) as answer:
            seen = await sse_events(answer, most=5)
        await gateway.engine.wait_paused()
        again = asyncio.create_task(post_stream(http))
        gateway.engine.release()
        events = await again
        assert events[: len(seen)] == seen
        assert deltas(events) == "Hello"
        assert len(gateway.engine.requests) == 1


async def test_the_same_key_on_http_and_on_a_websocket(gateway, http):
    first = (await post(http)).json()
    async with gateway.socket() as ws:
        await send_create(ws, client_message_id="message-1", stream_id="lane")
        events = await receive_until(ws)
        for event in events:
            validate_event(event, is_websocket=True)
        assert {event["stream_id"] for event in events} == {"lane"}
        assert events[-1]["response"] == first
        # the lane is free again, and this message is another one
        await send_create(ws, client_message_id="message-2", stream_id="lane")
        assert (await receive_until(ws))[-1]["response"]["id"] != first["id"]
        await send_create(ws, "Ho", client_message_id="message-2", stream_id="lane")
        error = await receive(ws)
        assert (error["status"], error["error"]["code"]) == (422, "idempotency_key_reused")
    assert len(gateway.engine.requests) == 2


async def test_on_two_sockets_at_once_it_is_one_answer(store):
    async with running_gateway(store, IN_TWO) as gateway:
        async with gateway.socket() as one, gateway.socket() as two:
            for ws in (one, two):
                await send_create(ws, client_message_id="m")
            await gateway.engine.wait_paused()
            gateway.engine.release()
            assert await receive_until(one) == await receive_until(two)
        assert len(gateway.engine.requests) == 1


async def test_another_body_under_the_key_is_422(gateway, http):
    await post(http)
    for fields in ({"instructions": "Be brief."}, {"temperature": 0.5}):
        error = error_of(await post(http, **fields), 422, "idempotency_key_reused")
        assert error["param"] == "Idempotency-Key"
    error_of(await post(http, "Ho"), 422, "idempotency_key_reused")
    assert len(gateway.engine.requests) == 1


async def test_a_key_is_its_tenants_own(gateway, http):
    first = (await post(http)).json()
    async with gateway.http("key-of-tenant-b") as other:
        second = await post(other, "something else")
        assert second.status_code == 200
        assert second.json()["id"] != first["id"]


async def test_a_message_that_was_refused_leaves_its_key_free(gateway, http):
    error_of(await post(http, model="nope"), 404)
    error_of(await post(http, "x" * 5000), 400, "context_length_exceeded")
    assert (await post(http)).status_code == 200


async def test_an_answer_whose_events_have_expired_is_told_anew(store):
    now = 0.0
    async with running_gateway(store, say(HELLO), clock=lambda: now) as gateway, gateway.http() as http:
        first = await post_stream(http)
        now = 10_000.0
        again = await post_stream(http)
        for event in again:
            validate_event(event)
        assert_contiguous(again)
        assert deltas(again) == HELLO
        assert again[-1]["response"] == first[-1]["response"]
        assert [e["type"] for e in again] == list(dict.fromkeys(e["type"] for e in first))
        assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize("fields", [{"max_output_tokens": 3}, {"include": ["message.output_text.logprobs"]}])
async def test_an_expired_answer_ends_as_it_ended(store, fields):
    now = 0.0
    async with running_gateway(store, say(HELLO), clock=lambda: now) as gateway, gateway.http() as http:
        first = await post_stream(http, **fields)
        now = 10_000.0
        again = await post_stream(http, **fields)
        assert again[-1]["type"] == first[-1]["type"]
        assert again[-1]["response"] == first[-1]["response"]
        assert [lp for e in again if "delta" in e for lp in e["logprobs"]] == [
            lp for e in first if "delta" in e for lp in e["logprobs"]
        ]


async def test_a_finished_answer_is_known_on_another_gateway(store):
    async with running_gateway(store, say(HELLO)) as one, one.http() as http:
        first = (await post(http)).json()
    async with running_gateway(store, say("Never."), owner="gateway-2") as two, two.http() as http:
        assert (await post(http)).json() == first
        assert deltas(await post_stream(http)) == HELLO
        assert two.engine.requests == []


async def test_a_running_answer_is_followed_from_another_gateway(store):
    async with (
        running_gateway(store, IN_TWO) as one,
        running_gateway(store, IN_TWO, owner="gateway-2") as two,
        one.http() as first,
        two.http() as second,
    ):
        sent = asyncio.create_task(post_stream(first))
        await one.engine.wait_paused()
        streamed, whole = asyncio.create_task(post_stream(second)), asyncio.create_task(post(second))
        async with two.socket() as ws:
            await send_create(ws, client_message_id="message-1")
            assert (await receive(ws))["type"] == "response.created"
            one.engine.release()
            events = await sent
            assert (await receive_until(ws))[-1]["response"] == events[-1]["response"]
        assert await streamed == events
        assert (await whole).json() == events[-1]["response"]
        assert (len(one.engine.requests), len(two.engine.requests)) == (1, 0)


async def test_a_claim_without_a_response_is_409_until_its_gateway_must_have_died(gateway, http):
    """As when a gateway is between claiming the key and storing the response, or died there."""
    sent = find_key("message-1", body())
    claim = Claim(sent.fingerprint, str(new_response_id()))
    redis, key = gateway.sessions._redis, f"{{t:a}}:i:{sent.key}"
    await redis.set(key, f'{{"fingerprint":"{claim.fingerprint}","response_id":"{claim.response_id}"}}', px=86400_000)
    answer = await post(http)
    error_of(answer, 409, "idempotency_key_in_use")
    assert answer.headers["Retry-After"] == "1"
    assert gateway.engine.requests == []
    await redis.pexpire(key, 86400_000 - ABANDONED_MS)
    first = await post(http)
    assert (first.status_code, (await post(http)).json()) == (200, first.json())
    assert len(gateway.engine.requests) == 1


async def test_without_the_session_store_a_message_with_a_key_is_503(store):
    async with running_gateway(store, say(HELLO)) as gateway, gateway.http() as http:
        await store.kill()
        answer = await post(http)
        error_of(answer, 503, "session_store_unavailable")
        assert "Retry-After" in answer.headers
        assert gateway.engine.requests == []
        await store.start()


async def test_a_background_message_sent_again_says_how_far_it_is(store):
    async with running_gateway(store, IN_TWO) as gateway, gateway.http() as http:
        first = (await post(http, background=True)).json()
        await gateway.engine.wait_paused()
        again = (await post(http, background=True)).json()
        assert (again["id"], again["status"]) == (first["id"], "in_progress")
        gateway.engine.release()
        assert output_text((await post(http)).json()) == "Hello"
        assert len(gateway.engine.requests) == 1


async def test_the_sdk_sends_keys(gateway):
    options = {"base_url": f"{gateway.base_url}/v1", "api_key": KEY_A, "max_retries": 0}
    asked = {"model": "byte-model", "input": "Hi", "extra_headers": KEY}
    async with AsyncOpenAI(**options) as client:
        first = await client.responses.create(**asked)
    with OpenAI(**options) as client:
        second = await asyncio.to_thread(client.responses.create, **asked)
    assert first.output_text == second.output_text == HELLO
    assert first.id == second.id
    assert len(gateway.engine.requests) == 1


async def test_messages_without_a_key_are_two(gateway, http):
    assert (await create(http))["id"] != (await create(http))["id"]
    assert len(gateway.engine.requests) == 2
