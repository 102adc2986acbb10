"""What a tenant is told over HTTP is the same whether another one has sent the very prompt or not (B41)."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.session_store import SessionServer, session_server
from tests.app.stateful_gateway import KEY_A, KEY_B, Gateway, running_gateway
from tests.assistant_bench import Work
from tests.held_engine import WatchedClient
from tests.letter_engine import letter_core
from tests.scripted_engine import byte_model_info, say

NUM_GUESSES = 12
ASSISTANT = {"id": "everyones"}
SALTS: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"prompt_cache_key": "a"}, {"user": "a"}]
"""Sent by both: a guesser knows even these."""


NAMES = ("id", "response_id", "created", "created_at", "completed_at")
"""Of what differs between any two answers."""


@dataclass(frozen=True)
class World:
    """Gateways of one secret, so that names which they derive from it are the same."""

    store: SessionServer
    state_dir: Path

    @contextlib.asynccontextmanager
    async def gateway(self) -> AsyncIterator[Gateway]:
        """With an engine of its own, which has seen nothing."""
        core = letter_core(byte_model_info(num_blocks=1024))
        async with (
            WatchedClient(core) as engine,
            running_gateway(self.store, say(""), engine=engine, state_dir=self.state_dir) as gateway,
        ):
            yield gateway


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with session_server() as store:
        yield World(store, tmp_path)


def text_of(number: int, kind: str) -> str:
    """Texts of one number are as long as each other, and no two begin alike."""
    words = f"{kind[0]}{number} was {kind}: the number of the safe is four seven one one, tell nobody about it, ever"
    return words[: 20 + 3 * (number % 20)]


def request(number: int, kind: str) -> tuple[str, dict[str, Any]]:
    """Path and body; the ways of asking take turns."""
    text = text_of(number, kind)
    common = {"temperature": 0, **SALTS[number // 3 % len(SALTS)]}
    match number % 3:
        case 0:
            assistant = {"prompt": ASSISTANT} if number % 2 else {}
            body = {"model": "byte-model", "input": text, "max_output_tokens": 3, **common, **assistant}
            return "/v1/responses", body
        case 1:
            model = "byte-model:everyones" if number % 2 else "byte-model"
            messages = [{"role": "user", "content": text}]
            return "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 3, **common}
        case _:
            return "/v1/completions", {"model": "byte-model", "prompt": text, "max_tokens": 3, **common}


def visible(value: Any) -> Any:
    """All that an answer says, but for names and times."""
    if isinstance(value, dict):
        return {name: visible(part) for name, part in value.items() if name not in NAMES}
    return [visible(part) for part in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Seen:
    answer: dict[str, Any]
    headers: list[str]
    report: dict[str, Any] | None
    """Why no more of it was cached; stored responses have one."""
    work: Work
    """What the engine did for it."""

    @property
    def costs(self) -> tuple[Any, ...]:
        return self.answer["usage"], self.headers, (self.report or {}).get("cached"), self.work

    @property
    def num_cached(self) -> int:
        usage = self.answer["usage"]
        details: dict[str, Any] = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
        return int(details["cached_tokens"])

    @property
    def num_tokens(self) -> int:
        usage = self.answer["usage"]
        return int(usage.get("input_tokens") or usage["prompt_tokens"])


async def ask(gateway: Gateway, http: httpx.AsyncClient, number: int, kind: str) -> Seen:
    path, body = request(number, kind)
    before = await gateway.engine.stats()
    answer = await http.post(path, json=body)
    work = Work.between(before, await gateway.engine.stats())
    assert answer.status_code == 200, answer.text
    said = answer.json()
    report = None
    if path == "/v1/responses":
        report = visible((await http.get(f"{path}/{said['id']}/cache")).json())
        assert report["prompt_tokens"] == said["usage"]["input_tokens"]
    return Seen(visible(said), sorted(answer.headers), report, work)


async def guesses(world: World, kind: str) -> list[tuple[Seen, Seen]]:
    """What tenant b sees of right and wrong guesses, if what a has sent is of this kind."""
    seen = []
    async with world.gateway() as gateway, gateway.http(KEY_A) as a, gateway.http(KEY_B) as b:
        for http in (a, b):
            for number in range(24):  # what all share is known before, and so is each one's markup
                await ask(gateway, http, number, "warm")
        for number in range(NUM_GUESSES):
            await ask(gateway, a, number, kind)
            right, wrong = [await ask(gateway, b, number, guess) for guess in ("sent", "kept")]
            seen.append((right, wrong))
            # the other half: whoever has sent it is told that it was cached
            again = await ask(gateway, a, number, kind)
            assert again.num_cached == again.num_tokens - 1 > right.num_cached
            assert again.work.prompt_tokens_computed == 1 < right.work.prompt_tokens_computed
    return seen


async def test_b41_right_and_wrong_guesses_are_told_the_same_and_cost_the_same(world):
    seen = await guesses(world, "sent")
    for right, wrong in seen:
        assert right.costs == wrong.costs
    # word by word as if a had sent something else, reports and answers too
    assert seen == await guesses(world, "gone")
    reasons = [right.report["first_miss"]["reason"] for right, _ in seen if right.report is not None]
    assert reasons == ["never_seen"] * len(reasons) != []


async def test_b41_another_tenants_report_is_answered_like_one_that_is_not_there(world):
    async with world.gateway() as gateway, gateway.http(KEY_A) as a, gateway.http(KEY_B) as b:
        response_id = (
            await a.post("/v1/responses", json={"model": "byte-model", "input": "Hi", "max_output_tokens": 3})
        ).json()["id"]
        assert (await a.get(f"/v1/responses/{response_id}/cache")).status_code == 200
        other_id = response_id[:-1] + ("a" if response_id[-1] != "a" else "b")
        answers = [await b.get(f"/v1/responses/{asked}/cache") for asked in (response_id, other_id)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text.replace(response_id, "") == answers[1].text.replace(other_id, "")


@pytest.mark.parametrize("path", ["/admin/stats", "/metrics"])
async def test_b41_counters_of_all_tenants_are_not_for_one_of_them(world, path):
    async with world.gateway() as gateway, gateway.http(KEY_B) as http:
        assert (await http.get(path)).status_code == 403
