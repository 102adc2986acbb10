"""What an engine could never serve is refused with what it could."""

import dataclasses
from typing import Any

import pytest

from app.errors import BadRequest
from app.prompts import BuiltPrompt
from app.servable import check_servable
from engine.sampling_params import SamplingParams
from tests.byte_model import BYTE_VOCAB_SIZE, byte_model_info

INFO = byte_model_info(max_model_len=64, block_size=16, num_blocks=3)
PROMPT = BuiltPrompt(token_ids=[1], scopes=[], param="input")


def prompt(*token_ids: int) -> BuiltPrompt:
    return dataclasses.replace(PROMPT, token_ids=list(token_ids))


@pytest.mark.parametrize(
    ("token_ids", "changes", "code", "said"),
    [
        ([], {}, None, "The prompt is empty"),
        ([1] * 64, {"max_tokens": 5}, "context_length_exceeded", "The context length of this model is 64 tokens, but"),
        ([1] * 48, {}, "context_length_exceeded", "The KV cache of this server holds 48 tokens, but the prompt has 48"),
        ([1, BYTE_VOCAB_SIZE], {}, None, "token ids outside 0 to 258"),
        ([-1], {}, None, "token ids outside 0 to 258"),
        ([1], {"logit_bias": {BYTE_VOCAB_SIZE: 1.0}}, None, "logit_bias"),
    ],
)
def test_what_can_never_be_served(token_ids: list[int], changes: dict[str, Any], code: str | None, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_servable(INFO, prompt(*token_ids), SamplingParams(**changes))
    assert refused.value.code == code
    assert refused.value.param == ("logit_bias" if "logit_bias" in changes else "input")
    assert said in refused.value.message


def test_the_longest_prompt_that_leaves_room_for_a_token() -> None:
    check_servable(INFO, prompt(*[1] * 47), SamplingParams())
