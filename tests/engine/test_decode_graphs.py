"""Decode steps of the runner over the memory of its graphs; what kernels compute is left out here (see
tests/interpreted/engine/test_decode_graphs.py): launches are written down instead of made."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.decode_graphs import GraphStep, find_row_counts
from engine.model_runner import ModelRunner
from engine.models import choose
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import BlockCopy, ScheduledBatch, Transfers
from engine.sequence import Sequence
from engine.warm_up import compile_kernels
from tests.device_guard import DeviceGuard, Waits
from tests.engine.runner_driver import RunnerDriver
from tests.graph_double import RecordedGraphs
from tests.interpreted.child import need_triton
from tests.tiny_model import make_tiny

need_triton()

from kernels.triton.backend import TritonKernels  # noqa: E402
from tests.kernels.ahead_of_time import Launched, recorded_launches, source_of  # noqa: E402

CPU = torch.device("cpu")
ON_HOST = torch.ones(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path: Path = tmp_path_factory.mktemp("model")
    return prepare(str(make_tiny(path / "tiny", tie_word_embeddings=False)), path / "state", "float32", lambda *_: None)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """Of kernels that would be compiled for a GPU, from a runner on this machine."""
    monkeypatch.setattr(choose, "make_triton_kernels", lambda device, num_heads: TritonKernels(CPU, num_heads))
    with recorded_launches() as launched:
        yield launched


def start(model: PreparedModel, capture: RecordedGraphs, **changes: Any) -> RunnerDriver:
    settings = {"device": "cpu", "dtype": "float32", "num_blocks": 400, "threads": 1, "kernels": "triton", **changes}
    runner = ModelRunner(model, EngineConfig(model_dir=str(model.path), **settings), capture)
    assert runner._graphs is not None
    with torch.inference_mode():
        runner._graphs._drawn._device.fill_(1)  # nobody draws: token 1, and it was drawn
    return RunnerDriver(runner)


def running(driver: RunnerDriver, num_tokens: int, **params: Any) -> Sequence:
    """A sequence all but the last of whose tokens are computed."""
    sequence = driver.sequence([3] * num_tokens, SamplingParams(**{"temperature": 0.7, "max_tokens": None, **params}))
    sequence.num_computed_tokens = num_tokens - 1
    return sequence


def device_memory(runner: ModelRunner) -> list[torch.Tensor]:
    """Weights, cache, and all that graphs read and write."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def search(value: Any) -> None:
        if id(value) in seen or isinstance(value, (str, int, float, type(None), type)):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                search(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                search(item)
        elif type(value).__module__.split(".")[0] in ("engine", "kernels"):
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            for name in names:
                if name != "_sides":  # those of the host
                    search(getattr(value, name))

    search(runner._decoder)
    search(runner._kv)
    search(runner._graphs)
    return found


def test_powers_of_two_and_the_most() -> None:
    assert [find_row_counts(n) for n in (1, 2, 3, 8, 64, 100)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 16, 32, 64],
        [1, 2, 4, 8, 16, 32, 64, 100],
    ]


def test_nothing_waits_for_the_device_before_the_ids_are_there(model: PreparedModel, launches: list[Launched]) -> None:
    driver = start(model, capture := RecordedGraphs(), max_num_seqs=4)
    rows = [running(driver, num) for num in (5, 40, 33)]
    driver.batch([(row, 1) for row in rows[:2]])
    rows[2].block_table = rows[1].block_table[:2]
    launches.clear()
    with DeviceGuard(device_memory(driver.runner)):
        driver.execute([(row, 1) for row in rows])
        driver.execute([(row, 1) for row in rows[:2]])
    assert len(capture.replayed) == 2
    assert {"attend_nodes", "attend_tails", "draw_tokens"} < {launched.function.__name__ for launched in launches}
    assert [row.output_ids for row in rows] == [[1, 1], [1, 1], [1]]


OWN_NUMBERS = {"x", "delta", "out", "summed", "gate", "up", "heads", "cosines", "sines", "q", "weight"}
"""Of a kernel: what it reads and writes between others, where a graph's own memory is."""


def test_two_hundred_steps_read_and_write_where_their_graphs_do(model: PreparedModel, launches: list[Launched]) -> None:
    """Rows come and go; plans, cache, parts, logits and drawn ids stay where they are, and shapes what they are."""
    driver = start(model, capture := RecordedGraphs(), max_num_seqs=8)
    rng = random.Random(1)
    rows = [running(driver, rng.randrange(5, 60)) for _ in range(8)]
    places: dict[tuple[int, int], set[tuple[object, ...]]] = {}
    for _ in range(200):
        launches.clear()
        chosen = rng.sample(rows, rng.randint(1, 8))
        for row in chosen:
            if row.num_tokens > 400:
                row.num_computed_tokens, row.token_ids = 3, row.token_ids[:4]
        driver.execute([(row, 1) for row in chosen])
        for number, launched in enumerate(launches):
            tensors = {name: value for name, value in launched.arguments.items() if isinstance(value, torch.Tensor)}
            fixed = tuple((name, x.data_ptr(), x.shape) for name, x in tensors.items() if name not in OWN_NUMBERS)
            places.setdefault((capture.replayed[-1], number), set()).add(fixed)
    assert len(capture.replayed) == 200
    assert len({graph for graph, _ in places}) == 4
    assert {len(found) for found in places.values()} == {1}


class AheadDriver:
    """Steps that may come again, and how many graphs each has launched."""

    def __init__(self, model: PreparedModel, **settings: Any) -> None:
        self.capture = RecordedGraphs()
        self.driver = start(model, self.capture, max_num_seqs=4, **settings)
        self.rows = [running(self.driver, num) for num in (5, 40, 33)]
        self.driver.batch([(row, 9) for row in self.rows])  # room for what comes

    def execute(self, *rows: int, may_come_again: bool = True) -> int:
        """A step of these rows; how many graphs it launched."""
        before = len(self.capture.replayed)
        chosen = [self.rows[row] for row in rows]
        batch = replace(self.driver.batch([(row, 1) for row in chosen]), may_come_again=may_come_again)
        tokens = self.driver.runner.execute(batch).tokens
        for scheduled, token in zip(batch.sequences, tokens, strict=True):
            scheduled.sequence.num_computed_tokens += 1
            scheduled.sequence.token_ids.append(token.token_id)
        return len(self.capture.replayed) - before

    def written(self, num_rows: int) -> dict[str, list[int]]:
        """What the last step launched for so many rows reads."""
        graphs = self.driver.runner._graphs
        assert graphs is not None
        [step] = [bucket.step for bucket in graphs._buckets if bucket.num_rows == num_rows]
        plan: Any = step.plan(step.forms[0])
        return {"ids": step.token_ids.tolist(), "positions": step.positions.tolist(), "slots": plan.slots.tolist()}


@pytest.mark.usefixtures("launches")
def test_the_step_behind_is_launched_before_the_ids_are_known(model: PreparedModel) -> None:
    made = AheadDriver(model)
    assert [made.execute(0, 1, 2) for _ in range(3)] == [2, 1, 1]
    # blocks 1, 2 to 4 and 5 to 7 of 16 tokens; three tokens are drawn, and the fourth step is on its way
    assert made.written(4) == {
        "ids": [1, 1, 1, 0],
        "positions": [7, 42, 35, 0],
        "slots": [1 * 16 + 7, 4 * 16 + 10, 7 * 16 + 3, -1],
    }
    assert [row.output_ids for row in made.rows] == [[1, 1, 1]] * 3


@pytest.mark.usefixtures("launches")
def test_rows_that_are_left_take_what_was_launched_for_all(model: PreparedModel) -> None:
    """And go on with a step of their own."""
    made = AheadDriver(model)
    assert [made.execute(0, 1, 2), made.execute(2, 0), made.execute(2, 0), made.execute(0)] == [2, 0, 2, 0]
    assert [row.output_ids for row in made.rows] == [[1] * 4, [1], [1] * 3]


@pytest.mark.usefixtures("launches")
def test_what_was_launched_ahead_is_left_where_a_row_joins(model: PreparedModel) -> None:
    made = AheadDriver(model)
    assert [made.execute(0, 1), made.execute(0, 1, 2), made.execute(0, 1, 2)] == [2, 2, 1]


@pytest.mark.usefixtures("launches")
def test_what_was_launched_ahead_is_left_where_a_row_is_elsewhere_or_blocks_are_moved(model: PreparedModel) -> None:
    made = AheadDriver(model)
    assert made.execute(0) == 2
    made.rows[0].block_table[0] = 99
    assert made.execute(0) == 2
    batch = replace(made.driver.batch([(made.rows[0], 1)]), transfers=Transfers(copies=(BlockCopy(7, 200),)))
    before = len(made.capture.replayed)
    made.driver.runner.execute(batch)
    assert len(made.capture.replayed) == before + 1


@pytest.mark.usefixtures("launches")
def test_nothing_is_launched_ahead_where_it_could_not_be_used(model: PreparedModel) -> None:
    """Where the scheduler has others to compute; of a row without a slot for the next token; of one whose logits are
    looked at."""
    made = AheadDriver(model)
    assert made.execute(0, may_come_again=False) == 1
    made.rows[0].block_table = [1]
    made.rows[0].token_ids += [1] * (16 - made.rows[0].num_tokens)
    made.rows[0].num_computed_tokens = 15
    assert made.execute(0) == 1
    made.rows[1] = running(made.driver, 20, logprobs=0)
    made.rows[2] = running(made.driver, 20, presence_penalty=1.0)
    assert [made.execute(1), made.execute(2)] == [1, 1]


@pytest.mark.usefixtures("launches")
def test_a_row_that_is_sure_to_end_writes_nothing_ahead(model: PreparedModel) -> None:
    made = AheadDriver(model)
    made.rows[1].max_output_tokens = 1
    made.execute(0, 1)
    assert made.written(2) == {"ids": [1, 1], "positions": [5, 39], "slots": [1 * 16 + 5, -1]}
    assert made.execute(0) == 0


@pytest.mark.usefixtures("launches")
def test_nothing_waits_for_the_device_ahead(model: PreparedModel) -> None:
    made = AheadDriver(model)
    with DeviceGuard(device_memory(made.driver.runner)):
        assert [made.execute(0, 1, 2) for _ in range(2)] == [2, 1]


def form_of(launched: Launched) -> str:
    """What a kernel is compiled for."""
    source = source_of(launched)
    form = (sorted(source.constants.items()), sorted(source.attrs.items()), source.signature, launched.options)
    return f"{launched.function.__name__} {form}"


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_nothing_is_compiled_while_requests_wait(
    model: PreparedModel, launches: list[Launched], enforce_eager: bool
) -> None:
    """Whatever steps come: prompts alone and beside rows, rows with nodes of all sizes and without, block copies."""
    settings = {"device": "cpu", "dtype": "float32", "num_blocks": 400, "threads": 1, "kernels": "triton"}
    config = EngineConfig(model_dir=str(model.path), max_num_seqs=40, enforce_eager=enforce_eager, **settings)
    runner = ModelRunner(model, config, RecordedGraphs())
    with torch.inference_mode():
        compile_kernels(runner._decoder, runner._blocks, choose.choose_draw(runner._decoder), 40)
    compiled = {form_of(launched) for launched in launches}
    launches.clear()
    driver = RunnerDriver(runner)
    first = running(driver, 40)
    driver.batch([(first, 1)])
    rows = [first, *(running(driver, 40) for _ in range(39))]
    for row in rows[1:]:
        row.block_table = first.block_table[:2]
    prompt = driver.sequence([5] * 50)
    for num_rows in (1, 2, 3, 8, 9, 17, 40):
        for num_new in (0, 1, 7):
            extend = [(prompt, num_new)] if num_new else []
            runner.execute(driver.batch([*((row, 1) for row in rows[:num_rows]), *extend]))
            runner.execute(driver.batch([*((row, 1) for row in rows[:num_rows]), *extend], with_nodes=False))
    runner.execute(driver.batch([(prompt, 50)]))
    copies = Transfers(copies=(BlockCopy(3, 200), BlockCopy(200, 5)))
    runner.execute(ScheduledBatch((), transfers=copies))
    runner.execute(ScheduledBatch((), transfers=Transfers(copies=(BlockCopy(3, 200), BlockCopy(4, 201)))))
    kernels = {launched.function.__name__ for launched in launches}
    assert kernels >= {"attend_nodes", "attend_tails", "attend_extends", "merge_parts", "draw_tokens", "move_blocks"}
    assert {form_of(launched) for launched in launches} <= compiled


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: bool(x[0]),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: (x + 1).tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: ON_HOST.copy_(x),
        lambda x: x + ON_HOST,
    ],
)
def test_what_waits_is_found(look: Any) -> None:
    there = torch.ones(2)
    with DeviceGuard([there]), pytest.raises(Waits):
        look(there)


@pytest.mark.usefixtures("launches")
def test_a_draw_that_is_looked_at_within_the_step_is_found(
    model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start(model, RecordedGraphs(), max_num_seqs=2)
    monkeypatch.setattr(GraphStep, "wait", lambda self: self._drawn.of(1).tolist())
    row = running(driver, 5)
    with DeviceGuard(device_memory(driver.runner)), pytest.raises(Waits):
        driver.execute([(row, 1)])
