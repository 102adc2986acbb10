"""Two ranks over gloo (fp32, tiny random model) say what one says, whatever the scheduler does with their blocks.

One pair of ranks serves all tests; each test's core starts with an empty cache and as many blocks as it wants.
"""

import itertools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineDeadError, EngineError, ModelNotSupported, NotEnoughMemory
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, Scope
from engine.rank_messages import RankStep
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import BlockCopy, Transfers
from tests.kernels_under_test import ORACLE
from tests.tiny_model import make_tiny

TRUNK = [(5 * i + 3) % 380 for i in range(45)]
PROMPTS = [[*TRUNK[: 9 * (i % 6)], *((11 * i + 7 * j) % 380 for j in range(3 + i))] for i in range(12)]
MAX_TOKENS = 16
BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4
"""Of both ranks: tokens, K and V, layers, KV heads, head_dim, bytes of a float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path: Path = tmp_path_factory.mktemp("model")
    tiny = make_tiny(path / "tiny", "qwen2", tie_word_embeddings=False)
    return prepare(str(tiny), path / "state", "float32", lambda *_: None)


def make_config(model: PreparedModel, **settings: Any) -> EngineConfig:
    config = EngineConfig(
        model_dir=str(model.path),
        device="cpu",
        dtype="float32",
        block_size=8,
        num_blocks=400,
        threads=1,
        host_cache_bytes=40 * BLOCK_BYTES,
        check_kv=True,
        shared_attention="always",
    )
    return config.replace(**settings)


class Engine:
    """Cores of several settings over one runner, integrity checked after every step."""

    def __init__(self, model: PreparedModel, **settings: Any) -> None:
        self.config = make_config(model, **settings)
        self.runner = ModelRunner(model, self.config)

    def core(self, *, num_blocks: int = 400, num_host_blocks: int = 0, **settings: Any) -> EngineCore:
        info = msgspec.structs.replace(self.runner.info, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        return EngineCore(self.config.replace(**settings), info, self.runner)

    def ask(
        self, core: EngineCore, prompts: list[list[int]], *, num_choices: int = 1, **params: Any
    ) -> list[list[int]]:
        """The ids of each choice of each prompt, all asked at once."""
        params = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **params}
        answers: dict[str, list[int]] = {}
        for i, choice in itertools.product(range(len(prompts)), range(num_choices)):
            request_id = f"{i}.{choice}"
            answers[request_id] = []
            request = AddRequest(
                request_id=request_id,
                prompt_ids=prompts[i],
                params=SamplingParams(**params),
                scopes=[Scope(END, b"")],
                choice=choice,
            )
            assert core.add(request) is None
        while core.has_work:
            for output in core.step():
                assert output.error is None
                answers[output.request_id] += output.token_ids
            core.check_integrity()
        return list(answers.values())


@pytest.fixture(scope="module")
def one(model: PreparedModel) -> Engine:
    return Engine(model, **ORACLE)


@pytest.fixture(scope="module")
def two(model: PreparedModel) -> Iterator[Engine]:
    engine = Engine(model, tensor_parallel=2)
    yield engine
    engine.runner.close()
    assert followers() == []


@pytest.fixture(scope="module")
def alone(one: Engine) -> list[list[int]]:
    """What one rank answers to each prompt, in a core that shares nothing."""
    core = one.core(enable_prefix_caching=False)
    answers = [one.ask(core, [prompt])[0] for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


def followers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "engine.rank_follower" in p.cmdline()]


def test_each_rank_has_half_of_the_heads_and_of_the_memory(one: Engine, two: Engine) -> None:
    assert len(followers()) == 1
    assert isinstance(two.runner._decoder, Decoder)
    assert two.runner._kv.shape == (2, 2, 401, 1, 8, 16)
    assert two.runner.plan.kv_bytes * 2 == one.runner.plan.kv_bytes
    assert str(two.runner.plan).startswith("each of 2 ranks: weights ")
    assert two.runner.info == one.runner.info
    assert two.runner.info.num_host_blocks == 40


def test_prefix_hits_and_chunks_of_prompts(two: Engine, alone: list[list[int]]) -> None:
    core = two.core(max_num_batched_tokens=24, max_num_seqs=8)
    assert two.ask(core, PROMPTS) == alone
    cold = core.stats()
    assert cold.hit_tokens > 0
    assert cold.blocks_not_read > 0
    assert two.ask(core, PROMPTS) == alone
    assert core.stats().hit_tokens > 2 * cold.hit_tokens


def test_choices_that_fork_from_one_prompt(one: Engine, two: Engine) -> None:
    """A prompt that ends within a block: each choice copies it before it writes."""
    drawn = {"num_choices": 4, "temperature": 1.0, "seed": 11}
    expected = one.ask(one.core(), [TRUNK[:20]], **drawn)
    assert len({tuple(answer) for answer in expected}) == 4
    core = two.core()
    copies = []
    execute = core._runner.execute

    class Recording:
        def execute(self, batch):
            copies.extend(batch.transfers.copies)
            return execute(batch)

    core._runner = Recording()
    assert two.ask(core, [TRUNK[:20]], **drawn) == expected
    assert len(copies) == 3


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_preempted_requests_are_computed_again_or_swapped_in(
    two: Engine, alone: list[list[int]], num_host_blocks: int
) -> None:
    core = two.core(num_blocks=14, num_host_blocks=num_host_blocks, max_num_seqs=6)
    assert two.ask(core, PROMPTS) == alone
    stats = core.stats()
    assert stats.preemptions > 0
    assert (stats.host.swapped_in > 0) == (num_host_blocks > 0)


def test_logprobs_of_prompt_and_answer(one: Engine, two: Engine) -> None:
    def logprobs(engine: Engine) -> list[float]:
        core = engine.core()
        params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, prompt_logprobs=1)
        request = AddRequest(request_id="a", prompt_ids=TRUNK[:12], params=params, scopes=[Scope(END, b"")])
        assert core.add(request) is None
        entries = []
        while core.has_work:
            for output in core.step():
                entries += [e for e in [*(output.prompt_logprobs or ()), *(output.logprobs or ())] if e is not None]
        return [entry.logprob for entry in entries]

    assert logprobs(two) == pytest.approx(logprobs(one), abs=1e-4)


def test_a_step_that_fails_before_it_is_told_fails_its_requests_only(
    two: Engine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = two.core()
    with monkeypatch.context() as patch:
        patch.setattr("engine.model_runner.BatchTensors.build", lambda *_, **__: 1 / 0)
        params = SamplingParams(max_tokens=1)
        request = AddRequest(request_id="a", prompt_ids=TRUNK, params=params, scopes=[Scope(END, b"")])
        assert core.add(request) is None
        [output] = core.step()
        assert output.error is not None
    assert two.ask(core, PROMPTS[:1]) == alone[:1]


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"tensor_parallel": 0}, EngineError, "tensor_parallel must be at least 1, got 0"),
        ({"tensor_parallel": 4}, ModelNotSupported, "it has 2 KV heads, which is no multiple of 4"),
        ({"tensor_parallel": 2, "deterministic": True}, EngineError, "tensor parallel excludes it"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_no_process(
    model: PreparedModel, settings: dict[str, Any], error: type[EngineError], sentence: str
) -> None:
    before = followers()
    with pytest.raises(error, match=sentence):
        ModelRunner(model, make_config(model, **settings))
    assert followers() == before


@pytest.mark.slow
def test_a_pool_that_does_not_fit_into_the_least_of_the_ranks(model: PreparedModel) -> None:
    before = followers()
    with pytest.raises(NotEnoughMemory, match="a KV cache of 1000000000 blocks"):
        ModelRunner(model, make_config(model, tensor_parallel=2, num_blocks=10**9))
    assert followers() == before


@pytest.mark.slow
def test_a_step_that_one_rank_cannot_compute_is_the_end_of_all(
    model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(model, make_config(model, tensor_parallel=2))
    core = EngineCore(make_config(model), runner.info, runner)
    params = SamplingParams(max_tokens=1)
    assert core.add(AddRequest(request_id="a", prompt_ids=TRUNK, params=params, scopes=[Scope(END, b"")])) is None
    make_step = RankStep.of
    foreign = Transfers(copies=(BlockCopy(1, 10**6),))
    monkeypatch.setattr(RankStep, "of", lambda _, tensors: make_step(foreign, tensors))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 ended with exit code 1: IndexError: "):
            core.step()
    assert followers_of(runner) == []


@pytest.mark.slow
def test_a_step_that_is_interrupted_is_the_last(model: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in an offline run: the other rank waits for a sum that does not come."""
    runner = ModelRunner(model, make_config(model, tensor_parallel=2))
    core = EngineCore(make_config(model), runner.info, runner)
    params = SamplingParams(max_tokens=1)
    for _ in range(2):
        assert core.add(AddRequest(request_id="a", prompt_ids=TRUNK, params=params, scopes=[Scope(END, b"")])) is None
        error = EngineDeadError if followers_of(runner) == [] else KeyboardInterrupt
        monkeypatch.setattr(runner._decoder, "forward", interrupt)
        with pytest.raises(error):
            core.step()
    assert followers_of(runner) == []


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def followers_of(runner: ModelRunner) -> list[psutil.Process]:
    assert runner._ranks is not None
    pids = {follower.process.pid for follower in runner._ranks._followers}
    return [process for process in followers() if process.pid in pids]


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_rank_that_is_stopped_is_the_end_of_all(model: PreparedModel, is_idle: bool) -> None:
    """It lives, its connections hold, and it does nothing: the first rank waits for a sum, or for a request."""
    runner = ModelRunner(model, make_config(model, tensor_parallel=2))
    told: queue.Queue[EngineDeadError] = queue.Queue()
    runner.listen(told.put)
    [rank] = followers_of(runner)
    rank.suspend()
    hung = "rank 1 of 2 said nothing for 10 s and was killed"
    if is_idle:
        assert str(told.get()) == hung
    core = EngineCore(make_config(model), runner.info, runner)
    request = AddRequest(request_id="a", prompt_ids=TRUNK, params=SamplingParams(), scopes=[Scope(END, b"")])
    assert core.add(request) is None
    with pytest.raises(EngineDeadError, match=f"^{hung}$"):
        core.step()
    runner.close()
    assert not rank.is_running()


def test_a_rank_that_is_killed_while_nothing_is_computed_is_noticed(model: PreparedModel) -> None:
    runner = ModelRunner(model, make_config(model, tensor_parallel=2))
    told: queue.Queue[EngineDeadError] = queue.Queue()
    runner.listen(told.put)
    followers_of(runner)[0].kill()
    assert str(told.get()) == "rank 1 of 2 was killed by SIGKILL"
    core = EngineCore(make_config(model), runner.info, runner)
    request = AddRequest(request_id="a", prompt_ids=TRUNK, params=SamplingParams(), scopes=[Scope(END, b"")])
    assert core.add(request) is None
    with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 was killed by SIGKILL$"):
        core.step()
    runner.close()
