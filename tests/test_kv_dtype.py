"""Quantised caches in a whole engine: greedy answers of a tiny model in float32 are the same with every backend and
however their KV came about, and no block of one kv dtype is taken for one of another."""

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.block_hash import hash_block, root_hash
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams
from kernels.kv_format import POISON
from tests.tiny_model import make_tiny

TRUNK = [(11 * i + 5) % 380 for i in range(30)]
PROMPTS = [
    [*TRUNK[:shared], *((13 * i + own) % 380 for i in range(own))]
    for shared, own in [(30, 3), (30, 9), (16, 20), (30, 1), (8, 8), (0, 37)]
]
KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
NUM_TOKENS = 12

Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path: Path = tmp_path_factory.mktemp("model")
    source = make_tiny(path / "tiny", tie_word_embeddings=False)
    return prepare(str(source), path / "state", "float32", lambda *_: None)


def load(model: PreparedModel, kv_dtype: str, **settings: Any) -> tuple[ModelRunner, EngineConfig]:
    settings = {"num_blocks": 200, "max_num_seqs": 12, "shared_attention": "always", **settings}
    fixed = {"device": "cpu", "dtype": "float32", "block_size": 8, "threads": 1, "check_kv": True}
    config = EngineConfig(model_dir=str(model.path), kv_dtype=kv_dtype, **fixed, **settings)
    return ModelRunner(model, config), config


def run(core: EngineCore, prompts: list[list[int]], choices: int = 1) -> Answers:
    """All at once; the answers of one prompt's choices are forks of one another."""
    answers: Answers = {}
    for i, prompt in enumerate(prompts):
        for choice in range(choices):
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            request = AddRequest(
                request_id=f"{i} {choice}", prompt_ids=prompt, params=params, scopes=[Scope(END, b"s")], choice=choice
            )
            assert core.add(request) is None
            answers[request.request_id] = []
    while core.has_work:
        for output in core.step():
            assert output.error is None, output
            answers[output.request_id] += output.token_ids
        core.check_integrity()
    return answers


def alone(runner: ModelRunner, config: EngineConfig) -> Answers:
    core = EngineCore(config.replace(enable_prefix_caching=False), runner.info, runner)
    return {f"{i} 0": run(core, [prompt])["0 0"] for i, prompt in enumerate(PROMPTS)}


@KV_DTYPES
def test_all_backends_say_the_same(model: PreparedModel, kv_dtype: str) -> None:
    expected = alone(*load(model, kv_dtype, kernels="reference"))
    assert len({tuple(ids) for ids in expected.values()}) > len(PROMPTS) // 2
    for settings in ({"kernels": "cpu"}, {"kernels": "cpu", "max_isa": "none"}, {"max_isa": "avx2"}):
        assert alone(*load(model, kv_dtype, **settings)) == expected, settings


@KV_DTYPES
@pytest.mark.parametrize("shared_attention", ["always", "never"])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_answers_are_the_same_however_their_kv_came_about(
    model: PreparedModel, kv_dtype: str, shared_attention: str, kernels: str
) -> None:
    runner, config = load(
        model, kv_dtype, shared_attention=shared_attention, kernels=kernels, host_cache_bytes=100 * 8 * 256
    )
    assert runner.plan.num_host_blocks > 50
    expected = alone(runner, config)

    def core(num_blocks: int = 200, **changes: Any) -> EngineCore:
        info = msgspec.structs.replace(runner.info, num_blocks=num_blocks)
        return EngineCore(config.replace(**changes), info, runner, runner.identity)

    cold = core()
    assert run(cold, PROMPTS) == expected
    assert cold.stats().hit_tokens > 0
    assert run(cold, PROMPTS) == expected, "warm"
    assert run(core(max_num_batched_tokens=17), PROMPTS) == expected, "in chunks"
    forked = run(core(), PROMPTS, choices=2)
    assert forked == {f"{i} {choice}": expected[f"{i} 0"] for i in range(len(PROMPTS)) for choice in range(2)}
    tight = core(num_blocks=14)
    for _ in range(2):
        assert run(tight, PROMPTS) == expected, "swapped"
    assert tight.stats().preemptions > 0
    assert tight.stats().host.swapped_in > 0


def test_blocks_of_one_kv_dtype_are_not_found_under_another(model: PreparedModel) -> None:
    runners = [load(model, kv_dtype)[0] for kv_dtype in ("auto", "int8", "fp8")]
    assert len({runner.info.fingerprint for runner in runners}) == 1
    roots = [root_hash(runner.info.fingerprint, *runner.identity) for runner in runners]
    assert len({hash_block(root, b"s", TRUNK[:8]) for root in roots}) == 3


@KV_DTYPES
def test_what_is_not_finite_fails_the_request_and_not_the_engine(model: PreparedModel, kv_dtype: str) -> None:
    runner, config = load(model, kv_dtype)
    core = EngineCore(config, runner.info, runner, runner.identity)
    run(core, [TRUNK])
    runner._kv.fill_(POISON)  # all that is cached now reads as NaN
    params = SamplingParams(temperature=0.0, max_tokens=4)
    assert (
        core.add(AddRequest(request_id="a", prompt_ids=[*TRUNK, 1], params=params, scopes=[Scope(END, b"s")])) is None
    )
    (output,) = core.step()
    assert output.error is not None


@pytest.mark.slow
@KV_DTYPES
def test_two_ranks_say_what_one_says(model: PreparedModel, kv_dtype: str) -> None:
    expected = alone(*load(model, kv_dtype, kernels="reference"))
    runner, config = load(model, kv_dtype, kernels="reference", tensor_parallel=2)
    with closing(runner):
        assert alone(runner, config) == expected
        assert runner.info.kv_bytes_per_token == 2 * runner.plan.bytes_per_block // 8
