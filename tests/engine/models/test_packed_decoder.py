"""The C++ decoder against torch's operators, layer by layer: several families, decode rows and prompts, nodes."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.batch_tensors import BatchTensors
from engine.config import EngineConfig
from engine.forest import SharedNode
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.packed_decoder import PackedDecoder
from engine.models.prepare import prepare
from engine.models.weights import Weights
from engine.prepared import PreparedModel
from engine.scheduled_batch import ScheduledBatch
from kernels.reference.backend import ReferenceKernels
from tests.engine.runner_driver import RunnerDriver
from tests.tiny_model import make_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "hidden_size": 96},
    "qwen2": {"head_dim": 80, "num_heads": 7, "num_kv_heads": 1, "hidden_size": 112, "tie_word_embeddings": False},
    "qwen3": {"head_dim": 96, "num_heads": 4, "num_kv_heads": 4},
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
# for six rows whose tables begin with the same 18 blocks, and then in threes with the same three more
NODES: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
    "no nodes": [],
    "one": [(0, 18, (0, 1, 2, 3, 4, 5))],
    "three": [(0, 18, (0, 1)), (0, 5, (2, 3)), (0, 21, (4, 5))],
    "three at two levels": [(0, 18, (0, 1, 2, 3, 4, 5)), (18, 21, (0, 1, 2)), (18, 21, (3, 4, 5))],
    "eight at two levels": [
        *((0, 18, (0, 1, 2)), (0, 16, (3, 4)), (0, 17, (5,))),
        *((18, 21, (0, 1)), (18, 20, (2,)), (16, 21, (3,)), (16, 20, (4,)), (17, 21, (5,))),
    ],
}


@pytest.fixture(scope="module", params=[(f, d) for f in FAMILIES for d in TOLERANCE], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedModel, str]:
    family, dtype = request.param
    path = tmp_path_factory.mktemp("model")
    source = make_tiny(path / "tiny", family, num_layers=3, **FAMILIES[family])
    return prepare(str(source), path / "state", dtype, lambda *_: None), dtype


def runner_of(model: tuple[PreparedModel, str], **settings: Any) -> ModelRunner:
    prepared, dtype = model
    config = EngineConfig(model_dir=str(prepared.path), device="cpu", dtype=dtype, num_blocks=100, threads=1)
    return ModelRunner(prepared, config.replace(**settings))


def ids(start: int, length: int) -> list[int]:
    return [(start + 5 * i * i + i) % 380 for i in range(length)]


def mixed_batch(driver: RunnerDriver) -> ScheduledBatch:
    """Six decode rows, two of which computed their beginnings themselves, and two extends; K and V of all that lies
    before is in the cache, and NaN everywhere else."""
    driver.runner._kv.fill_(torch.nan)
    trunk = ids(1, 288)
    documents = [ids(2, 48), ids(3, 48)]
    rows = [driver.sequence([*trunk, *documents[row // 3], *ids(10 + row, 4 + 9 * row)]) for row in range(6)]
    for row, sequence in enumerate(rows):
        if row:
            driver.share(rows[0 if row < 4 else 3], sequence, 21 if row != 3 else 18)
        driver.logits([(sequence, sequence.num_uncomputed_tokens - 1)])
    fresh, goes_on = driver.sequence(ids(20, 40)), driver.sequence(ids(21, 60))
    driver.logits([(goes_on, 25)])
    return driver.batch([*((row, 1) for row in rows), (fresh, 40), (goes_on, 30)], with_nodes=False)


@pytest.mark.parametrize("nodes", NODES)
def test_every_layer_and_the_logits_equal_the_reference(model: tuple[PreparedModel, str], nodes: str) -> None:
    prepared, dtype = model
    runner = runner_of(model)
    packed = runner._decoder
    assert isinstance(packed, PackedDecoder)
    shape = prepared.manifest.config
    weights = Weights(prepared.weights_path(dtype), shape)
    device = torch.device("cpu")
    plain = Decoder(shape, weights, ReferenceKernels(device), device, runner.plan.max_model_len)

    batch = mixed_batch(RunnerDriver(runner))
    assert batch.num_decodes == 6
    tables = [row.sequence.block_table for row in batch.decodes]
    shared = tuple(SharedNode(tuple(tables[rows[0]][start:end]), rows) for start, end, rows in NODES[nodes])
    for node, (start, end, rows) in zip(shared, NODES[nodes], strict=True):
        assert all(tuple(tables[row][start:end]) == node.block_ids for row in rows)
    tensors = BatchTensors.build(ScheduledBatch(batch.sequences, 6, (), shared), 16, all_rows=True)
    kv = runner._kv.clone()

    tolerance = TOLERANCE[dtype]
    plan = plain.plan(tensors.attention, runner._kv_shape)
    arrays = packed.plan(tensors.attention, runner._kv_shape)
    embedded = packed.forward(tensors.token_ids, tensors.positions, kv.clone(), arrays, 6, 0)
    assert_near(embedded, plain._embedding[torch.from_numpy(tensors.token_ids)], tolerance)
    plain_layers = plain._layers
    for num_layers in range(1, shape.num_layers + 1):
        plain._layers = plain_layers[:num_layers]
        # a copy each: both write the step's K and V
        mine, theirs = kv.clone(), kv.clone()
        expected = plain.forward(tensors.token_ids, tensors.positions, theirs[:num_layers], plan, 6)
        got = packed.forward(tensors.token_ids, tensors.positions, mine, arrays, 6, num_layers)
        assert_near(got, expected, tolerance)
        is_unused = kv.isnan() & theirs.isnan()
        assert torch.equal(mine.isnan(), is_unused)
        assert_near(mine[~is_unused], theirs[~is_unused], tolerance)
        assert_equal_bits(mine[num_layers:], kv[num_layers:])
    assert_near(packed.logits(got), plain.logits(expected), tolerance)


@pytest.mark.parametrize(
    ("news", "asked"),
    [
        # behind six decode rows: a whole prompt of 40 tokens, and 30 or 35 of the 35 that are left of another
        ((40, 30), [*range(6), 45]),
        ((40, 35), [*range(6), 45, 80]),
        ((17, 35), [*range(6), 57]),
        ((17, 30), [*range(6)]),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_are_asked_for_have_the_bits_that_they_have_among_all(
    model: tuple[PreparedModel, str], news: tuple[int, int], asked: list[int], threads: int
) -> None:
    """And K and V of all rows are written."""
    runner = runner_of(model, threads=threads)
    driver = RunnerDriver(runner)
    *rows, fresh, goes_on = [row.sequence for row in mixed_batch(driver).sequences]
    batch = driver.batch([*((row, 1) for row in rows), (fresh, news[0]), (goes_on, news[1])])
    before = runner._kv.clone()
    packed = runner._decoder

    def forward(*, all_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = BatchTensors.build(batch, 16, all_rows=all_rows)
        assert tensors.sample_rows == asked
        kv = before.clone()
        plan = packed.plan(tensors.attention, runner._kv_shape)
        return packed.forward(tensors.token_ids, tensors.positions, kv, plan, 6)[asked].clone(), kv

    (all_hidden, all_kv), (hidden, kv) = forward(all_rows=True), forward(all_rows=False)
    assert_equal_bits(hidden, all_hidden)
    assert_equal_bits(kv, all_kv)


def test_a_chunk_of_which_nothing_is_asked_for_writes_k_and_v(model: tuple[PreparedModel, str]) -> None:
    runner = runner_of(model)
    driver = RunnerDriver(runner)
    prompt = driver.sequence(ids(4, 70))
    batch = driver.batch([(prompt, 50)])
    runner._kv.fill_(torch.nan)
    runner.logits(batch)  # of all rows
    expected = runner._kv.clone()
    assert (~expected.isnan()).any((0, 1, 3, 5)).sum() == 50
    runner._kv.fill_(torch.nan)
    assert runner.execute(batch).tokens == []
    assert_equal_bits(runner._kv, expected)


def assert_equal_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.isfinite().all()
    assert (got.double() - expected.double()).norm() <= tolerance * expected.double().norm()


def test_a_prompt_has_the_same_bits_whole_in_chunks_and_token_by_token(model: tuple[PreparedModel, str]) -> None:
    prompt = ids(4, 70)
    whole = RunnerDriver(runner_of(model)).logits_in_chunks(prompt, [70])
    for sizes in ([17, 17, 17, 17, 2], [1] * 70, [64, 6], [33, 1, 36]):
        assert torch.equal(RunnerDriver(runner_of(model, threads=2)).logits_in_chunks(prompt, sizes), whole), sizes


def test_a_row_has_the_same_bits_alone_and_in_company(model: tuple[PreparedModel, str]) -> None:
    prompts = [ids(30 + i, 5 + 11 * i) for i in range(6)]

    def logits(chosen: list[int]) -> torch.Tensor:
        driver = RunnerDriver(runner_of(model))
        rows = [driver.sequence(prompts[i]) for i in chosen]
        for row in rows:
            driver.logits([(row, row.num_tokens - 1)])
        return driver.logits([(row, 1) for row in rows])

    together = logits([0, 1, 2, 3, 4, 5])
    for i in range(6):
        assert torch.equal(logits([i])[0], together[i])
    assert torch.equal(logits([4, 2]), together[[4, 2]])


def test_what_is_not_laid_out_as_the_c_plus_plus_side_reads_it_is_an_assertion(
    model: tuple[PreparedModel, str],
) -> None:
    runner = runner_of(model)
    driver = RunnerDriver(runner)
    tensors = BatchTensors.build(driver.batch([(driver.sequence(ids(1, 4)), 4)]), 16)
    packed = runner._decoder
    plan = packed.plan(tensors.attention, runner._kv_shape)
    token_ids, kv = tensors.token_ids, runner._kv
    for wrong in (token_ids.astype(np.int64), np.repeat(token_ids, 2)[::2], token_ids[:3]):
        with pytest.raises(AssertionError):
            packed.forward(wrong, tensors.positions, kv, plan, 0)
    for wrong_kv in (kv[:1], kv.half(), kv.mT.contiguous().mT):
        with pytest.raises(AssertionError):
            packed.forward(token_ids, tensors.positions, wrong_kv, plan, 0)
