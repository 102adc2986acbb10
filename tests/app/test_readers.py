"""Answers with and without readers: which are paused, go on and end, by a clock that the test moves."""

import asyncio
import contextlib
import datetime
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app import readers as readers_module
from app.config import FileConfig
from app.grace import GraceRules
from app.ids import try_parse_response_id
from app.ledger import read_usage
from app.limits import Limits
from app.readers import Readers
from tests.app.clock import Clock
from tests.app.session_store import SessionServer
from tests.app.stateful_gateway import (
    FILE_CONFIG,
    Gateway,
    assert_contiguous,
    body,
    create,
    deltas,
    output_text,
    receive,
    receive_until,
    resume,
    running_gateway,
    send,
    send_create,
    sse_events,
)
from tests.scripted_engine import Pause

RULES = GraceRules(grace_s=30, unread_tokens=100, paused_ttl_s=600)


class Run:
    """Says what it was told to do."""

    def __init__(self, name: str = "resp_1") -> None:
        self.node = SimpleNamespace(id=name)
        self.num_output_tokens = 0
        self.told: list[str] = []
        self.can_pause = True
        self._on_tokens: Any = None

    def say(self, num_tokens: int) -> None:
        self.num_output_tokens += num_tokens
        if self._on_tokens is not None:
            self._on_tokens()

    def watch_tokens(self, on_tokens: Any) -> None:
        self._on_tokens = on_tokens

    def pause(self) -> bool:
        if self.can_pause:
            self.told.append("pause")
        return self.can_pause

    def go_on(self) -> None:
        self.told.append("go on")

    def stop(self, by: str) -> None:
        self.told.append(by)


class Stage:
    """Readers whose look at the clock the test takes."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.sleeps: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self.readers = Readers(self.clock, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        assert seconds == readers_module.LOOK_S
        slept = asyncio.get_running_loop().create_future()
        self.sleeps.put_nowait(slept)
        await slept

    def keep(self, run: Run | None = None) -> Run:
        run = run or Run()
        self.readers.keep(run, RULES)  # type: ignore[arg-type]
        return run

    def after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.readers.look()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await stage.readers.close()


async def test_it_is_paused_after_the_grace_time_and_goes_on_with_its_first_reader(stage: Stage) -> None:
    run = stage.keep()
    leave = stage.readers.enter("resp_1")
    stage.after(10_000)
    leave()
    stage.after(29)
    assert run.told == []
    stage.after(1)
    assert (run.told, stage.readers.paused) == (["pause"], ["resp_1"])
    stage.after(599)
    leave = stage.readers.enter("resp_1")
    assert (run.told, stage.readers.paused) == (["pause", "go on"], [])
    stage.after(10_000)
    leave()
    stage.after(30)
    assert run.told == ["pause", "go on", "pause"]


async def test_who_read_it_before_it_came_here_counts(stage: Stage) -> None:
    """As one who followed it while another gateway ran it."""
    leave, other = stage.readers.enter("resp_1"), stage.readers.enter("resp_1")
    other()
    run = stage.keep()
    stage.after(10_000)
    assert run.told == []
    leave()
    stage.after(30)
    assert run.told == ["pause"]


async def test_each_of_several_readers_counts(stage: Stage) -> None:
    run = stage.keep()
    leave, other = stage.readers.enter("resp_1"), stage.readers.enter("resp_1")
    leave()
    leave()
    stage.after(1000)
    assert run.told == []
    with stage.readers.reading("resp_1"):
        other()
        stage.after(1000)
        assert run.told == []
    stage.after(30)
    assert run.told == ["pause"]


async def test_tokens_pause_it_with_the_very_one_that_is_too_much(stage: Stage) -> None:
    run = stage.keep()
    leave = stage.readers.enter("resp_1")
    run.say(10_000)
    leave()
    run.say(99)
    assert run.told == []
    run.say(1)
    assert run.told == ["pause"]
    stage.readers.touch("resp_1")
    run.say(99)
    assert run.told == ["pause", "go on"]
    run.say(1)
    assert run.told == ["pause", "go on", "pause"]


async def test_who_only_looks_starts_the_time_anew(stage: Stage) -> None:
    run = stage.keep()
    for _ in range(5):
        stage.after(29)
        stage.readers.touch("resp_1")
    assert run.told == []
    stage.after(30)
    assert run.told == ["pause"]


async def test_readers_elsewhere_count_as_well(stage: Stage) -> None:
    run = stage.keep()
    stage.readers.read_elsewhere("resp_1", is_read=True)
    stage.after(1000)
    with stage.readers.reading("resp_1"):
        stage.readers.read_elsewhere("resp_1", is_read=False)
        stage.after(1000)
        stage.readers.read_elsewhere("resp_1", is_read=True)
    stage.after(1000)
    assert run.told == []
    stage.readers.read_elsewhere("resp_1", is_read=False)
    stage.after(29)
    stage.readers.read_elsewhere("resp_1", is_read=False)
    stage.after(1)
    assert run.told == ["pause"]
    stage.readers.read_elsewhere("resp_1", is_read=True)
    assert run.told == ["pause", "go on"]


async def test_a_paused_one_ends_when_its_time_is_over(stage: Stage) -> None:
    run = stage.keep()
    stage.after(30)
    stage.after(599)
    assert run.told == ["pause"]
    stage.after(1)
    assert run.told == ["pause", "not_resumed"]
    stage.readers.release(run)  # type: ignore[arg-type]
    assert stage.readers.paused == []
    stage.after(1000)
    assert run.told == ["pause", "not_resumed"]


async def test_what_cannot_be_paused_yet_is_asked_again(stage: Stage) -> None:
    run = stage.keep()
    run.can_pause = False
    stage.after(30)
    assert stage.readers.paused == []
    run.can_pause = True
    stage.after(0)
    assert (run.told, stage.readers.paused) == (["pause"], ["resp_1"])


async def test_only_so_many_are_paused_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers_module, "MAX_PAUSED", 2)
    runs = [stage.keep(Run(f"resp_{i}")) for i in range(3)]
    for run in runs:
        run.say(100)
    assert [run.told for run in runs] == [["pause", "not_resumed"], ["pause"], ["pause"]]


async def test_readers_of_what_is_not_kept_change_nothing(stage: Stage) -> None:
    leave = stage.readers.enter("resp_2")
    stage.readers.touch("resp_2")
    stage.readers.read_elsewhere("resp_2", is_read=True)
    leave()
    stage.after(1000)
    run = stage.keep()
    leave = stage.readers.enter("resp_1")
    stage.readers.release(run)  # type: ignore[arg-type]
    leave()
    stage.after(1000)
    assert run.told == []


async def test_the_clock_is_looked_at_while_something_is_unread_and_only_then(stage: Stage) -> None:
    run = stage.keep()
    slept = await stage.sleeps.get()
    stage.clock.now += 30
    slept.set_result(None)
    slept = await stage.sleeps.get()
    assert run.told == ["pause"]
    leave = stage.readers.enter("resp_1")
    slept.set_result(None)
    while any(task.get_name() == "unread answers" for task in asyncio.all_tasks()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    leave()
    await stage.sleeps.get()


# ---- with a whole gateway


def limited(**limits: float) -> FileConfig:
    return FILE_CONFIG.model_copy(update={"limits": Limits(**limits)})


TEXT = "The lighthouse"
AFTER = "The li"


def halting(request: Any) -> Iterator[Any]:
    """Says all of it, and stands for a while in the middle."""
    yield AFTER.encode()
    yield Pause()
    yield from TEXT.removeprefix(AFTER).encode()


def look_after(gateway: Gateway, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    gateway.readers.look()


async def until_unread(gateway: Gateway) -> None:
    """Until the gateway has seen that its readers are gone; the time only guards against hanging."""
    async with asyncio.timeout(30):
        while any(kept.grace.is_read for kept in gateway.readers._kept.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def until_seen(gateway: Gateway, response_id: str, text: str) -> None:
    async with asyncio.timeout(30):
        while True:
            events, _ = await gateway.near.read(response_id, -1, 1000)
            if deltas([json.loads(event.data) for event in events]) == text:
                return
            await asyncio.sleep(0.002)


async def begin_and_go(gateway: Gateway) -> list[Any]:
    """An answer's events up to the middle of its text, where its reader goes."""
    async with gateway.http() as http, http.stream("POST", "/v1/responses", json=body(stream=True)) as answer:
        events = await sse_events(answer, 5)
    assert deltas(events) == AFTER
    await until_unread(gateway)
    return events


async def test_a_paused_answer_leaves_the_engine_and_goes_on_without_a_gap(store: SessionServer, clock: Clock) -> None:
    async with running_gateway(store, halting, clock=clock, num_cached_tokens=3) as gateway, gateway.http() as http:
        events = await begin_and_go(gateway)
        response_id = events[0]["response"]["id"]
        look_after(gateway, clock, 29)
        assert gateway.engine.num_running == 1
        look_after(gateway, clock, 1)
        assert gateway.readers.paused == [response_id]
        await gateway.engine.wait_idle()
        reading = asyncio.create_task(resume(http, response_id, events[-1]["sequence_number"]))
        await gateway.engine.wait_submitted(2)
        first, second = gateway.engine.requests
        assert (second.prompt_ids, second.output_ids) == (first.prompt_ids, list(AFTER.encode()))
        assert second.params == first.params
        gateway.engine.release()
        events += await reading
        assert_contiguous(events)
        response = events[-1]["response"]
        assert (response["status"], deltas(events), output_text(response)) == ("completed", TEXT, TEXT)
        usage = response["usage"]
        assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (len(TEXT) + 1, 3)
        assert (await http.get(f"/v1/responses/{response_id}")).json() == response
        assert await resume(http, response_id, -1) == events
        await gateway.services.flush_usage()
        (record,) = await usage_records(gateway)
        assert (record.id, record.output_tokens, record.outcome) == (response_id, len(TEXT) + 1, "completed")
        assert record.prompt_tokens == usage["input_tokens"]
        assert (gateway.readers.paused, gateway.engine.num_running) == ([], 0)


async def usage_records(gateway: Gateway) -> list[Any]:
    today = datetime.datetime.now(datetime.UTC).date()
    day = datetime.timedelta(days=1)
    return [r async for r in read_usage(gateway.commands, since=today - day, until=today + day)]


async def test_the_buffer_limit_pauses_it_in_the_midst_of_its_text(store: SessionServer, clock: Clock) -> None:
    config = limited(grace_tokens=3)

    def script(request: Any) -> Iterator[Any]:
        yield AFTER.encode()
        yield Pause()
        for byte in TEXT.removeprefix(AFTER).encode():
            yield byte
            yield Pause()

    async with running_gateway(store, script, clock=clock, file_config=config) as gateway, gateway.http() as http:
        events = await begin_and_go(gateway)
        response_id = events[0]["response"]["id"]
        for num_tokens in range(1, 4):
            gateway.engine.release()
            await until_seen(gateway, response_id, TEXT[: len(AFTER) + num_tokens])
        assert gateway.readers.paused == [response_id]
        await gateway.engine.wait_idle()
        assert (await http.post(f"/v1/responses/{response_id}/cancel")).json()["status"] == "cancelled"


async def test_past_its_time_it_is_incomplete_and_says_why(store: SessionServer, clock: Clock) -> None:
    async with running_gateway(store, halting, clock=clock) as gateway, gateway.http() as http:
        events = await begin_and_go(gateway)
        response_id = events[0]["response"]["id"]
        look_after(gateway, clock, 30)
        await gateway.engine.wait_idle()
        look_after(gateway, clock, 600)
        await gateway.wait_no_runs()
        rest = await resume(http, response_id, events[-1]["sequence_number"])
        assert_contiguous(events + rest)
        response = rest[-1]["response"]
        assert (rest[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
        assert response["incomplete_details"] == {"reason": "not_resumed"}
        assert output_text(response) == AFTER
        assert len(gateway.engine.requests) == 1
        child = await create(http, "Go on.", previous_response_id=response_id, max_output_tokens=3)
        assert output_text(child) == AFTER[:3]


async def test_it_goes_on_for_whoever_comes_back_by_any_way(store: SessionServer, clock: Clock) -> None:
    """A websocket, a look without a stream, the same message once more; and a cancel ends it."""
    async with running_gateway(store, halting, clock=clock) as gateway, gateway.http() as http:

        async def paused(text: str = "Hi", /, **headers: str) -> str:
            async with gateway.http() as own:
                own.headers.update(headers)
                async with own.stream("POST", "/v1/responses", json=body(text, stream=True)) as answer:
                    events = await sse_events(answer, 5)
            await until_unread(gateway)
            look_after(gateway, clock, 30)
            response_id: str = events[0]["response"]["id"]
            assert gateway.readers.paused == [response_id]
            return response_id

        response_id = await paused()
        async with gateway.socket() as ws:
            await send(ws, type="response.resume", response_id=response_id, starting_after=4)
            await gateway.engine.wait_submitted(2)
            gateway.engine.release()
            assert deltas(await receive_until(ws)) == TEXT.removeprefix(AFTER)
        response_id = await paused("Look")
        assert (await http.get(f"/v1/responses/{response_id}")).json()["status"] == "in_progress"
        await gateway.engine.wait_submitted(4)
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert output_text((await http.get(f"/v1/responses/{response_id}")).json()) == TEXT
        await paused("Again", **{"Idempotency-Key": "k"})
        again = asyncio.create_task(http.post("/v1/responses", json=body("Again"), headers={"Idempotency-Key": "k"}))
        await gateway.engine.wait_submitted(6)
        gateway.engine.release()
        assert output_text((await again).json()) == TEXT
        response_id = await paused("Stop")
        cancelled = (await http.post(f"/v1/responses/{response_id}/cancel")).json()
        assert (cancelled["status"], output_text(cancelled)) == ("cancelled", AFTER)
        assert len(gateway.engine.requests) == 7


async def test_one_in_the_background_is_never_paused(store: SessionServer, clock: Clock) -> None:
    async with running_gateway(store, halting, clock=clock) as gateway, gateway.http() as http:
        response = await create(http, background=True)
        await gateway.engine.wait_paused()
        look_after(gateway, clock, 100_000)
        assert gateway.readers.paused == []
        gateway.engine.release()
        await gateway.wait_no_runs()
        assert output_text((await http.get(f"/v1/responses/{response['id']}")).json()) == TEXT


async def test_who_waits_for_the_whole_answer_reads_it_until_the_connection_is_lost(
    store: SessionServer, clock: Clock
) -> None:
    async with running_gateway(store, halting, clock=clock) as gateway, gateway.http() as http:
        waiting = asyncio.create_task(create(http))
        await gateway.engine.wait_paused()
        look_after(gateway, clock, 1000)
        assert gateway.readers.paused == []
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await until_unread(gateway)
        look_after(gateway, clock, 30)
        (response_id,) = gateway.readers.paused
        assert (await http.post(f"/v1/responses/{response_id}/cancel")).json()["status"] == "cancelled"


async def test_a_lost_websocket_leaves_its_lanes_unread(store: SessionServer, clock: Clock) -> None:
    async with running_gateway(store, halting, clock=clock) as gateway, gateway.http() as http:
        async with gateway.socket() as ws:
            await send_create(ws, stream_id="left")
            first = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
            look_after(gateway, clock, 1000)
            assert gateway.readers.paused == []
        await until_unread(gateway)
        look_after(gateway, clock, 30)
        response_id = first[0]["response"]["id"]
        assert gateway.readers.paused == [response_id]
        async with gateway.socket() as ws:
            await send(ws, type="response.resume", response_id=response_id, starting_after=3)
            event = await receive(ws)
            assert (event["delta"], event["stream_id"]) == (AFTER, "left")
            assert gateway.readers.paused == []
        assert (await http.post(f"/v1/responses/{response_id}/cancel")).status_code == 200


async def test_a_reader_at_another_gateway_wakes_it_and_keeps_it_awake(store: SessionServer, clock: Clock) -> None:
    async with (
        running_gateway(store, halting, clock=clock) as gateway,
        running_gateway(store, halting, owner="gateway-2") as other,
        other.http() as http,
    ):
        events = await begin_and_go(gateway)
        response_id = events[0]["response"]["id"]
        look_after(gateway, clock, 30)
        await gateway.engine.wait_idle()
        reading = asyncio.create_task(resume(http, response_id, events[-1]["sequence_number"]))
        await gateway.engine.wait_submitted(2)
        look_after(gateway, clock, 1000)
        assert gateway.readers.paused == []
        gateway.engine.release()
        events += await reading
        assert_contiguous(events)
        assert (deltas(events), events[-1]["response"]["status"]) == (TEXT, "completed")
        assert other.engine.requests == []


async def test_when_the_last_reader_elsewhere_has_gone_it_is_paused_again(store: SessionServer, clock: Clock) -> None:
    async with (
        running_gateway(store, halting, clock=clock, lease_ms=300) as gateway,
        running_gateway(store, halting, owner="gateway-2", lease_ms=300) as other,
        other.http() as http,
    ):
        events = await begin_and_go(gateway)
        response_id = events[0]["response"]["id"]
        async with http.stream("GET", f"/v1/responses/{response_id}?stream=true") as answer:
            assert await sse_events(answer, 5) == events
            async with asyncio.timeout(30):
                while not gateway.readers._kept[response_id].grace.is_read_elsewhere:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            parsed = try_parse_response_id(response_id)
            assert parsed is not None
            assert await gateway.sessions._redis.pttl(f"{{s:{parsed.root}}}:w:{response_id}") > 0
        await until_unread(gateway)
        look_after(gateway, clock, 30)
        assert gateway.readers.paused == [response_id]
        # a look from there wakes it too
        assert (await http.get(f"/v1/responses/{response_id}")).json()["status"] == "in_progress"
        await gateway.engine.wait_submitted(2)
        assert (await http.post(f"/v1/responses/{response_id}/cancel")).json()["status"] == "cancelled"
