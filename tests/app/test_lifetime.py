"""A websocket's life: told before its end, not longer than its time, and not all at the same moment."""

import pytest

from app.lifetime import Lifetime
from app.limits import Limits
from tests.app.session_store import SessionServer
from tests.app.stateful_gateway import (
    assert_contiguous,
    deltas,
    output_text,
    receive,
    receive_until,
    receive_until_closed,
    running_gateway,
    send,
    send_create,
)
from tests.app.timers import Timers
from tests.scripted_engine import Pause, Script

HELLO: Script = lambda request: [b"Hel", Pause(), b"lo"]  # noqa: E731


@pytest.mark.parametrize(
    ("lifetime", "shortened", "due"),
    [
        (Lifetime(3600, 60), 0.0, [3540, 3600]),
        (Lifetime(3600, 60), 1.0, [3180, 3240]),
        (Lifetime(3600, 60), 0.5, [3360, 3420]),
        (Lifetime(10, 60), 0.0, [0, 10]),
    ],
)
def test_the_client_is_told_before_the_end(lifetime: Lifetime, shortened: float, due: list[float]) -> None:
    timers, told = Timers(), []
    with lifetime.running(
        timers.later, lambda: told.append("farewell"), lambda: told.append("over"), lambda: shortened
    ):
        assert list(timers.left) == due
        for call in timers.left.values():
            call()
    assert told == ["farewell", "over"]
    assert timers.left == {}, "a socket that has gone leaves a timer behind"


def test_each_life_is_of_another_length() -> None:
    timers = Timers()
    lengths = set()
    for _ in range(20):
        with Lifetime(3600, 60).running(timers.later, print, print):
            lengths.add(max(timers.left))
    assert len(lengths) == 20
    assert all(3240 <= length <= 3600 for length in lengths)


def test_it_is_configured() -> None:
    assert Lifetime.of(Limits(socket_lifetime_s=5, socket_farewell_s=1)) == Lifetime(5, 1)
    assert Lifetime.of(Limits()) == Lifetime(3600, 60)


# ---- with a whole gateway


@pytest.fixture
def timers() -> Timers:
    return Timers()


async def test_an_idle_socket_is_told_and_closed(store: SessionServer, timers: Timers) -> None:
    async with running_gateway(store, HELLO, later=timers.later) as gateway, gateway.socket() as ws:
        await send(ws, type="ping")
        assert (await receive(ws))["error"]["code"] == "unknown_message_type"
        timers.first()
        event = await receive(ws)
        assert event == {"type": "reconnect", "reason": "lifetime", "after_ms": event["after_ms"]}
        assert 0 <= event["after_ms"] < 500
        assert await receive_until_closed(ws) == ([], 1001)


async def test_answers_that_run_come_to_their_end_and_nothing_new_is_taken(
    store: SessionServer, timers: Timers
) -> None:
    async with running_gateway(store, HELLO, later=timers.later) as gateway, gateway.socket() as ws:
        await send_create(ws)
        await send_create(ws, "It waits for the same lane.")
        events = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
        timers.first()
        assert (await receive(ws))["type"] == "reconnect"
        await send_create(ws, stream_id="new")
        refused = await receive(ws)
        assert (refused["type"], refused["status"], refused["stream_id"]) == ("error", 400, "new")
        assert refused["error"]["code"] == "websocket_connection_limit_reached"
        gateway.engine.release()
        rest, code = await receive_until_closed(ws)
        assert code == 1001
        answer = [*events, *rest[:-1]]
        assert_contiguous(answer)
        assert (answer[-1]["type"], deltas(answer)) == ("response.completed", "Hello")
        assert rest[-1]["error"]["code"] == "websocket_connection_limit_reached"
        assert len(gateway.engine.requests) == 1


async def test_answers_that_take_too_long_go_on_over_a_new_connection(store: SessionServer, timers: Timers) -> None:
    """What is not stored ends with its socket."""
    async with running_gateway(store, HELLO, later=timers.later) as gateway, gateway.http() as http:
        async with gateway.socket() as ws:
            await send_create(ws, stream_id="stored")
            stored = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
            await send_create(ws, stream_id="unstored", store=False)
            await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
            timers.first()
            timers.first()
            (event,), code = await receive_until_closed(ws)
            assert (event["type"], code) == ("reconnect", 1012)
        response_id = stored[0]["response"]["id"]
        await gateway.engine.wait_aborted()
        async with gateway.socket() as ws:
            await send(ws, type="response.resume", response_id=response_id, starting_after=len(stored) - 1)
            gateway.engine.release()
            rest = await receive_until(ws)
        assert_contiguous(stored + rest)
        assert deltas(stored + rest) == output_text((await http.get(f"/v1/responses/{response_id}")).json()) == "Hello"
