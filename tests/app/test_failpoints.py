"""Two gateways as processes, one of which dies at the worst moment, in forced order; and an engine between two choices.

What was logged before was seen, what was not was seen by nobody: readers on the other gateway, and those who come back
there, see one sequence of events, to the answer's end."""

import asyncio
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.ledger import read_usage
from app.redis_commands import RedisCommands
from app.usage_record import UsageRecord
from tests.app.answer_reader import Reader, check_whole
from tests.app.fleet import Fleet, fleet
from tests.app.gateway_process import Failpoint, Place
from tests.app.stateful_gateway import body, output_text
from tests.app.supervised import until

SCRIPT = ["the lamp", {"pause": None}, " is lit"]
TEXT = "the lamp is lit"

BEFORE_APPEND = Failpoint(Place.APPEND, " is lit")
AFTER_APPEND = Failpoint(Place.APPEND, " is lit", is_after=True)
BEFORE_END = Failpoint(Place.FINISH, " is lit")
AFTER_END = Failpoint(Place.FINISH, " is lit", is_after=True)
BEFORE_TAKE = Failpoint(Place.TAKE, waits_for_signal=True)
AFTER_TAKE = Failpoint(Place.TAKE, is_after=True, waits_for_signal=True)


async def begin(gateways: Fleet, name: str = "gateway-1") -> str:
    answer = await gateways.http(name).post("/v1/responses", json=body(background=True))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def read_usage_of(gateways: Fleet) -> Mapping[str, UsageRecord]:
    """What the ledger holds, by response."""
    commands = RedisCommands.connect(gateways.store.url, max_connections=2)
    day, today = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC).date()
    try:
        records = [record async for record in read_usage(commands, since=today - day, until=today + day)]
    finally:
        await commands.close()
    assert len({record.id for record in records}) == len(records), "one record a response"
    return {record.id: record for record in records}


async def assert_at_rest(gateways: Fleet) -> None:
    """No engine holds anything."""
    for name in gateways.engines:
        stats = await gateways.stats(name)
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.blocks.referenced == stats.blocks.pinned


async def die_and_read_on(folder: Path, failpoint: Failpoint) -> tuple[str, str]:
    """How the answer of a gateway ends that dies there: its status and its text."""
    async with fleet(folder, SCRIPT, failpoints={"gateway-1": failpoint}) as gateways:
        response_id = await begin(gateways)
        near, far = Reader(gateways, response_id), Reader(gateways, response_id)
        reading = [
            asyncio.create_task(near.read_on("gateway-1")),
            asyncio.create_task(far.read_on("gateway-2")),
        ]
        await until(lambda: near.text == far.text == "the lamp")
        await gateways.release("engine-1")
        assert await gateways.ended("gateway-1") == -9
        assert not await reading[0], "its connection was cut"
        async with gateways.releasing("engine-1"):
            assert await reading[1]
            assert await near.read_on("gateway-2")
        stored = await check_whole(gateways, near, far)
        await gateways.start("gateway-1")  # and this life of it knows what the other one did
        await check_whole(gateways, near, far)
        for name in gateways.gateways:
            assert await gateways.end(name) == 0
        await assert_at_rest(gateways)
        check_usage(await read_usage_of(gateways), stored)
        return stored["status"], output_text(stored)


def check_usage(records: Mapping[str, UsageRecord], stored: Mapping[str, Any]) -> None:
    """One record, which says what the response says."""
    assert list(records) == [stored["id"]]
    record, usage = records[stored["id"]], stored["usage"]
    assert (record.prompt_tokens, record.output_tokens) == (usage["input_tokens"], usage["output_tokens"])


async def test_a_gateway_killed_after_engine_output_and_before_the_append(tmp_path: Path) -> None:
    assert await die_and_read_on(tmp_path, BEFORE_APPEND) == ("completed", TEXT)


@pytest.mark.slow
async def test_a_gateway_killed_after_the_append_and_before_anybody_is_sent_it(tmp_path: Path) -> None:
    assert await die_and_read_on(tmp_path, AFTER_APPEND) == ("completed", TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", [BEFORE_END, AFTER_END], ids=["before", "after"])
async def test_a_gateway_killed_when_it_stores_the_end(tmp_path: Path, failpoint: Failpoint) -> None:
    assert await die_and_read_on(tmp_path, failpoint) == ("completed", TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", [BEFORE_TAKE, AFTER_TAKE], ids=["before", "after"])
async def test_both_gateways_killed_one_between_the_others_lease_and_its_own(
    tmp_path: Path, failpoint: Failpoint
) -> None:
    """The second one had seen that the first one's lease has run out, and dies when it takes the answer."""
    async with fleet(tmp_path, SCRIPT, failpoints={"gateway-2": failpoint}) as gateways:
        reader = Reader(gateways, await begin(gateways))
        reading = asyncio.create_task(reader.read_on("gateway-2"))
        await until(lambda: reader.text == "the lamp")
        gateways.arm("gateway-2")
        await gateways.kill("gateway-1")
        assert await gateways.ended("gateway-2") == -9
        assert not await reading
        await gateways.start("gateway-2")
        async with gateways.releasing("engine-1"):
            assert await reader.read_on("gateway-2")
        stored = await check_whole(gateways, reader)
        assert await gateways.end("gateway-2") == 0
        await assert_at_rest(gateways)
        check_usage(await read_usage_of(gateways), stored)
        assert (stored["status"], output_text(stored)) == ("completed", TEXT)


@pytest.mark.slow
async def test_a_gateway_that_was_only_stopped_keeps_what_nobody_has_taken(tmp_path: Path) -> None:
    """Between the end of its lease and a takeover it goes on: nobody has asked for the answer meanwhile."""
    async with fleet(tmp_path, SCRIPT, num_gateways=1) as gateways:
        reader = Reader(gateways, await begin(gateways))
        reading = asyncio.create_task(reader.read_on("gateway-1"))
        await until(lambda: reader.text == "the lamp")
        gateways.stop("gateway-1")
        commands = RedisCommands.connect(gateways.store.url, max_connections=1)
        while await commands.redis.keys("*:o:*"):  # noqa: ASYNC110 its clock is Redis's own
            await asyncio.sleep(0.01)
        await commands.close()
        await gateways.release("engine-1")
        gateways.go_on("gateway-1")
        assert await reading
        stored = await check_whole(gateways, reader)
        assert (stored["status"], output_text(stored)) == ("completed", TEXT)
        assert await gateways.end("gateway-1") == 0
        check_usage(await read_usage_of(gateways), stored)


async def test_the_engine_killed_between_two_choices(tmp_path: Path) -> None:
    """The first one has ended, the second one has said nothing yet: it is all that the next engine is asked for."""
    script = [{"by_choice": [["first"], [{"pause": None}, "second"]]}]
    async with fleet(tmp_path, script, num_gateways=1) as gateways:
        request = {
            "model": "byte-model",
            "messages": [{"role": "user", "content": "hi"}],
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        texts, reasons, usage = ["", ""], [None, None], None
        async with gateways.http("gateway-1").stream("POST", "/v1/chat/completions", json=request) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage")
                for choice in chunk["choices"]:
                    index = choice["index"]
                    texts[index] += choice["delta"].get("content", "")
                    reasons[index] = choice["finish_reason"]
                    if (index, choice["finish_reason"]) == (0, "stop"):
                        await gateways.kill("engine-1")
                        await gateways.start("engine-1")
                        stack_of_release = asyncio.create_task(release_until_idle(gateways))
        await stack_of_release
        assert (texts, reasons) == (["first", "second"], ["stop", "stop"])
        assert usage["completion_tokens"] == len("first") + 1 + len("second") + 1
        stats = await gateways.stats("engine-1")
        assert stats.generation_tokens == len("second") + 1, "the first choice is not computed again"
        assert await gateways.end("gateway-1") == 0
        await assert_at_rest(gateways)
        (record,) = (await read_usage_of(gateways)).values()
        assert (record.prompt_tokens, record.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


async def release_until_idle(gateways: Fleet) -> None:
    """From when the lost choice has come to the new engine."""
    while not (await gateways.stats("engine-1")).running:  # noqa: ASYNC110 another process tells nobody
        await asyncio.sleep(0.01)
    await gateways.release("engine-1")
