"""Steps of a tiny real model: what is drawn, what is copied, what is reported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError, ModelNotSupported, NotEnoughMemory
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import BlockCopy, ScheduledBatch, SwapIn, SwapOut, Transfers
from tests.engine.runner_driver import GREEDY, RunnerDriver
from tests.tiny_model import make_tiny

PROMPT = [(5 * i + 3) % 380 for i in range(70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path = tmp_path_factory.mktemp("model")
    return prepare(str(make_tiny(path / "tiny")), path / "state", "float32", lambda *_: None)


def start(model: PreparedModel, **changes: Any) -> ModelRunner:
    settings = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "threads": 1, **changes}
    return ModelRunner(model, EngineConfig(model_dir=str(model.path), **settings))


@pytest.fixture
def driver(model: PreparedModel) -> RunnerDriver:
    return RunnerDriver(start(model))


def test_dtype_auto_takes_what_was_prepared(model: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever prepared it may have expected another device."""
    monkeypatch.setattr("engine.model_runner.resolve_dtype", lambda dtype, device: "bfloat16")
    assert start(model, dtype="auto").identity[0] == "float32"
    with pytest.raises(ModelNotSupported, match="bfloat16"):
        start(model, dtype="bfloat16")


def test_what_it_tells_of_itself(model: PreparedModel) -> None:
    runner = start(model, num_blocks=20)
    info = runner.info
    assert (info.model_name, info.vocab_size, info.block_size, info.num_blocks) == ("tiny", 384, 16, 20)
    assert (info.max_model_len, info.max_tokens_in_pool) == (320, 320)
    assert info.fingerprint == model.manifest.fingerprint
    assert info.kv_dtype == "float32"
    # 2 layers * 2 * 2 heads * 16 * 4 bytes * 16 tokens, and the null block
    assert runner.plan.kv_bytes == 21 * 8192


@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("int8", 2 * 2 * 2 * (16 + 2)), ("fp8", 2 * 2 * 2 * 16)])
def test_what_it_tells_of_a_quantised_cache(model: PreparedModel, kv_dtype: str, token_bytes: int) -> None:
    runner = start(model, num_blocks=20, kv_dtype=kv_dtype)
    assert (runner.info.kv_dtype, runner.info.kv_bytes_per_token) == (kv_dtype, token_bytes)
    assert runner.plan.kv_bytes == 21 * 16 * token_bytes
    assert runner.identity != start(model, num_blocks=20).identity


def test_a_dtype_that_no_cache_has(model: PreparedModel) -> None:
    with pytest.raises(EngineError, match="kv_dtype must be auto, int8 or fp8, got 'int4'"):
        start(model, kv_dtype="int4")


def test_sequences_that_share_blocks_say_what_they_would_say_alone(driver: RunnerDriver) -> None:
    alone = []
    for own in range(5):
        sequence = driver.sequence([*PROMPT[:64], own, own + 1])
        driver.execute([(sequence, 66)])
        for _ in range(20):
            driver.execute([(sequence, 1)])
        alone.append(sequence.output_ids)
    assert len({tuple(ids) for ids in alone}) == 5

    first = driver.sequence([*PROMPT[:64], 0, 1])
    driver.execute([(first, 66)])
    others = [driver.sequence([*PROMPT[:64], own, own + 1]) for own in range(1, 5)]
    for other in others:
        driver.share(first, other, 4)
    driver.execute([(first, 1), *((other, 2) for other in others)])
    rows = [first, *others]
    while any(row.num_output_tokens < 21 for row in rows):
        batch = driver.batch([(row, 1) for row in rows if row.num_output_tokens < 21])
        assert [node.block_ids for node in batch.nodes] in ([tuple(first.block_table[:4])], [])
        driver.execute([(row, 1) for row in rows if row.num_output_tokens < 21])
    assert [row.output_ids for row in rows] == alone


def test_a_copied_block_goes_on_like_its_source(driver: RunnerDriver) -> None:
    """Blocks 1 and 2 hold 20 tokens; the second is copied to 9 and the copy is continued."""
    source = driver.sequence(PROMPT[:21])
    driver.logits([(source, 20)])
    expected = driver.logits_in_chunks(PROMPT[:21], [20, 1])[-1]
    twin = driver.sequence(PROMPT[:21])
    twin.block_table, twin.num_computed_tokens = [1, 9], 20
    batch = driver.batch([(twin, 1)])
    result = driver.runner.execute(ScheduledBatch(batch.sequences, 1, Transfers(copies=(BlockCopy(2, 9),))))
    assert result.tokens[0].token_id == int(expected.argmax())


def test_a_swapped_block_goes_on_like_its_source(model: PreparedModel) -> None:
    """Block 1 goes out in the step that writes other tokens into it, comes back as 30 and is copied to 31 at once."""
    driver = RunnerDriver(start(model, host_cache_bytes=4 * 8192))
    assert (driver.runner.info.num_host_blocks, driver.runner.info.kv_bytes_per_token) == (4, 512)
    assert driver.runner.swap_time.block_s >= 0
    source = driver.sequence(PROMPT[:21])
    driver.logits([(source, 20)])
    expected = driver.logits_in_chunks(PROMPT[:21], [20, 1])[-1]
    other = driver.sequence(PROMPT[30:50])
    other.block_table = [1, 20]
    batch = driver.batch([(other, 20)])
    driver.runner.execute(ScheduledBatch(batch.sequences, 0, Transfers(swap_outs=(SwapOut(1, 3),))))
    twin = driver.sequence(PROMPT[:21])
    twin.block_table, twin.num_computed_tokens = [31, 2], 20
    batch = driver.batch([(twin, 1)])
    moves = Transfers(swap_ins=(SwapIn(3, 30),), copies=(BlockCopy(30, 31),))
    result = driver.runner.execute(ScheduledBatch(batch.sequences, 1, moves))
    assert result.tokens[0].token_id == int(expected.argmax())


def test_a_swap_without_a_host_tier_is_an_error(driver: RunnerDriver) -> None:
    with pytest.raises(AssertionError, match="without a host tier"):
        driver.runner.execute(ScheduledBatch((), 0, Transfers(swap_outs=(SwapOut(1, 0),))))


def test_a_step_of_copies_alone(driver: RunnerDriver) -> None:
    assert driver.runner.execute(ScheduledBatch((), 0, Transfers(copies=(BlockCopy(1, 2),)))).tokens == []


def test_a_sequence_that_is_not_at_its_end_draws_nothing(driver: RunnerDriver) -> None:
    long, short = driver.sequence(PROMPT, request_id="long"), driver.sequence(PROMPT[:5], request_id="short")
    result = driver.execute([(long, 30), (short, 5)])
    assert len(result.tokens) == 1
    assert (long.num_output_tokens, short.num_output_tokens) == (0, 1)


@pytest.mark.parametrize("sizes", [[20], [7, 13], [1, 18, 1]])
def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut(driver: RunnerDriver, sizes: list[int]) -> None:
    prompt = PROMPT[:20]
    expected = driver.logits_in_chunks(prompt, [20]).log_softmax(-1)
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    sequence = driver.sequence(prompt, params, request_id="p")
    entries = []
    for size in sizes:
        entries += driver.execute([(sequence, size)]).prompt_logprobs.get("p", [])
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[position, entry.token_id].item(), abs=1e-4)
        best = expected[position].topk(2)
        assert [token for token, _ in entry.top] == best.indices.tolist()


def test_b28_a_seeded_sequence_is_the_same_alone_joined_late_and_after_a_hit(driver: RunnerDriver) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=None)

    def seeded() -> Any:
        return driver.sequence(PROMPT[:40], params, seed=7)

    alone = seeded()
    driver.execute([(alone, 40)])
    for _ in range(14):
        driver.execute([(alone, 1)])

    unseeded = [driver.sequence(PROMPT[: 20 + i], params, seed=1000 + i) for i in range(7)]
    driver.execute([(s, s.num_prompt_tokens) for s in unseeded])
    for _ in range(5):
        driver.execute([(s, 1) for s in unseeded])
    joined, hit = seeded(), seeded()
    driver.share(alone, hit, 2)
    driver.execute([*((s, 1) for s in unseeded), (joined, 40), (hit, 8)])
    for _ in range(14):
        driver.execute([(s, 1) for s in (hit, *unseeded, joined)])
    assert joined.output_ids == alone.output_ids == hit.output_ids

    # preempted after its third token, computed again with what it had
    preempted = seeded()
    preempted.token_ids += alone.output_ids[:3]
    driver.execute([(preempted, 43)])
    for _ in range(11):
        driver.execute([(preempted, 1)])
    assert preempted.output_ids == alone.output_ids


def test_an_idle_pool_of_gigabytes_costs_nothing(model: PreparedModel) -> None:
    """Its pages are taken when they are written, so a start does not have to zero them."""
    program = f"""
import resource, engine.config, engine.model_runner, engine.prepared
model = engine.prepared.PreparedModel.load({str(model.path)!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
runner = engine.model_runner.ModelRunner(
    model, engine.config.EngineConfig(model_dir="", device="cpu", dtype="float32", num_blocks=100_000))
assert runner.plan.kv_bytes > 700 * 2**20
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_what_cannot_be_started_is_said_in_one_sentence(model: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotSupported, match=r"there is no .*weights-bfloat16\.safetensors: prepare the model"):
        start(model, dtype="bfloat16")
    with pytest.raises(NotEnoughMemory, match="a KV cache of 1000000000 blocks needs"):
        start(model, num_blocks=10**9)
    if not torch.cuda.is_available():
        with pytest.raises(ModelNotSupported, match="device cuda was asked for"):
            start(model, device="cuda")
    monkeypatch.setattr("engine.device.available_memory_bytes", lambda: 1000)
    with pytest.raises(NotEnoughMemory, match="loading the model's weights needs"):
        start(model)


def test_greedy_is_the_argmax_of_the_logits(driver: RunnerDriver) -> None:
    expected = driver.logits_in_chunks(PROMPT, [70])[-1].argmax()
    sequence = driver.sequence(PROMPT, GREEDY)
    assert driver.execute([(sequence, 70)]).tokens[0].token_id == expected
