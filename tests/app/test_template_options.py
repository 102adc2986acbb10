"""Options of chat templates: what may be said, and what tells them apart."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app.template_options import TemplateOptions, canonical, digest, merged


class Holder(BaseModel):
    options: TemplateOptions


@pytest.mark.parametrize("options", [{}, {"a": 1, "b_2": 0.5, "größe": "x" * 1024, "c": False}])
def test_what_may_be_said(options: dict[str, Any]) -> None:
    assert Holder.model_validate({"options": options}).options == options


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (None, "should be an object"),
        ([], "should be an object"),
        ({str(i): 1 for i in range(17)}, "at most 16"),
        ({"": 1}, "names"),
        ({"a b": 1}, "names"),
        ({"a" * 65: 1}, "names"),
        ({1: 1}, "names"),
        ({"a": None}, "strings, numbers or booleans"),
        ({"a": {}}, "strings, numbers or booleans"),
        ({"a": "x" * 1025}, "at most 1024 characters"),
    ],
)
def test_what_may_not(options: Any, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Holder.model_validate({"options": options})


def test_what_comes_later_wins() -> None:
    assert merged({"a": 1, "b": 1}, None, {"b": 2}) == {"a": 1, "b": 2}


def test_each_difference_is_another_digest() -> None:
    seen = [{"a": v} for v in (False, 0, 0.0, "0", "", "False", 1)] + [{"b": False}, {"a": False, "b": False}]
    assert len({digest(options) for options in seen}) == len({canonical(options) for options in seen}) == len(seen)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({}) == ""
