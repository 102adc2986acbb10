"""What a tenant is told over HTTP is the same whether another one has sent the very prompt or not (B41)."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.app.session_store import session_server
from tests.app.stateful_gateway import KEY_A, KEY_B, Gateway, running_gateway
from tests.assistant_bench import Work
from tests.held_engine import WatchedClient
from tests.letter_engine import letter_core
from tests.scripted_engine import byte_model_info, say

NUM_GUESSES = 20
ASSISTANT = {"id": "everyones"}
SALTS: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"prompt_cache_key": "a"}, {"user": "a"}]
"""Sent by both: a guesser knows even these."""


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    core = letter_core(byte_model_info(num_blocks=1024))
    async with (
        session_server() as store,
        WatchedClient(core) as engine,
        running_gateway(store, say(""), engine=engine) as gateway,
    ):
        yield gateway


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


async def ask(gateway: Gateway, http: httpx.AsyncClient, number: int, kind: str) -> tuple[Any, ...]:
    """What the caller can see of the cost: usage, and how much the answer says at all; and what the engine did."""
    path, body = request(number, kind)
    before = await gateway.engine.stats()
    answer = await http.post(path, json=body)
    work = Work.between(before, await gateway.engine.stats())
    assert answer.status_code == 200, answer.text
    seen: dict[str, Any] = answer.json()
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "content-length")}
    return seen["usage"], sorted(seen), sorted(headers), work


def cached(seen: tuple[Any, ...]) -> tuple[int, int]:
    """Prompt tokens found, and all."""
    usage = seen[0]
    details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
    return details["cached_tokens"], usage.get("input_tokens") or usage["prompt_tokens"]


async def test_b41_usage_and_work_are_the_same_for_guesses_that_are_right_and_wrong(gateway):
    """And the other half: whoever has sent it is told that it was cached."""
    async with gateway.http(KEY_A) as a, gateway.http(KEY_B) as b:
        for http in (a, b):
            for number in range(24):  # what all share is known before, and so is each one's markup
                await ask(gateway, http, number, "warm")
        for number in range(NUM_GUESSES):
            await ask(gateway, a, number, "sent")
            right, wrong = [await ask(gateway, b, number, kind) for kind in ("sent", "kept")]
            assert right == wrong
            again = await ask(gateway, a, number, "sent")
            num_cached, num_tokens = cached(again)
            assert num_cached == num_tokens - 1 > cached(right)[0]
            assert again[-1].prompt_tokens_computed == 1 < right[-1].prompt_tokens_computed


@pytest.mark.parametrize("path", ["/admin/stats", "/metrics"])
async def test_b41_counters_of_all_tenants_are_not_for_one_of_them(gateway, path):
    async with gateway.http(KEY_B) as http:
        assert (await http.get(path)).status_code == 403
