"""What the side channel's benchmark sends in which order, and what it concludes."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.api_client import Answer
from benchmarks.side_channel import Guess, Guesser, Pair, judge

PROMPT_TOKENS = 40


@dataclass
class FakeEngine:
    """Finds what the same tenant has asked before; `leaks`: also what another one has."""

    leaks: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)
    prefill_tokens: int = 0
    hit_tokens: int = 0

    def ask(self, tenant: str, text: str) -> Answer:
        is_cached = any(text == known and (self.leaks or tenant == by) for by, known in self.asked)
        self.asked.append((tenant, text))
        cached = PROMPT_TOKENS - 1 if is_cached else 10
        self.prefill_tokens += PROMPT_TOKENS - cached
        self.hit_tokens += cached
        return Answer((PROMPT_TOKENS - cached) / 1000 + len(self.asked) % 7 / 1e4, PROMPT_TOKENS, cached, 1)


class FakeClient:
    def __init__(self, engine: FakeEngine, tenant: str) -> None:
        self._engine = engine
        self._tenant = tenant

    async def chat(self, messages: list[dict[str, str]], **fields: Any) -> Answer:
        return self._engine.ask(self._tenant, messages[0]["content"])

    async def wait_until_idle(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "engine": {"prefill_tokens": engine.prefill_tokens, "steps": len(engine.asked)},
            "prefix_cache": {"query_tokens": PROMPT_TOKENS * len(engine.asked), "hit_tokens": engine.hit_tokens},
        }


async def run(engine: FakeEngine, num_pairs: int = 20) -> dict[str, Any]:
    a, b = FakeClient(engine, "a"), FakeClient(engine, "b")
    guesser = Guesser(b, num_groups=5, seed=1)
    across = await guesser.guess(a, num_pairs)
    return judge(across, await guesser.guess(b, num_pairs))


async def test_one_text_of_each_pair_is_sent_before_both_are_guessed_in_another_order() -> None:
    engine = FakeEngine()
    guesser = Guesser(FakeClient(engine, "b"), num_groups=5, seed=1)
    await guesser.guess(FakeClient(engine, "a"), 10)
    sent = [text for tenant, text in engine.asked[:10] if tenant == "a"]
    guessed = [text for tenant, text in engine.asked[10:] if tenant == "b"]
    assert (len({*sent}), len({*guessed})) == (10, 20), "each text once"
    assert {*sent} < {*guessed}
    assert [text for text in guessed if text in sent] != sent
    assert {len(text) for text in guessed} == {5 * 5 - 1}


async def test_an_engine_that_keeps_tenants_apart_passes() -> None:
    figures = await run(FakeEngine())
    assert figures["other_tenants"]["holds"]
    assert figures["other_tenants"]["pairs_of_equal_work"] == 20
    assert figures["control"]["holds"]
    assert figures["control"]["auc"] == 1


async def test_an_engine_that_does_not_is_caught() -> None:
    figures = await run(FakeEngine(leaks=True))
    assert not figures["other_tenants"]["holds"]
    assert figures["other_tenants"]["auc"] == 1
    assert figures["other_tenants"]["pairs_of_equal_usage"] == 0


def pairs(sent: Guess, new: Guess) -> list[Pair]:
    return [Pair(sent, new)] * 4


def test_a_control_that_shows_nothing_does_not_hold() -> None:
    guess = Guess(0.1, (40, 1), (40, 0))
    figures = judge(pairs(guess, guess), pairs(guess, guess))
    assert figures["other_tenants"]["holds"]
    assert not figures["control"]["holds"]


def test_work_that_differs_in_one_pair_does_not_hold_whatever_the_clock_says() -> None:
    guess, less_work = Guess(0.1, (40, 1), (40, 0)), Guess(0.1, (39, 1), (40, 0))
    figures = judge([*pairs(guess, guess), Pair(less_work, guess)], pairs(guess, guess))
    assert figures["other_tenants"]["interval"] == [0.5, 0.5]
    assert not figures["other_tenants"]["holds"]


def test_guesses_of_different_lengths_could_tell_anything() -> None:
    short, long = Guess(0.1, (40, 1), (40, 0)), Guess(0.1, (41, 1), (41, 0))
    with pytest.raises(RuntimeError, match=r"got \[40, 41\]"):
        judge(pairs(short, long), pairs(short, short))
