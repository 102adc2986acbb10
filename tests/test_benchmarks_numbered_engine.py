"""The engine without a model: what it says when, and to whom."""

from pathlib import Path

import pytest

from benchmarks.numbered_engine import (
    NUM_WORDS,
    REST_S,
    NumberedCore,
    StepTimes,
    make_numbered_model,
    number_in,
    numbered_info,
    pace_of,
    seed_of,
)
from engine.protocol import AddRequest, FinishReason
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.byte_model import BYTE_VOCAB_SIZE


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def core(tmp_path: Path, clock: Clock) -> NumberedCore:
    return NumberedCore(numbered_info(), StepTimes(tmp_path / "times"), clock=clock, sleep=clock.sleep)


def ask(core: NumberedCore, name: str, num_tokens: int, num_together: int = 1, interval_s: float = 0.0) -> None:
    params = SamplingParams(max_tokens=num_tokens, seed=seed_of(num_together, interval_s))
    core.add(AddRequest(request_id=name, prompt_ids=[1], params=params, scopes=[]))


def step(core: NumberedCore) -> list[tuple[str, int, FinishReason | None]]:
    """The number that each request was told."""
    return [(o.request_id, o.token_ids[0] - BYTE_VOCAB_SIZE, o.finish_reason) for o in core.step()]


@pytest.mark.parametrize("pace", [(1, 0.0), (500, 0.025), (3, 0.000_001)])
def test_the_pace_is_said_in_the_seed(pace: tuple[int, float]) -> None:
    assert pace_of(seed_of(*pace)) == pace
    assert pace_of(None) == (1, 0.0)


def test_requests_that_belong_together_wait_for_one_another_and_get_the_same_steps(
    core: NumberedCore, clock: Clock
) -> None:
    ask(core, "a", 2, num_together=2, interval_s=0.01)
    assert not core.has_work
    ask(core, "b", 2, num_together=2, interval_s=0.01)
    assert step(core) == [("a", 0, None), ("b", 0, None)]
    assert step(core) == [("a", 1, FinishReason.LENGTH), ("b", 1, FinishReason.LENGTH)]
    assert (core.times[0], core.times[1]) == (100.0 + REST_S, pytest.approx(100.01 + REST_S))
    assert not core.has_work


def test_without_an_interval_a_step_is_made_when_the_last_one_was_taken(core: NumberedCore) -> None:
    is_taken = False
    core.is_taken = lambda: is_taken
    ask(core, "a", 1)
    assert not core.has_work
    is_taken = True
    assert core.has_work
    assert step(core) == [("a", 0, FinishReason.LENGTH)]


def test_what_is_aborted_is_told_nothing_more(core: NumberedCore) -> None:
    ask(core, "a", 5)
    ask(core, "b", 5, num_together=2)
    core.abort(["a", "b"])
    assert not core.has_work
    ask(core, "c", 1, num_together=2)
    assert not core.has_work, "it waits for another one than that which went"


def test_its_tokens_are_the_numbers(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_numbered_model(tmp_path / "model"))
    for number in (0, 7, NUM_WORDS - 1):
        text = tokenizer.decode([BYTE_VOCAB_SIZE + number])
        assert (text, number_in(text)) == (f" {number:04}", number)
