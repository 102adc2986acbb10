"""What a gateway has not brought to its end in its time to drain: another one goes on with it, or its own next life."""

import asyncio

from tests.app.clock import Clock
from tests.app.session_store import SessionServer
from tests.app.stateful_gateway import (
    Gateway,
    assert_contiguous,
    body,
    create,
    deltas,
    output_text,
    receive_until,
    receive_until_closed,
    resume,
    running_gateway,
    send,
    send_create,
)
from tests.scripted_engine import Pause, Script

HELLO: Script = lambda request: [b"Hel", Pause(), b"lo"]  # noqa: E731


async def drain(gateway: Gateway) -> None:
    """Without a moment for what runs."""
    gateway.services.drain.add_end(gateway.service.finish)
    gateway.services.drain.begin()
    await gateway.services.drain.run(0.0)


async def test_another_gateway_goes_on_for_whoever_comes_there(store: SessionServer) -> None:
    async with (
        running_gateway(store, HELLO, owner="gateway-1") as first,
        running_gateway(store, HELLO, owner="gateway-2") as second,
        second.http() as http,
    ):
        async with first.socket() as ws:
            await send_create(ws)
            events = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
            response_id = events[0]["response"]["id"]
            async with second.socket() as other:
                await send(other, type="response.resume", response_id=response_id)  # of one that still runs there
                assert await receive_until(other, lambda e: e["type"] == "response.output_text.delta") == events
                await drain(first)
                (told,), code = await receive_until_closed(ws)
                assert (told["type"], code) == ("reconnect", 1012)
                after = events[-1]["sequence_number"]
                reading = asyncio.create_task(resume(http, response_id, after))
                await second.engine.wait_paused()
                assert second.engine.requests[-1].output_ids == list(b"Hel")
                second.engine.release()
                rest = await reading
                assert await receive_until(other) == rest
        assert_contiguous(events + rest)
        response = rest[-1]["response"]
        assert (response["status"], deltas(events + rest), output_text(response)) == ("completed", "Hello", "Hello")
        assert response["usage"]["output_tokens"] == len("Hello") + 1
        assert (first.engine.num_running, second.engine.num_running) == (0, 0)


async def test_a_gateway_alone_goes_on_when_it_is_started_again(store: SessionServer) -> None:
    async with running_gateway(store, HELLO, owner="first life") as gateway, gateway.http() as http:
        response_id = (await create(http, background=True))["id"]
        async with gateway.socket() as ws:
            await send(ws, type="response.resume", response_id=response_id)
            events = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
            await drain(gateway)
    async with running_gateway(store, HELLO, owner="second life") as gateway, gateway.http() as http:
        reading = asyncio.create_task(resume(http, response_id, events[-1]["sequence_number"]))
        await gateway.engine.wait_paused()
        gateway.engine.release()
        rest = await reading
        assert_contiguous(events + rest)
        assert (rest[-1]["response"]["status"], deltas(events + rest)) == ("completed", "Hello")


async def test_a_paused_answer_moves_too_and_is_paused_there_when_nobody_comes(
    store: SessionServer, clock: Clock
) -> None:
    async with running_gateway(store, HELLO, owner="gateway-1", clock=clock) as first:
        async with first.http() as http:
            waiting = asyncio.create_task(http.post("/v1/responses", json=body()))
            await first.engine.wait_paused()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(30):
            while not first.readers.paused:
                clock.now += 30
                first.readers.look()
                await asyncio.sleep(0.002)
        (response_id,) = first.readers.paused
        await drain(first)
    async with running_gateway(store, HELLO, owner="gateway-2", clock=clock) as second, second.http() as http:
        assert (await http.get(f"/v1/responses/{response_id}")).json()["status"] == "in_progress"
        await second.engine.wait_paused()
        async with asyncio.timeout(30):
            while not second.readers.paused:
                clock.now += 30
                second.readers.look()
                await asyncio.sleep(0.002)
        clock.now += 600
        second.readers.look()
        await second.wait_no_runs()
        found = (await http.get(f"/v1/responses/{response_id}")).json()
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "not_resumed"})
        assert output_text(found) == "Hel"
