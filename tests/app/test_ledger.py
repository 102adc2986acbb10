"""The usage ledger on a real server: one record for each generation, whatever happens, and its sums are the usage."""

import asyncio
import datetime
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from app.ledger import Ledger, read_usage
from app.redis_commands import RedisCommands, SessionsUnavailable
from app.usage_export import Format, export
from app.usage_record import CSV_HEAD, UsageRecord, to_csv
from engine.protocol import AddRequest
from tests.app.session_store import SessionServer
from tests.app.stateful_gateway import body, running_gateway
from tests.app.test_usage_record import record
from tests.scripted_engine import Die, Fail, Item, Pause

EVER = {"since": datetime.date(1970, 1, 1), "until": datetime.date(9999, 1, 1)}


@asynccontextmanager
async def opened(server: SessionServer, retention_days: int = 90, timeout_s: float = 5.0) -> AsyncIterator[Ledger]:
    ledger = Ledger(RedisCommands.connect(server.url, timeout_s=timeout_s), retention_days=lambda: retention_days)
    yield ledger
    await ledger.close()


async def rows(server: SessionServer, **what: object) -> list[UsageRecord]:
    commands = RedisCommands.connect(server.url)
    try:
        return [row async for row in read_usage(commands, **{**EVER, **what})]
    finally:
        await commands.close()


async def test_what_is_written_twice_is_there_once(server: SessionServer) -> None:
    async with opened(server) as one, opened(server) as other:
        for ledger, tokens in ((one, 3), (one, 3), (other, 5)):
            ledger.add(record(output_tokens=tokens))
            await ledger.flush()
            assert ledger.num_waiting == 0
    assert await rows(server) == [record(output_tokens=5)]


async def test_days_and_tenants_are_chosen(server: SessionServer) -> None:
    made = [
        record(f"{tenant}{day}", tenant=tenant, created_at=f"2026-11-{day}T00:00:00.000Z")
        for day, tenant in itertools.product((28, 29, 30), ("a", "b*", "b"))
    ]
    async with opened(server) as ledger:
        for row in made:
            ledger.add(row)
    assert sorted(r.id for r in await rows(server)) == sorted(r.id for r in made)
    assert [r.id for r in await rows(server, tenant="b*")] == ["b*28", "b*29", "b*30"]
    since = datetime.date(2026, 11, 29)
    assert [r.id for r in await rows(server, tenant="a", since=since)] == ["a29", "a30"]
    assert [r.id for r in await rows(server, tenant="a", until=since)] == ["a28", "a29"]


async def test_records_are_forgotten_after_their_time(server: SessionServer) -> None:
    async with opened(server, retention_days=2) as ledger:
        ledger.add(record())
    commands = RedisCommands.connect(server.url)
    assert 2 * 86400 - 60 < await commands.redis.ttl("{t:a}:usage:2026-11-30") <= 2 * 86400
    await commands.close()


async def test_records_wait_while_redis_is_away(server: SessionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ledger.RETRY_S", 0.01)
    await server.kill()
    async with opened(server, timeout_s=0.2) as ledger:
        ledger.add(record())
        await ledger.flush()
        assert ledger.num_waiting == 1
        await server.start()
        while ledger.num_waiting:  # noqa: ASYNC110 until an attempt succeeds
            await asyncio.sleep(0.01)
    assert await rows(server) == [record()]


async def test_what_waits_is_bounded_and_a_loss_is_logged(
    server: SessionServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.ledger.MAX_WAITING", 2)
    await server.kill()
    with caplog.at_level(logging.ERROR):
        async with opened(server, timeout_s=0.05) as ledger:
            for number in range(3):
                ledger.add(record(str(number)))
            assert ledger.num_waiting == 2
            assert "the usage of 2 is lost" in caplog.text
    assert "the usage of 2 answers is lost" in caplog.text
    with pytest.raises(SessionsUnavailable):
        await rows(server)


async def test_export_in_both_forms(server: SessionServer, tmp_path) -> None:
    made = [record("a"), record("b", tenant="b")]
    async with opened(server) as ledger:
        for row in made:
            ledger.add(row)
    lines: dict[Format, list[str]] = {form: [] for form in Format}
    for form, got in lines.items():
        await asyncio.to_thread(export, server.url, tmp_path, EVER["since"], None, form, got.append)
    assert lines[Format.csv] == [CSV_HEAD, *map(to_csv, made)]
    assert [json.loads(line)["id"] for line in lines[Format.jsonl]] == ["a", "b"]


# ---- through the gateway


async def test_every_accepted_request_has_one_record_and_the_sums_are_the_usage(server: SessionServer) -> None:
    """Chats, completions and responses; an engine that dies in the middle of them; what was refused has none."""
    left = iter([Die()])

    def script(request: AddRequest) -> Iterator[Item]:
        yield from b"some"
        yield Pause(0.0)
        yield from itertools.islice(left, 1)
        yield from b" words"

    async with running_gateway(server, script, num_cached_tokens=3) as gateway, gateway.http() as http:
        chat = {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}]}
        asked = [
            http.post("/v1/chat/completions", json=chat),
            http.post("/v1/chat/completions", json={**chat, "n": 3}),
            http.post("/v1/completions", json={"model": "byte-model", "prompt": ["ab", "cdef"], "max_tokens": 5}),
            http.post("/v1/responses", json=body()),
            http.post("/v1/responses", json=body(store=False)),
            http.post("/v1/responses", json=body(max_output_tokens=2)),
            http.post("/v1/chat/completions", json={**chat, "max_tokens": -1}),
        ]
        answering = asyncio.gather(*asked)
        await gateway.engine.wait_for(lambda: not gateway.engine.is_ready)
        gateway.engine.revive()
        *answers, refused = [answer.json() for answer in await answering]
        assert "error" in refused
        await gateway.services.flush_usage()
        records = {row.id: row for row in await rows(server)}
    assert records.keys() == {answer["id"] for answer in answers}
    for answer in answers:
        usage, row = answer["usage"], records[answer["id"]]
        cached = (usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"]
        assert row.prompt_tokens == usage.get("prompt_tokens", usage.get("input_tokens"))
        assert row.output_tokens == usage.get("completion_tokens", usage.get("output_tokens"))
        assert row.trunk_tokens + row.history_tokens == cached
        assert row.computed_tokens == row.prompt_tokens - cached
        assert (row.outcome, row.model) == ("completed", "byte-model")
        assert row.queue_ms >= 0
        assert row.prefill_ms >= 0
        assert row.decode_ms > 0
    assert {row.tenant for row in records.values()} == {"a"}


async def test_what_failed_or_was_left_is_recorded_too(server: SessionServer) -> None:
    def script(request: AddRequest) -> list[Item]:
        return [b"abc", Fail() if request.params.max_tokens == 7 else Pause()]

    async with running_gateway(server, script) as gateway, gateway.http() as http:
        failed = await http.post("/v1/responses", json=body(max_output_tokens=7))
        assert failed.status_code == 500
        running = asyncio.create_task(http.post("/v1/responses", json=body(background=False)))
        await gateway.engine.wait_paused()
        [response_id] = gateway.service.runs.ids
        run = gateway.service.runs.find("a", response_id)
        assert run is not None
        run.stop()
        cancelled = (await running).json()
        assert cancelled["status"] == "cancelled"
        by_outcome = {row.outcome: row for row in await rows(server)}
    assert by_outcome.keys() == {"failed", "aborted"}
    assert by_outcome["aborted"].id == cancelled["id"]
    assert by_outcome["aborted"].output_tokens == cancelled["usage"]["output_tokens"] == 3
    assert by_outcome["failed"].output_tokens == 3


async def test_what_a_gateway_writes_late_does_not_count_once_another_has_taken_over(server: SessionServer) -> None:
    async with opened(server) as slow, opened(server) as taker:
        for ledger, row in ((slow, record()), (taker, record(output_tokens=7, takeovers=1)), (slow, record())):
            ledger.add(row)
            await ledger.flush()
    assert await rows(server) == [record(output_tokens=7, takeovers=1)]
