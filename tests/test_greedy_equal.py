"""Greedy text of 20 prompts is the same alone, all together, and with the prefix cache off (fp32), shadow KV on."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, FinishReason, Scope
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.kernels_under_test import ORACLE, some_of
from tests.tiny_model import make_tiny

SYSTEM = (
    "You answer for the railway of a small town. The trains run from six in the morning until eleven at night, every "
    "half hour, from the harbour by way of the market and the school to the lake. A ticket costs two coins, children "
    "ride for one, dogs for nothing. Lost things are kept at the harbour station for thirty days. Be brief and kind. "
)
QUESTIONS = (
    *("When does the first train leave?", "May I take my dog?", "Where is the market?", "I lost my hat.", "Hello!"),
    *("What does a ticket cost for two adults?", "Is there a train at midnight?", "Write a poem about the lake."),
    *("How long are lost things kept?", "Name the stops in order.", "Thank you.", "Can children ride alone?"),
    *(
        "Do you sell monthly tickets?",
        "Why is the train late?",
        "Say it in French.",
        "1 + 1 = ?",
        "What is a trunk line?",
    ),
    *("Which stop is best for the school?", "Tell me a joke.", "Who built the railway?"),
)


def chat_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    turns = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(turns)


class Engine:
    """One loaded model behind engine cores of several settings. A new core starts with an empty cache."""

    def __init__(self, model: PreparedModel, **settings: Any) -> None:
        self._config = EngineConfig(
            model_dir=str(model.path), device="cpu", dtype="float32", check_kv=True, num_blocks=600, **settings
        )
        self._runner = ModelRunner(model, self._config)
        self._params = SamplingParams(temperature=0.0, eos_token_ids=model.manifest.eos_token_ids, max_tokens=1)

    def core(self, **changes: Any) -> EngineCore:
        return EngineCore(self._config.replace(**changes), self._runner.info, self._runner)

    def run(self, core: EngineCore, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, eos_token_ids=self._params.eos_token_ids, max_tokens=max_tokens, ignore_eos=False
        )
        for i, prompt in enumerate(prompts):
            request = AddRequest(request_id=str(i), prompt_ids=prompt, params=params, scopes=[Scope(END, b"s")])
            assert core.add(request) is None
        outputs: list[list[int]] = [[] for _ in prompts]
        while core.has_work:
            for output in core.step():
                outputs[int(output.request_id)] += output.token_ids
                assert output.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH), output
            core.check_integrity()
        return outputs


def assert_the_same_in_any_company(
    model: PreparedModel, prompts: list[list[int]], max_tokens: int, **settings: Any
) -> None:
    engine = Engine(model, **settings)
    oracle = Engine(model, **settings, **ORACLE) if ORACLE else engine
    without_cache = oracle.core(enable_prefix_caching=False)
    alone = [oracle.run(without_cache, [prompt], max_tokens)[0] for prompt in prompts]
    assert without_cache.stats().hit_tokens == 0
    assert len({tuple(ids) for ids in alone}) > len(prompts) // 2
    assert engine.run(engine.core(enable_prefix_caching=False), prompts, max_tokens) == alone

    cold = engine.core()
    assert engine.run(cold, prompts, max_tokens) == alone
    assert cold.stats().hit_tokens > 0
    assert engine.run(cold, prompts, max_tokens) == alone, "warm"
    one_by_one = engine.core()
    assert [engine.run(one_by_one, [prompt], max_tokens)[0] for prompt in prompts] == alone
    # chunks of another size, fewer at a time
    assert engine.run(engine.core(max_num_batched_tokens=48, max_num_seqs=7), prompts, max_tokens) == alone


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_text_of_a_tiny_model_is_the_same_in_any_company(family: str, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "tiny", family, max_position_embeddings=1024, tie_word_embeddings=False)
    model = prepare(str(source), tmp_path / "state", "float32", lambda *_: None)
    tokenizer = Tokenizer.load(model)
    prompts = some_of([chat_ids(tokenizer, question) for question in QUESTIONS], 3)
    assert_the_same_in_any_company(model, prompts, max_tokens=16, threads=1)


@pytest.mark.slow
def test_greedy_text_of_the_demo_model_is_the_same_in_any_company(demo_model_fp32: PreparedModel) -> None:
    tokenizer = Tokenizer.load(demo_model_fp32)
    prompts = [chat_ids(tokenizer, question) for question in QUESTIONS]
    assert_the_same_in_any_company(demo_model_fp32, prompts, max_tokens=24)
