"""Wherever an answer is cut, a choice that is brought to the last text there goes on to the very same deltas."""

from typing import Any

import pytest

from app import progress as progresses
from app.cached_tokens import CachedTokens
from app.choice import Choice, ChoiceDelta
from app.progress import FirstToken, Midway, Progress, joined
from engine.protocol import FinishReason, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from engine.token_stream import TokenStream
from tests.byte_model import IM_END, IM_START, make_byte_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_byte_model(tmp_path_factory.mktemp("model")))


def choice(tokenizer: Tokenizer, params: SamplingParams) -> Choice:
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
    return Choice(0, TokenStream("", lambda request_id: None), detokenizer, params)


def outputs(ids: list[int], params: SamplingParams, finish: FinishReason | None) -> list[RequestOutput]:
    """One for each id; the last one ends it."""
    made = [RequestOutput(request_id="r", token_ids=[i], logprobs=[TokenLogprobs(i, -0.5, [])]) for i in ids]
    made[-1].finish_reason = finish
    if finish is FinishReason.STOP:
        made[-1].stop_token_id = ids[-1]
    if params.logprobs is None:
        for output in made:
            output.logprobs = None
    return made


def facts(deltas: list[ChoiceDelta]) -> Any:
    """All that does not depend on what came together."""
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    return "".join(delta.text for delta in deltas), entries, deltas[-1].finish_reason, deltas[-1].stop_reason


CASES: list[tuple[list[int], dict[str, Any], FinishReason]] = [
    ([*"aü灯 b".encode(), IM_END], {}, FinishReason.STOP),
    (list("aü灯".encode()), {}, FinishReason.LENGTH),
    (list("aü灯".encode())[:-1], {}, FinishReason.LENGTH),
    ([*b"one STO STOPPED"], {"stop": ("STOP", "PEN")}, FinishReason.LENGTH),
    ([*b"one STO STOPPED"], {"stop": ("STOPP",), "include_stop_str_in_output": True}, FinishReason.LENGTH),
    ([*b"ab ST", IM_END], {"stop": ("STOP",)}, FinishReason.STOP),
    ([*b"a", IM_START, *b"b", IM_END, *b"c", IM_END], {"ignore_eos": True}, FinishReason.LENGTH),
    ([*b"a", IM_START, *b"b", IM_END, *b"c"], {"skip_special_tokens": False}, FinishReason.LENGTH),
]


@pytest.mark.parametrize(("ids", "changes", "finish"), CASES)
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_choice_goes_on_from_the_last_text_before_any_cut(
    tokenizer: Tokenizer, ids: list[int], changes: dict[str, Any], finish: FinishReason, logprobs: int | None
) -> None:
    params = SamplingParams(max_tokens=None, eos_token_ids=(IM_END,), logprobs=logprobs, **changes)
    for cut in range(len(ids) + 1):
        first, said, stretches = choice(tokenizer, params), list[ChoiceDelta](), list[Progress]()
        logged, num_told = 0, 0
        for output in outputs(ids, params, finish)[:cut]:
            if first.is_done:
                break
            said.append(first.take(output))
            if said[-1].text:  # what is logged: the gateway says it with each text
                stretches.append(
                    Progress(
                        token_ids=first.token_ids[num_told:],
                        unsettled=first.unsent_logprobs,
                        finish_reason=first.finish_reason,
                        stop_token_id=first.stop_token_id,
                    )
                )
                num_told, logged = len(first.token_ids), len(said)
        before, so_far = said[:logged], joined([Progress(), *stretches])
        so_far = progresses.from_bytes(progresses.to_bytes(so_far))
        second = choice(tokenizer, params)
        second.restore(Midway(so_far, "".join(delta.text for delta in before), 16, 0.0))
        assert second.token_ids == first.token_ids[:num_told]
        after = []
        for output in outputs(ids, params, finish)[num_told:]:
            if second.is_done:
                break
            after.append(second.take(output))
        never_cut = choice(tokenizer, params)
        whole = []
        for output in outputs(ids, params, finish):
            if not never_cut.is_done:
                whole.append(never_cut.take(output))
        if after:
            assert facts([*before, *after]) == facts(whole)
        else:
            assert second.finish_reason == whole[-1].finish_reason
            assert facts([*before, whole[-1]])[0].startswith(second.detokenizer.text)
            assert second.detokenizer.text == never_cut.detokenizer.text
        assert second.token_ids == never_cut.token_ids
        assert second.detokenizer.num_settled_tokens == never_cut.detokenizer.num_settled_tokens


def test_ids_that_say_another_text_here_are_refused(tokenizer: Tokenizer) -> None:
    params = SamplingParams(eos_token_ids=(IM_END,))
    with pytest.raises(ValueError, match="the 2 ids of 'abc' say 'ab' here"):
        choice(tokenizer, params).restore(Midway(Progress(token_ids=[97, 98]), "abc", 16, 0.0))


def test_stretches_are_joined_in_order() -> None:
    first = FirstToken(CachedTokens(trunk=1, history=2), 3.0, 4.0)
    entry = TokenLogprobs(2, -0.5, [(2, -0.5)])
    one = Progress(token_ids=[1, 2], unsettled=[entry], first=first)
    two = Progress(token_ids=[3], finish_reason="stop", stop_token_id=3)
    assert joined([one, two]) == Progress(token_ids=[1, 2, 3], first=first, finish_reason="stop", stop_token_id=3)
    assert joined([one]) == one
    assert progresses.from_bytes(progresses.to_bytes(one)) == one
