"""The core over a real (tiny, random, float32) model: an answer does not depend on who else is served, or when."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.packed_decoder import PackedDecoder
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, PinTrunk, Scope
from engine.sampling_params import SamplingParams
from tests import kernels_under_test
from tests.kernels.libraries import library
from tests.tiny_model import make_tiny

TRUNK = [(5 * i + 3) % 380 for i in range(45)]
PROMPTS = [[*TRUNK[: 9 * (i % 6)], *((11 * i + 7 * j) % 380 for j in range(3 + i))] for i in range(20)]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path: Path = tmp_path_factory.mktemp("model")
    return prepare(str(make_tiny(path / "tiny", tie_word_embeddings=False)), path / "state", "float32", lambda *_: None)


@dataclass
class Engine:
    """Blocks of 8 tokens, nodes wherever blocks are shared, shadow KV on, integrity checked after every step."""

    model: PreparedModel
    settings: dict[str, Any]
    core: EngineCore = field(init=False)
    runner: ModelRunner = field(init=False)
    answers: dict[str, list[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        settings = {"dtype": "float32", "device": "cpu", "block_size": 8, "num_blocks": 400, "threads": 1}
        settings |= {"check_kv": True, "shared_attention": "always"}
        config = EngineConfig(model_dir=str(self.model.path), **{**settings, **self.settings})
        self.runner = ModelRunner(self.model, config)
        self.core = EngineCore(config, self.runner.info, self.runner, runs_ahead=self.runner.runs_ahead)

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        scopes: Sequence[Scope] = (Scope(END, b""),),
        choice: int = 0,
        **params: Any,
    ) -> None:
        request = AddRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0, **params}),
            scopes=list(scopes),
            choice=choice,
        )
        assert self.core.add(request) is None
        self.answers[request_id] = []

    def step(self) -> None:
        for output in self.core.step():
            assert output.error is None
            self.answers[output.request_id] += output.token_ids
        self.core.check_integrity()

    def run(self) -> dict[str, list[int]]:
        while self.core.has_work:
            self.step()
        return self.answers

    def ask(self, prompt_ids: list[int], scopes: Sequence[Scope] = (Scope(END, b""),), **params: Any) -> list[int]:
        self.add("ask", prompt_ids, scopes, **params)
        return self.run()["ask"]


def test_these_engines_compute_in_c_plus_plus_with_shadow_kv_on(model):
    kernels_under_test.need_auto("the C++ decoder")
    library(torch.float32, None)
    engine = Engine(model, {})
    assert isinstance(engine.runner._decoder, PackedDecoder)
    assert engine.core._shadow is not None


def ask_all(model: PreparedModel, **settings: Any) -> tuple[list[list[int]], EngineCore]:
    engine = Engine(model, settings)
    for i, prompt_ids in enumerate(PROMPTS):
        engine.add(str(i), prompt_ids)
    return list(engine.run().values()), engine.core


@pytest.fixture(scope="module")
def alone(model: PreparedModel) -> list[list[int]]:
    """Each prompt in an engine that has seen nothing and shares nothing."""
    engine = Engine(model, {"enable_prefix_caching": False, **kernels_under_test.ORACLE})
    answers = [engine.ask(prompt_ids) for prompt_ids in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == 20
    return answers


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [512, 70])
def test_twenty_together_answer_as_alone(model, alone, enable_prefix_caching, max_num_batched_tokens):
    answers, core = ask_all(
        model, enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=max_num_batched_tokens
    )
    assert answers == alone
    assert (core.stats().hit_tokens > 0) == enable_prefix_caching
    assert (core.stats().blocks_not_read > 0) == enable_prefix_caching


def test_b01_warm_answers_are_those_of_a_cold_cache(model, alone):
    engine = Engine(model, {"num_blocks": 60})
    for i, prompt_ids in enumerate(PROMPTS):
        engine.ask([*TRUNK[: i + 20], i], max_tokens=i % 5 + 1, stop_token_ids=(alone[i][0],))
        assert engine.ask(prompt_ids) == alone[i]
        assert engine.ask(prompt_ids) == alone[i]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_b02_an_abort_after_any_chunk_poisons_nothing(model, alone, num_steps):
    engine = Engine(model, {"num_blocks": 40, "max_num_seqs": 16, "max_num_batched_tokens": 16})
    engine.add("cut", PROMPTS[17])
    for _ in range(num_steps):
        engine.step()
    engine.core.abort(["cut"])
    assert engine.ask(PROMPTS[17]) == alone[17]
    assert engine.ask(PROMPTS[16]) == alone[16]
    assert engine.ask(PROMPTS[17]) == alone[17]


@pytest.mark.parametrize("is_parent_running", [True, False])
def test_b08_a_child_writes_into_its_own_copy(model, is_parent_running):
    """20 tokens in common, which end in the third block: parent and child go on differently from there."""
    parent, child = TRUNK[:20], [*TRUNK[:20], 7, 8]
    expected = {name: Engine(model, {}).ask(prompt_ids) for name, prompt_ids in (("p", parent), ("c", child))}
    engine = Engine(model, {})
    engine.add("p", parent)
    engine.step()
    [sequence] = engine.core.scheduler.running
    table = list(sequence.block_table)
    if not is_parent_running:
        engine.run()
    # every layer's K and V of the 20 tokens
    num_filled = 4 if is_parent_running else 8

    def parents_kv() -> bytes:
        last = engine.runner._kv[:, :, table[2], :, :num_filled]
        return engine.runner._kv[:, :, table[:2]].numpy().tobytes() + last.contiguous().numpy().tobytes()

    before = parents_kv()
    engine.add("c", child)
    for step in range(5):
        engine.step()
        [row] = [s for s in engine.core.scheduler.running if s.request_id == "c"]
        if step == 0:
            assert row.num_cached_tokens == 20
        assert row.block_table[:2] == table[:2]
        assert row.block_table[2] != table[2]
        assert parents_kv() == before
    assert engine.run() == {"p": expected["p"], "c": expected["c"]}


def test_a_pinned_trunk_serves_every_tenant_as_a_cold_cache_would(model, alone):
    engine = Engine(model, {"num_blocks": 60, "max_num_seqs": 16, "max_num_batched_tokens": 16})
    assert engine.core.pin(PinTrunk("t", TRUNK[:36], [Scope(END, b"assistant")])) is None
    engine.run()
    assert [str(state.state) for state in engine.core.take_trunk_news()] == ["pinned"]
    for i in (4, 10, 16):  # prompts that begin with 36 tokens of the trunk
        for tenant in (b"a", b"b"):
            scopes = [Scope(36, b"assistant"), Scope(END, tenant)]
            assert engine.ask(PROMPTS[i], scopes) == alone[i]
    assert engine.core.stats().hit_tokens == engine.core.stats().query_tokens - 2 * sum(3 + i for i in (4, 10, 16))


@pytest.mark.parametrize("num_blocks", [14, 18, 24])
def test_b09_preempted_requests_answer_as_alone(model, alone, num_blocks):
    answers, core = ask_all(model, num_blocks=num_blocks, max_num_seqs=6)
    assert answers == alone
    assert core.stats().preemptions > 0


HOST_BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4
"""Of the tiny model: tokens, K and V, layers, KV heads, head_dim, bytes of a float32."""


@pytest.mark.parametrize("num_blocks", [14, 18, 24])
@pytest.mark.parametrize("num_host_blocks", [5, 100])
def test_b09_swapped_requests_answer_as_alone(model, alone, num_blocks, num_host_blocks):
    host_cache_bytes = num_host_blocks * HOST_BLOCK_BYTES
    answers, core = ask_all(model, num_blocks=num_blocks, max_num_seqs=6, host_cache_bytes=host_cache_bytes)
    assert answers == alone
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.host.total == num_host_blocks
    assert stats.host.swapped_in > 0


def test_prompts_that_were_swapped_out_answer_as_alone(model, alone):
    engine = Engine(model, {"num_blocks": 14, "host_cache_bytes": 200 * HOST_BLOCK_BYTES})
    for _ in range(3):
        for prompt_ids, answer in zip(PROMPTS, alone, strict=True):
            assert engine.ask(prompt_ids) == answer
    assert engine.core.stats().host.swapped_in > 30


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("is_step_over", [True, False])
def test_an_abort_at_any_point_of_a_swap_poisons_nothing(model, alone, num_steps, is_step_over):
    """A prompt comes back from the host while what was there goes out, in a pool that holds one of both."""
    settings = {"num_blocks": 14, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = Engine(model, {**settings, "host_cache_bytes": 30 * HOST_BLOCK_BYTES})
    assert engine.ask(PROMPTS[17]) == alone[17]
    filler = [(13 * i + 1) % 380 for i in range(80)]
    answer = engine.ask(filler)
    engine.add("cut", PROMPTS[17])
    for _ in range(num_steps):
        engine.step()
    scheduler = engine.core.scheduler
    if not is_step_over:
        batch = scheduler.schedule()
        assert num_steps > 0 or (batch.transfers.swap_ins and batch.transfers.swap_outs)
        engine.core._shadow.execute(batch)
        result = engine.runner.execute(batch)
        engine.core.abort(["cut"])
        scheduler.check_integrity()
        scheduler.update(batch, result)
    engine.core.abort(["cut"])
    engine.core.check_integrity()
    for _ in range(2):
        assert engine.ask(PROMPTS[17]) == alone[17]
        assert engine.ask(filler) == answer
    assert engine.core.stats().host.swapped_in > 8


def test_b28_a_seed_does_not_depend_on_its_neighbours(model):
    seeded = {"temperature": 1.0, "seed": 7}
    alone = Engine(model, {}).ask(PROMPTS[5], **seeded)
    assert Engine(model, {}).ask(PROMPTS[5], temperature=1.0, seed=8) != alone
    for first_steps, num_blocks in ((0, 400), (5, 400), (0, 18)):
        engine = Engine(model, {"num_blocks": num_blocks, "max_num_seqs": 8})
        for i in range(7):
            engine.add(f"unseeded {i}", PROMPTS[i], temperature=1.0)
        for _ in range(first_steps):
            engine.step()
        engine.add("seeded", PROMPTS[5], **seeded)
        assert engine.run()["seeded"] == alone
        assert (engine.core.stats().preemptions > 0) == (num_blocks == 18)
        assert engine.ask(PROMPTS[5], **seeded) == alone  # now from the cache
