"""Two gateways over one session store: any of them replays any answer and follows it live, and when one goes at the
worst moment the other one goes on with what it left, so that every reader sees one and the same sequence of events."""

import asyncio
import contextlib
import json
import random

import pytest

from app.ids import try_parse_response_id
from tests.app.session_store import on_both_servers
from tests.app.stateful_gateway import (
    TERMINAL,
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
    slowly,
    sse_events,
)
from tests.scripted_engine import Pause

TEXT = "The lighthouse keeper's storm: ünïcödé and 灯台. "


@contextlib.asynccontextmanager
async def two_gateways(store, script, **options):
    async with (
        running_gateway(store, script, owner="gateway-1", **options) as first,
        running_gateway(store, script, owner="gateway-2", **options) as second,
    ):
        yield first, second


class Freezer:
    """Stops a gateway's commands to Redis, as SIGSTOP or death would, until `thaw`, which its end calls too."""

    def __init__(self, gateway):
        self._commands, self._run = gateway.commands, gateway.commands.run
        gateway.holds.callback(self.thaw)
        self._thawed = asyncio.Event()
        self.is_reached = asyncio.Event()

    async def freeze(self):
        """Returns when those have ended that had been sent."""

        async def run(command, timeout_s=None):
            self.is_reached.set()
            await self._thawed.wait()
            return await self._run(command, timeout_s)

        self._commands.run = run
        while self._commands.num_under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    def thaw(self):
        self._commands.run = self._run
        self._thawed.set()


async def until(condition):
    """The time only guards against hanging."""
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_logged(gateway, response_id, text):
    """Until its readers here have been given this much."""

    async def is_logged():
        if not gateway.near.holds(response_id):
            return False  # it may be about to take it over
        events, _ = await gateway.near.read(response_id, -1, 1000)
        return deltas([json.loads(event.data) for event in events]) == text

    await until(is_logged)


async def expire_lease(gateway, response_id):
    response_id = try_parse_response_id(response_id)
    assert await gateway.sessions._redis.delete(f"{{s:{response_id.root}}}:o:{response_id}") == 1


async def begin(http, most, **fields):
    """The first events of a new answer, and then the connection is cut."""
    async with http.stream("POST", "/v1/responses", json=body(stream=True, **fields)) as answer:
        return await sse_events(answer, most)


async def resume_on_socket(gateway, response_id, after):
    async with gateway.socket() as ws:
        await send(ws, type="response.resume", response_id=response_id, starting_after=after)
        return await receive_until(ws)


async def check_whole(http, events, *others):
    """One sequence of events, whose text is the stored one."""
    assert_contiguous(events)
    assert events[-1]["type"] in TERMINAL
    for other in others:
        assert other == events
    stored = (await http.get(f"/v1/responses/{events[0]['response']['id']}")).json()
    assert events[-1]["response"] == stored
    assert deltas(events) == output_text(stored)
    return stored


async def cut_and_resume(gateways, https, rnd):
    """One answer that begins on a random gateway, cut again and again at a random event and resumed on the other one,
    over SSE or a websocket; and a reader that is never cut."""
    at = rnd.randrange(2)
    seen = await begin(https[at], rnd.randint(1, 6))
    response_id = seen[0]["response"]["id"]
    whole = asyncio.create_task(resume(rnd.choice(https), response_id, -1))
    while seen[-1]["type"] not in TERMINAL:
        at, most, after = 1 - at, rnd.randint(1, 12), seen[-1]["sequence_number"]
        if rnd.random() < 0.5:
            url = f"/v1/responses/{response_id}?stream=true&starting_after={after}"
            async with https[at].stream("GET", url) as answer:
                seen += await sse_events(answer, most)
        else:
            # with a bounded queue the client would stop reading, and miss the end of the connection that it closes
            async with gateways[at].socket(max_queue=None) as ws:
                await send(ws, type="response.resume", response_id=response_id, starting_after=after)
                while most and seen[-1]["type"] not in TERMINAL:
                    seen.append(await receive(ws))
                    seen[-1].pop("stream_id", None)
                    most -= 1
    stored = await check_whole(https[at], seen, await whole)
    assert output_text(stored) == TEXT


async def cut_and_resume_many(store, seed, rounds, at_once):
    rnd = random.Random(seed)
    async with two_gateways(store, slowly(TEXT)) as gateways, contextlib.AsyncExitStack() as stack:
        https = [await stack.enter_async_context(gateway.http()) for gateway in gateways]
        for _ in range(rounds):
            await asyncio.gather(*(cut_and_resume(gateways, https, rnd) for _ in range(at_once)))
        for gateway in gateways:
            await gateway.wait_no_runs()
            assert gateway.log.followed == []


async def test_b36_cut_at_random_events_and_resumed_on_the_other_gateway(store):
    await cut_and_resume_many(store, seed=36, rounds=3, at_once=8)


@pytest.mark.slow
@on_both_servers
async def test_b36_a_thousand_answers_cut_and_resumed(store):
    await cut_and_resume_many(store, seed=1000, rounds=50, at_once=20)


async def test_a_reader_on_the_other_gateway_follows_live(store):
    async with two_gateways(store, lambda r: [b"a", Pause(), b"b"]) as (first, second), first.http() as http:
        d = await create(http, background=True)
        await first.engine.wait_paused()
        async with second.http() as other, second.socket() as ws:  # noqa: SIM117
            async with other.stream("GET", f"/v1/responses/{d['id']}?stream=true") as answer:
                reading = asyncio.create_task(sse_events(answer))
                await send(ws, type="response.resume", response_id=d["id"])
                before = await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")
                assert deltas(before) == "a"
                first.engine.release()
                listened = before + await receive_until(ws)
                await check_whole(other, await reading, listened)
        assert second.log.followed == []


@on_both_servers
async def test_b42_another_tenants_answer_is_not_followed(store):
    async with two_gateways(store, lambda r: [b"a", Pause()]) as (first, second), first.http() as http:
        d = await create(http, background=True)
        async with second.http("key-of-tenant-b") as foreign:
            answer = await foreign.get(f"/v1/responses/{d['id']}?stream=true")
            unknown = await foreign.get(f"/v1/responses/{d['id'][:-22]}{'0' * 22}?stream=true")
            assert answer.status_code == unknown.status_code == 404
            assert answer.json() == {
                "error": {**unknown.json()["error"], "message": f"Response with id '{d['id']}' not found."}
            }
        assert second.log.followed == []
        await http.post(f"/v1/responses/{d['id']}/cancel")


async def test_an_answer_deleted_on_one_gateway_ends_on_the_other(store):
    async with two_gateways(store, lambda r: [b"a", Pause(), b"b"]) as (first, second), first.http() as http:
        d = await create(http, background=True)
        await first.engine.wait_paused()
        reading = asyncio.create_task(resume(http, d["id"], -1))
        async with second.http() as other:
            assert (await other.delete(f"/v1/responses/{d['id']}")).status_code == 200
            events = await reading
            assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
            await first.wait_no_runs()
            assert (await other.get(f"/v1/responses/{d['id']}")).status_code == 404
        assert await first.sessions._redis.keys("{s:*") == []


async def test_a_stop_cancels_on_whichever_gateway_it_arrives(store):
    async with two_gateways(store, lambda r: [b"a", Pause(), b"b"]) as (first, second):  # noqa: SIM117
        async with first.http() as http, second.http() as other, second.socket() as ws:
            for way in ("http", "socket"):
                d = await create(http, background=True)
                await until_logged(first, d["id"], "a")
                reading = asyncio.create_task(resume(other, d["id"], -1))
                if way == "http":
                    stopped = (await other.post(f"/v1/responses/{d['id']}/cancel")).json()
                    assert (stopped["status"], output_text(stopped)) == ("cancelled", "a")
                else:
                    await send(ws, type="response.cancel", response_id=d["id"])
                stored = await check_whole(http, await reading)
                assert stored["status"] == "cancelled"
                await first.wait_no_runs()
                assert first.engine.num_running == 0


# ---- a gateway goes


async def test_a_gateway_that_goes_after_engine_output_and_before_the_append(store):
    """What was not logged was seen by nobody: the other gateway goes on from what is, and the first one, which was not
    dead but slow, cannot add to it; its own readers see how it goes on too."""
    async with two_gateways(store, lambda r: [b"seen", Pause(), b" unseen"]) as (first, second), first.http() as http:  # noqa: SIM117
        async with http.stream("POST", "/v1/responses", json=body(stream=True)) as answer:
            reading = asyncio.create_task(sse_events(answer))
            await first.engine.wait_paused()
            response_id = (await resume_on_socket_until_text(first))[0]["response"]["id"]
            freezer = Freezer(first)
            await freezer.freeze()
            first.engine.release()
            await freezer.is_reached.wait()
            await expire_lease(second, response_id)
            async with second.http() as other:
                elsewhere = asyncio.create_task(resume(other, response_id, -1))
                await second.engine.wait_paused()
                second.engine.release()
                events = await elsewhere
                stored = await check_whole(other, events)
                assert (stored["status"], output_text(stored)) == ("completed", "seen unseen")
                assert bytes(second.engine.requests[0].output_ids) == b"seen"
                freezer.thaw()
                await check_whole(other, await reading)
                await first.wait_no_runs()
                await check_whole(http, await resume(http, response_id, -1), events)


async def resume_on_socket_until_text(gateway):
    """The only answer there is, read up to its first text."""
    (response_id,) = gateway.service.runs.ids
    async with gateway.socket() as ws:
        await send(ws, type="response.resume", response_id=response_id)
        return await receive_until(ws, lambda e: e["type"] == "response.output_text.delta")


async def test_a_gateway_that_goes_after_the_append_and_before_it_is_sent(store):
    """What is logged counts, whoever saw it."""
    async with two_gateways(store, lambda r: [b"a", Pause(), b"b", Pause()]) as (first, second):  # noqa: SIM117
        async with first.http() as http, second.http() as other:
            d = await create(http, background=True)
            await until_logged(first, d["id"], "a")
            far, freezer, appended, gate = first.log._far, Freezer(first), asyncio.Event(), asyncio.Event()
            append = far.append

            async def append_and_freeze(appends):
                outcomes = await append(appends)
                await freezer.freeze()
                appended.set()
                await gate.wait()
                return outcomes

            far.append = append_and_freeze
            first.engine.release()
            try:
                await appended.wait()
                await until_logged(first, d["id"], "a")  # nobody here has seen more
                await expire_lease(second, d["id"])
                elsewhere = asyncio.create_task(resume(other, d["id"], -1))
                await second.engine.wait_paused()
                second.engine.release()
                events = await elsewhere
                assert output_text(await check_whole(other, events)) == "ab"
                assert bytes(second.engine.requests[0].output_ids) == b"ab"
            finally:
                far.append = append
                freezer.thaw()
                gate.set()
            first.engine.release()
            await first.wait_no_runs()
            await check_whole(http, await resume(http, d["id"], -1), events)


async def test_a_gateway_that_goes_after_the_end_was_stored_and_before_it_was_logged(store):
    """The node has its end and the log has not: the log is completed from the node, once, whoever does it."""
    async with two_gateways(store, lambda r: [b"logged", Pause(), b" stored"]) as (first, second):  # noqa: SIM117
        async with first.http() as http, second.http() as other:
            d = await create(http, background=True)
            await until_logged(first, d["id"], "logged")
            reading = asyncio.create_task(resume(other, d["id"], -1))
            far, gate, is_held = first.log._far, asyncio.Event(), asyncio.Event()
            append = far.append

            async def append_late(appends):
                is_held.set()
                await gate.wait()
                return await append(appends)

            far.append = append_late
            first.engine.release()
            await is_held.wait()

            async def is_stored():
                return (await other.get(f"/v1/responses/{d['id']}")).json()["status"] != "in_progress"

            await until(is_stored)
            events, again = await asyncio.gather(resume(other, d["id"], 2), resume(other, d["id"], -1))
            stored = await check_whole(other, again, await reading)
            assert again[3:] == events
            assert (stored["status"], output_text(stored)) == ("completed", "logged stored")
            gate.set()
            await first.wait_no_runs()
            await check_whole(http, await resume(http, d["id"], -1), again)


async def test_a_follower_notices_by_itself_that_the_gateway_has_gone(store):
    """It had its cursor there before, and nobody else asks: between expiry and takeover it waits."""
    async with two_gateways(store, lambda r: [b"a", Pause(), b"b"], lease_ms=300) as (first, second):  # noqa: SIM117
        async with first.http() as http, second.http() as other:
            d = await create(http, background=True)
            await until_logged(first, d["id"], "a")
            reading = asyncio.create_task(resume(other, d["id"], -1))

            async def is_followed():
                return second.log.followed

            await until(is_followed)
            freezer = Freezer(first)
            await freezer.freeze()  # so its lease expires
            await second.engine.wait_paused()
            second.engine.release()
            stored = await check_whole(other, await reading)
            assert (stored["status"], output_text(stored)) == ("completed", "ab")
            freezer.thaw()
            await first.wait_no_runs()
            await check_whole(http, await resume(http, d["id"], -1))


# ---- Redis goes


@on_both_servers
async def test_while_redis_is_away_readers_go_on_from_memory_and_nobody_else_can(store):
    async with two_gateways(store, lambda r: [b"a", Pause(), b"b", Pause(), b"c"]) as (first, second):  # noqa: SIM117
        async with first.http() as http, first.socket() as ws, second.http() as other:
            d = await create(http, background=True)
            await until_logged(first, d["id"], "a")
            await send(ws, type="response.resume", response_id=d["id"])
            await store.kill()
            first.engine.release()
            seen = await receive_until(ws, lambda e: "b" in e.get("delta", ""))
            assert deltas(seen) == "ab"
            await store.start()

            async def is_dropped():
                return not await first.sessions._redis.keys("*:e:*")

            await until(is_dropped)
            answer = await other.get(f"/v1/responses/{d['id']}?stream=true")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
            first.engine.release()
            seen += await receive_until(ws)
            assert deltas(seen) == "abc"
            await check_whole(http, seen)
            assert output_text((await other.get(f"/v1/responses/{d['id']}")).json()) == "abc"


async def test_an_answer_whose_log_and_gateway_are_lost_is_incomplete(store):
    async with two_gateways(store, lambda r: [b"a", Pause()]) as (first, second), first.http() as http:
        d = await create(http, background=True)
        await until_logged(first, d["id"], "a")
        freezer = Freezer(first)
        await freezer.freeze()
        await second.sessions._redis.delete(*await second.sessions._redis.keys("*:e:*"))
        await expire_lease(second, d["id"])
        async with second.http() as other:
            found = (await other.get(f"/v1/responses/{d['id']}")).json()
            assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "log_lost"})
            assert (await other.get(f"/v1/responses/{d['id']}?stream=true")).status_code == 404
        freezer.thaw()
        first.engine.release()
        await first.wait_no_runs()
        assert (await http.get(f"/v1/responses/{d['id']}")).json() == found
