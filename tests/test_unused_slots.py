"""B29: what former owners left in a block's unused slots reaches nobody, whatever it is."""

import math
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams
from tests.kernels_under_test import NAME
from tests.tiny_model import make_tiny

LENGTHS = (1, 15, 16, 17, 33)
NUM_TOKENS = 20
BACKENDS: dict[str, dict[str, str]] = {
    "reference": {"kernels": "reference"},
    "torch's cpu operators": {"kernels": "cpu", "max_isa": "none"},
    "compiled": {"kernels": "cpu"},
}
if NAME != "auto":
    BACKENDS = {NAME: {"kernels": NAME}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedModel]:
    path: Path = tmp_path_factory.mktemp("model")
    source = make_tiny(path / "tiny", tie_word_embeddings=False)
    return {dtype: prepare(str(source), path / dtype, dtype, lambda *_: None) for dtype in ("float32", "bfloat16")}


def answers(model: PreparedModel, backend: str, dtype: str, content: float, budget: int) -> dict[str, list[int]]:
    """Of prompts of all lengths, two of each, which share its blocks, in a pool that is full of `content`."""
    config = EngineConfig(
        model_dir=str(model.path),
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]  one of them
        num_blocks=60,
        max_num_seqs=10,
        max_num_batched_tokens=budget,
        threads=1,
        check_kv=True,
        **BACKENDS[backend],  # type: ignore[arg-type]
    )
    runner = ModelRunner(model, config)
    runner._kv.fill_(content)
    core = EngineCore(config, runner.info, runner, runner.identity)
    told: dict[str, list[int]] = {}
    for length in LENGTHS:
        for choice in range(2):
            request = AddRequest(
                request_id=f"{length} {choice}",
                prompt_ids=[(length + 5 * i) % 380 for i in range(length)],
                params=SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3, ignore_eos=True),
                scopes=[Scope(END, b"")],
                choice=choice,
            )
            assert core.add(request) is None
            told[request.request_id] = []
    while core.has_work:
        for output in core.step():
            assert output.error is None, output
            told[output.request_id] += output.token_ids
    core.check_integrity()
    return told


@pytest.mark.parametrize("content", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_b29_answers_from_a_poisoned_pool_are_those_from_a_clean_one(models, backend, dtype, content):
    for budget in (10, 512):
        expected = answers(models[dtype], backend, dtype, 0.0, budget)
        assert answers(models[dtype], backend, dtype, content, budget) == expected
        assert {len(token_ids) for token_ids in expected.values()} == {NUM_TOKENS}
        assert len({tuple(token_ids) for token_ids in expected.values()}) == 2 * len(LENGTHS)
