"""The engine over interpreted Triton kernels says what it says over plain torch, token for token, in float32; shadow KV
is on, and every argument of a kernel is checked."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.decoder import Decoder
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from kernels.triton import blocks
from tests.engine.test_core_with_model import HOST_BLOCK_BYTES, TRUNK, Engine
from tests.tiny_model import make_tiny

PROMPTS = [TRUNK[:20], [*TRUNK[:20], 7, 8], [*TRUNK[:36], 9], [*TRUNK[:36], 10, 11], [1, 2, 3], TRUNK]
"""Blocks have 8 tokens: shared at two levels, to the middle of a block, and not at all."""
MAX_TOKENS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepared(tmp_path_factory.mktemp("model"))


def prepared(path: Path, family: str = "llama", dtype: str = "float32") -> PreparedModel:
    source = make_tiny(path / "tiny", family, tie_word_embeddings=False)
    return prepare(str(source), path / "state", dtype, lambda *_: None)


def engine(model: PreparedModel, **settings: Any) -> Engine:
    return Engine(model, {"kernels": "triton", **settings})


def ask_all(engine: Engine) -> dict[str, list[int]]:
    """Even ones greedily, odd ones with a seed, one of them with filters; the first computes what the others share."""
    for i, prompt_ids in enumerate(PROMPTS):
        drawn = {"temperature": 0.9, "seed": i} if i % 2 else {}
        drawn |= {"top_p": 0.95, "top_k": 40} if i == 1 else {}
        engine.add(str(i), prompt_ids, max_tokens=MAX_TOKENS, **drawn)
        engine.step()
    return engine.run()


@pytest.fixture(scope="module")
def expected(model: PreparedModel) -> dict[str, list[int]]:
    answers = ask_all(Engine(model, {"kernels": "reference"}))
    assert len({tuple(answer) for answer in answers.values()}) == len(PROMPTS)
    return answers


def test_these_engines_compute_with_triton_and_shadow_kv(model: PreparedModel) -> None:
    made = engine(model)
    assert isinstance(made.runner._decoder, Decoder)
    assert made.runner._decoder.kernels_name == "triton"
    assert made.core._shadow is not None


@pytest.mark.parametrize("shared_attention", ["always", "never"])
def test_together(
    model: PreparedModel, expected: dict[str, list[int]], shared_attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def copy_blocks(kv: torch.Tensor, sources: list[int], targets: list[int]) -> None:
        copied.extend(targets)
        copy(kv, sources, targets)

    copy = blocks.copy_blocks
    monkeypatch.setattr(blocks, "copy_blocks", copy_blocks)
    made = engine(model, shared_attention=shared_attention)
    assert ask_all(made) == expected
    # whoever goes on from the middle of a block that another one reads has its own copy of it
    assert len(copied) >= 2
    assert made.core.stats().hit_tokens > 0
    assert (made.core.stats().blocks_not_read > 0) == (shared_attention == "always")


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_caches(model: PreparedModel, kv_dtype: str) -> None:
    """Forks copy records, and shadow KV reads them."""
    made = engine(model, shared_attention="always", kv_dtype=kv_dtype)
    assert ask_all(made) == ask_all(Engine(model, {"kernels": "reference", "kv_dtype": kv_dtype}))
    assert made.core.stats().hit_tokens > 0


def test_chunked_preempted_and_swapped(model: PreparedModel, expected: dict[str, list[int]]) -> None:
    """In a pool that holds one of the longer ones; what another one drove out comes back from the host."""
    settings = {"num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    made = engine(model, host_cache_bytes=60 * HOST_BLOCK_BYTES, **settings)
    assert ask_all(made) == expected
    assert made.core.stats().preemptions > 0
    made.ask([(13 * i + 1) % 380 for i in range(56)], max_tokens=1)
    assert made.ask(PROMPTS[2], max_tokens=2) == expected["2"][:2]
    host = made.core.stats().host
    assert (host.swapped_out > 0, host.swapped_in > 0) == (True, True)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_several_pieces_of_nodes_and_tails(family: str, tmp_path: Path) -> None:
    """Pieces have 256 tokens: three rows share 264 of them, one of which comes as a fork of another, and one has 300 of
    its own. With biases, and with norms of heads."""
    model = prepared(tmp_path, family)
    trunk, other = (
        [(7 * i * i + 3 * i + first) % 380 for i in range(length)] for first, length in ((1, 264), (2, 300))
    )
    prompts = {"trunk": ([*trunk, 5], 0), "fork": ([*trunk, 5], 1), "branch": ([*trunk, 6, 7], 0), "alone": (other, 0)}

    def answers(kernels: str) -> tuple[dict[str, list[int]], int]:
        made = Engine(model, {"kernels": kernels, "num_blocks": 120})
        for name, (prompt_ids, choice) in prompts.items():
            made.add(name, prompt_ids, choice=choice, max_tokens=5, temperature=0.9, seed=4)
            made.step()
        return made.run(), made.core.stats().blocks_not_read

    expected = answers("reference")
    assert len({tuple(ids) for ids in expected[0].values()}) == len(prompts)
    assert expected[1] >= 2 * 33
    assert answers("triton") == expected
