"""--deterministic: a row's logits have the same bits alone and in company of 31, cold, warm, forked and preempted, in
chunks of any size, and whether shared blocks are read once or by each row.

What is right is what an engine says that shares nothing and serves one whole prompt at a time.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import kernels
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch, StepResult
from engine.shared_attention import DETERMINISTIC_TOKENS
from kernels.cpu import build
from tests.kernels.libraries import compiler
from tests.tiny_model import make_tiny

NUM_ROWS = 32
NUM_OUTPUTS = 10
WHOLE = 1200
"""Tokens of a step: more than any prompt has."""

Logits = dict[tuple[int, int], torch.Tensor]
"""By prompt and position; fp32 [vocab_size]. Of several choices, all have been compared."""


def ids(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 131 + 7 * i * i + 3 * i) % 380 for i in range(num_tokens)]


def make_prompts() -> list[list[int]]:
    """A trunk of two pieces and a bit; half of the chats have one of two documents that reach over the third piece.

    Some answers begin before a piece ends and go on behind it.
    """
    trunk, documents = ids(1, 530), (ids(2, 260), ids(3, 300))
    prompts = []
    for i in range(NUM_ROWS):
        shared = [*trunk, *documents[i % 4 // 2]] if i % 2 else trunk
        own = 4 + 5 * i % 37 if i % 3 else -(len(shared) + 4) % 256
        prompts.append([*shared, *ids(10 + i, own)])
    return prompts


PROMPTS = make_prompts()


class Listener:
    """A model whose logits are kept, each compared with what was said before for the same prompt and position."""

    def __init__(self, model: PreparedModel, dtype: str, **settings: Any) -> None:
        self.config = EngineConfig(
            model_dir=str(model.path),
            device="cpu",
            dtype=dtype,  # type: ignore[arg-type]  one of them
            num_blocks=NUM_ROWS * WHOLE // 16,
            max_num_batched_tokens=WHOLE,
            max_num_seqs=NUM_ROWS,
            deterministic=True,
            **{"threads": 2, "shared_attention": "always", **settings},
        )
        self._runner = ModelRunner(model, self.config)
        self.info = self._runner.info
        self.logits: Logits = {}
        self.most_nodes = 0
        """Of the rows of a step, since the last look."""
        sample = self._runner._sampler.sample

        def listen(logits: torch.Tensor, sequences: list[Any]) -> Any:
            for row, sequence in zip(logits, sequences, strict=True):
                key = (int(sequence.request_id.split()[0]), sequence.num_tokens)
                said = self.logits.setdefault(key, row.clone())
                assert torch.equal(said, row), f"prompt {key[0]} at {key[1]}: {(said - row).abs().max()} apart"
            return sample(logits, sequences)

        self._runner._sampler.sample = listen  # type: ignore[method-assign]
        # greedy rows would take the largest without that logits are written
        self._runner._sampler.takes_largest = lambda sequences: False  # type: ignore[method-assign]

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.most_nodes = max(self.most_nodes, len(batch.nodes))
        for node in batch.nodes:
            assert len(node.block_ids) * self.info.block_size % 256 == 0
        return self._runner.execute(batch)

    def core(self, num_blocks: int | None = None, **changes: Any) -> EngineCore:
        info = msgspec.structs.replace(self.info, num_blocks=num_blocks or self.info.num_blocks)
        return EngineCore(self.config.replace(**changes), info, self, self._runner.identity)


def add(core: EngineCore, prompt: int, choice: int = 0, priority: int = 0) -> None:
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": prompt} if prompt % 2 else {"temperature": 0.0}
    request = AddRequest(
        request_id=f"{prompt} {choice}",
        prompt_ids=PROMPTS[prompt],
        params=SamplingParams(max_tokens=NUM_OUTPUTS, ignore_eos=True, **drawn),
        scopes=[Scope(END, b"")],
        choice=choice if prompt % 2 == 0 else 0,  # a choice that draws would draw other tokens
        priority=priority,
    )
    assert core.add(request) is None


def run(core: EngineCore, prompts: Iterable[int]) -> None:
    for prompt in prompts:
        add(core, prompt)
    while core.has_work:
        for output in core.step():
            assert output.error is None, output


def needs_the_decoder() -> None:
    if build.best_isa(build.cpu_flags()) is None:
        pytest.skip("nothing is compiled for this processor")
    compiler()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def listener(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Listener:
    """Has heard every prompt alone."""
    needs_the_decoder()
    path = tmp_path_factory.mktemp("model")
    source = make_tiny(path / "tiny", tie_word_embeddings=False, max_position_embeddings=2048)
    listener = Listener(prepare(str(source), path / "state", request.param, lambda *_: None), request.param)
    hear_alone(listener, range(NUM_ROWS))
    return listener


def hear_alone(listener: Listener, prompts: Iterable[int]) -> None:
    core = listener.core(enable_prefix_caching=False, shared_attention="never")
    for prompt in prompts:
        run(core, [prompt])
    stats = core.stats()
    assert stats.generation_tokens == len(listener.logits) > 0
    assert stats.hit_tokens == stats.blocks_not_read == 0


@pytest.mark.parametrize("shared_attention", ["always", "never"])
@pytest.mark.parametrize("chunk", [17, 64, WHOLE])
def test_logits_are_the_same_in_company(listener: Listener, chunk: int, shared_attention: str) -> None:
    """Cold, then warm; 17 rows at a time where no more fit into a step."""
    core = listener.core(
        max_num_batched_tokens=chunk, max_num_seqs=min(chunk, NUM_ROWS), shared_attention=shared_attention
    )
    listener.most_nodes = 0
    for _ in range(2):
        run(core, range(NUM_ROWS))
    assert core.stats().hit_tokens > 0
    assert listener.most_nodes == (3 if shared_attention == "always" else 0)
    assert len(listener.logits) == NUM_ROWS * NUM_OUTPUTS, "nobody drew another token"


def test_logits_are_the_same_without_a_cache_and_where_nodes_pay(listener: Listener) -> None:
    run(listener.core(enable_prefix_caching=False), range(NUM_ROWS))
    run(listener.core(shared_attention="auto"), range(NUM_ROWS))
    assert len(listener.logits) == NUM_ROWS * NUM_OUTPUTS


@pytest.mark.parametrize("shared_attention", ["always", "never"])
def test_logits_are_the_same_in_forks(listener: Listener, shared_attention: str) -> None:
    """Siblings come together with the first choice and while it answers; all say the same."""
    core = listener.core(shared_attention=shared_attention)
    for prompt in range(8):
        for choice in range(2):
            add(core, prompt, choice)
    for _ in range(4):
        core.step()
    for prompt in range(8):
        add(core, prompt, 2)
    run(core, range(8, 12))
    assert len(listener.logits) == NUM_ROWS * NUM_OUTPUTS


def test_logits_are_the_same_after_a_preemption(listener: Listener) -> None:
    """More urgent ones come when others are in mid-answer, in a pool too small for what those have computed."""
    core = listener.core(num_blocks=110, max_num_seqs=8)
    for prompt in range(8):
        add(core, prompt, priority=1)
    while core.stats().generation_tokens < 20:
        core.step()
    run(core, range(8, NUM_ROWS))
    assert core.stats().preemptions > 0
    assert len(listener.logits) == NUM_ROWS * NUM_OUTPUTS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_the_demo_model_are_the_same_in_company(dtype: str, request: pytest.FixtureRequest) -> None:
    needs_the_decoder()
    model = request.getfixturevalue("demo_model_fp32" if dtype == "float32" else "demo_model")
    listener = Listener(model, dtype)
    hear_alone(listener, range(0, NUM_ROWS, 5))
    for chunk in (64, WHOLE):
        for shared_attention in ("always", "never"):
            run(listener.core(max_num_batched_tokens=chunk, shared_attention=shared_attention), range(NUM_ROWS))
    run(listener.core(max_num_batched_tokens=17, max_num_seqs=17), range(0, NUM_ROWS, 3))
    assert len(listener.logits) == NUM_ROWS * NUM_OUTPUTS


def test_nodes_keep_to_the_grid_of_the_kernels() -> None:
    source = (Path(kernels.__file__).parent / "cpu" / "csrc" / "pieces.h").read_text()
    assert f"PIECE_TOKENS = {DETERMINISTIC_TOKENS};" in source


@pytest.mark.parametrize("settings", [{"kernels": "reference"}, {"max_isa": "none"}, {"dtype": "float16"}], ids=str)
def test_other_backends_refuse(settings: dict[str, str], tmp_path: Path) -> None:
    dtype = settings.get("dtype", "float32")
    model = prepare(str(make_tiny(tmp_path / "tiny")), tmp_path / "state", dtype, lambda *_: None)
    config = EngineConfig(model_dir=str(model.path), device="cpu", dtype="float32", num_blocks=8, deterministic=True)
    with pytest.raises(EngineError, match=r"deterministic mode needs the C\+\+ decoder.* on cpu"):
        ModelRunner(model, config.replace(**settings))
