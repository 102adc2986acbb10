import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelNotSupported
from engine.text.chat_template import ChatTemplate, Message, TemplateError
from engine.text.plain_encoder import PlainEncoder
from tests.engine.text.small_tokenizers import FAMILIES, Family, family
from tests.engine.text.strategies import plain_texts

each_family = pytest.mark.parametrize("name", FAMILIES)
REFUSES_SYSTEM = ("mistral", "gemma")


def user(content: str) -> Message:
    return Message("user", content)


def answer(content: str, token_ids: Sequence[int] | None = None) -> Message:
    return Message("assistant", content, None if token_ids is None else tuple(token_ids))


def prompt_text(f: Family, messages: Sequence[Message], **kwargs: Any) -> str:
    """The prompt as one text, control tokens by name."""
    ids = f.template.render(messages, template_kwargs=kwargs).token_ids
    return b"".join(map(f.tokenizer.token_bytes, ids)).decode()


@each_family
@settings(deadline=None, max_examples=40)
@given(contents=st.lists(plain_texts, min_size=1, max_size=5), with_system=st.booleans(), generation=st.booleans())
def test_ids_are_hugging_faces_for_texts_without_control_strings(
    name: str, contents: list[str], with_system: bool, generation: bool
) -> None:
    f = family(name)
    messages = []
    if with_system and name not in REFUSES_SYSTEM and len(contents) > 1:
        messages.append({"role": "system", "content": contents.pop(0)})
    for i, content in enumerate(contents):
        messages.append({"role": "assistant" if i % 2 else "user", "content": content})
    rendered = f.template.render([Message(**m) for m in messages], add_generation_prompt=generation)
    assert rendered.token_ids == f.reference_ids(messages, add_generation_prompt=generation)
    assert rendered.template_changed == ()


def test_chatml_word_by_word() -> None:
    messages = [Message("system", "Be brief."), user("Hi"), answer("Hello"), user("Bye")]
    assert prompt_text(family("qwen2"), messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_kwargs_reach_the_template() -> None:
    assert prompt_text(family("qwen3"), [user("Hi")], enable_thinking=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert "Today Date: 1 May 2025\n" in prompt_text(family("llama3"), [user("Hi")], date_string="1 May 2025")


def test_template_kwargs_may_have_names_that_are_part_of_a_control_string() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ think }}{{ im }}", family("qwen3").tokenizer)
    ids = template.render([user("Hi")], template_kwargs={"think": " there", "im": "!"}).token_ids
    assert family("qwen3").tokenizer.decode(ids) == "Hi there!"


@pytest.mark.parametrize("kwarg", ["messages", "chat_template", "bos_token", "add-generation-prompt", "tools"])
def test_template_kwargs_cannot_replace_what_the_server_gives(kwarg: str) -> None:
    with pytest.raises(TemplateError, match="chat_template_kwargs"):
        family("qwen3").template.render([user("Hi")], template_kwargs={kwarg: "x"})


# ---- one BOS


@pytest.mark.parametrize("name", ["llama3", "mistral", "llama2", "gemma"])
def test_b24_a_chat_has_one_bos_whatever_is_typed(name: str) -> None:
    f = family(name)
    for content in ("Hello", f"{f.bos} Hello {f.bos}", ""):
        ids = f.template.render([user(content)]).token_ids
        assert (ids[0], ids.count(f.ids[f.bos])) == (f.ids[f.bos], 1)
    trunk = f.template.trunk_ids([Message("system", "Be brief.")])
    assert (trunk[0], trunk.count(f.ids[f.bos])) == (f.ids[f.bos], 1)


# ---- roles


@each_family
def test_b22_any_sequence_of_roles_is_a_prompt_or_a_template_error(name: str) -> None:
    template = family(name).template
    roles = ("system", "developer", "user", "assistant", "tool", "wizard")
    refusals: dict[tuple[str, ...], TemplateError] = {}
    for length in range(1, 5):
        for sequence in itertools.product(roles, repeat=length):
            messages = [Message(role, f"text {i}") for i, role in enumerate(sequence)]
            try:
                rendered = template.render(messages)
            except TemplateError as e:
                refusals[sequence] = e
                continue
            text = b"".join(map(family(name).tokenizer.token_bytes, rendered.token_ids)).decode()
            assert [text.count(m.content) for m in messages] == [1] * length
    for sequence, refusal in refusals.items():
        assert not {"user", "system", "developer"}.issuperset(sequence)
        assert (refusal.code, refusal.param) == ("invalid_messages", "messages")
        assert "\n" not in refusal.message


@each_family
@pytest.mark.parametrize("roles", ["system user", "developer user", "user user", "system system user", "user system"])
def test_b22_common_sequences_are_taken_by_every_template(name: str, roles: str) -> None:
    family(name).template.render([Message(role, "text") for role in roles.split()])


def test_b22_a_refused_system_message_begins_the_first_user_turn() -> None:
    messages = [Message("system", "Be brief."), user("Hi"), answer("Hello"), user("Bye")]
    assert prompt_text(family("gemma"), messages) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


def test_b22_neighbours_of_one_role_are_merged_only_if_refused() -> None:
    messages = [user("One"), user("Two")]
    assert prompt_text(family("gemma"), messages) == (
        "<bos><start_of_turn>user\nOne\n\nTwo<end_of_turn>\n<start_of_turn>model\n"
    )
    assert prompt_text(family("qwen3"), messages) == (
        "<|im_start|>user\nOne<|im_end|>\n<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    )


ONE_SYSTEM_MESSAGE_AT_THE_START = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('Only at the start') }}"
    "{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (["system a", "developer b", "user c"], "[system: a\n\nb][user: c]"),
        (["system a", "user b", "system c", "user d"], "[system: a][user: b][user: c\n\nd]"),
        (["system a", "user b", "system c"], "[system: a][user: b][user: c]"),
        (["system a", "system b", "user c", "system d"], "[system: a\n\nb][user: c\n\nd]"),
        (["user a", "system b"], "[user: a][user: b]"),
    ],
)
def test_b22_as_little_as_possible_is_changed(messages: list[str], expected: str) -> None:
    tokenizer = family("smollm2").tokenizer
    template = ChatTemplate(ONE_SYSTEM_MESSAGE_AT_THE_START, tokenizer)
    ids = template.render([Message(*m.split()) for m in messages]).token_ids
    assert tokenizer.decode(ids) == expected


def test_b22_a_system_message_that_a_template_leaves_out_is_folded() -> None:
    source = "{% for m in messages if m.role != 'system' %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    template = ChatTemplate(source, family("smollm2").tokenizer)
    ids = template.render([Message("system", "Be brief."), user("Hi")]).token_ids
    assert family("smollm2").tokenizer.decode(ids) == "[user: Be brief.\n\nHi]"


def test_b22_the_refusal_is_the_templates_own_sentence() -> None:
    with pytest.raises(TemplateError, match="refuses these messages: Conversation roles must alternate") as caught:
        family("gemma").template.render([answer("Hello"), user("Hi")])
    assert (caught.value.code, caught.value.param) == ("invalid_messages", "messages")


def test_b22_an_unknown_role_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"messages\[1\].role must be one of .*, got 'wizard'"):
        family("smollm2").template.render([user("Hi"), Message("wizard", "Abracadabra")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ {}['a']['b'] }}",
        "{{ messages[0].content | int('x') + 1 }}",
    ],
)
def test_b22_whatever_goes_wrong_in_a_template_is_a_template_error(source: str) -> None:
    template = ChatTemplate(source, family("smollm2").tokenizer)
    with pytest.raises(TemplateError, match="refuses"):
        template.render([user("Hi")])


@pytest.mark.parametrize("source", ["{% for %}", "{{ unclosed", "{% endfor %}"])
def test_a_template_that_is_no_jinja_is_not_supported(source: str) -> None:
    with pytest.raises(ModelNotSupported, match="template"):
        ChatTemplate(source, family("smollm2").tokenizer)


# ---- nothing to say


@each_family
def test_b23_no_messages_are_refused(name: str) -> None:
    with pytest.raises(TemplateError, match="must not be empty"):
        family(name).template.render([])


@each_family
@pytest.mark.parametrize("content", ["", " ", "\n\n", None])
def test_b23_empty_contents_are_taken(name: str, content: Any) -> None:
    template = family(name).template
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "assistant"]):
        for empty in range(len(roles)):
            messages = [Message(role, content if i == empty else "text") for i, role in enumerate(roles)]
            assert template.render(messages).token_ids


def test_b23_a_template_that_writes_nothing_is_refused() -> None:
    with pytest.raises(TemplateError, match="empty prompt"):
        ChatTemplate("{{ messages[0].content }}", family("smollm2").tokenizer).render([user("")])


# ---- runs that are known


@each_family
def test_the_runs_of_a_head_are_not_encoded_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f = family(name)
    head = [Message("system", "You are a helpful assistant. " * 20)]
    known = f.template.head_runs(head)
    messages = [*head, user("Hi"), answer("Hello"), user("Bye")]
    expected = f.template.render(messages)
    encoded: list[str] = []

    def encode_after_control(self: PlainEncoder, text: str) -> list[int]:
        encoded.append(text)
        return self._after_control.encode(text, add_special_tokens=False).ids

    monkeypatch.setattr(PlainEncoder, "encode_after_control", encode_after_control)
    assert f.template.render(messages, known_runs=known) == expected
    assert set(encoded).isdisjoint(known)
    # in these three the instructions and the user's text are one run
    if name not in ("mistral", "llama2", "gemma"):
        assert not any("helpful assistant" in run for run in encoded)


def test_the_runs_of_a_head_word_by_word() -> None:
    tokenizer = family("qwen2").tokenizer
    assert family("qwen2").template.head_runs([Message("system", "Be brief.")]) == {
        "system\nBe brief.": tokenizer.encode("system\nBe brief."),
        "\n": tokenizer.encode("\n"),
    }


# ---- the trunk


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@each_family
@settings(deadline=None, max_examples=40)
@given(instructions=plain_texts, text=plain_texts)
def test_a_trunk_is_shared_up_to_the_text_that_the_user_begins(name: str, instructions: str, text: str) -> None:
    f = family(name)
    head = [Message("system", instructions)]
    trunk = f.template.trunk_ids(head)
    prompt = f.template.render([*head, user(text)]).token_ids
    shared = common_prefix(trunk, prompt)
    last_control = max((i for i, t in enumerate(trunk) if t in f.tokenizer.control_ids), default=-1)
    assert shared > last_control
    # probes are prompts too
    for probe in ("a", "\n\n", "  ", "1"):
        prompt = f.template.render([*head, user(probe)]).token_ids
        assert prompt[: len(trunk)] == trunk


def test_a_trunk_ends_where_user_text_could_merge_with_it() -> None:
    f = family("smollm2")
    trunk = f.template.trunk_ids([Message("system", "Be brief.")])
    text = b"".join(map(f.tokenizer.token_bytes, trunk)).decode()
    # a message that begins with a newline merges with the newline before it
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"


def test_a_trunk_of_a_template_that_knows_no_system_role() -> None:
    f = family("gemma")
    trunk = f.template.trunk_ids([Message("system", "Be brief.")])
    text = b"".join(map(f.tokenizer.token_bytes, trunk)).decode()
    assert text.startswith("<bos><start_of_turn>user\nBe brief")
