"""Steps that go on from the last one draw what steps made anew would draw."""

import pytest
import torch

from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence
from tests.engine.runner_driver import RunnerDriver
from tests.tiny_model import make_tiny

PROMPT = [(5 * i + 3) % 380 for i in range(70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path = tmp_path_factory.mktemp("model")
    return prepare(str(make_tiny(path / "tiny")), path / "state", "float32", lambda *_: None)


@pytest.fixture
def driver(model: PreparedModel) -> RunnerDriver:
    config = EngineConfig(model_dir=str(model.path), device="cpu", dtype="float32", num_blocks=200, threads=1)
    return RunnerDriver(ModelRunner(model, config))


def started(driver: RunnerDriver) -> list[Sequence]:
    """Four rows; three of them share four blocks, and their own parts end at other places of a block."""
    rows = [driver.sequence([*PROMPT[:64], *range(own, 2 + 3 * own)]) for own in range(1, 4)]
    driver.execute([(rows[0], rows[0].num_tokens)])
    for row in rows[1:]:
        driver.share(rows[0], row, 4)
        driver.execute([(row, row.num_uncomputed_tokens)])
    alone = driver.sequence(PROMPT[30:49])
    driver.execute([(alone, 19)])
    return [*rows, alone]


def step(driver: RunnerDriver, rows: list[Sequence], batch: ScheduledBatch) -> torch.Tensor:
    """The logits; the largest one of each row is drawn."""
    driver.batch([(row, 1) for row in rows])  # gives them blocks
    logits = driver.runner.logits(batch)
    for row, token_id in zip(rows, logits.argmax(-1).tolist(), strict=True):
        row.num_computed_tokens += 1
        row.token_ids.append(token_id)
    return logits


def steady_batch(driver: RunnerDriver, rows: list[Sequence]) -> ScheduledBatch:
    nodes = driver.batch([(row, 1) for row in rows]).nodes
    assert [len(node.rows) for node in nodes] == [3]
    return ScheduledBatch(tuple(ScheduledSequence(row, 1, True) for row in rows), len(rows), nodes=nodes)


def test_rows_that_stay_the_same_go_on_in_place(driver: RunnerDriver, model: PreparedModel) -> None:
    """Over block boundaries, and further than the room that a row's table had at first."""
    rows, expected_rows = started(driver), started(driver)
    batch, expected_batch = steady_batch(driver, rows), steady_batch(driver, expected_rows)
    went_on = 0
    for _ in range(150):
        last = driver.runner._steady
        logits = step(driver, rows, batch)
        went_on += driver.runner._steady is last
        steady = driver.runner._steady
        # other tuples of the same rows: made anew
        anew = ScheduledBatch(tuple(list(expected_batch.sequences)), len(rows), nodes=expected_batch.nodes)
        assert torch.equal(step(driver, expected_rows, anew), logits)
        driver.runner._steady = steady
    assert 140 < went_on < 150


def test_rows_that_went_another_way_are_read_anew(driver: RunnerDriver) -> None:
    """More than a token further, set back, or with other nodes."""
    rows = started(driver)
    batch = steady_batch(driver, rows)
    step(driver, rows, batch)
    steady = driver.runner._steady
    assert steady is not None
    assert not steady.try_advance(ScheduledBatch(batch.sequences, len(rows), nodes=()))
    assert steady.try_advance(batch)
    rows[1].num_computed_tokens -= 2
    assert not steady.try_advance(batch)
    rows[1].num_computed_tokens += 4
    rows[1].token_ids += [1, 2]
    assert not steady.try_advance(batch)
