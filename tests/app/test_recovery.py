"""An answer whose gateway has gone is gone on with: what readers see, what is stored and what is counted are as if
nobody had gone. Gateways in one loop, over a real store; order is forced by holding a gateway's commands to Redis."""

import asyncio
import contextlib
import datetime
import math
import time

import msgspec
import pytest

from app import response_end
from app.config import FileConfig, TenantConfig, hash_key
from app.ids import try_parse_response_id
from app.ledger import read_usage
from app.redis_commands import SessionsUnavailable
from tests.app.stateful_gateway import KEY_A, create, output_text, resume, running_gateway
from tests.app.test_two_gateways import Freezer, check_whole, expire_lease, until, until_logged
from tests.scripted_engine import Pause

TEXT = "Störung: 灯台, 42"


def cut_at(num_tokens, text=TEXT):
    """Says it token by token, and stands still after so many of them."""
    data = text.encode()
    return lambda request: [*data[:num_tokens], Pause(), *data[num_tokens:]]


def whole(text=TEXT):
    return lambda request: list(text.encode())


@contextlib.asynccontextmanager
async def gateways(store, script=None, successors_script=None, **options):
    async with (
        running_gateway(store, script or cut_at(8), owner="gateway-1", **options) as first,
        running_gateway(store, successors_script or whole(), owner="gateway-2", **options) as second,
        first.http() as http,
        second.http() as other,
    ):
        yield first, second, http, other


@contextlib.asynccontextmanager
async def gone(gateway, successor, response_id):
    """The gateway does nothing any more, and its lease is over; at the end it comes back, and finds that it has nothing
    left to do."""
    freezer = Freezer(gateway)
    await freezer.freeze()
    await expire_lease(successor, response_id)
    try:
        yield
    finally:
        freezer.thaw()
        gateway.service.runs.look_at_leases()
        await gateway.wait_no_runs()


async def usage_records(gateway):
    await gateway.services.flush_usage()
    return [row async for row in read_usage(gateway.commands, **EVER)]


EVER = {"since": datetime.date(1970, 1, 1), "until": datetime.date(9999, 1, 1)}


def told(response):
    """What does not depend on when it was made, and by whom."""
    (item,) = response["output"]
    return response["status"], item["content"], item["status"], response["usage"], response["incomplete_details"]


# ---- as if nobody had gone


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 10, 12, len(TEXT.encode())])
@pytest.mark.parametrize("fields", [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}])
async def test_the_answer_is_that_of_one_that_was_never_cut(store, num_tokens, fields):
    """Also where a character was cut, and in its log-probabilities; whoever read it, and wherever."""
    script = cut_at(num_tokens)
    async with gateways(store, script, num_cached_tokens=3) as (first, second, http, other):
        d = await create(http, background=True, **fields)
        await first.engine.wait_paused()
        await until_logged(first, d["id"], TEXT.encode()[:num_tokens].decode(errors="ignore"))
        reading = asyncio.create_task(resume(http, d["id"], -1))
        async with gone(first, second, d["id"]):
            events = await resume(other, d["id"], -1)
            stored = await check_whole(other, events)
        await check_whole(http, events, await reading, await resume(http, d["id"], -1))
        never_cut = await create(other, **fields)
        assert told(stored) == told(never_cut)
        assert output_text(stored) == TEXT
        assert first.engine.requests[0].prompt_ids == second.engine.requests[0].prompt_ids
        assert first.engine.requests[0].params == second.engine.requests[0].params
        assert first.engine.requests[0].params.seed is not None
        rows = {row.id: row for row in await usage_records(second)}
        assert rows.keys() == {stored["id"], never_cut["id"]}
        assert (rows[stored["id"]].takeovers, rows[stored["id"]].outcome) == (1, "completed")
        assert (
            rows[stored["id"]].output_tokens == rows[never_cut["id"]].output_tokens == stored["usage"]["output_tokens"]
        )
        assert [g.engine.num_running for g in (first, second)] == [0, 0]


async def test_what_was_all_logged_but_its_end_is_ended_without_an_engine(store):
    async with gateways(store, whole(), num_cached_tokens=2) as (first, second, http, other):
        gate, is_held = asyncio.Event(), asyncio.Event()
        finish = first.sessions.finish

        async def finish_late(node):
            is_held.set()
            await gate.wait()
            return await finish(node)

        first.sessions.finish = finish_late
        d = await create(http, background=True, max_output_tokens=9)
        await is_held.wait()
        await first.service.runs.flush()
        async with gone(first, second, d["id"]):
            stored = await check_whole(other, await resume(other, d["id"], -1))
            gate.set()
        assert (stored["status"], stored["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert output_text(stored) == TEXT.encode()[:9].decode()
        assert stored["usage"]["output_tokens"] == 9
        assert stored["usage"]["input_tokens_details"]["cached_tokens"] == 2
        assert second.engine.requests == []
        # what the first one had recorded late does not count any more
        (row,) = await usage_records(second)
        assert (row.takeovers, row.output_tokens, row.outcome) == (1, 9, "completed")


async def test_a_stop_string_is_found_across_the_cut(store):
    script = cut_at(10, "one two STOP three")
    async with gateways(store, script, whole("one two STOP three")) as (first, second, http, other):
        d = await create(http, background=True, stop=["STOP"])
        await until_logged(first, d["id"], "one two ")
        async with gone(first, second, d["id"]):
            stored = await check_whole(other, await resume(other, d["id"], -1))
        assert (stored["status"], output_text(stored)) == ("completed", "one two ")
        assert stored["usage"]["output_tokens"] == len("one two STOP")


async def test_an_answer_is_taken_over_more_than_once(store):
    """The first gateway gets back what it had lost, and its own readers go on."""
    async with gateways(store, cut_at(4), cut_at(8)) as (first, second, http, other):
        d = await create(http, background=True)
        await until_logged(first, d["id"], TEXT[:3])
        reading = asyncio.create_task(resume(http, d["id"], -1))
        async with gone(first, second, d["id"]):
            elsewhere = asyncio.create_task(resume(other, d["id"], -1))
            await until_logged(second, d["id"], TEXT[:7])
        async with gone(second, first, d["id"]):
            await http.get(f"/v1/responses/{d['id']}")
            stored = await check_whole(http, await reading)
        await check_whole(other, await elsewhere, await reading)
        assert output_text(stored) == TEXT
        (row,) = await usage_records(first)
        assert (row.takeovers, row.output_tokens) == (2, stored["usage"]["output_tokens"])


async def test_a_turn_in_a_conversation_is_added_once(store):
    async with gateways(store) as (first, second, http, other):
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        d = await create(http, background=True, conversation=conversation)
        await first.engine.wait_paused()
        async with gone(first, second, d["id"]):
            stored = await check_whole(other, await resume(other, d["id"], -1))
        items = (await other.get(f"/v1/conversations/{conversation}/items")).json()["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]
        child = await create(other, conversation=conversation)
        assert second.engine.requests[-1].prompt_ids[: len(second.engine.requests[0].prompt_ids)] == (
            second.engine.requests[0].prompt_ids
        )
        assert output_text(stored) == output_text(child) == TEXT


# ---- who does it


async def test_an_answer_that_nobody_asks_for_is_found(store):
    async with gateways(store, lease_ms=300) as (first, second, http, other):
        d = await create(http, background=True)
        await first.engine.wait_paused()
        freezer = Freezer(first)
        await freezer.freeze()  # so its lease expires, and it says no more that it lives
        await second.engine.wait_submitted()
        await second.wait_no_runs()
        stored = (await other.get(f"/v1/responses/{d['id']}")).json()
        assert (stored["status"], output_text(stored)) == ("completed", TEXT)
        freezer.thaw()
        await first.wait_no_runs()

        async def is_cleared():
            return await second.sessions._redis.keys("*:runs") == []

        await until(is_cleared)


async def test_of_many_gateways_one_goes_on_with_it(store):
    async with contextlib.AsyncExitStack() as stack:
        first, second, http, _ = await stack.enter_async_context(gateways(store))
        third = await stack.enter_async_context(running_gateway(store, whole(), owner="gateway-3"))
        others = [second, third]
        https = [await stack.enter_async_context(gateway.http()) for gateway in others]
        d = await create(http, background=True)
        await first.engine.wait_paused()
        async with gone(first, second, d["id"]):
            read = await asyncio.gather(*(resume(h, d["id"], -1) for h in https * 4))
            for h in https:
                await check_whole(h, *read)
        assert sum(len(gateway.engine.requests) for gateway in others) == 1


async def test_a_cancel_that_no_gateway_heard_is_heard_by_the_one_that_takes_over(store):
    async with gateways(store, cut_at(8), cut_at(9)) as (first, second, http, other):
        d = await create(http, background=True)
        await first.engine.wait_paused()
        await second.sessions.ask_to_stop(try_parse_response_id(d["id"]))
        async with gone(first, second, d["id"]):
            stored = await check_whole(other, await resume(other, d["id"], -1))
        assert stored["status"] == "cancelled"
        assert second.engine.num_running == 0


async def test_where_no_engine_is_it_waits_for_one(store):
    async with gateways(store) as (first, second, http, other):
        d = await create(http, background=True)
        await until_logged(first, d["id"], TEXT[:7])
        second.engine.die()
        async with gone(first, second, d["id"]):
            reading = asyncio.create_task(resume(other, d["id"], -1))

            async def is_taken():
                return second.service.runs.ids

            await until(is_taken)
            second.engine.revive()
            stored = await check_whole(other, await reading)
        assert (stored["status"], output_text(stored)) == ("completed", TEXT)


# ---- what cannot be gone on with


async def test_an_answer_by_which_gateways_go_again_and_again_is_given_up(store):
    async with gateways(store, cut_at(3), cut_at(3)) as (first, second, http, other):
        d = await create(http, background=True)
        await until_logged(first, d["id"], TEXT[:2])
        pair = [first, second]
        for _ in range(4):
            async with gone(pair[0], pair[1], d["id"]):
                await pair[1].service.follow(pair[1].services.current.tenants.of_id("a"), d["id"], -1)
            pair.reverse()
        stored = await check_whole(other, await resume(other, d["id"], -1))
        assert (stored["status"], output_text(stored)) == ("failed", TEXT[:2])
        assert stored["error"]["message"].startswith("One server after the other ended")
        assert stored["usage"]["output_tokens"] == 2, "half a character was never logged"
        (row,) = await usage_records(second)
        assert (row.outcome, row.output_tokens, row.takeovers) == ("failed", 2, 4)


@pytest.mark.parametrize("lacks", ["how to submit it", "its model"])
async def test_what_cannot_be_submitted_again_fails_with_its_text(store, lacks):
    async with gateways(store) as (first, second, http, other):
        d = await create(http, background=True)
        await until_logged(first, d["id"], TEXT[:7])
        if lacks == "how to submit it":
            await second.sessions._redis.delete(*await second.sessions._redis.keys("*:q:*"))
        else:
            msgspec.structs.force_setattr(second.services.model.manifest, "fingerprint", "another model")
        async with gone(first, second, d["id"]):
            stored = await check_whole(other, await resume(other, d["id"], -1))
        assert (stored["status"], output_text(stored)) == ("failed", TEXT[:7])
        assert stored["error"]["message"] == "The server that ran this response ended before it was finished."
        assert second.engine.requests == []


# ---- what is counted


LIMITED = FileConfig(
    tenants=(
        TenantConfig(
            id="a", key_hashes=(hash_key(KEY_A),), tokens_per_day=10_000, tokens_per_minute=9_000, max_answers=1
        ),
    )
)


async def test_what_was_reserved_is_settled_and_its_place_is_held(store):
    async with gateways(store, cut_at(8), cut_at(9), file_config=LIMITED) as (first, second, http, other):
        d = await create(http, background=True)
        await first.engine.wait_paused()
        redis = second.sessions._redis
        assert float(await redis.hget("{t:a}:limits", "used")) > 512
        async with gone(first, second, d["id"]):
            reading = asyncio.create_task(resume(other, d["id"], -1))
            await second.engine.wait_paused()
            refused = await other.post("/v1/responses", json={"model": "byte-model", "input": "Hi"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
            second.engine.release()
            stored = await check_whole(other, await reading)
            await second.wait_no_runs()
            await second.services.rate_limits.close()
            assert float(await redis.hget("{t:a}:limits", "used")) == stored["usage"]["total_tokens"]
        await first.services.rate_limits.close()
        assert float(await redis.hget("{t:a}:limits", "used")) == stored["usage"]["total_tokens"]
        for gateway in (first, second):
            assert gateway.services.caps.num_held("a", "answers") == 0


async def test_an_answer_is_ended_before_it_is_deleted_elsewhere(store):
    """So its usage is counted, and its readers see an end."""
    async with gateways(store) as (first, second, http, other):
        d = await create(http, background=True)
        await until_logged(first, d["id"], TEXT[:7])
        assert (await other.delete(f"/v1/responses/{d['id']}")).status_code == 200
        await first.wait_no_runs()
        (row,) = await usage_records(first)
        assert (row.id, row.outcome, row.output_tokens) == (d["id"], "aborted", 8)
        keys = await second.sessions._redis.keys("{s:*")
        assert keys == []


async def test_an_answer_of_a_gateway_that_has_gone_is_deleted(store):
    async with gateways(store, cut_at(8), cut_at(9)) as (first, second, http, other):
        d = await create(http, background=True)
        await first.engine.wait_paused()
        async with gone(first, second, d["id"]):
            assert (await other.delete(f"/v1/responses/{d['id']}")).status_code == 200
            assert (await other.get(f"/v1/responses/{d['id']}")).status_code == 404
        assert [g.engine.num_running for g in (first, second)] == [0, 0]
        (row,) = await usage_records(second)
        assert (row.id, row.outcome) == (d["id"], "aborted")


# ---- Redis was away too


async def test_after_redis_was_away_more_may_have_been_seen_than_is_logged(store):
    """Its gateway went on from memory, and has gone before it could say so."""
    async with gateways(store) as (first, second, http, other):
        d = await create(http, background=True)
        await until_logged(first, d["id"], TEXT[:7])
        await store.kill()
        first.engine.release()
        await until_logged(first, d["id"], TEXT)
        freezer = Freezer(first)
        await freezer.freeze()
        await store.start()
        second.commands.failed_at = -math.inf  # it may have been about to say that it lives
        await expire_lease(second, d["id"])
        stored = (await other.get(f"/v1/responses/{d['id']}")).json()
        assert (stored["status"], stored["incomplete_details"]) == ("incomplete", {"reason": "log_lost"})
        assert output_text(stored) == TEXT[:7]
        answer = await other.get(f"/v1/responses/{d['id']}?stream=true")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert second.engine.requests == []
        freezer.thaw()
        await first.wait_no_runs()
        assert (await http.get(f"/v1/responses/{d['id']}")).json() == stored


async def test_readers_of_what_went_on_from_memory_are_not_given_what_another_gateway_adds(store, monkeypatch):
    """Redis was away for the first gateway alone."""
    monkeypatch.setattr(response_end, "STORE_END_PAUSES_S", (0.05,) * 100_000)  # it tries until it is back
    async with gateways(store) as (first, second, http, other):
        d = await create(http, background=True)
        await until_logged(first, d["id"], TEXT[:7])
        reading = asyncio.create_task(resume(http, d["id"], -1))
        run = first.commands.run

        async def away(command, timeout_s=None):
            command.close()
            raise SessionsUnavailable("away")

        first.commands.run = away
        await expire_lease(second, d["id"])
        first.engine.release()
        await until_logged(first, d["id"], TEXT)
        events = await resume(other, d["id"], -1)
        stored = await check_whole(other, events)
        assert (stored["status"], output_text(stored)) == ("completed", TEXT)
        first.commands.run = run
        assert (await reading)[-1]["code"] == "response_not_found"
        await first.wait_no_runs()
        assert await resume(other, d["id"], -1) == events, "what the other one has added is still there"


async def test_while_nobody_could_renew_his_lease_nobody_is_taken_over(store):
    async with gateways(store) as (first, second, http, other):
        d = await create(http, background=True)
        await first.engine.wait_paused()
        second.commands.failed_at = time.monotonic() + 3600
        await expire_lease(second, d["id"])
        assert (await other.get(f"/v1/responses/{d['id']}")).json()["status"] == "in_progress"
        assert second.service.runs.ids == []
        first.engine.release()
        await first.wait_no_runs()
        assert output_text((await other.get(f"/v1/responses/{d['id']}")).json()) == TEXT
