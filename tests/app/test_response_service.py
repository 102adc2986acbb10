"""What the shells stand on: leases, shutdown, callers that go at any moment."""

import asyncio

import pytest

from app import leases
from app.errors import ApiError
from app.event_writer import Waiter
from app.sessions import SessionsUnavailable
from app.tenants import Tenant
from tests.app.stateful_gateway import body, create, deltas, output_text, resume, running_gateway
from tests.scripted_engine import Pause, say

A = Tenant("a")


async def test_leases_are_renewed_while_answers_run_and_only_then(store):
    async with running_gateway(store, lambda r: [b"a", Pause()], lease_ms=300) as gateway:
        started = await gateway.service.create(gateway.services.current, A, body())
        await gateway.engine.wait_paused()
        (key,) = await gateway.sessions._redis.keys("*:o:*")
        for _ in range(3):
            await gateway.sessions._redis.pexpire(key, 100)
            async with asyncio.timeout(30):
                while await gateway.sessions._redis.pttl(key) <= 100:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert (await gateway.service.get(A, started.run.response.id)).status == "in_progress"
        await gateway.service.cancel(A, started.run.response.id)
        await gateway.wait_no_runs()
        async with asyncio.timeout(30):
            while any(t.get_name() == "lease renewal" for t in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_an_answer_that_was_taken_waits_for_the_engine_that_went_just_then(store):
    """Between the moment in which nothing can be refused any more and the submission."""
    async with running_gateway(store, say("here")) as gateway:

        async def lose_engine(node):
            gateway.engine.die()

        started = await gateway.service.create(gateway.services.current, A, body(), before_start=lose_engine)
        gateway.engine.revive()
        response = await gateway.service.wait(A, started.run)
        assert (response.status, response.output[0].text, response.usage.output_tokens) == ("completed", "here", 5)


async def test_after_the_store_was_away_leases_come_back_at_once(store, monkeypatch):
    """While Redis is away they are tried again and again, not once in a third of their time."""
    monkeypatch.setattr(leases, "LEASE_RETRY_S", 0.001)
    async with running_gateway(store, lambda r: [b"a", Pause()], lease_ms=3000) as gateway:
        renew, attempts, has_renewed = gateway.sessions.renew_leases, 0, asyncio.Event()

        async def away_for_100_attempts(ids, **options):
            nonlocal attempts
            attempts += 1
            if attempts <= 100:
                raise SessionsUnavailable("away")
            has_renewed.set()
            return await renew(ids, **options)

        monkeypatch.setattr(gateway.sessions, "renew_leases", away_for_100_attempts)
        started = await gateway.service.create(gateway.services.current, A, body())
        async with asyncio.timeout(60):
            await has_renewed.wait()
        assert attempts == 101
        await gateway.service.cancel(A, started.run.response.id)


async def test_b19_an_answer_that_runs_here_is_no_orphan_when_its_lease_was_lost(store):
    """As after Redis was away for longer than a lease: whoever asks, it runs, has no children yet, and ends whole."""
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway, gateway.http() as http:
        d = await create(http, "Hi", background=True)
        await gateway.engine.wait_paused()
        redis, url = gateway.sessions._redis, f"/v1/responses/{d['id']}"
        (node_key,) = await redis.keys("*:r:*")
        await redis.delete(*await redis.keys("*:o:*"))
        reading = asyncio.create_task(resume(http, d["id"], -1))
        child = await http.post("/v1/responses", json=body(previous_response_id=d["id"]))
        assert (child.status_code, child.json()["error"]["code"]) == (409, "response_in_progress")
        assert (await http.get(url)).json()["status"] == "in_progress"
        (item,) = (await http.get(f"{url}/input_items")).json()["data"]
        assert item["content"][0]["text"] == "Hi"
        assert await redis.hget(node_key, "status") == b"in_progress"
        gateway.engine.release()
        events = await reading
        assert (events[-1]["type"], deltas(events)) == ("response.completed", "ab")
        assert output_text((await http.get(url)).json()) == "ab"


async def test_a_caller_that_goes_while_it_creates_leaves_a_whole_response_or_none(store):
    """Cancelled after any number of turns of the loop: nothing is left that says it runs and does not."""
    async with running_gateway(store, say("ok")) as gateway:
        for num_turns in range(0, 40, 3):
            for is_stored in (True, False):
                creating = asyncio.create_task(
                    gateway.service.create(gateway.services.current, A, body(store=is_stored))
                )
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                creating.cancel()
                await asyncio.gather(creating, return_exceptions=True)
        await gateway.service.close(grace_s=10)
        statuses = {await gateway.sessions._redis.hget(key, "status")
                    for key in await gateway.sessions._redis.keys("*:r:*")}  # fmt: skip
        assert statuses <= {b"completed"}
        assert await gateway.sessions._redis.keys("*:o:*") == []
        assert (gateway.engine.num_running, gateway.service.num_running) == (0, 0)


async def test_events_that_nobody_wants_are_not_kept(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway:
        started = await gateway.service.create(gateway.services.current, A, body(store=False), wants_events=False)
        await gateway.engine.wait_paused()
        assert await started.source.read(100) == ([], True)
        gateway.engine.release()
        assert (await started.run.wait()).output[0].text == "ab"
        assert await started.source.read(100) == ([], True)
        # a stored one can be read later
        stored = await gateway.service.create(gateway.services.current, A, body(), wants_events=False)
        await gateway.engine.wait_paused()
        gateway.engine.release()
        await stored.run.wait()
        followed = await gateway.service.follow(A, stored.run.response.id, -1)
        with Waiter(followed.source) as waiter:
            events = [event async for some in waiter for event in some]
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


async def test_closing_lets_answers_end_in_the_time_they_have(store):
    async with running_gateway(store, lambda r: [b"a", Pause(), b"b"]) as gateway:
        started = await gateway.service.create(gateway.services.current, A, body())
        await gateway.engine.wait_paused()
        closing = asyncio.create_task(gateway.service.close(grace_s=30))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await gateway.service.create(gateway.services.current, A, body())
        assert (refused.value.status, refused.value.code) == (503, "shutting_down")
        gateway.engine.release()
        await closing
        assert (await gateway.service.get(A, started.run.response.id)).status == "completed"


async def test_an_answer_sent_back_as_text_finds_its_ids_again(store):
    """A client that keeps the conversation itself gets the same prompt as one that names the parent."""
    answer = b"\xc3\xa4"  # two tokens, one character
    async with running_gateway(store, lambda r: [answer]) as gateway, gateway.http() as http:
        first = await create(http, "Hi", store=False)
        history = [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "Go on."}]
        await create(http, history, store=False)
        stored = await create(http, "Hi")
        await create(http, "Go on.", previous_response_id=stored["id"])
        assert output_text(first) == "ä"
        assert gateway.engine.requests[1].prompt_ids == gateway.engine.requests[3].prompt_ids
