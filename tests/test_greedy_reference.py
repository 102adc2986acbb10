"""Greedy text of fifty prompts is the same with the kernels under test as with the reference backend, however the
shared beginnings are read (fp32, shadow KV on)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.packed_decoder import PackedDecoder
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests import kernels_under_test
from tests.kernels.libraries import compiler
from tests.tiny_model import make_tiny

SYSTEM = (
    "You answer for the railway of a small town. The trains run from six in the morning until eleven at night, every "
    "half hour, from the harbour by way of the market and the school to the lake. A ticket costs two coins, children "
    "ride for one, dogs for nothing. Lost things are kept at the harbour station for thirty days. Be brief and kind. "
)
DOCUMENTS = (
    "On Saturday the 12th the market square is closed for the flower show. Trains do not stop there between nine and "
    "four; please use the school stop, which is five minutes away on foot.",
    "The river bridge is being painted from May to July. Between ten and two a bus runs from the school to the lake, "
    "and bicycles cannot be taken. The bus takes eleven minutes longer than the train.",
    "The café at the lake serves soup, bread and apple cake from eleven to six. It has twenty-four seats, a children's "
    "corner and a terrace. On the first Sunday of the month there is live music at three.",
    "Found this week: one violin, two left gloves, a red umbrella, a set of keys with a wooden fish, a school bag with "
    "the name Jonas in it, and a cake for six, which could not be kept.",
    "School classes of up to thirty pupils travel at a flat price of twenty coins, there and back, except before nine "
    "in the morning. The ride must be booked two days ahead at the harbour station.",
)
QUESTIONS = (
    "When does the first train leave?",
    "May I take my dog?",
    "What does a ticket cost for two adults and a child?",
    "Is there a train at midnight?",
    "Write two lines about the lake.",
    "How long are lost things kept?",
    "Name the stops in order.",
    "What should I know before I set out today?",
    "Thank you!",
    "Summarise the notice in one sentence.",
)
DECODER = PackedDecoder if kernels_under_test.NAME == "auto" else Decoder
ENGINES: dict[str, dict[str, Any]] = {
    "reference": {"kernels": "reference", "shared_attention": "never"},
    "nodes for all that is shared": {"shared_attention": "always"},
    "no nodes": {"shared_attention": "never"},
}


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """A trunk for all, a document for each ten of them, then the question."""
    turns = "<|im_start|>system\n{}\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(turns.format(SYSTEM, doc, question)) for doc in DOCUMENTS for question in QUESTIONS]


def answers(
    model: PreparedModel, prompts: list[list[int]], max_tokens: int, settings: dict[str, Any]
) -> list[list[int]]:
    """Of all prompts, served together."""
    config = EngineConfig(
        model_dir=str(model.path), device="cpu", dtype="float32", check_kv=True, num_blocks=1000, **settings
    )
    runner = ModelRunner(model, config)
    assert type(runner._decoder) is (DECODER if config.kernels != "reference" else Decoder)
    core = EngineCore(config, runner.info, runner, runner.identity)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, eos_token_ids=model.manifest.eos_token_ids)
    told: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        request = AddRequest(request_id=str(i), prompt_ids=prompt, params=params, scopes=[Scope(END, b"town")])
        assert core.add(request) is None
        told[request.request_id] = []
    while core.has_work:
        for output in core.step():
            assert output.error is None, output
            told[output.request_id] += output.token_ids
    core.check_integrity()
    assert (core.stats().blocks_not_read > 0) == (config.shared_attention == "always")
    return list(told.values())


def assert_all_say_the_same(
    model: PreparedModel, max_tokens: int, choose: Callable[[list[list[int]]], list[list[int]]]
) -> None:
    if DECODER is PackedDecoder:
        compiler()
    chosen = choose(prompts(Tokenizer.load(model)))
    expected = answers(model, chosen, max_tokens, ENGINES["reference"])
    assert len({tuple(ids) for ids in expected}) > len(chosen) // 2
    for name, settings in ENGINES.items():
        if name != "reference":
            assert answers(model, chosen, max_tokens, settings) == expected, name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fifty_prompts_to_a_tiny_model(family: str, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny", family, max_position_embeddings=1024, tie_word_embeddings=False)
    model = prepare(str(source), tmp_path / "state", "float32", lambda *_: None)
    assert_all_say_the_same(model, 16, lambda all_of_them: kernels_under_test.some_of(all_of_them, 7))


def test_eight_prompts_to_the_demo_model(demo_model_fp32: PreparedModel) -> None:
    assert_all_say_the_same(demo_model_fp32, 16, lambda all_of_them: all_of_them[::7])


@pytest.mark.slow
def test_fifty_prompts_to_the_demo_model(demo_model_fp32: PreparedModel) -> None:
    assert_all_say_the_same(demo_model_fp32, 32, lambda all_of_them: all_of_them)
