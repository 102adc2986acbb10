"""What bodies may say of a beam search, and what does not go with it."""

from pathlib import Path
from typing import Any

import pytest

from app.beam_request import BeamSearchFields
from app.errors import BadRequest
from app.request_params import parse_request
from engine.beam_search import BeamSearchParams
from engine.text.tokenizer import Tokenizer
from tests.byte_model import make_byte_model


def parse(**body: Any) -> BeamSearchFields:
    return parse_request(BeamSearchFields, body)


@pytest.mark.parametrize(
    "body", [{}, {"use_beam_search": False, "temperature": 1.5}, {"use_beam_search": None, "n": 20}]
)
def test_without_the_word_there_is_none(body: dict[str, Any]) -> None:
    assert parse(**body).to_beam_search() is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, BeamSearchParams(1, None)),
        ({"n": 4}, BeamSearchParams(4, None)),
        ({"n": 2, "best_of": 10}, BeamSearchParams(10, None)),
        ({"n": 3, "length_penalty": 0, "ignore_eos": True}, BeamSearchParams(3, None, True, 0.0)),
        (
            {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.0, "stop": []},
            BeamSearchParams(1, None),
        ),
        (
            {"presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}},
            BeamSearchParams(1, None),
        ),
        (
            {"stop_token_ids": [5], "min_tokens": 0, "stream": False, "seed": 5},
            BeamSearchParams(1, None),
        ),
    ],
    ids=str,
)
def test_width_penalty_and_what_changes_nothing(body: dict[str, Any], expected: BeamSearchParams) -> None:
    params = parse(use_beam_search=True, **body).to_beam_search()
    assert params == expected
    assert params is not None
    params.validate()


@pytest.mark.parametrize(
    "body",
    [
        *({"temperature": 0.7}, {"temperature": 1}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.1}),
        *({"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}, {"logit_bias": {"5": 1}}),
        *({"min_tokens": 3}, {"stop": "END"}, {"include_stop_str_in_output": True}, {"stream": True}),
    ],
    ids=str,
)
def test_what_does_not_go_with_beams_is_named(body: dict[str, Any]) -> None:
    [name] = body
    parse(**body).to_beam_search()
    with pytest.raises(BadRequest, match=f"'{name}' is not supported with 'use_beam_search'") as caught:
        parse(use_beam_search=True, **body).to_beam_search()
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n": 11}, "n", "Invalid value for 'n': a beam search has at most 10 beams, got 11."),
        ({"best_of": 11}, "best_of", "Invalid value for 'best_of': a beam search has at most 10 beams, got 11."),
        ({"n": 4, "best_of": 3}, "best_of", "Invalid value for 'best_of': should be at least n = 4, got 3."),
    ],
)
def test_a_width_that_cannot_be(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(use_beam_search=True, **body).to_beam_search()
    assert (caught.value.message, caught.value.code, caught.value.param) == (message, "invalid_value", param)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"length_penalty": 10.5}, "invalid_value"),
        ({"length_penalty": "1"}, "invalid_type"),
        ({"use_beam_search": 1}, "invalid_type"),
        ({"best_of": 0}, "invalid_value"),
        ({"best_of": True}, "invalid_type"),
    ],
    ids=str,
)
def test_values_of_a_wrong_kind(body: dict[str, Any], code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert (caught.value.code, caught.value.param) == (code, next(iter(body)))


def test_best_of_alone_would_be_another_answer() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(n=2, best_of=3).to_beam_search()
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "best_of")
    assert parse(n=2, best_of=2).to_beam_search() is None


def test_the_models_defaults_are_for_drawing_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_byte_model(tmp_path / "model"))
    defaults = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
    params = parse(use_beam_search=True, n=2, stop_token_ids=[7]).to_params(tokenizer, defaults, 9)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 1.0, 1.0)
    assert (params.n, params.stop_token_ids, params.max_tokens) == (2, (7,), 9)
    assert parse(n=2).to_params(tokenizer, defaults, 9).temperature == 0.7
