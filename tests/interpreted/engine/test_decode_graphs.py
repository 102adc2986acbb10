"""An engine whose decode steps are replayed says what one says that launches them one by one: over interpreted kernels,
with a double in place of the graphs that launches over the same memory again."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.prepared import PreparedModel
from tests.engine import test_core_with_model as core_with_model
from tests.engine.test_core_with_model import Engine
from tests.graph_double import RecordedGraphs, sizes_in_order_of_capture
from tests.interpreted.engine.test_engine import PROMPTS, prepared

Run = tuple[int, bool]
"""Rows that a graph is for, and whether there are nodes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepared(tmp_path_factory.mktemp("model"))


class GraphEngine:
    """Beside the engine's answers, what was replayed."""

    def __init__(self, model: PreparedModel, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.capture = RecordedGraphs()
        with monkeypatch.context() as patched:
            patched.setattr(core_with_model, "ModelRunner", lambda *args: ModelRunner(*args, capture=self.capture))
            self.engine = Engine(model, {"kernels": "triton", "max_num_seqs": 6, **settings})
        assert self.engine.runner._graphs is not None
        self.captured = sizes_in_order_of_capture(self.engine.runner._graphs)
        assert len(self.captured) == self.capture.num_captured

    @property
    def replayed(self) -> list[Run]:
        return [self.captured[number] for number in self.capture.replayed]


def ask_all(engine: Engine) -> dict[str, list[int]]:
    """All prompts at once, answers of three to eight tokens: one after the other leaves. Two steps later one joins that
    goes on from the middle of a block of the others. Greedy, by seeds and filters, with a penalty."""
    for i, prompt_ids in enumerate(PROMPTS):
        drawn = {"temperature": 0.9, "seed": i} if i % 2 else {}
        drawn |= {"top_p": 0.95, "top_k": 40} if i == 1 else {}
        engine.add(str(i), prompt_ids, max_tokens=3 + i, **drawn)
    for _ in range(5):
        engine.step()
    engine.add("fork", PROMPTS[1], max_tokens=2, temperature=0.9, seed=9)
    engine.run()
    engine.add("penalised", PROMPTS[4], max_tokens=4, repetition_penalty=1.5)
    return engine.run()


@pytest.fixture(scope="module")
def expected(model: PreparedModel) -> dict[str, list[int]]:
    answers = ask_all(Engine(model, {"kernels": "reference"}))
    assert len({tuple(answer) for answer in answers.values()}) == len(PROMPTS) + 2
    return answers


def test_prefix_hits_forks_joins_and_leaves(
    model: PreparedModel, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of five go with the graph for six, where one has left with what was launched for all; steps with prompts go
    without."""
    made = GraphEngine(model, monkeypatch)
    assert made.captured == [(6, True), (6, False), (4, True), (4, False), (2, True), (2, False), (1, False)]
    assert ask_all(made.engine) == expected
    assert made.engine.core.stats().hit_tokens > 0
    assert made.replayed == [*[(6, True)] * 5, (2, True), (2, True), *[(1, False)] * 6]


@pytest.mark.slow
def test_a_small_pool(model: PreparedModel, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is preempted computes again, and joins the others' graph."""
    made = GraphEngine(model, monkeypatch, num_blocks=8, max_num_seqs=4, max_num_batched_tokens=16)
    assert ask_all(made.engine) == expected
    assert made.engine.core.stats().preemptions > 0
    assert {num_rows for num_rows, _ in made.replayed} >= {1, 2, 4}


def test_log_probabilities_are_those_of_the_step(model: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where one row's logits are changed before the draw, they are the raw ones all the same."""

    def ask(engine: Engine) -> list[list[float]]:
        engine.add("plain", PROMPTS[4], max_tokens=3, logprobs=1)
        engine.add("changed", PROMPTS[4], max_tokens=3, logprobs=1, repetition_penalty=1.5)
        found: dict[str, list[float]] = {"plain": [], "changed": []}
        while engine.core.has_work:
            for output in engine.core.step():
                found[output.request_id] += [entry.logprob for entry in output.logprobs or ()]
        return list(found.values())

    made = GraphEngine(model, monkeypatch, max_num_seqs=2)
    for values, expected in zip(ask(made.engine), ask(Engine(model, {"kernels": "reference"})), strict=True):
        assert values == pytest.approx(expected, abs=1e-4)
    assert set(made.replayed) == {(2, False), (1, False)}


def test_without_graphs(model: PreparedModel) -> None:
    capture = RecordedGraphs()
    config = EngineConfig(
        model_dir=str(model.path), device="cpu", dtype="float32", num_blocks=8, kernels="triton", enforce_eager=True
    )
    assert ModelRunner(model, config, capture)._graphs is None
    assert capture.num_captured == 0
