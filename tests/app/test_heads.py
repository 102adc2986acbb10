"""Heads of chats: known within a scope, bounded."""

from pathlib import Path

import pytest

from app.heads import Head, Heads
from engine.text.chat_template import ChatTemplate, Message
from engine.text.tokenizer import Tokenizer
from tests.byte_model import IM_END, IM_START, make_byte_model


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    prepared = make_byte_model(tmp_path_factory.mktemp("model"))
    return ChatTemplate(prepared.chat_template or "", Tokenizer.load(prepared))


def system(*texts: str) -> list[Message]:
    return [Message("system", text) for text in texts]


def head(num_tokens: int) -> Head:
    return Head([1] * num_tokens, {})


def test_a_head_is_what_prompts_that_begin_with_it_have_in_common(template: ChatTemplate) -> None:
    made = Heads(template).try_make(system("Be kind."))
    assert made is not None
    assert made.token_ids == [IM_START, *b"system\nBe kind.", IM_END, 10, IM_START, *b"user\n"]
    assert made.runs == {"system\nBe kind.": list(b"system\nBe kind."), "\n": [10]}


def test_runs_that_are_known_are_not_encoded_again(template: ChatTemplate) -> None:
    made = Heads(template).try_make(system("Be kind."), {"system\nBe kind.": [7], "never seen": [8]})
    assert made is not None
    assert made.runs["system\nBe kind."] == [7]
    assert made.token_ids[:3] == [IM_START, 7, IM_END]
    assert "never seen" not in made.runs


def test_what_the_template_refuses_has_no_head(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_byte_model(tmp_path))
    refusing = ChatTemplate("{{ raise_exception('not like this') }}", tokenizer)
    assert Heads(refusing).try_make(system("Be kind.")) is None


def test_keys_tell_scopes_and_texts_apart() -> None:
    keys = {
        Heads.key(b"a", system("x", "y")),
        Heads.key(b"b", system("x", "y")),
        Heads.key(b"a", system("xy")),
        Heads.key(b"a", system("x", "y", "")),
        Heads.key(b"a", system("y", "x")),
    }
    assert len(keys) == 5
    assert Heads.key(b"a", [Message("developer", "x")]) == Heads.key(b"a", system("x")), "rendered alike"


def test_the_heads_used_least_recently_go_first(template: ChatTemplate) -> None:
    heads = Heads(template, max_heads=3, max_tokens=10)
    for name in (b"1", b"2", b"3"):
        heads.keep(name, head(3))
    assert heads.find(b"1") is not None
    heads.keep(b"4", head(3))
    assert [heads.find(name) is not None for name in (b"1", b"2", b"3", b"4")] == [True, False, True, True]
    heads.keep(b"5", head(9))
    assert len(heads) == 1, "bounded in tokens too"
    heads.keep(b"6", head(11))
    heads.keep(b"5", head(9))
    assert len(heads) == 1
    assert heads.find(b"5") is not None
