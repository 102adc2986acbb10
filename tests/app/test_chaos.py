"""Everything is killed again and again while clients talk. Afterwards every answer that was accepted is whole, or says
why it is not; what readers saw is what is stored; nothing is held; and each answer is paid for once.

A run is a seed, which a failed one prints: TRUNKLINE_CHAOS_SEED=… runs it again, as far as processes repeat themselves.
"""

import asyncio
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.app.answer_reader import Reader
from tests.app.chaos_clients import Client, Story
from tests.app.fleet import Fleet, fleet
from tests.app.stateful_gateway import output_text
from tests.app.test_failpoints import assert_at_rest, read_usage_of

NUM_CLIENTS = 10
BYTE_PAUSE_S = 0.005
REDIS = "redis"


@dataclass
class Killer:
    """kill -9 of one after another, each of which comes back a moment later."""

    fleet: Fleet
    rnd: random.Random
    victims: list[str]
    num_kills: dict[str, int] = field(default_factory=dict)

    async def kill_for(self, seconds: float) -> None:
        """At least each of them once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        left = self.rnd.sample(self.victims, len(self.victims))
        while left or loop.time() < deadline:
            victim = left.pop() if left else self.rnd.choice(self.victims)
            self.num_kills[victim] = self.num_kills.get(victim, 0) + 1
            await self._kill(victim, self.rnd.uniform(0.0, 1.0))
            await asyncio.sleep(self.rnd.uniform(0.0, 2.0))

    async def _kill(self, victim: str, away_s: float) -> None:
        if victim == REDIS:
            await self.fleet.store.kill()
            await asyncio.sleep(away_s)
            await self.fleet.store.start()
        else:
            await self.fleet.kill(victim)
            await asyncio.sleep(away_s)
            await self.fleet.start(victim)


async def run_chaos(folder: Path, seconds: float, *, kills_redis: bool = False) -> None:
    """`seconds` are without what the end takes."""
    seed = int(os.environ.get("TRUNKLINE_CHAOS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"TRUNKLINE_CHAOS_SEED={seed}")  # shown where the test fails
    script = [{"echo": BYTE_PAUSE_S}]
    async with fleet(folder, script, num_engines=2, lease_ms=2000) as gateways:
        stops = asyncio.Event()
        clients = [Client(gateways, f"c{i}", random.Random(f"{seed} {i}"), stops) for i in range(NUM_CLIENTS)]
        gateways_and_redis = [*gateways.gateways, *([REDIS] if kills_redis else [])]
        killers = [
            Killer(gateways, random.Random(f"{seed} {victims}"), victims)
            for victims in (gateways_and_redis, gateways.engines)
        ]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.talk(), name=client.name)
            await asyncio.gather(*(killer.kill_for(seconds) for killer in killers))
            stops.set()
        stories = [story for client in clients for story in client.stories]
        kills = killers[0].num_kills | killers[1].num_kills
        print(f"kills: {kills}, cuts: {sum(c.num_cuts for c in clients)}, messages: {len(stories)}")
        stored = await settle(gateways)
        print_outcomes(stored)
        assert stored.keys() == {story.response_id for story in stories}, "each message has one answer, and no more"
        for story in stories:
            await check_story(gateways, story, stored[story.response_id], is_strict=not kills_redis)
        for name in gateways.gateways:
            assert await gateways.end(name) == 0
            assert "Traceback" not in gateways.log(name), gateways.log(name)
        await assert_at_rest(gateways)
        await check_usage(gateways, stored)


async def settle(gateways: Fleet) -> dict[str, dict[str, Any]]:
    """Every response in the store, at its end, which both gateways tell alike."""
    redis = Redis.from_url(gateways.store.url)
    names = [bytes(key).decode() async for key in redis.scan_iter("{s:*}:r:*", count=1000)]
    await redis.aclose()
    ids = [name.rpartition(":")[2] for name in names]
    stored = {}
    http, other = map(gateways.http, gateways.gateways)
    for response_id in ids:
        path = f"/v1/responses/{response_id}"
        while (found := (await http.get(path)).json())["status"] in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert (await other.get(path)).json() == found
        stored[response_id] = found
    return stored


async def check_story(gateways: Fleet, story: Story, stored: dict[str, Any], *, is_strict: bool) -> None:
    text, status = output_text(stored), stored["status"]
    assert status in ("completed", "failed", "incomplete")
    if status == "completed":
        assert text == story.text
    else:
        assert stored["error"] or stored["incomplete_details"]
        assert story.text.startswith(text)
    for reader in story.readers:
        assert story.text.startswith(reader.text)
        if reader.has_ended:
            assert reader.events[-1]["response"] == stored
            assert reader.text == text
    if is_strict:
        assert not story.is_lost
        for gateway in gateways.gateways:
            again = Reader(gateways, story.response_id)
            assert await again.read_on(gateway)
            assert again.has_ended
            assert all(reader.events == again.events for reader in story.readers)


async def check_usage(gateways: Fleet, stored: dict[str, dict[str, Any]]) -> None:
    """One record for each answer, which says what the answer says, and nothing else."""
    records = await read_usage_of(gateways)
    assert records.keys() == stored.keys(), [stored[name] for name in stored.keys() - records.keys()]
    for response_id, response in stored.items():
        record, usage = records[response_id], response["usage"]
        said = (usage["input_tokens"], usage["output_tokens"])
        assert (record.prompt_tokens, record.output_tokens) == said, (record, response)


def print_outcomes(stored: dict[str, dict[str, Any]]) -> None:
    outcomes: dict[str, int] = {}
    for response in stored.values():
        why = (response["error"] or {}).get("message") or (response["incomplete_details"] or {}).get("reason")
        outcome = f"{response['status']}: {why}" if why else response["status"]
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(outcomes)


@pytest.mark.slow
async def test_a_minute_of_chaos(tmp_path: Path) -> None:
    await run_chaos(tmp_path, 60.0)


@pytest.mark.slow
async def test_a_minute_of_chaos_in_which_redis_is_killed_too(tmp_path: Path) -> None:
    await run_chaos(tmp_path, 60.0, kills_redis=True)
