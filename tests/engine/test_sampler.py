"""The sampler against twenty lines of numpy, and against itself in other company."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from engine import cpu_draw, device_draw
from engine.cpu_draw import CpuDraw
from engine.errors import InvalidRequest
from engine.philox import uniforms
from engine.protocol import TokenLogprobs
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

VOCAB = 5000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small tensors on a shared machine: a second thread would mostly be waited for."""
    torch.set_num_threads(1)


def sequence(
    prompt: list[int] | None = None, output: list[int] | None = None, seed: int = 0, choice: int = 0, **params: Any
) -> Sequence:
    made = Sequence("r", prompt or [1], SamplingParams(max_tokens=None, **params), (), seed, 10**6, choice)
    made.token_ids += output or []
    return made


def draw(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    """logits [vocab] for all, or [rows, vocab]."""
    rows = logits.float().expand(len(sequences), -1).clone()
    return [token.token_id for token in Sampler().sample(rows, list(sequences))]


def logits_like_a_model(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """A few likely tokens over a broad tail, rounded to bfloat16 so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(vocab, generator=generator) * 3).bfloat16().float()


def reference_draw(logits: np.ndarray, s: Sequence) -> int:
    """The documented order: bias, penalties, temperature, min_p, top_k, top_p; ranked by logit, then by id."""
    p, x = s.params, logits.astype(np.float64).copy()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(s.token_ids):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(s.output_ids):
        x[token] -= p.presence_penalty + p.frequency_penalty * s.output_ids.count(token)
    if p.temperature < 1e-5:
        return int(x.argmax())
    shares = np.exp((x - x.max()) / p.temperature)
    shares /= shares.max()
    is_filtered = 0 < p.top_k < len(logits) or p.top_p < 1 or p.min_p > 0
    ranking = np.lexsort((np.arange(len(x)), -x)) if is_filtered else np.arange(len(x))
    if is_filtered:
        ranking = ranking[shares[ranking] >= p.min_p]
        ranking = ranking[: p.top_k] if p.top_k > 0 else ranking
        cumulative = shares[ranking].cumsum()
        if p.top_p < 1:
            ranking = ranking[: int((cumulative < p.top_p * cumulative[-1]).sum()) + 1]
    cumulative = shares[ranking].cumsum()
    share = 1 - uniforms([s.seed], [s.choice], [s.num_tokens])[0]
    return int(ranking[np.searchsorted(cumulative, share * cumulative[-1])])


@pytest.mark.parametrize("top_k", [-1, 0, 1, 50, 300, VOCAB, VOCAB + 1])
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.5, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1e-4])
def test_b27_filters_against_numpy(top_k: int, top_p: float, min_p: float) -> None:
    """0 and -1 turn top_k off, more than the vocabulary is the vocabulary; top_p 0 is the best token, 1 is off."""
    for seed in (0, 1):
        logits = logits_like_a_model(seed)
        drawn = [
            sequence(seed=seed, temperature=t, top_k=top_k, top_p=top_p, min_p=min_p).params.validate(VOCAB)
            for t in (0.3, 1.0, 2.0)
        ]
        sequences = [Sequence("r", [1], p, (), seed, 10**6) for p in drawn]
        assert draw(logits, *sequences) == [reference_draw(logits.numpy(), s) for s in sequences]


def test_b27_equal_logits_are_ranked_by_id() -> None:
    logits = torch.zeros(VOCAB)
    logits[[40, 7, 4000]] = 1.0
    assert draw(logits, sequence(temperature=1.0, top_k=1)) == [7]
    assert draw(logits, sequence(temperature=1.0, top_p=0.0)) == [7]
    assert draw(logits, sequence(temperature=0.0)) == [7]
    assert {draw(logits, sequence(temperature=1.0, top_k=2, seed=i))[0] for i in range(50)} == {7, 40}
    # equal ones far beyond the candidates that are looked at first
    assert {draw(torch.zeros(VOCAB), sequence(temperature=1.0, top_k=300, seed=i))[0] < 300 for i in range(5)} == {True}


@pytest.mark.parametrize(
    "params", [{"top_p": 0.95}, {"top_k": 3000}, {"min_p": 1e-3}, {"top_k": 4000, "top_p": 0.5}], ids=str
)
def test_b27_flat_distributions_are_cut_behind_the_first_candidates(params: dict[str, Any]) -> None:
    """With many equal logits among them, and ids that are masked."""
    flat = logits_like_a_model(3) / 10
    flat[::7] = -math.inf
    sequences = [sequence(temperature=1.0, seed=seed, **params) for seed in range(40)]
    assert draw(flat, *sequences) == [reference_draw(flat.numpy(), s) for s in sequences]


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}], ids=str
)
def test_b27_the_first_candidates_and_the_whole_vocabulary_draw_alike(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_like_a_model(4) * 2
    sequences = [sequence(temperature=1.0, seed=seed, **params) for seed in range(40)]
    drawn = draw(logits, *sequences)
    monkeypatch.setattr(cpu_draw, "NUM_CANDIDATES", VOCAB)
    assert draw(logits, *sequences) == drawn


def test_draws_on_a_device_are_those_of_the_processor() -> None:
    """The same rules twice: row by row, and by torch's operators for all rows at once."""
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.4, 1.0, 3e38)
        for k in (0, 1, 30, 2000)
        for p in (0.0, 0.7, 0.999, 1.0)
        for m in (0.0, 0.01, 1.0)
    ]
    logits = torch.stack([logits_like_a_model(i, 3000) for i in range(len(params))])
    logits[:, ::5] = -math.inf
    random_numbers = [(0.37 * i) % 1 for i in range(len(params))]
    best = logits.max(-1).values
    processor = CpuDraw()
    drawn = [
        processor.draw(row, value, p, number)
        for row, value, p, number in zip(logits.numpy(), best.tolist(), params, random_numbers, strict=True)
    ]
    assert device_draw.draw(logits, best, params, random_numbers).tolist() == drawn


@pytest.mark.parametrize("seed", range(15))
def test_b27_everything_at_once_against_numpy(seed: int) -> None:
    rng = random.Random(seed)
    logits = logits_like_a_model(seed, 600)
    sequences = [
        sequence(
            prompt=[rng.randrange(600) for _ in range(20)],
            output=[rng.randrange(40) for _ in range(30)],
            seed=rng.getrandbits(60),
            choice=rng.randrange(3),
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 20, 400]),
            top_p=rng.choice([0.3, 0.9, 1.0]),
            min_p=rng.choice([0.0, 0.02]),
            repetition_penalty=rng.choice([1.0, 1.2, 0.8]),
            presence_penalty=rng.choice([0.0, 1.5, -1.0]),
            frequency_penalty=rng.choice([0.0, 0.7, -0.3]),
            logit_bias=rng.choice([{}, {3: 5.0, 599: -100.0}]),
        )
        for _ in range(8)
    ]
    assert draw(logits, *sequences) == [reference_draw(logits.numpy(), s) for s in sequences]


def test_b27_repetition_counts_the_prompt_presence_and_frequency_the_output_only() -> None:
    logits = torch.zeros(10)
    logits[4], logits[5] = 2.0, 1.9
    asked = {"prompt": [4] * 8, "temperature": 0.0}
    assert draw(logits, sequence(**asked)) == [4]
    assert draw(logits, sequence(**asked, repetition_penalty=1.2)) == [5]
    assert draw(logits, sequence(**asked, presence_penalty=2.0, frequency_penalty=2.0)) == [4]
    assert draw(logits, sequence(**asked, output=[4], presence_penalty=0.2)) == [5]
    assert draw(logits, sequence(**asked, output=[4, 4, 4], frequency_penalty=0.04)) == [5]
    assert draw(logits, sequence(**asked, output=[4], frequency_penalty=0.04)) == [4]


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-320, 1e-8, 9.9e-6])
def test_b26_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = logits_like_a_model(1) * 30
    best = int(logits.argmax())
    params = SamplingParams(temperature=temperature).validate(VOCAB)
    assert [draw(logits, Sequence("r", [1], params, (), seed, 9))[0] for seed in range(20)] == [best] * 20


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 2.0, 1e9, 3e38])
def test_b26_extreme_temperatures_give_tokens(temperature: float) -> None:
    """Scaled in fp32 after the largest logit is taken off: no overflow, no NaN."""
    logits = logits_like_a_model(1) * 1e4
    params = SamplingParams(temperature=temperature, top_p=0.9).validate(VOCAB)
    drawn = [draw(logits, Sequence("r", [1], params, (), seed, 9))[0] for seed in range(20)]
    assert all(0 <= token < VOCAB for token in drawn)
    if temperature <= 1e-4:
        assert set(drawn) == {int(logits.argmax())}


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "param",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
)
def test_b26_impossible_numbers_are_refused(param: str, value: float) -> None:
    if param in ("presence_penalty", "frequency_penalty") and value == -1.0:
        value = -2.1
    with pytest.raises(InvalidRequest, match=param) as raised:
        SamplingParams(**{param: value}).validate(VOCAB)
    assert raised.value.param == param


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5}])
def test_b26_logits_that_are_not_finite_are_a_fault_of_their_own_row(bad: float, params: dict[str, Any]) -> None:
    logits = torch.zeros(3, 300)
    logits[:, 7] = 50.0
    logits[1, 3] = bad
    first, faulty, last = Sampler().sample(logits, [sequence(**params) for _ in range(3)])
    assert (first.token_id, first.fault, last.token_id, last.fault) == (7, None, 7, None)
    assert faulty.fault == "the largest logit at position 1 is not finite"


def test_a_row_in_which_every_id_is_masked_is_a_fault() -> None:
    masked = sequence(min_tokens=1, stop_token_ids=tuple(range(300)), min_p=0.5)
    faulty, other = Sampler().sample(torch.zeros(2, 300), [masked, sequence(temperature=0.0)])
    assert faulty.fault is not None
    assert (other.token_id, other.fault) == (0, None)


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.01}, {"top_k": 100}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e300, 3e38, 1e30])
def test_b26_the_hottest_temperature_draws_no_masked_id(temperature: float, filters: dict[str, Any]) -> None:
    masked = tuple(range(400))
    for seed in range(20):
        hot = sequence(seed=seed, temperature=temperature, min_tokens=1, stop_token_ids=masked, **filters)
        (token,) = Sampler().sample(logits_like_a_model(seed)[None].clone(), [hot])
        assert token.fault is None
        assert token.token_id not in masked


def test_penalties_follow_a_sequence_that_grows() -> None:
    """Counts are kept from step to step; each step equals a sampler that sees the sequence for the first time."""
    sampler = Sampler()
    growing = sequence(
        prompt=[5, 5, 9], temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    )
    for step in range(100):
        logits = logits_like_a_model(step, vocab=120)
        (token,) = sampler.sample(logits[None].clone(), [growing])
        assert token.token_id == draw(logits, growing)[0] == reference_draw(logits.numpy(), growing)
        growing.token_ids.append(token.token_id)


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_p": 0.99}, {"temperature": 3.0, "top_p": 0.98}]
)
def test_b28_a_seeded_draw_does_not_depend_on_its_neighbours(params: dict[str, Any]) -> None:
    """Alone, among unseeded ones with other settings, and in another order."""
    logits = torch.stack([logits_like_a_model(i) for i in range(8)])
    params = {"temperature": 1.0, **params}
    mine = [sequence(prompt=list(range(1, 2 + i)), seed=7, **params) for i in range(8)]
    alone = [draw(logits[i], s)[0] for i, s in enumerate(mine)]
    assert draw(logits, *mine) == alone
    assert draw(logits.flip(0), *reversed(mine)) == alone[::-1]
    others = [{"temperature": 0.0}, {"top_k": 3}, {"temperature": 0.7}, {"top_p": 0.5, "repetition_penalty": 1.5}]
    for row in range(8):
        crowd = [sequence(seed=100 + i, **others[i % 4]) for i in range(8)]
        crowd[row] = mine[row]
        assert draw(logits, *crowd)[row] == alone[row]


def test_a_seed_a_choice_and_a_position_each_give_another_draw() -> None:
    logits = torch.zeros(VOCAB)
    drawn = draw(
        logits,
        sequence(seed=1),
        sequence(seed=2),
        sequence(seed=1, choice=1),
        sequence(prompt=[1, 2], seed=1),
        sequence(prompt=[3], output=[2], seed=1),
        sequence(seed=1),
    )
    assert len(set(drawn)) == 4
    assert drawn[0] == drawn[5]
    # resubmitted with its output as prompt, a request goes on with the same noise
    assert drawn[3] == drawn[4]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, 1.0])
    num = 20_000
    for params in ({}, {"top_p": 0.9}, {"top_k": 3}):
        counts = np.zeros(6)
        for start in range(0, num, 2000):
            rows = [sequence(seed=start + i, temperature=1.5, **params) for i in range(2000)]
            counts += np.bincount(draw(logits, *rows), minlength=6)
        shares = np.exp(logits.double().numpy() / 1.5)
        kept = {"top_p": 4, "top_k": 3}.get(next(iter(params), ""), 6)
        shares[np.lexsort((np.arange(6), -shares))[kept:]] = 0
        expected = shares / shares.sum() * num
        assert counts[expected == 0].sum() == 0
        possible = expected > 0
        # 5 degrees of freedom: 20.5 is exceeded once in a thousand, and the seeds are fixed
        assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 20.5


def test_min_tokens_keeps_every_end_away() -> None:
    logits = torch.zeros(10)
    logits[[2, 3, 5]] = torch.tensor([9.0, 8.0, 7.0])
    ends: dict[str, Any] = {"eos_token_ids": (2,), "stop_token_ids": (3,), "min_tokens": 2, "temperature": 0.0}
    assert draw(logits, sequence(**ends)) == [5]
    assert draw(logits, sequence(**ends, output=[7])) == [5]
    assert draw(logits, sequence(**ends, output=[7, 7])) == [2]
    # an end that is ignored ends nothing, so it may be drawn
    assert draw(logits, sequence(**ends, ignore_eos=True)) == [2]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_like_a_model(3, 50)
    expected = logits.log_softmax(-1)
    greedy = sequence(temperature=0.0, logit_bias={11: 100.0}, repetition_penalty=2.0, logprobs=3)
    rows = logits.expand(3, -1).clone()
    tokens = Sampler().sample(rows, [sequence(temperature=0.0), greedy, sequence(temperature=0.0, logprobs=0)])
    assert tokens[0].logprobs is None
    got = tokens[1].logprobs
    assert isinstance(got, TokenLogprobs)
    assert tokens[1].token_id == got.token_id == 11
    assert got.logprob == pytest.approx(expected[11].item())
    best = expected.topk(3)
    assert [value for _, value in got.top] == pytest.approx(best.values.tolist())
    assert [expected[token].item() for token, _ in got.top] == pytest.approx(best.values.tolist())
    assert tokens[2].logprobs == TokenLogprobs(int(logits.argmax()), pytest.approx(expected.max().item()), [])


def test_no_rows_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_an_answer_that_goes_on_draws_what_it_would_have_drawn(name: str) -> None:
    logits, said = logits_like_a_model(3, 50), [7, 7, 9]
    unbroken = sequence([1, 2], said, seed=11, choice=2, min_tokens=4, stop_token_ids=(5,), **{name: 1.8})
    resumed = Sequence("r", [1, 2], unbroken.params, (), 11, 10**6, 2, resumed_ids=said)
    for _ in range(20):
        [one, other] = draw(logits, unbroken, resumed)
        assert one == other
        unbroken.token_ids.append(one)
        resumed.token_ids.append(other)
