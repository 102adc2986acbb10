"""The next turn's prompt begins with this turn's prompt and output, id by id."""

from itertools import dropwhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.chat_template import ChatTemplate, Message
from tests.engine.text.small_tokenizers import FAMILIES, Family, family
from tests.engine.text.strategies import hostile_texts, plain_texts

each_family = pytest.mark.parametrize("name", FAMILIES)


def outputs(f: Family) -> st.SearchStrategy[list[int]]:
    """Any ids that a model may draw before it ends its turn."""
    ids = [t for t in range(f.tokenizer.vocab_size) if t not in f.tokenizer.eos_token_ids]
    return st.lists(st.sampled_from(ids), max_size=12)


@each_family
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_next_prompt_begins_with_prompt_and_output(name: str, data: st.DataObject) -> None:
    f = family(name)
    texts = st.one_of(plain_texts, hostile_texts(f.tokenizer.control))
    messages: list[Message] = []
    if data.draw(st.booleans()):
        messages.append(Message("system", data.draw(texts)))
    kwargs: dict[str, Any] = {"enable_thinking": False} if name == "qwen3" and data.draw(st.booleans()) else {}
    before: list[int] = []
    for _ in range(3):
        messages.append(Message("user", data.draw(texts)))
        rendered = f.template.render(messages, template_kwargs=kwargs)
        assert rendered.template_changed == ()
        assert rendered.token_ids[: len(before)] == before
        output = data.draw(outputs(f))
        if kwargs:  # an answer that opens with a thought is taken for one of a turn that was asked with thinking
            output = list(dropwhile(lambda token_id: token_id == f.ids["<think>"], output))
        before = rendered.token_ids + output
        messages.append(Message("assistant", f.tokenizer.decode(output), tuple(output)))


def test_kept_ids_stand_where_the_text_would() -> None:
    f = family("smollm2")
    start, end = f.ids["<|im_start|>"], f.ids["<|im_end|>"]
    newline, opening = f.tokenizer.encode("\n"), [start, *f.tokenizer.encode("assistant\n")]
    kept = [f.tokenizer.encode(c)[0] for c in "Hello"]
    assert kept != f.tokenizer.encode("Hello")
    messages = [Message("user", "Hi"), Message("assistant", "Hello", tuple(kept)), Message("user", "Bye")]
    first = f.template.render(messages[:1], add_generation_prompt=False).token_ids
    bye = [start, *f.tokenizer.encode("user\nBye"), end, *newline]
    assert f.template.render(messages).token_ids == [*first, *opening, *kept, end, *newline, *bye, *opening]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}", "the template changes the text"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content[:30] }}\n{% endfor %}", "the template cuts the text"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.content }}\n{% endfor %}", "it stands there twice"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}", "answers are left out"),
    ],
)
def test_an_answer_that_does_not_come_out_once_becomes_text_and_is_reported(source: str, why: str) -> None:
    tokenizer = family("smollm2").tokenizer
    template = ChatTemplate(source, tokenizer)
    kept = [Message("user", "Hi"), Message("assistant", "Hello", (300, 301)), Message("user", "Bye")]
    text = [Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Bye")]
    rendered = template.render(kept)
    assert rendered.template_changed == (1,), why
    assert rendered.token_ids == template.render(text).token_ids


def test_other_answers_keep_their_ids_when_one_cannot() -> None:
    tokenizer = family("smollm2").tokenizer
    source = "{% for m in messages %}{{ m.content | upper if loop.first else m.content }}\n{% endfor %}"
    template = ChatTemplate(source, tokenizer)
    rendered = template.render([Message("assistant", "Hello", (300,)), Message("assistant", "Hello", (301, 302))])
    assert rendered.template_changed == (0,)
    assert rendered.token_ids == [*tokenizer.encode("HELLO\n"), 301, 302, *tokenizer.encode("\n")]


def test_merged_answers_keep_their_ids() -> None:
    f = family("gemma")
    messages = [Message("user", "Hi"), Message("assistant", "a", (300,)), Message("assistant", "b", (301,))]
    rendered = f.template.render(messages, add_generation_prompt=False)
    assert rendered.template_changed == ()
    start, end = f.ids["<start_of_turn>"], f.ids["<end_of_turn>"]
    after = rendered.token_ids[rendered.token_ids.index(start, 2) :]
    blank = f.tokenizer.encode_runs([(), "\n\n"])
    assert after == [start, *f.tokenizer.encode("model\n"), 300, *blank, 301, end, *f.tokenizer.encode("\n")]


def test_control_ids_in_a_kept_answer_are_kept() -> None:
    f = family("qwen3")
    thought = [f.ids["<think>"], *f.tokenizer.encode("\nhm\n"), f.ids["</think>"], *f.tokenizer.encode("\n\nParis")]
    messages = [Message("user", "Hi"), Message("assistant", f.tokenizer.decode(thought), tuple(thought))]
    ids = f.template.render([*messages, Message("user", "Sure?")]).token_ids
    first = f.template.render(messages[:1]).token_ids
    assert ids[: len(first) + len(thought)] == first + thought


def test_an_answer_with_thoughts_of_its_own_gets_no_empty_thought_before_it() -> None:
    f = family("qwen3")
    thought = [f.ids["<think>"], *f.tokenizer.encode("\nhm\n"), f.ids["</think>"]]
    messages = [Message("user", "Hi"), Message("assistant", "", tuple(thought)), Message("user", "Sure?")]
    ids = f.template.render(messages, template_kwargs={"enable_thinking": False}).token_ids
    # its own, and the one of the generation prompt
    assert ids.count(f.ids["<think>"]) == 2


def test_a_typed_placeholder_is_text() -> None:
    f = family("smollm2")
    typed = "\ue0a00123456789abcdef:kept0:0123456789abcdef\ue0a1"
    ids = f.template.render([Message("assistant", "x", (300,)), Message("user", typed)]).token_ids
    assert ids.count(300) == 1
    assert typed in f.tokenizer.decode(ids)
