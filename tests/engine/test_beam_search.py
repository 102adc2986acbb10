"""The search without an engine, over made-up models: against a plain one, against trying everything, step by step."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.beam_search import MAX_BEAM_WIDTH, Beam, BeamSearch, BeamSearchParams
from engine.errors import InvalidRequest
from engine.prefix_cache import MAX_TAILS
from engine.protocol import TokenLogprobs
from engine.sampling_params import MAX_LOGPROBS
from tests.beam_reference import search_plainly

Model = Callable[[tuple[int, ...]], list[float]]


def random_model(seed: int, vocab_size: int, sharpness: float) -> Model:
    """Log-probabilities that depend on all tokens so far."""

    def next_logprobs(token_ids: tuple[int, ...]) -> list[float]:
        weights = random.Random(f"{seed} {token_ids}")
        logits = [sharpness * weights.random() for _ in range(vocab_size)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return next_logprobs


def entry(logprobs: list[float], num_top: int) -> TokenLogprobs:
    """What the engine says of a position."""
    top = sorted(enumerate(logprobs), key=lambda pair: -pair[1])[:num_top]
    return TokenLogprobs(*top[0], top)


def run(search: BeamSearch, model: Model, order: random.Random | None = None) -> int:
    """Answers until the search is done, each step's beams in any order. Returns how many were asked for."""
    num_asked = 0
    num_top = search.step_params.logprobs
    assert num_top is not None
    while not search.is_done:
        asked = list(enumerate(search.live))
        num_asked += len(asked)
        if order is not None:
            order.shuffle(asked)
        for i, (index, beam) in enumerate(asked):
            assert search.take(index, entry(model(beam.token_ids), num_top)) == (i == len(asked) - 1)
    return num_asked


def start(
    width: int, max_tokens: int, end_ids: frozenset[int] = frozenset(), length_penalty: float = 1.0, **more: int
) -> BeamSearch:
    params = BeamSearchParams(width, max_tokens, length_penalty=length_penalty)
    return BeamSearch(params.validate(), more.pop("num_prompt_tokens", 3), max_tokens, end_ids, **more)


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(1, 12),
    sharpness=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    width=st.integers(1, MAX_BEAM_WIDTH),
    max_tokens=st.integers(1, 8),
    end_ids=st.frozensets(st.integers(0, 11), max_size=4),
    length_penalty=st.sampled_from([-2.0, -0.5, 0.0, 0.7, 1.0, 3.0, 10.0]),
    num_prompt_tokens=st.sampled_from([1, 7, 100_000]),
)
def test_it_finds_what_a_plain_search_finds_that_never_stops_early(
    seed: int,
    vocab_size: int,
    sharpness: float,
    width: int,
    max_tokens: int,
    end_ids: frozenset[int],
    length_penalty: float,
    num_prompt_tokens: int,
) -> None:
    model = random_model(seed, vocab_size, sharpness)
    search = start(width, max_tokens, end_ids, length_penalty, num_prompt_tokens=num_prompt_tokens)
    num_asked = run(search, model, random.Random(seed))
    expected = search_plainly(model, num_prompt_tokens, width, max_tokens, end_ids, length_penalty)
    best = search.best()
    assert [(b.token_ids, b.cum_logprob) for b in best] == [(f.token_ids, f.cum_logprob) for f in expected]
    assert [b.stop_token_id is not None for b in best] == [f.has_ended for f in expected]
    assert all(b.stop_token_id in (None, b.token_ids[-1]) for b in best)
    assert num_asked <= 1 + width * (max_tokens - 1)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("end_ids", [frozenset[int](), frozenset({2})], ids=["without_end", "with_end"])
def test_a_search_wide_enough_for_everything_finds_the_best_of_all(
    end_ids: frozenset[int], length_penalty: float
) -> None:
    model = random_model(1, 3, 4.0)
    search = start(9, 2, end_ids, length_penalty)
    run(search, model)
    every: dict[tuple[int, ...], float] = {}
    for pair in itertools.product(range(3), repeat=2):
        token_ids = pair[:1] if pair[0] in end_ids else pair
        every[token_ids] = sum(model(token_ids[:i])[t] for i, t in enumerate(token_ids))

    def score(token_ids: tuple[int, ...]) -> float:
        return every[token_ids] / (3 + len(token_ids) - (token_ids[-1] in end_ids)) ** length_penalty

    assert [b.token_ids for b in search.best()] == sorted(every, key=score, reverse=True)


def test_a_width_of_one_is_greedy() -> None:
    model = random_model(2, 10, 3.0)
    search = start(1, 6)
    run(search, model)
    greedy: tuple[int, ...] = ()
    for _ in range(6):
        logprobs = model(greedy)
        greedy = (*greedy, logprobs.index(max(logprobs)))
    [best] = search.best()
    assert best.token_ids == greedy


def test_the_id_that_ends_a_sequence_counts_for_its_probability_and_not_for_its_length() -> None:
    search = start(2, 5, frozenset({9}), num_prompt_tokens=4)
    assert search.score(Beam((1, 2, 9), -3.0, stop_token_id=9)) == -3.0 / 6
    assert search.score(Beam((1, 2, 9), -3.0)) == -3.0 / 7, "alive: with ignore_eos an end id is like any other"


def test_steps_by_hand() -> None:
    search = start(2, 3, frozenset({0}), length_penalty=0.0)
    assert search.live == (Beam(),)
    assert search.take(0, TokenLogprobs(1, -1.0, [(1, -1.0), (0, -1.5), (2, -2.0), (3, -3.0)]))
    assert [b.token_ids for b in search.live] == [(1,), (2,)]
    assert not search.take(1, TokenLogprobs(4, -0.1, [(4, -0.1), (0, -0.2), (5, -9.0), (6, -9.0)]))
    assert search.take(0, TokenLogprobs(4, -0.5, [(4, -0.5), (5, -0.75), (0, -4.0), (6, -9.0)]))
    assert [(b.token_ids, b.cum_logprob) for b in search.live] == [((1, 4), -1.5), ((1, 5), -1.75)]
    assert [(b.token_ids, b.cum_logprob) for b in search.best()] == [((0,), -1.5), ((1, 4), -1.5)]
    assert not search.is_done, "(1, 4) may still come before (2, 0) with -2.2"
    flat = TokenLogprobs(7, -0.75, [(7, -0.75), (8, -0.75), (9, -0.75), (5, -0.75)])
    search.take(0, flat)
    search.take(1, flat)
    assert search.is_done
    assert [b.token_ids for b in search.best()] == [(0,), (2, 0)]


@pytest.mark.parametrize(
    ("length_penalty", "num_steps"),
    # -4 can never overtake -1.25; divided by the 103 tokens that it might come to, it could
    [(0.0, 1), (-1.0, 1), (1.0, 100)],
)
def test_it_ends_when_no_live_beam_can_come_into_the_result(length_penalty: float, num_steps: int) -> None:
    search = start(2, 100, frozenset({0, 1}), length_penalty)
    told = TokenLogprobs(0, -1.0, [(0, -1.0), (1, -1.25), (2, -4.0), (3, -50.0)])
    search.take(0, told)
    assert [b.token_ids for b in search.best()] == [(0,), (1,)]
    taken = 1
    sure = TokenLogprobs(2, -0.0, [(2, -0.0), (3, -50.0), (4, -50.0), (5, -50.0)])
    while not search.is_done:
        taken += 1
        for index in range(len(search.live)):
            search.take(index, sure)
    assert taken == num_steps
    longest = [b for b in search.best() if len(b.token_ids) == 100]
    assert [b.cum_logprob for b in longest] == ([-4.0] if num_steps == 100 else [])


def test_it_ends_when_no_beam_is_alive() -> None:
    search = start(2, 100, frozenset({0, 1, 2, 3}))
    search.take(0, TokenLogprobs(0, -1.0, [(0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0)]))
    assert search.is_done
    assert [b.stop_token_id for b in search.best()] == [0, 1]


def test_a_beam_goes_on_however_many_ends_are_likelier() -> None:
    model = random_model(3, 30, 0.1)
    for width, num_ends in ((1, 2), (1, 19), (5, 9)):
        ends = frozenset(sorted(range(30), key=lambda t: -model(())[t])[:num_ends])
        search = start(width, 2, ends)
        run(search, lambda ids, ends=ends: [lp + (t in ends) for t, lp in enumerate(model(ids))])  # type: ignore[misc]
        assert len(search.live) == width


def test_impossible_tokens_come_last() -> None:
    search = start(2, 2)
    top = [(1, -0.5), (2, -math.inf), (3, -math.inf), (4, -math.inf)]
    search.take(0, TokenLogprobs(1, -0.5, top))
    search.take(0, TokenLogprobs(1, -0.5, top))
    search.take(1, TokenLogprobs(1, -0.5, top))
    assert [b.cum_logprob for b in search.best()] == [-1.0, -math.inf]


def test_entries_are_kept_if_asked_for() -> None:
    model = random_model(4, 9, 3.0)
    search = start(2, 3, num_logprobs=5)
    assert search.step_params.logprobs == 5
    run(search, model)
    for beam in search.best():
        assert [e.token_id for e in beam.logprobs] == list(beam.token_ids)
        assert math.isclose(sum(e.logprob for e in beam.logprobs), beam.cum_logprob)
        for i, kept in enumerate(beam.logprobs):
            assert kept.top == entry(model(beam.token_ids[:i]), 5).top
    plain = start(2, 3)
    run(plain, model)
    assert [b.token_ids for b in plain.best()] == [b.token_ids for b in search.best()]
    assert plain.best()[0].logprobs == ()


def test_an_answer_nobody_asked_for_is_refused() -> None:
    search = start(2, 3)
    told = TokenLogprobs(1, -1.0, [(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0)])
    for index in (-1, 1):
        with pytest.raises(ValueError, match=f"beam {index} of 1"):
            search.take(index, told)
    search.take(0, told)
    search.take(1, told)
    with pytest.raises(ValueError, match="beam 1 of 2 was not asked for, or was taken already"):
        search.take(1, told)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (BeamSearchParams(0, 1), "beam_width must be from 1 to 10, got 0"),
        (BeamSearchParams(11, 1), "beam_width must be from 1 to 10, got 11"),
        (BeamSearchParams(2, 0), "max_tokens must be at least 1, got 0"),
        (BeamSearchParams(2, 1, length_penalty=math.nan), "length_penalty must be between -10 and 10, got nan"),
        (BeamSearchParams(2, 1, length_penalty=-10.5), "length_penalty must be between -10 and 10, got -10.5"),
        (BeamSearchParams(2, 1, temperature=0.7), "temperature must be 0 in a beam search, got 0.7"),
        (BeamSearchParams(2, 1, temperature=math.nan), "temperature must be 0 in a beam search, got nan"),
    ],
)
def test_what_cannot_be_searched_is_named(params: BeamSearchParams, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params.validate()
    assert caught.value.message == message
    assert caught.value.param == message.split()[0]


def test_the_widest_search_fits_what_the_engine_gives_and_keeps() -> None:
    assert start(MAX_BEAM_WIDTH, 1, frozenset(range(300))).step_params.logprobs == MAX_LOGPROBS
    assert MAX_TAILS >= 2 * MAX_BEAM_WIDTH, "or some beams would be computed again from where their block begins"
