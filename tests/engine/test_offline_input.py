"""One prompt or several, in each of their forms."""

import pytest

from engine.errors import InvalidRequest
from engine.offline_input import each_conversation, each_prompt


def test_one_prompt_or_several_as_text_ids_or_objects() -> None:
    assert each_prompt("a") == ["a"]
    assert each_prompt([1, 2]) == [[1, 2]]
    assert each_prompt({"prompt": "a"}) == ["a"]
    assert each_prompt(["a", (1, 2), {"prompt": "b"}, {"prompt_token_ids": [3]}]) == ["a", [1, 2], "b", [3]]
    assert each_prompt([]) == []


def test_an_object_without_a_prompt_says_what_it_has() -> None:
    with pytest.raises(InvalidRequest, match=r"expected 'prompt' or 'prompt_token_ids', got \['text'\]"):
        each_prompt([{"text": "a"}])


def test_one_conversation_or_several() -> None:
    one = [{"role": "user", "content": "a"}]
    assert each_conversation(one) == [one]
    assert each_conversation([one, one]) == [one, one]
