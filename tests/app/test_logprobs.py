"""Log-probabilities as OpenAI's two APIs write them."""

import json
import math

import pytest

from app.logprobs import LOWEST, CompletionLogprobs, chat_logprobs, finite
from engine.protocol import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from tests.byte_model import IM_END, make_byte_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_byte_model(tmp_path_factory.mktemp("model")))


def test_a_token_that_is_part_of_a_character_has_its_bytes(tokenizer: Tokenizer) -> None:
    entries = [TokenLogprobs(b, -0.25, [(b, -0.25), (65, -1.0)]) for b in "é".encode()]
    written = chat_logprobs(tokenizer, entries)
    assert [e["bytes"] for e in written] == [[0xC3], [0xA9]]
    assert bytes(b for e in written for b in e["bytes"]).decode() == "é"
    assert written[0]["top_logprobs"][1] == {"token": "A", "logprob": -1.0, "bytes": [65]}


def test_no_value_is_outside_json() -> None:
    assert [finite(x) for x in (-math.inf, math.nan, -1e9, -1.0, 0.0)] == [LOWEST, LOWEST, LOWEST, -1.0, 0.0]
    assert json.dumps(finite(-math.inf)) == "-9999.0"


def test_offsets_go_on_and_hidden_tokens_take_no_room(tokenizer: Tokenizer) -> None:
    logprobs = CompletionLogprobs(tokenizer, hidden_ids=frozenset([IM_END]))
    first = logprobs.add([None, TokenLogprobs(98, -1.0, [])], first_id=IM_END)
    assert first["text_offset"] == [0, 0]
    assert first["tokens"] == ["<|im_end|>", "b"]
    assert first["token_logprobs"] == [None, -1.0]
    assert first["top_logprobs"] == [None, {"b": -1.0}], "the drawn token is always there"
    assert logprobs.add([TokenLogprobs(99, -2.0, [(100, -0.5)])])["text_offset"] == [1]


def test_a_first_token_needs_its_id(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="first_id"):
        CompletionLogprobs(tokenizer).add([None])
