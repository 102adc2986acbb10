"""A gateway that is told to end: what it still does, what it refuses, and what is said to those it cannot wait for."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import pytest
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import InvalidStatus

from app.drain import Drain
from tests.app.clock import Clock
from tests.app.serving import CHAT, chat_body, sse_data
from tests.app.session_store import SessionServer
from tests.app.stateful_gateway import (
    TERMINAL,
    Gateway,
    body,
    create,
    deltas,
    output_text,
    receive,
    receive_until,
    receive_until_closed,
    running_gateway,
    send_create,
)
from tests.scripted_engine import Pause, Script

HELLO: Script = lambda request: [b"Hel", Pause(), b"lo"]  # noqa: E731
Starts = Callable[..., AbstractAsyncContextManager[Gateway]]


@asynccontextmanager
async def gateway_with(store: SessionServer, script: Script = HELLO) -> AsyncIterator[Gateway]:
    async with running_gateway(store, script) as gateway:
        gateway.services.drain.add_end(gateway.service.finish)
        yield gateway


@contextmanager
def draining(gateway: Gateway, timeout_s: float = 60.0) -> Iterator[asyncio.Task[None]]:
    """Told to end; the task is done when it may go."""
    drain = gateway.services.drain
    drain.begin()
    task = asyncio.create_task(drain.run(timeout_s))
    yield task
    assert task.done(), "the test waits for the end"
    task.result()


async def test_nothing_new_is_taken_and_what_runs_goes_on(store: SessionServer) -> None:
    async with gateway_with(store) as gateway, gateway.http() as http, gateway.http() as second:
        async with http.stream("POST", CHAT, json=chat_body(stream=True)) as chat:
            await gateway.engine.wait_paused()
            running = asyncio.create_task(create(second))
            await gateway.engine.wait_paused(2)
            with draining(gateway) as ended:
                async with gateway.http() as third:
                    for refused in (
                        await third.get("/ready"),
                        await third.post(CHAT, json=chat_body()),
                        await third.post("/v1/completions", json={"model": "byte-model", "prompt": "x"}),
                        await third.post("/v1/responses", json=body()),
                    ):
                        assert refused.status_code == 503
                        assert refused.json()["error"]["code"] == "shutting_down"
                        assert refused.headers["retry-after"] == "1"
                        assert refused.headers["connection"] == "close"
                    assert (await third.get("/health")).status_code == 200
                assert not ended.done()
                gateway.engine.release()
                assert output_text(await running) == "Hello"
                text = "".join([part async for part in chat.aiter_text()])
                await ended
        events = list(sse_data(text.encode()))
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert "".join(deltas) == "Hello"
        assert len(gateway.engine.requests) == 2


async def test_stored_answers_can_be_asked_for_and_stopped_while_it_drains(store: SessionServer) -> None:
    async with gateway_with(store) as gateway, gateway.http() as http:
        started = await create(http, background=True)
        await gateway.engine.wait_paused()
        with draining(gateway) as ended:
            assert (await http.get(f"/v1/responses/{started['id']}")).json()["status"] == "in_progress"
            await http.post(f"/v1/responses/{started['id']}/cancel")
            await ended
        assert (await http.get(f"/v1/responses/{started['id']}")).json()["status"] == "cancelled"


async def test_sockets_are_told_to_reconnect_and_closed_when_their_answers_have_ended(store: SessionServer) -> None:
    async with gateway_with(store) as gateway, gateway.socket() as busy, gateway.socket() as idle:
        await send_create(busy)
        await receive_until(busy, lambda e: e["type"] == "response.output_text.delta")
        with draining(gateway) as ended:
            for ws in (busy, idle):
                event = await receive(ws)
                assert (event["type"], event["reason"]) == ("reconnect", "shutting_down")
                assert 0 <= event["after_ms"] < 500
            assert await receive_until_closed(idle) == ([], 1001)
            await send_create(busy, "more", stream_id="other")
            refused = await receive(busy)
            assert (refused["type"], refused["error"]["code"]) == ("error", "shutting_down")
            with pytest.raises(InvalidStatus) as failed:
                await gateway.socket()
            assert failed.value.response.status_code == 503
            gateway.engine.release()
            events, code = await receive_until_closed(busy)
            assert output_text(events[-1]["response"]) == "Hello"
            assert events[-1]["type"] == "response.completed"
            assert code == 1001
            await ended


async def test_requests_that_wait_for_their_lane_are_refused(store: SessionServer) -> None:
    async with gateway_with(store) as gateway, gateway.socket() as ws:
        await send_create(ws, "first")
        await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        await send_create(ws, "second")
        with draining(gateway) as ended:
            gateway.engine.release()
            events, code = await receive_until_closed(ws)
            await ended
        kinds = [e["type"] for e in events]
        assert kinds.index("response.completed") < kinds.index("error")
        assert code == 1001
        assert len(gateway.engine.requests) == 1


async def test_whoever_takes_too_long_is_told_why_and_what_is_stored_is_left_to_others(store: SessionServer) -> None:
    async with gateway_with(store) as gateway, gateway.http() as http, gateway.http() as second, gateway.socket() as ws:
        await send_create(ws)
        stored = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        await send_create(ws, stream_id="unstored", store=False)
        await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        async with (
            http.stream("POST", CHAT, json=chat_body(stream=True)) as chat,
            second.stream("POST", "/v1/responses", json=body(stream=True)) as answer,
            gateway.http() as third,
        ):
            whole = asyncio.create_task(third.post(CHAT, json=chat_body()))
            waits = asyncio.create_task(third.post("/v1/responses", json=body()))
            await gateway.engine.wait_paused(6)
            with draining(gateway, timeout_s=0.0) as ended:
                await ended
            chats = list(sse_data("".join([part async for part in chat.aiter_text()]).encode()))
            answers = list(sse_data("".join([part async for part in answer.aiter_text()]).encode()))
            for refused in (await whole, await waits):
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert chats[-1] == "[DONE]"
        assert json.loads(chats[-2])["error"]["code"] == "shutting_down"
        told = json.loads(answers[-1])
        assert (told["type"], told["code"]) == ("error", "shutting_down")
        events, code = await receive_until_closed(ws)
        assert code == 1012
        (end,) = [event for event in events if event["type"] in TERMINAL]
        assert (end["stream_id"], end["response"]["status"]) == ("unstored", "failed")
        assert "shut down" in end["response"]["error"]["message"]
        redis = gateway.sessions._redis
        assert await redis.keys("*:o:*") == []
        statuses = [await redis.hget(key, "status") for key in await redis.keys("*:r:*")]
        assert statuses == [b"in_progress"] * 3
        assert deltas(stored) == "Hel"
    assert not gateway.engine.core.running


async def test_a_paused_answer_is_left_to_others_at_once(store: SessionServer, clock: Clock) -> None:
    async with running_gateway(store, HELLO, clock=clock) as gateway, gateway.socket() as ws:
        gateway.services.drain.add_end(gateway.service.finish)
        await send_create(ws)
        await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        await ws.close()
        async with asyncio.timeout(30):
            while not gateway.readers.paused:
                clock.now += 30
                gateway.readers.look()
                await asyncio.sleep(0.002)
        with draining(gateway, timeout_s=3600.0) as ended:
            await ended
        assert await gateway.sessions._redis.keys("*:o:*") == []
        assert gateway.service.num_running == 0


def test_the_sdk_reads_the_event_as_one_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="reconnect"):
        TypeAdapter(ResponsesServerEvent).validate_python({"type": "reconnect", "reason": "x", "after_ms": 1})


async def test_it_waits_for_what_is_under_way_and_no_longer() -> None:
    drain = Drain()
    told: list[str] = []
    drain.at_cut(lambda: told.append("cut"))
    with drain.watched(lambda: told.append("begin")):
        with drain.under_way(), drain.under_way():
            assert drain.num_under_way == 2
            drain.begin()
            ended = asyncio.create_task(drain.run(3600.0))
            await asyncio.sleep(0)
            assert not ended.done()
        await ended
        assert told == ["begin"]
        assert not drain.is_cut
        with drain.under_way():
            await drain.run(0.0)
        assert told == ["begin", "cut"]
        assert drain.is_cut


async def test_readers_that_wait_are_interrupted_when_the_time_is_over() -> None:
    drain = Drain()
    told: list[str] = []
    with drain.until_cut(lambda error: told.append("too early")):
        pass
    with (
        drain.until_cut(lambda error: told.append(type(error).__name__)),
        drain.watched(lambda: told.append("begin"), lambda: told.append("cut")),
        drain.under_way(),
    ):
        drain.begin()
        await drain.run(0.0)
    assert sorted(told) == ["ShuttingDown", "begin", "cut"]


async def test_one_that_comes_too_late_is_told_at_once() -> None:
    drain = Drain()
    drain.begin()
    told: list[str] = []
    with drain.watched(lambda: told.append("begin")):
        assert told == ["begin"]


async def test_its_parts_end_within_the_same_time() -> None:
    drain = Drain()
    asked: list[float] = []

    async def end(timeout_s: float) -> None:
        asked.append(timeout_s)

    drain.add_end(end)
    drain.begin()
    await drain.run(7.0)
    assert asked == [7.0]
