"""Beam search over a real (tiny, random, float32) model: what it finds, and how little it computes for that."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from app.beam_streams import BeamSearchEngine
from app.generation import Generation
from app.prompts import BuiltPrompt
from app.tenants import Tenant
from engine import LLM, BeamSearchParams, SamplingParams
from engine.beam_search import MAX_BEAM_WIDTH, BeamSearch, BeamSearchOutput
from engine.core import EngineCore
from engine.errors import InvalidRequest, RequestError
from engine.inproc_client import InprocEngineClient
from engine.protocol import END, AddRequest, Scope
from tests.beam_reference import search_plainly
from tests.tiny_model import make_tiny

END_IDS = (2, 0, 8, 41, 202, 203)
"""Some that the random model is fond of, so that sequences end at different lengths."""
PROMPTS = [[20, 21, 22], [30, 40, 50, 60], [(7 * i) % 380 for i in range(21)], [(11 * i + 5) % 380 for i in range(16)]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny(tmp_path_factory.mktemp("beams") / "tiny", tie_word_embeddings=False)
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": END_IDS}))
    return path


@pytest.fixture(scope="module")
def hugging_face(source: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    model.generation_config = transformers.GenerationConfig()  # what a test does not say is not to come from the file
    return model


@pytest.fixture(scope="module")
def make_llm(source: Path) -> Callable[..., LLM]:
    def make(**changes: Any) -> LLM:
        settings: dict[str, Any] = {"block_size": 8, "num_blocks": 200, "threads": 1, "check_kv": True, **changes}
        return LLM(source, state_dir=source.parent / "state", dtype="float32", device="cpu", **settings)

    return make


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


def found(output: BeamSearchOutput) -> list[list[int]]:
    return [sequence.token_ids for sequence in output.sequences]


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 4.0])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_it_finds_what_a_plain_search_over_transformers_finds(
    llm: LLM, hugging_face: Any, ignore_eos: bool, length_penalty: float
) -> None:
    params = BeamSearchParams(4, 7, ignore_eos=ignore_eos, length_penalty=length_penalty)
    num_ended = 0
    for prompt_ids, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):

        def next_logprobs(token_ids: tuple[int, ...], prompt_ids: list[int] = prompt_ids) -> list[float]:
            with torch.inference_mode():
                logits = hugging_face(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, -1]
            return logits.log_softmax(-1).tolist()

        end_ids = frozenset(() if ignore_eos else END_IDS)
        expected = search_plainly(next_logprobs, len(prompt_ids), 4, 7, end_ids, length_penalty)
        assert found(output) == [list(f.token_ids[:-1] if f.has_ended else f.token_ids) for f in expected]
        assert [s.cum_logprob for s in output.sequences] == pytest.approx([f.cum_logprob for f in expected], abs=1e-3)
        for sequence, plain in zip(output.sequences, expected, strict=True):
            assert sequence.tokens == [*prompt_ids, *sequence.token_ids]
            assert sequence.finish_reason == ("stop" if plain.has_ended else "length")
            assert sequence.stop_reason == (plain.token_ids[-1] if plain.has_ended else None)
            num_ended += plain.has_ended
    assert (num_ended > 0) == (not ignore_eos)


@pytest.mark.parametrize("num_beams", [1, 3, MAX_BEAM_WIDTH])
def test_transformers_finds_the_same_beams(llm: LLM, hugging_face: Any, num_beams: int) -> None:
    """Without end ids all sequences have one length, so that its length penalty and ours give one order."""
    for prompt_ids, output in zip(
        PROMPTS, llm.beam_search(PROMPTS, BeamSearchParams(num_beams, 6, ignore_eos=True)), strict=True
    ):
        ids = torch.tensor([prompt_ids])
        config = transformers.GenerationConfig(
            num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        expected = hugging_face.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert [s.tokens for s in output.sequences] == expected.tolist()


def test_transformers_finds_the_same_best_sequence_where_sequences_end(llm: LLM, hugging_face: Any) -> None:
    """Without a length penalty both rank by the log-probability alone, and both go on while a beam may still win."""
    ends = []
    for prompt_ids in PROMPTS:
        [output] = llm.beam_search(prompt_ids, BeamSearchParams(4, 8, length_penalty=0.0))
        ids = torch.tensor([prompt_ids])
        config = transformers.GenerationConfig(
            num_beams=4, max_new_tokens=8, length_penalty=0.0, do_sample=False, pad_token_id=0, eos_token_id=END_IDS
        )
        [expected] = hugging_face.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config).tolist()
        best = output.sequences[0]
        ends.append(best.stop_reason)
        assert best.tokens + ([] if best.stop_reason is None else [best.stop_reason]) == expected
    assert any(ends)


def test_a_width_of_one_is_the_greedy_answer(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    beams = llm.beam_search(PROMPTS, BeamSearchParams(1, 9, ignore_eos=True))
    assert [found(b) for b in beams] == [[g.outputs[0].token_ids] for g in greedy]
    assert [b.sequences[0].output_text for b in beams] == [g.outputs[0].text for g in greedy]


@pytest.mark.parametrize("width", [2, 7, MAX_BEAM_WIDTH])
@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 8, 9, 20])
def test_each_step_computes_one_token_for_each_beam_and_copies_one_block_at_most(
    make_llm: Callable[..., LLM], width: int, num_prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uncached part of the prompt once, then one token for each live beam and further step."""
    llm = make_llm()
    core, num_copies = llm._core, []
    execute = llm._runner.execute

    def counted(batch: Any) -> Any:
        num_copies.append((len(batch.transfers.copies), len(batch.sequences)))
        return execute(batch)

    monkeypatch.setattr(llm._runner, "execute", counted)
    prompt_ids = [(13 * i + 20) % 380 for i in range(num_prompt_tokens)]
    num_steps = 20
    [cold] = llm.beam_search([prompt_ids], BeamSearchParams(width, num_steps, ignore_eos=True))
    stats = core.stats()
    assert stats.prompt_tokens_computed == num_prompt_tokens + width * (num_steps - 1)
    assert stats.steps == num_steps
    assert (stats.query_tokens, stats.hit_tokens) == (num_prompt_tokens, 0), "the prompt counts once"
    assert all(copies <= sequences for copies, sequences in num_copies), "at most one block for each beam"
    # where a parent ends with a full block, that is used as it is
    whole = [step for step in range(1, num_steps) if (num_prompt_tokens + step - 1) % 8 == 0]
    assert [step for step in range(1, num_steps) if num_copies[step][0] == 0] == whole

    [warm] = llm.beam_search([prompt_ids], BeamSearchParams(width, num_steps, ignore_eos=True))
    assert found(warm) == found(cold)
    # the tails of the beams may have taken the place of that at the prompt's end: then its last block is computed
    assert core.stats().prompt_tokens_computed - stats.prompt_tokens_computed <= 8 + width * (num_steps - 1)


def test_without_a_cache_and_with_hardly_any_blocks_it_finds_the_same(make_llm: Callable[..., LLM], llm: LLM) -> None:
    params = BeamSearchParams(6, 10)
    expected = llm.beam_search(PROMPTS, params)
    for changes in (
        {"enable_prefix_caching": False},
        {"num_blocks": 5},  # the longest sequence has 31 tokens: hardly any beam can run beside another
        {"num_blocks": 5, "enable_prefix_caching": False},
        {"max_num_seqs": 2, "max_num_batched_tokens": 4},
        {"max_waiting": 6},
    ):
        assert llm_finds(make_llm(**changes), params) == [found(output) for output in expected], changes


def llm_finds(llm: LLM, params: BeamSearchParams) -> list[list[list[int]]]:
    outputs = [found(output) for output in llm.beam_search(PROMPTS, params)]
    blocks = llm._core.stats().blocks
    assert (blocks.free, blocks.referenced) == (blocks.total, 0)
    return outputs


def test_beams_that_are_preempted_find_the_same(make_llm: Callable[..., LLM], llm: LLM) -> None:
    """Beside an older answer that grows, in steps so short that a beam without a cache takes several of them."""
    [expected] = llm.beam_search([PROMPTS[2]], BeamSearchParams(4, 12, ignore_eos=True))
    core = make_llm(num_blocks=7, max_num_batched_tokens=9, max_num_seqs=9, enable_prefix_caching=False)._core
    search = BeamSearch(BeamSearchParams(4, 12), len(PROMPTS[2]), 12, frozenset())
    grower = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    num_steps = 0
    while not search.is_done:
        num_steps += 1
        waiting = set()
        for index, beam in enumerate(search.live):
            add(core, f"{num_steps} {index}", [*PROMPTS[2], *beam.token_ids], search.step_params)
            waiting.add(f"{num_steps} {index}")
        while waiting:
            if "grows" not in core.scheduler:
                add(core, "grows", [50], grower)
            for output in core.step():
                if output.request_id in waiting:
                    assert output.logprobs is not None
                    waiting.remove(output.request_id)
                    search.take(int(output.request_id.split()[1]), output.logprobs[0])
    assert [list(beam.token_ids) for beam in search.best()] == found(expected)
    assert core.stats().preemptions > 0, "of beams: the answer is older, and beams do not grow"
    core.abort(["grows"])
    core.check_integrity()


def add(core: EngineCore, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
    request = AddRequest(request_id=request_id, prompt_ids=prompt_ids, params=params, scopes=[Scope(END, b"")])
    assert core.add(request) is None


def test_without_max_tokens_it_goes_on_to_the_end_of_the_context(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=30)
    [output] = llm.beam_search([PROMPTS[2]], BeamSearchParams(2, None, ignore_eos=True))
    assert [len(s.tokens) for s in output.sequences] == [30, 30]
    [clamped] = llm.beam_search([PROMPTS[2]], BeamSearchParams(2, 1000, ignore_eos=True))
    assert found(clamped) == found(output)


def test_text_and_objects_are_prompts_too(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    ids = llm.tokenizer.encode_completion("hello")
    of_text, of_object, of_ids = llm.beam_search(["hello", {"prompt": "hello"}, {"prompt_token_ids": ids}], params)
    assert found(of_text) == found(of_object) == found(of_ids)
    assert of_text.sequences[0].text.startswith("hello")
    assert of_text.sequences[0].text == llm.tokenizer.decode(of_text.sequences[0].tokens, skip_special_tokens=False)


def test_what_is_wrong_is_named_and_nothing_is_left_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="beam_width must be from 1 to 10, got 11"):
        llm.beam_search("a", BeamSearchParams(11, 4))
    with pytest.raises(RequestError, match=r"prompt 1: the prompt must be made of token ids from 0 to 383, got 999"):
        llm.beam_search([[20, 21], [999]], BeamSearchParams(2, 4))
    with pytest.raises(RequestError, match=r"prompt 0: this model's context holds 512 tokens"):
        llm.beam_search([[20] * 512], BeamSearchParams(2, 4))
    assert llm._core.stats().running == llm._core.stats().waiting == 0
    llm._core.check_integrity()


def test_an_error_in_the_middle_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    execute, num_steps = llm._runner.execute, 0

    def fail_at_the_third(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        return execute(batch)

    monkeypatch.setattr(llm._runner, "execute", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(PROMPTS, BeamSearchParams(3, 8))
    assert not llm._core.has_work
    llm._core.check_integrity()


# ---- as the gateway searches


@asynccontextmanager
async def engine_of(llm: LLM) -> AsyncIterator[InprocEngineClient]:
    """The engine of `llm`, whose pool must be idle in the end."""
    client = InprocEngineClient(llm._core, llm._runner.info)
    await client.start()
    try:
        yield client
    finally:
        await client.close()
    assert not llm._core.has_work
    llm._core.check_integrity()


def generation(llm: LLM, client: InprocEngineClient, width: int, max_tokens: int) -> Generation:
    prompts = [BuiltPrompt(ids, [Scope(END, b"mine")]) for ids in PROMPTS]
    params = SamplingParams(n=width, temperature=0, max_tokens=max_tokens, eos_token_ids=END_IDS)
    beams = BeamSearchEngine(client, BeamSearchParams(width, None))
    return Generation(beams, llm.tokenizer, prompts, params, Tenant("a"))


async def find(generation: Generation) -> list[list[int]]:
    with generation:
        async for _ in generation:
            pass
    return [generation.output_ids(i) for i in range(generation.num_choices)]


def ids_of(outputs: list[BeamSearchOutput]) -> list[list[int]]:
    """With the ids that ended them."""
    sequences = [sequence for output in outputs for sequence in output.sequences]
    return [s.token_ids + ([] if s.stop_reason is None else [s.stop_reason]) for s in sequences]


async def test_over_http_it_finds_the_same_as_offline(make_llm: Callable[..., LLM], llm: LLM) -> None:
    expected = ids_of(llm.beam_search(PROMPTS, BeamSearchParams(5, 9)))
    other = make_llm()
    async with engine_of(other) as client:
        assert await find(generation(other, client, 5, 9)) == expected
        assert (await client.stats()).query_tokens == sum(map(len, PROMPTS)), "each prompt counts once"


@pytest.mark.parametrize("num_steps_before", range(0, 40, 7))
async def test_a_reader_that_leaves_in_the_middle_leaves_an_idle_pool(
    make_llm: Callable[..., LLM], num_steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(num_blocks=30, max_num_batched_tokens=16, max_num_seqs=16)
    reached = asyncio.Event()
    loop, execute, num_steps = asyncio.get_running_loop(), llm._runner.execute, 0

    def counted(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > num_steps_before:
            loop.call_soon_threadsafe(reached.set)
        return execute(batch)

    monkeypatch.setattr(llm._runner, "execute", counted)
    async with engine_of(llm) as client:
        search = asyncio.create_task(find(generation(llm, client, 6, 400)))
        await reached.wait()
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        num_steps_then = num_steps
        stats = await client.stats()
        assert (stats.running, stats.waiting, stats.blocks.referenced) == (0, 0, 0)
        assert num_steps <= num_steps_then + 1, "what was under way ends within a step"
