"""The offline API over a tiny random model, in float32: batches, choices, stops, conversations, wrong input."""

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.errors import InvalidRequest, ModelNotSupported, RequestError
from tests.tiny_model import make_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("llm")
    model = make_tiny(folder / "tiny")
    return LLM(
        model, state_dir=folder / "state", dtype="float32", num_blocks=64, max_num_batched_tokens=64, check_kv=True
    )


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", "two two two", "three", "four four"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in prompts]
    assert [r.prompt for r in together] == prompts
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]
    assert [r.outputs[0].text for r in together] == [r.outputs[0].text for r in alone]
    assert {r.outputs[0].finish_reason for r in together} == {"length"}


def test_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode_completion("a prompt")
    (of_text,) = llm.generate("a prompt", GREEDY, use_tqdm=False)
    (of_ids,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert of_ids.prompt is None
    assert of_text.prompt_token_ids == of_ids.prompt_token_ids == ids
    assert of_text.outputs[0].token_ids == of_ids.outputs[0].token_ids


def test_a_second_run_finds_the_prompt_cached(llm: LLM) -> None:
    prompt = list(range(20, 60))
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 39)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_n_choices_differ_and_a_seed_brings_them_again(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=5, temperature=50, max_tokens=12, ignore_eos=True
    )  # the random model is very sure
    one, two = (llm.generate("tell me", params, use_tqdm=False)[0] for _ in range(2))
    assert [c.index for c in one.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in one.outputs}) == 3
    assert [c.token_ids for c in one.outputs] == [c.token_ids for c in two.outputs]


def test_a_stop_string_ends_one_choice_and_leaves_the_others(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = whole.text[2:4]
    stopped, other = llm.generate(
        ["hello", "other"],
        [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=(stop,)), GREEDY],
        use_tqdm=False,
    )
    assert stopped.outputs[0].text == whole.text[: whole.text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert len(other.outputs[0].token_ids) == 8


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    first, second = llm.chat([conversation, conversation[1:]], GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == first.prompt_token_ids != second.prompt_token_ids
    assert one.outputs[0].token_ids == first.outputs[0].token_ids


def test_logprobs_come_one_a_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate([20, 21, 22], params, use_tqdm=False)
    (completion,) = result.outputs
    assert [entry.token_id for entry in completion.logprobs or []] == completion.token_ids
    assert all(len(entry.top) == 2 for entry in completion.logprobs or [])
    assert result.prompt_logprobs is not None
    assert [None if e is None else e.token_id for e in result.prompt_logprobs] == [None, 21, 22]


def test_a_wrong_prompt_is_named_and_nothing_is_left_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: the prompt must be made of token ids from 0 to 383, got 999"):
        llm.generate([[20, 21], [20, 999]], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="one SamplingParams for each of 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert len(llm.generate("still works", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_a_prepared_model_is_taken_as_it_is(llm: LLM) -> None:
    again = LLM(llm.config.model_dir, dtype="float32", num_blocks=16)
    (mine,) = again.generate("hello", GREEDY, use_tqdm=False)
    (theirs,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert "Processed prompts" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="nowhere"):
        LLM(tmp_path / "nowhere", state_dir=tmp_path)
