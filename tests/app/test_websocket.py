"""The Responses websocket over real sockets: the official client, lanes, bad frames, slow readers, cuts."""

import asyncio
import contextlib
import itertools
import json
import random
import socket as sockets
import threading

import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app import websocket
from app.config import TenantConfig, hash_key
from app.prompts import THREAD_FROM_CHARACTERS
from tests.app.clean_log import clean_log
from tests.app.session_store import on_both_servers
from tests.app.stateful_gateway import (
    FILE_CONFIG,
    KEY_A,
    KEY_B,
    TERMINAL,
    assert_contiguous,
    body,
    create,
    deltas,
    output_text,
    prompt_of,
    receive,
    receive_until,
    receive_until_closed,
    resume,
    running_gateway,
    send,
    send_create,
    slowly,
    stream,
    validate_event,
)
from tests.scripted_engine import Fail, Pause, say

STORY = "The keeper's lamp went out at 3 o'clock. " * 3


@pytest.fixture
async def gateway(store):
    async with running_gateway(store, say(STORY)) as gateway:
        yield gateway


def of(events, lane):
    return [e for e in events if e.get("stream_id") == lane]


def num_ended(events):
    return sum(e["type"] in TERMINAL for e in events)


async def until_ended(ws, count, events=None):
    """Receives until so many answers have ended."""
    events = [] if events is None else events
    while num_ended(events) < count:
        events.append(await receive(ws))
    return events


# ---- the official client


async def test_the_sdk_with_two_lanes_interleaved(store):
    """client.responses.connect() of the official SDK: two stream_ids at once, then a turn that goes on."""
    async with running_gateway(store, slowly(STORY)) as gateway:
        await talk_on_two_lanes(gateway)


async def talk_on_two_lanes(gateway):
    client = openai.AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key=KEY_A)
    async with client, client.responses.connect() as connection:
        for lane in ("a", "b"):
            await connection.response.create(model="byte-model", input=f"Hi from {lane}", stream_id=lane)
        events, text, ids = [], {"a": "", "b": ""}, {}
        async for event in connection:
            validate_event(event.model_dump(warnings=False), is_websocket=True)
            events.append(event)
            if event.type == "response.output_text.delta":
                text[event.stream_id] += event.delta
            if event.type == "response.completed":
                ids[event.stream_id] = event.response.id
                assert event.response.output_text == text[event.stream_id]
                if len(ids) == 2:
                    break
        assert text == {"a": STORY, "b": STORY}
        order = [event.stream_id for event in events]
        assert sum(x != y for x, y in itertools.pairwise(order)) > 10
        for lane in "ab":
            numbers = [event.sequence_number for event in events if event.stream_id == lane]
            assert numbers == list(range(len(numbers)))
        await connection.response.create(model="byte-model", input="Go on.", previous_response_id=ids["a"])
        async for event in connection:
            if event.type == "response.completed":
                assert event.response.previous_response_id == ids["a"]
                break
    assert "Hi from a" in prompt_of(gateway.engine)
    assert "Hi from b" not in prompt_of(gateway.engine)


# ---- events and lanes


async def test_events_are_those_of_http(gateway):
    async with gateway.socket() as ws, gateway.http() as http:
        await send_create(ws, "Hi")
        events = await receive_until(ws)
        for event in events:
            validate_event(event, is_websocket=True)
            assert "stream_id" not in event
        assert_contiguous(events)
        others = await stream(http, "Hi")
        kinds = [[e["type"] for e in x if not e["type"].endswith("text.delta")] for x in (events, others)]
        assert kinds[0] == kinds[1]
        assert deltas(events) == deltas(others) == STORY
        stored = (await http.get(f"/v1/responses/{events[0]['response']['id']}")).json()
        assert stored == events[-1]["response"]


async def test_a_lane_answers_in_order(gateway):
    async with gateway.socket() as ws:
        for text in ("One.", "Two.", "Three."):
            await send_create(ws, text, stream_id="x")
        events = await until_ended(ws, 3)
    ids = [e["response"]["id"] for e in events if e["type"] == "response.created"]
    assert len(set(ids)) == 3
    order = [e["response"]["id"] for e in events if "response" in e]
    assert order == [i for i in ids for _ in range(3)]
    assert {e["stream_id"] for e in events} == {"x"}
    prompts = [prompt_of(gateway.engine, i) for i in range(3)]
    assert ["One." in prompts[0], "Two." in prompts[1], "Three." in prompts[2]] == [True] * 3


async def test_lanes_run_side_by_side(store):
    """A lane that stands still holds up no other one."""
    async with running_gateway(store, lambda r: [b"a", Pause()] if b"slow" in bytes(
        i for i in r.prompt_ids if i < 256) else [b"quick"]) as gateway, gateway.socket() as ws:  # fmt: skip
        await send_create(ws, "slow", stream_id="one")
        await gateway.engine.wait_paused()
        await send_create(ws, "now", stream_id="two")
        await send_create(ws, "now")
        events = await until_ended(ws, 2)
        assert {e.get("stream_id") for e in events if e["type"] in TERMINAL} == {"two", None}


async def test_a_fork_onto_other_lanes(gateway):
    async with gateway.socket() as ws:
        await send_create(ws, "My name is Ada.", stream_id="one")
        first = (await receive_until(ws))[-1]["response"]["id"]
        for lane in ("two", "three"):
            await send_create(ws, "What is my name?", stream_id=lane, previous_response_id=first)
        await until_ended(ws, 2)
        requests = gateway.engine.requests
        assert requests[1].prompt_ids == requests[2].prompt_ids
        assert requests[1].prompt_ids[: len(requests[0].prompt_ids)] == requests[0].prompt_ids


async def test_an_error_echoes_its_lane(gateway):
    async with gateway.socket() as ws:
        await send_create(ws, "x", stream_id="lane-7", model="no-such-model")
        event = await receive(ws)
        validate_event(event, is_websocket=True)
        assert (event["type"], event["status"], event["stream_id"]) == ("error", 404, "lane-7")
        assert event["error"]["code"] == "model_not_found"


async def test_cancel_ends_one_lane(store):
    async with running_gateway(store, lambda r: [b"part", Pause(), b"rest"]) as gateway, gateway.socket() as ws:
        for lane in ("a", "b"):
            await send_create(ws, stream_id=lane)
        await gateway.engine.wait_paused(2)
        events = []
        while len(of(events, "a")) < 5:
            events.append(await receive(ws))
        response_id = of(events, "a")[0]["response"]["id"]
        for _ in range(3):
            await send(ws, type="response.cancel", response_id=response_id)
        await until_ended(ws, 1, events)
        last = of(events, "a")[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        assert output_text(last["response"]) == "part"
        gateway.engine.release()
        await until_ended(ws, 2, events)
        assert output_text(of(events, "b")[-1]["response"]) == "partrest"
        assert [e for e in events if e["type"] == "error"] == []
        for lane in "ab":
            assert_contiguous(of(events, lane))


# ---- answers that are not stored


async def test_an_unstored_answer_can_be_continued_on_its_socket_only(gateway):
    async with gateway.socket() as ws, gateway.http() as http:
        await send_create(ws, "My name is Ada.", store=False)
        first = (await receive_until(ws))[-1]["response"]
        answer = await http.post("/v1/responses", json=body(previous_response_id=first["id"]))
        assert answer.json()["error"]["code"] == "previous_response_not_found"
        await send_create(ws, "And mine?", store=False, previous_response_id=first["id"])
        second = (await receive_until(ws))[-1]["response"]
        requests = gateway.engine.requests
        whole = [*requests[0].prompt_ids, *STORY.encode(), 257]
        assert requests[1].prompt_ids[: len(whole)] == whole
        # a stored child holds what came before it, and can be continued by anybody of the tenant
        await send_create(ws, "Keep this.", previous_response_id=second["id"])
        third = (await receive_until(ws))[-1]["response"]
        await create(http, "Go on.", previous_response_id=third["id"])
        assert requests[3].prompt_ids[: len(requests[2].prompt_ids)] == requests[2].prompt_ids
        await send_create(ws, "x", previous_response_id=first["id"])
        assert (await receive(ws))["error"]["code"] == "previous_response_not_found", "only the latest one is kept"


async def test_when_the_socket_goes_stored_answers_go_on_and_others_end(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        async with gateway.socket() as ws:
            await send_create(ws, stream_id="kept")
            await send_create(ws, stream_id="lost", store=False)
            await send_create(ws, "never asked for", stream_id="kept")
            await gateway.engine.wait_paused(2)
            events = []
            while len(of(events, "kept")) < 5 or len(of(events, "lost")) < 5:
                events.append(await receive(ws))
        await gateway.engine.wait_aborted(1)
        assert gateway.engine.num_running == 1
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert len(gateway.engine.requests) == 2
        response_id = of(events, "kept")[0]["response"]["id"]
        assert output_text((await http.get(f"/v1/responses/{response_id}")).json()) == "ab"


# ---- bad frames


BAD = {
    "empty": "",
    "brace": "{",
    "null": "null",
    "list": "[]",
    "nan": '{"type": NaN}',
    "no type": "{}",
    "unknown type": '{"type": "response.nope"}',
    "create without input": '{"type": "response.create"}',
    "bad model": '{"type": "response.create", "model": "nope", "input": "x"}',
    "bad stream_id": '{"type": "response.create", "stream_id": 3, "input": "x"}',
    "unknown parent": '{"type": "response.create", "input": "x", "previous_response_id": "resp_0"}',
    "cancel unknown": '{"type": "response.cancel", "response_id": "resp_0"}',
    "resume unknown": '{"type": "response.resume", "response_id": "resp_0", "starting_after": 0}',
    "deep": "[" * 20000 + "]" * 20000,
    "steer": '{"type": "response.steer", "previous_response_id": "resp_0", "input": "x"}',
}


async def test_b32_bad_text_is_one_error_each_and_socket_and_answer_live_on(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.socket() as ws:
        await send_create(ws, stream_id="good")
        await gateway.engine.wait_paused()
        events = [await receive(ws) for _ in range(5)]
        for name, message in BAD.items():
            await ws.send(message)
            error = await receive(ws)
            validate_event(error, is_websocket=True)
            assert error["type"] == "error", name
            assert error["error"]["message"], name
            assert "Traceback" not in str(error)
        gateway.engine.release()
        await until_ended(ws, 1, events)
        assert_contiguous(events)
        assert deltas(events) == "ab"


HOSTILE = {
    "binary": (b"{}", 1003),
    "empty binary": (b"", 1003),
    "binary that is no UTF-8": (b"\xff\xfe", 1003),
    "300 KiB of text": ("x" * (300 << 10), 1009),
    "2 MiB of text": ("x" * (2 << 20), 1009),
    "20 MiB of text": ("x" * (20 << 20), 1009),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_b32_hostile_frames_close_with_their_code_and_the_answer_is_not_lost(store, name):
    frame, code = HOSTILE[name]
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        with clean_log():
            async with gateway.socket() as ws:
                await send_create(ws)
                await gateway.engine.wait_paused()
                events = [await receive(ws) for _ in range(5)]
                with contextlib.suppress(ConnectionClosed):
                    await ws.send(frame)
                if code == 1003:
                    assert (await receive(ws))["type"] == "error"
                assert (await receive_until_closed(ws)) == ([], code)
        gateway.engine.release()
        events += await resume(http, events[0]["response"]["id"], events[-1]["sequence_number"])
        assert_contiguous(events)
        assert deltas(events) == "ab"


async def test_b32_text_that_is_no_utf8_closes_with_1007(gateway):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Authorization: Bearer " + KEY_A.encode() + b"\r\n\r\n"
    )
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\x81\x82\x00\x00\x00\x00\xff\xfe")
    frame = await reader.readexactly(4)
    assert (frame[0], int.from_bytes(frame[2:4])) == (0x88, 1007)
    writer.close()
    await writer.wait_closed()


async def test_a_message_in_many_fragments_is_one_message(gateway):
    async with gateway.socket() as ws:
        message = json.dumps({"type": "response.create", **body()})

        async def parts():
            for i in range(0, len(message), 7):
                yield message[i : i + 7]
                await ws.ping()

        await ws.send(parts())
        assert (await receive_until(ws))[-1]["type"] == "response.completed"


# ---- who may


@pytest.mark.parametrize("key", [None, "wrong-key-of-nobody"])
async def test_without_a_key_the_handshake_is_refused(gateway, key):
    with pytest.raises(InvalidStatus) as refused:
        async with gateway.socket(key):
            pass
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"


async def test_a_foreign_origin_is_refused(gateway):
    with pytest.raises(InvalidStatus) as refused:
        async with gateway.socket(origin="https://evil.example"):
            pass
    assert refused.value.response.status_code == 403


@on_both_servers
async def test_b42_another_tenants_ids_are_unknown_on_the_socket(store):
    async with running_gateway(store, lambda r: [b"secret", Pause(), b"!"]) as gateway:  # noqa: SIM117
        async with gateway.socket() as mine, gateway.socket(KEY_B) as other:
            await send_create(mine, "My secret is 42.")
            await gateway.engine.wait_paused()
            events = [await receive(mine)]
            answers = []
            for response_id in (events[0]["response"]["id"], "resp_" + "0" * 44):
                answers.append([])
                for message in (
                    {"type": "response.cancel", "response_id": response_id},
                    {"type": "response.resume", "response_id": response_id, "starting_after": 0},
                    {"type": "response.create", **body(previous_response_id=response_id)},
                ):
                    await send(other, **message)
                    answers[-1].append(json.dumps(await receive(other)).replace(response_id, "ID"))
            assert answers[0] == answers[1]
            assert "previous_response_not_found" in answers[0][2]
            assert len(gateway.engine.requests) == 1
            gateway.engine.release()
            await until_ended(mine, 1, events)
            assert deltas(events) == "secret!"


# ---- another configuration


def put_in_force(gateway, **changes):
    """Another configuration, as a reload would."""
    live = gateway.services.live
    live.current = live.build(live.current.file_config.model_copy(update=changes))


def tenant(name, key):
    return TenantConfig(id=name, key_hashes=(hash_key(key),))


async def test_each_message_is_answered_with_the_assistants_of_now(gateway):
    async with gateway.socket() as ws:
        await send_create(ws, "Hi", prompt={"id": "support"})
        first = (await receive_until(ws))[-1]["response"]
        edited = FILE_CONFIG.assistants[0].model_copy(update={"instructions": "Be brief."})
        put_in_force(gateway, assistants=(edited,))
        await send_create(ws, "And?", previous_response_id=first["id"])
        second = (await receive_until(ws))[-1]["response"]
        assert second["prompt"]["id"] == first["prompt"]["id"] == "support"
        assert second["prompt"]["version"] != first["prompt"]["version"]
        assert prompt_of(gateway.engine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
        put_in_force(gateway, assistants=())
        await send_create(ws, "And?", previous_response_id=second["id"])
        error = (await receive_until(ws))[-1]
        assert (error["status"], error["error"]["code"]) == (404, "prompt_not_found")


@pytest.mark.parametrize(
    "tenants",
    [
        [tenant("b", KEY_B)],
        [tenant("a", "another-key-of-a"), tenant("b", KEY_B)],
        [tenant("a", KEY_B), tenant("b", KEY_A)],
    ],
    ids=["no tenant", "another key", "the key of another tenant"],
)
async def test_without_its_key_a_socket_takes_nothing_new_and_closes_when_its_answers_have_ended(store, tenants):
    async with running_gateway(store, lambda r: [b"Hel", Pause(), b"lo"]) as gateway, gateway.socket() as ws:
        for lane, is_stored in (("x", True), ("y", False)):
            await send_create(ws, "Hi", stream_id=lane, store=is_stored)
        await send_create(ws, "I wait for the lane.", stream_id="x")
        await gateway.engine.wait_paused(2)
        put_in_force(gateway, tenants=tuple(tenants))
        await send_create(ws, "And me?", stream_id="z")
        events = await receive_until(ws, lambda e: e["type"] == "error")
        assert (events[-1]["status"], events[-1]["error"]["code"]) == (401, "invalid_api_key")
        gateway.engine.release()
        more, code = await receive_until_closed(ws)
        events += more
        assert code == 1008
        assert [deltas(of(events, lane)) for lane in "xyz"] == ["Hello", "Hello", ""]
        assert num_ended(events) == 2
        assert [e.get("stream_id") for e in events if e["type"] == "error"] == [None, "x"]
        assert len(gateway.engine.requests) == 2


async def test_with_its_key_a_socket_lives_through_changes(gateway):
    async with gateway.socket() as ws:
        for number in range(3):
            put_in_force(gateway, tenants=(tenant(f"c{number}", f"key-of-c-{number}"), *FILE_CONFIG.tenants))
            await send_create(ws, "Hi")
            assert num_ended(await receive_until(ws)) == 1


# ---- cut and resumed


async def test_b36_cut_at_any_event_and_resumed_again_and_again(gateway):
    """The connection dies after random numbers of events, ten times in one answer; text exact, numbers contiguous."""
    rnd = random.Random(36)
    for _ in range(5):
        ws = await gateway.socket()
        await send_create(ws, stream_id="lane")
        events = [await receive(ws) for _ in range(rnd.randint(1, 9))]
        response_id = events[0]["response"]["id"]
        while events[-1]["type"] not in TERMINAL:
            ws.transport.abort()
            await ws.wait_closed()
            ws = await gateway.socket()
            last = events[-1]["sequence_number"]
            await send(ws, type="response.resume", response_id=response_id, starting_after=last)
            for _ in range(rnd.randint(1, 25)):
                events.append(await receive(ws))
                if events[-1]["type"] in TERMINAL:
                    break
        await ws.close()
        assert_contiguous(events)
        assert deltas(events) == STORY == output_text(events[-1]["response"])
        assert {e["stream_id"] for e in events} == {"lane"}


async def test_a_second_tab_sees_the_same_and_names_its_own_lane(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway:  # noqa: SIM117
        async with gateway.socket() as first, gateway.socket() as second:
            await send_create(first)
            await gateway.engine.wait_paused()
            events = [await receive(first)]
            await send(second, type="response.resume", response_id=events[0]["response"]["id"], stream_id="tab")
            gateway.engine.release()
            await until_ended(first, 1, events)
            others = await until_ended(second, 1)
            assert [e | {"stream_id": "tab"} for e in events] == others


async def test_a_replay_does_not_disturb_a_running_lane(store):
    async with running_gateway(store, say("hello")) as gateway, gateway.socket() as ws:
        await send_create(ws, stream_id="a")
        first = await receive_until(ws)
        await send_create(ws, stream_id="b")
        await send(ws, type="response.resume", response_id=first[0]["response"]["id"], starting_after=2)
        events = await until_ended(ws, 2)
        assert of(events, "a") == first[3:]
        assert_contiguous(of(events, "b"))


async def test_a_reader_is_told_when_the_events_it_waits_for_are_held_no_more(store):
    """As where the response was deleted while it was read. Its lane goes on with the next request."""
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.socket() as ws:
        await send_create(ws, stream_id="lane")
        events = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        await send_create(ws, "next", stream_id="lane")
        await send(ws, type="response.resume", response_id=events[0]["response"]["id"], stream_id="tab")
        await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        await gateway.log.drop(events[0]["response"]["id"])
        events = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        errors = [e for e in events if e["type"] == "error"]
        for error in errors:
            validate_event(error, is_websocket=True)
            assert (error["status"], error["error"]["code"]) == (404, "response_not_found")
        assert sorted(e["stream_id"] for e in errors) == ["lane", "tab"]
        assert {e["stream_id"] for e in events if e["type"] != "error"} == {"lane"}
        gateway.engine.release()
        assert deltas(await until_ended(ws, 1, events)) == "ab"


async def test_resumed_answers_are_bounded_until_one_has_ended(store, monkeypatch):
    """The one too many is refused by an error of its own; lanes are not held up, and an end makes room."""
    monkeypatch.setattr(websocket, "MAX_RESUMED", 3)
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway:  # noqa: SIM117
        async with gateway.http() as http, gateway.socket() as ws:
            d = await create(http, background=True)
            await gateway.engine.wait_paused()
            for tab in "1234":
                await send(ws, type="response.resume", response_id=d["id"], stream_id=tab)
            events = await receive_until(ws, lambda e: e["type"] == "error")
            validate_event(events[-1], is_websocket=True)
            assert (events[-1]["status"], events[-1]["error"]["code"]) == (429, "too_many_requests")
            taken = set("1234") - {events.pop()["stream_id"]}
            await send_create(ws, stream_id="lane")
            await gateway.engine.wait_paused(2)
            gateway.engine.release()
            await until_ended(ws, 4, events)
            assert {e["stream_id"]: deltas(of(events, e["stream_id"])) for e in events} == dict.fromkeys(
                [*taken, "lane"], "ab"
            )
            await send(ws, type="response.resume", response_id=d["id"], stream_id="5")
            assert deltas(await until_ended(ws, 1)) == "ab"


async def test_the_next_answer_counts_from_zero_again(gateway):
    async with gateway.socket() as ws:
        for _ in range(2):
            await send_create(ws)
            assert_contiguous(await receive_until(ws))


# ---- failures


@pytest.mark.parametrize("is_stored", [True, False])
async def test_b19_a_failure_ends_the_answer_and_the_socket_lives(store, is_stored):
    script = lambda r: [*b"abc", Fail("the batch failed")]  # noqa: E731
    async with running_gateway(store, script) as gateway:  # noqa: SIM117
        async with gateway.socket() as ws, gateway.http() as http:
            await send_create(ws, stream_id="lane", store=is_stored)
            events = await receive_until(ws)
            assert_contiguous(events)
            last = events[-1]
            validate_event(last, is_websocket=True)
            assert (last["type"], last["stream_id"]) == ("response.failed", "lane")
            assert last["response"]["error"]["message"]
            if is_stored:
                stored = (await http.get(f"/v1/responses/{last['response']['id']}")).json()
                assert (stored["status"], output_text(stored)) == ("failed", "abc")
            gateway.engine.die()
            await send_create(ws, stream_id="lane")
            error = await receive(ws)
            assert (error["type"], error["status"], error["stream_id"]) == ("error", 503, "lane")
            gateway.engine.revive()
            await send_create(ws, stream_id="lane", store=is_stored)
            assert (await receive_until(ws))[0]["type"] == "response.created"


# ---- slow readers


def small_socket(port):
    """A TCP socket with a tiny receive buffer, so that a client that does not read is felt soon."""
    s = sockets.socket()
    s.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    s.connect(("127.0.0.1", port))
    s.setblocking(False)
    return s


async def test_b33_a_slow_reader_is_closed_with_4008_and_its_answer_is_whole(store):
    """It reads nothing while its answer runs far out of the log's window; a healthy client is not held up."""
    text = "x" * 1000
    async with (
        running_gateway(store, slowly(text), window_events=50, send_buffer_bytes=4096) as gateway,
        gateway.socket(sock=small_socket(gateway.port), max_queue=1) as slow,
        gateway.socket() as healthy,
        gateway.http() as http,
    ):
        await send_create(slow, stream_id="slow")
        await gateway.engine.wait_submitted()
        await send_create(healthy)
        events = await receive_until(healthy)
        assert deltas(events) == text
        await gateway.wait_no_runs()
        seen, code = await receive_until_closed(slow)
        assert code == 4008
        assert_contiguous(seen)
        assert text.startswith(deltas(seen))
        stored = (await http.get(f"/v1/responses/{seen[0]['response']['id']}")).json()
        assert output_text(stored) == text
        assert gateway.near.num_bytes < 400 * 1000


async def test_b33_a_slow_reader_within_the_window_gets_everything(store):
    text = "y" * 2000
    async with running_gateway(store, slowly(text), send_buffer_bytes=4096) as gateway:  # noqa: SIM117
        async with gateway.socket(sock=small_socket(gateway.port), max_queue=1) as slow:
            for lane in ("stored", "unstored"):
                await send_create(slow, stream_id=lane, store=lane == "stored")
            await gateway.engine.wait_submitted(2)
            await gateway.wait_no_runs()
            events = await until_ended(slow, 2)
            for lane in ("stored", "unstored"):
                assert_contiguous(of(events, lane))
                assert deltas(of(events, lane)) == text
            assert len(of(events, "unstored")) < len(of(events, "stored")), "deltas merged while nobody read"


async def test_b33_a_reader_that_never_reads_again_is_given_up(store):
    config = FILE_CONFIG.model_copy(update={"limits": FILE_CONFIG.limits.model_copy(update={"send_timeout_s": 0.2})})
    part, num_parts = b"z" * 1000, 300  # more than all buffers hold, in however few events it comes
    text = part.decode() * num_parts
    script = [part] * num_parts
    async with (
        running_gateway(
            store, lambda r: script, file_config=config, send_buffer_bytes=4096, max_model_len=2 * len(text)
        ) as gateway,
        gateway.http() as http,
    ):
        async with gateway.socket(sock=small_socket(gateway.port), max_queue=1, close_timeout=0.1) as slow:
            await send_create(slow)
            created = await receive(slow)
            await gateway.wait_no_runs()
            async with asyncio.timeout(30):
                while any(t.get_name() == "websocket writer" for t in asyncio.all_tasks()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        stored = (await http.get(f"/v1/responses/{created['response']['id']}")).json()
        assert output_text(stored) == text


# ---- the loop stays free


async def test_b34_while_a_long_text_is_rendered_pings_and_other_lanes_are_answered(store, monkeypatch):
    """Rendering and encoding of what is long are no work of the event loop."""
    text = "word " * (THREAD_FROM_CHARACTERS // 5 + 1)
    async with running_gateway(store, say("Hi."), max_model_len=10 * len(text)) as gateway:  # noqa: SIM117
        async with gateway.socket() as ws, gateway.socket() as other, gateway.http() as http:
            render, may_go_on, has_begun = gateway.services.template.render, threading.Event(), asyncio.Event()
            loop = asyncio.get_running_loop()

            def held(messages, **options):
                if len(messages[0].content) >= len(text):
                    loop.call_soon_threadsafe(has_begun.set)
                    assert may_go_on.wait(600)
                return render(messages, **options)

            monkeypatch.setattr(gateway.services.template, "render", held)
            await send_create(ws, text, stream_id="long")
            await has_begun.wait()
            for socket in (ws, other):
                await (await socket.ping())
                await send_create(socket, stream_id="short")
                assert deltas(await until_ended(socket, 1)) == "Hi."
            assert (await http.get("/health")).status_code == 200
            may_go_on.set()
            events = await until_ended(ws, 1)
            assert {e["stream_id"] for e in events} == {"long"}
            assert deltas(events) == "Hi."


# ---- storms


async def test_many_sockets_that_die_at_random_leave_nothing(store):
    rnd = random.Random(8)
    async with running_gateway(store, say(STORY)) as gateway, gateway.http() as http:

        async def one(i):
            ws = await gateway.socket()
            try:
                await send_create(ws, f"number {i}", store=i % 2 == 0)
                most = itertools.count(rnd.randint(1, 12), -1)  # there are fewer where several tokens came at once
                return await receive_until(ws, lambda e: next(most) == 1 or e["type"] in TERMINAL)
            finally:
                ws.transport.abort()

        seen = await asyncio.gather(*(one(i) for i in range(40)))
        await gateway.wait_no_runs()
        assert gateway.engine.num_running == 0
        for i, events in enumerate(seen):
            if i % 2 == 0:
                whole = events + await resume(http, events[0]["response"]["id"], events[-1]["sequence_number"])
                assert_contiguous(whole)
                assert deltas(whole) == STORY
        await asyncio.sleep(0)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not [name for name in names if name.startswith(("response ", "websocket", "event log", "lease"))]
