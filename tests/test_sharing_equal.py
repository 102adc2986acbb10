"""Fifty prompts are answered with the same tokens however their KV came about: computed in one piece or in chunks,
found in the cache, forked from a sibling that still runs, lost to a preemption and computed again, or swapped out to
the host tier and in again.

Float32, shadow KV on. Even prompts are greedy, odd ones draw with a seed of their own. What is right is
what an engine says that shares nothing and serves one request at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.kernels_under_test import NAME, ORACLE
from tests.tiny_model import make_tiny

NUM_PROMPTS = 50 if NAME == "auto" else 20
"""Interpreted kernels take minutes for fifty."""
NUM_CHOICES = 3
TEXT = (
    "The line runs from the harbour by way of the market and the school to the lake, every half hour, from six in the "
    "morning until eleven at night. A ticket costs two coins, children ride for one, dogs for nothing. Whoever loses "
    "a hat may ask for it at the harbour, where lost things are kept for thirty days and then given to the school. "
)

Answers = dict[tuple[int, int], list[int]]
"""By prompt and choice."""


def make_prompts(text_ids: list[int], block_size: int) -> list[list[int]]:
    """Lengths one less than, equal to and one more than whole blocks; the shared beginnings likewise."""
    shared = [0, *(blocks * block_size + more for blocks in (1, 2, 3) for more in (-1, 0, 1)), 2 * block_size + 4]
    prompts = []
    for i in range(NUM_PROMPTS):
        num_shared = shared[i % len(shared)]
        length = (num_shared // block_size + 1 + i % 2) * block_size + i % 3 - 1
        own = (text_ids[j % len(text_ids)] for j in range(7 * i + 1, 7 * i + 200))
        prompts.append([*text_ids[:num_shared], *own][: max(length, num_shared + 1)])
    return prompts


@dataclass(frozen=True)
class Engine:
    """One loaded model; each core starts with an empty cache over KV tensors that are full of what was there before."""

    runner: ModelRunner
    config: EngineConfig
    prompts: list[list[int]]
    max_tokens: int

    @classmethod
    def load(cls, model: PreparedModel, text_ids: list[int], max_tokens: int, **settings: Any) -> "Engine":
        settings = {"device": "cpu", "dtype": "float32", "check_kv": True, "shared_attention": "always", **settings}
        config = EngineConfig(model_dir=str(model.path), **settings)
        return cls(ModelRunner(model, config), config, make_prompts(text_ids, config.block_size), max_tokens)

    @staticmethod
    def kv_bytes_per_token(model: PreparedModel) -> int:
        """In float32."""
        config = model.manifest.config
        return config.kv_bytes_per_token(config.head_dim * 4)

    def core(self, num_blocks: int | None = None, num_host_blocks: int = 0, **changes: Any) -> EngineCore:
        """Of the runner's blocks as many. Swapping counts as free, so that the cost model never prefers to compute."""
        info = self.runner.info
        assert num_host_blocks <= info.num_host_blocks
        info = msgspec.structs.replace(info, num_blocks=num_blocks or info.num_blocks, num_host_blocks=num_host_blocks)
        return EngineCore(self.config.replace(**changes), info, self.runner, self.runner.identity)

    @property
    def tight_pool(self) -> int:
        """Blocks for the longest request and some more: no two of the longer ones fit."""
        longest = max(map(len, self.prompts)) + self.max_tokens
        return longest // self.config.block_size + 5

    def request(self, prompt: int, choice: int = 0) -> AddRequest:
        """Prompts of two tenants behind a trunk that ends in the middle of a block, and of a third without one."""
        own = Scope(END, b"tenant %d" % (prompt % 3))
        trunk = Scope(2 * self.config.block_size + 4, b"assistant")
        drawn = {"temperature": 0.8, "top_p": 0.95, "seed": prompt} if prompt % 2 else {"temperature": 0.0}
        return AddRequest(
            request_id=f"{prompt} {choice}",
            prompt_ids=self.prompts[prompt],
            params=SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, **drawn),
            scopes=[own] if prompt % 3 == 2 else [trunk, own],
            choice=choice,
        )


def add_to(core: EngineCore, request: AddRequest, answers: Answers) -> None:
    assert core.add(request) is None
    prompt, choice = map(int, request.request_id.split())
    answers[prompt, choice] = []


def step(core: EngineCore, answers: Answers) -> None:
    for output in core.step():
        assert output.error is None, output
        prompt, choice = map(int, output.request_id.split())
        answers[prompt, choice] += output.token_ids
    core.check_integrity()


def run(core: EngineCore, requests: Iterable[AddRequest]) -> Answers:
    """All of them at once, to their ends; the core's check that an idle pool holds nothing comes with the last step."""
    answers: Answers = {}
    for request in requests:
        add_to(core, request, answers)
    while core.has_work:
        step(core, answers)
    return answers


def run_forked(core: EngineCore, engine: Engine, prompts: Sequence[int]) -> Answers:
    """A sibling is there from the start; another comes when the first ones are in mid-answer."""
    answers: Answers = {}
    for prompt in prompts:
        for choice in (0, 1):
            add_to(core, engine.request(prompt, choice), answers)
    while not all(answers.values()):
        step(core, answers)
    for prompt in prompts:
        add_to(core, engine.request(prompt, 2), answers)
    while core.has_work:
        step(core, answers)
    return answers


@dataclass(frozen=True)
class Case:
    engine: Engine
    alone: Answers
    """What is right."""
    num_forked: int
    """Prompts whose other choices are among them."""

    @property
    def expected(self) -> Answers:
        return {(prompt, choice): ids for (prompt, choice), ids in self.alone.items() if choice == 0}

    @property
    def requests(self) -> list[AddRequest]:
        return [self.engine.request(prompt) for prompt in range(NUM_PROMPTS)]


def make_case(engine: Engine, oracle: Engine | None = None, num_forked: int = NUM_PROMPTS) -> Case:
    oracle = oracle or engine
    core = oracle.core(enable_prefix_caching=False)
    alone: Answers = {}
    for prompt in range(NUM_PROMPTS):
        for choice in range(NUM_CHOICES if prompt < num_forked else 1):
            alone |= run(core, [oracle.request(prompt, choice)])
    assert core.stats().hit_tokens == 0
    assert all(len(ids) == engine.max_tokens for ids in alone.values())
    assert len({tuple(ids) for ids in alone.values()}) > NUM_PROMPTS // 2
    return Case(engine, alone, num_forked)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path: Path = tmp_path_factory.mktemp("model")
    source = make_tiny(path / "tiny", tie_word_embeddings=False)
    model = prepare(str(source), path / "state", "float32", lambda *_: None)
    text_ids = Tokenizer.load(model).encode(TEXT)
    settings = {"block_size": 8, "num_blocks": 700, "threads": 1, "max_num_seqs": 16}
    host_cache_bytes = 400 * 8 * Engine.kv_bytes_per_token(model)
    engine = Engine.load(model, text_ids, 12, host_cache_bytes=host_cache_bytes, **settings)
    return make_case(engine, Engine.load(model, text_ids, 12, **settings, **ORACLE) if ORACLE else engine)


BUDGETS = pytest.mark.parametrize("budget", [17, 64, 4096], ids=["chunks of 17", "chunks of 64", "whole"])
POOLS = pytest.mark.parametrize("is_tight", [False, True], ids=["large pool", "tight pool"])


def open_core(case: Case, budget: int, is_tight: bool) -> EngineCore:
    num_blocks = case.engine.tight_pool if is_tight else None
    return case.engine.core(num_blocks, max_num_batched_tokens=budget)


def assert_preempted(core: EngineCore, is_tight: bool, before: int = 0) -> None:
    assert (core.stats().preemptions > before) == is_tight, core.stats()


def assert_cold_and_warm(case: Case, budget: int, *, is_tight: bool) -> None:
    core = open_core(case, budget, is_tight)
    for _ in ("cold", "warm"):
        before = core.stats()
        assert run(core, case.requests) == case.expected
        assert_preempted(core, is_tight, before.preemptions)
        assert core.stats().hit_tokens > before.hit_tokens


def assert_forked(case: Case, budget: int, *, is_tight: bool) -> None:
    core = open_core(case, budget, is_tight)
    for first in range(0, case.num_forked, 5):
        before = core.stats().preemptions
        answers = run_forked(core, case.engine, range(first, first + 5))
        assert answers == {place: case.alone[place] for place in answers}
        assert len(answers) == 5 * NUM_CHOICES
        assert_preempted(core, is_tight, before)


@BUDGETS
@POOLS
def test_b01_b09_cold_and_warm_chunked_and_preempted_answers_are_those_of_a_request_alone(tiny, budget, is_tight):
    assert_cold_and_warm(tiny, budget, is_tight=is_tight)


@BUDGETS
@POOLS
def test_b08_b09_forked_answers_are_those_of_a_request_alone(tiny, budget, is_tight):
    assert_forked(tiny, budget, is_tight=is_tight)


def test_b01_each_prompt_again_and_again_in_a_cache_that_forgets(tiny):
    """One at a time, in a pool that holds a few of them: hits of every length, and blocks that are used again."""
    core = tiny.engine.core(tiny.engine.tight_pool)
    for prompt in [*range(NUM_PROMPTS), *reversed(range(NUM_PROMPTS)), *range(0, NUM_PROMPTS, 7)]:
        assert run(core, [tiny.engine.request(prompt)]) == {(prompt, 0): tiny.alone[prompt, 0]}
    assert core.stats().hit_tokens > 0


def assert_swapped(case: Case, budget: int, num_host_blocks: int) -> None:
    """The pool is tight: what is preempted goes to the host too, and comes back from there."""
    core = case.engine.core(case.engine.tight_pool, num_host_blocks, max_num_batched_tokens=budget)
    for _ in ("cold", "warm"):
        before = core.stats()
        assert run(core, case.requests) == case.expected
        after = core.stats()
        assert after.preemptions > before.preemptions
        assert after.host.swapped_in > before.host.swapped_in
        assert after.host.swapped_out > before.host.swapped_out
    for first in range(0, case.num_forked, 10):
        before = core.stats()
        answers = run_forked(core, case.engine, range(first, first + 5))
        assert answers == {place: case.alone[place] for place in answers}
        assert core.stats().host.swapped_in > before.host.swapped_in
    assert core.stats().host.used <= num_host_blocks


@pytest.mark.parametrize(("budget", "num_host_blocks"), [(17, 400), (64, 20), (4096, 60)])
def test_b09_swapped_answers_are_those_of_a_request_alone(tiny, budget, num_host_blocks):
    assert_swapped(tiny, budget, num_host_blocks)


def test_b01_each_prompt_again_from_the_host(tiny):
    """One at a time, in a pool that holds a few of them; the host holds all."""
    core = tiny.engine.core(tiny.engine.tight_pool, 400)
    run(core, tiny.requests)
    before = core.stats()
    for prompt in range(NUM_PROMPTS):
        assert run(core, [tiny.engine.request(prompt)]) == {(prompt, 0): tiny.alone[prompt, 0]}
    assert core.stats().host.swapped_in - before.host.swapped_in > NUM_PROMPTS


@pytest.mark.slow
def test_b01_b08_b09_the_demo_model_answers_the_same_in_all_these_ways(demo_model_fp32: PreparedModel) -> None:
    text_ids = Tokenizer.load(demo_model_fp32).encode(TEXT)
    host_cache_bytes = 200 * 16 * Engine.kv_bytes_per_token(demo_model_fp32)
    settings = {"block_size": 16, "num_blocks": 700, "max_num_seqs": 16}
    engine = Engine.load(demo_model_fp32, text_ids, 8, host_cache_bytes=host_cache_bytes, **settings)
    case = make_case(engine, num_forked=10)
    assert_cold_and_warm(case, 4096, is_tight=False)
    assert_cold_and_warm(case, 17, is_tight=True)
    assert_forked(case, 64, is_tight=True)
    assert_swapped(case, 64, 200)
