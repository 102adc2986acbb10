"""Prompts: ids, scopes, and answers that find their ids again."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.assistants import Assistant, Assistants
from app.config import AssistantConfig
from app.errors import BadRequest
from app.prompts import THREAD_FROM_CHARACTERS, KeptAnswers, PromptBuilder, num_common
from app.scopes import Narrowing, Scopes
from app.tenants import Tenant
from engine.protocol import END, Scope
from engine.text.chat_template import ChatTemplate, Message, RenderedPrompt
from engine.text.tokenizer import Tokenizer
from tests.byte_model import IM_END, IM_START, OPTIONAL_THINKING, make_byte_model

A, B = Tenant("a"), Tenant("b")
SCOPES = Scopes(b"s" * 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ChatTemplate]:
    prepared = make_byte_model(tmp_path_factory.mktemp("model"))
    tokenizer = Tokenizer.load(prepared)
    return tokenizer, ChatTemplate(prepared.chat_template or "", tokenizer)


@pytest.fixture
def builder(model: tuple[Tokenizer, ChatTemplate]) -> PromptBuilder:
    return PromptBuilder(*model, SCOPES)


@pytest.fixture(scope="module")
def assistant(model: tuple[Tokenizer, ChatTemplate]) -> Assistant:
    config = AssistantConfig(id="support", tenant="a", instructions="Be kind.")
    return next(iter(Assistants.build([config], model[1], SCOPES)))


def turn(role: str, text: str) -> list[int]:
    return [IM_START, *f"{role}\n{text}".encode(), IM_END, 10]


ANSWER = [IM_START, *b"assistant\n"]


async def test_a_chat(builder: PromptBuilder) -> None:
    prompt = await builder.build(A, [Message("user", "hi")])
    assert prompt.token_ids == [*turn("user", "hi"), *ANSWER]
    assert prompt.scopes == [Scope(END, SCOPES.private_key(A))]
    without = await builder.build(A, [Message("user", "hi")], add_generation_prompt=False)
    assert without.token_ids == turn("user", "hi")


async def test_an_assistant_is_shared_up_to_where_the_user_begins(builder: PromptBuilder, assistant: Assistant) -> None:
    prompt = await builder.build(A, [Message("user", "hi")], assistant=assistant)
    assert prompt.token_ids == [*turn("system", "Be kind."), *turn("user", "hi"), *ANSWER]
    trunk = [*turn("system", "Be kind."), IM_START, *b"user\n"]
    assert list(assistant.trunk_ids) == trunk
    assert prompt.scopes == [Scope(len(trunk), assistant.scope_key), Scope(END, SCOPES.private_key(A))]
    assert builder.trunk_prompt(assistant).scopes == [Scope(END, assistant.scope_key)]


async def test_salts_narrow_the_private_part_only(builder: PromptBuilder, assistant: Assistant) -> None:
    async def scopes(tenant: Tenant, **salts: str) -> tuple[bytes, bytes]:
        narrowing = Narrowing(**salts)
        prompt = await builder.build(tenant, [Message("user", "hi")], assistant=assistant, narrowing=narrowing)
        return prompt.scopes[0].key, prompt.private_key

    seen = [
        await scopes(A),
        await scopes(A, cache_salt="x"),
        await scopes(A, prompt_cache_key="x"),
        await scopes(B),
        await scopes(B, cache_salt="x"),
    ]
    assert {trunk for trunk, _ in seen} == {assistant.scope_key}
    assert len({private for _, private in seen}) == 5


async def test_a_history_finds_the_ids_of_its_answers(builder: PromptBuilder) -> None:
    """`prompt(t + 1)` starts with `prompt(t) + output(t)`, whatever ids the answer was made of."""
    first = await builder.build(A, [Message("user", "hi")])
    output = [IM_START, *b"x"]  # ids that no text would be encoded to
    builder.remember(first, "odd", output)
    history = [Message("user", "hi"), Message("assistant", "odd"), Message("user", "why?")]
    second = await builder.build(A, history)
    assert second.token_ids[: len(first.token_ids) + 2] == first.token_ids + output
    for other in (await builder.build(B, history), await builder.build(A, history, narrowing=Narrowing("x"))):
        assert output != other.token_ids[len(first.token_ids) : len(first.token_ids) + 2], "another scope's ids"


async def test_a_system_prompt_that_nobody_declared_ends_a_scope(builder: PromptBuilder) -> None:
    """So that a herd of chats with one system prompt shares it to the very token."""
    private = SCOPES.private_key(A)
    head = [*turn("system", "Be kind."), IM_START, *b"user\n"]
    for role in ("system", "developer"):
        prompt = await builder.build(A, [Message(role, "Be kind."), Message("user", "hi")])
        assert prompt.token_ids == [*head, *b"hi", IM_END, 10, *ANSWER]
        assert prompt.scopes == [Scope(len(head), private), Scope(END, private)]
    two = await builder.build(A, [Message("system", "Be"), Message("developer", "kind."), Message("user", "hi")])
    heads = [*turn("system", "Be"), *turn("system", "kind."), IM_START, *b"user\n"]
    assert two.scopes == [Scope(len(heads), private), Scope(END, private)]


async def test_a_chat_of_system_messages_only_has_them_marked_as_far_as_others_can_go_on(
    builder: PromptBuilder,
) -> None:
    prompt = await builder.build(A, [Message("system", "Be kind.")])
    head = [*turn("system", "Be kind."), IM_START]
    assert prompt.scopes[:-1] == [Scope(len(head), prompt.private_key)], "what follows is an answer and no user"
    without = await builder.build(A, [Message("system", "Be kind.")], add_generation_prompt=False)
    assert without.scopes == [Scope(END, without.private_key)], "the mark would be the end of the prompt"


async def test_a_later_system_message_ends_nothing(builder: PromptBuilder) -> None:
    prompt = await builder.build(A, [Message("user", "hi"), Message("system", "Be kind."), Message("user", "hi")])
    assert prompt.scopes == [Scope(END, prompt.private_key)]


async def test_system_text_after_an_assistants_has_a_mark_of_its_own(
    builder: PromptBuilder, assistant: Assistant
) -> None:
    asked = [Message("system", "Today is Monday."), Message("user", "hi")]
    head = [*turn("system", "Be kind."), *turn("system", "Today is Monday."), IM_START, *b"user\n"]
    for _ in range(2):
        prompt = await builder.build(A, asked, assistant=assistant)
        shared = len([*turn("system", "Be kind."), IM_START])  # up to where the two go apart
        assert prompt.scopes == [
            Scope(shared, assistant.scope_key),
            Scope(len(head), prompt.private_key),
            Scope(END, prompt.private_key),
        ]
        assert prompt.token_ids[: len(head)] == head


async def test_the_head_of_a_chat_is_rendered_apart_only_once_in_its_scope(
    model: tuple[Tokenizer, ChatTemplate],
) -> None:
    rendered: list[int] = []

    class Counting(ChatTemplate):
        def render(self, messages: Any, **kwargs: Any) -> RenderedPrompt:
            rendered.append(len(messages))
            return super().render(messages, **kwargs)

    builder = PromptBuilder(model[0], Counting(model[1]._source, model[0]), SCOPES)

    async def count(tenant: Tenant, text: str, **salts: str) -> int:
        rendered.clear()
        asked = [Message("system", "Be kind."), Message("user", text), Message("assistant", "x"), Message("user", "y")]
        prompt = await builder.build(tenant, asked, narrowing=Narrowing(**salts))
        assert prompt.num_known_tokens == len([*turn("system", "Be kind."), IM_START, *b"user\n"])
        return rendered.count(2)

    assert [await count(A, text) for text in "abc"] == [4, 0, 0], "four probes"
    assert [await count(B, "a"), await count(A, "a", cache_salt="s")] == [4, 4], "nothing is known of another scope"


async def test_where_a_template_takes_no_user_after_a_system_message_nothing_is_marked(
    model: tuple[Tokenizer, ChatTemplate],
) -> None:
    source = "{% if messages[-1].role == 'user' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    builder = PromptBuilder(model[0], ChatTemplate(source, model[0]), SCOPES)
    prompt = await builder.build(A, [Message("system", "Be kind.")])
    assert prompt.token_ids == list(b"Be kind.")
    assert prompt.scopes == [Scope(END, prompt.private_key)]


async def test_prompts_say_whose_they_are(builder: PromptBuilder, assistant: Assistant) -> None:
    by_user = Tenant("a", is_scoped_by_user=True)

    async def owner(tenant: Tenant, **fields: str) -> tuple[bytes, bytes]:
        narrowing = Narrowing(**fields)
        chat = await builder.build(tenant, [Message("user", "hi")], assistant=assistant, narrowing=narrowing)
        [completion] = await builder.build_completions(tenant, ["hi"], narrowing=narrowing)
        assert chat.owner_key == completion.owner_key
        assert chat.private_key == completion.private_key
        assert (chat.assistant_id, completion.assistant_id) == ("support", None)
        return chat.owner_key, chat.private_key

    plain = await owner(A)
    assert await owner(A, user="u") == plain, "users of a tenant that is not scoped by user are one"
    assert (await owner(A, cache_salt="s"))[0] == plain[0], "a salt is no owner"
    nobody, ada, bob = await owner(by_user), await owner(by_user, user="ada"), await owner(by_user, user="bob")
    assert len({plain, nobody, ada, bob, await owner(B)}) == 5
    assert len({key for pair in (plain, nobody, ada, bob) for key in pair}) == 8


async def test_completions_are_plain_text_or_ids(builder: PromptBuilder) -> None:
    text, ids = await builder.build_completions(A, ["a<|im_end|>", [1, 2]])
    assert text.token_ids == list(b"a<|im_end|>")
    assert (text.text, ids.text) == ("a<|im_end|>", None)
    assert ids.token_ids == [1, 2]
    assert text.scopes == ids.scopes == [Scope(END, SCOPES.private_key(A))]


async def test_b22_what_the_template_refuses_is_a_bad_request(model: tuple[Tokenizer, ChatTemplate]) -> None:
    builder = PromptBuilder(model[0], ChatTemplate("{{ raise_exception('not like this') }}", model[0]), SCOPES)
    for text in ("short", "x" * (THREAD_FROM_CHARACTERS + 1)):
        with pytest.raises(BadRequest) as caught:
            await builder.build(A, [Message("user", text)], param="input")
        assert caught.value.status == 400
        assert caught.value.param == "input", "as the request calls it"


async def test_long_texts_give_the_same_ids(builder: PromptBuilder) -> None:
    text = "word " * THREAD_FROM_CHARACTERS
    prompt = await builder.build(A, [Message("user", text)])
    assert prompt.token_ids == [*turn("user", text), *ANSWER]


async def test_instructions_are_not_encoded_for_each_request(model: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = model
    config = AssistantConfig(id="support", tenant="a", instructions="Be kind.")
    assistant = next(iter(Assistants.build([config], template, SCOPES)))
    marked = replace(assistant, head_runs={run: [7] for run in assistant.head_runs})
    prompt = await PromptBuilder(tokenizer, template, SCOPES).build(A, [Message("user", "hi")], assistant=marked)
    assert prompt.token_ids[:3] == [IM_START, 7, IM_END]


async def test_other_template_options_share_the_trunk_up_to_where_they_show(
    model: tuple[Tokenizer, ChatTemplate],
) -> None:
    template = ChatTemplate(OPTIONAL_THINKING, model[0])
    config = AssistantConfig(id="support", tenant="a", instructions="Be kind.", template_options={"tail": "!"})
    (assistant,) = Assistants.build([config], template, SCOPES)
    builder = PromptBuilder(model[0], template, SCOPES)
    trunk = [*turn("system", "Be kind.!"), IM_START, *b"user\n"]
    assert list(assistant.trunk_ids) == trunk
    built = [
        await builder.build(A, [Message("user", "hi")], assistant=assistant, template_options=options)
        for options in (None, {"tail": "!"}, {"tail": "?"}, {"thinking": False})
    ]
    asked = [*turn("user", "hi"), *ANSWER]
    assert [prompt.token_ids for prompt in built] == [
        [*turn("system", "Be kind.!"), *asked],
        [*turn("system", "Be kind.!"), *asked],
        [*turn("system", "Be kind.?"), *asked],
        [*turn("mode", "False"), *turn("system", "Be kind.!"), *asked],
    ]
    assert [prompt.scopes[0].end_token for prompt in built] == [len(trunk), len(trunk), len(b"?system\nBe kind."), 1]
    assert {prompt.scopes[0].key for prompt in built} == {assistant.scope_key}
    digests = [prompt.template_digest for prompt in built]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3
    assert (await builder.build(A, [Message("user", "hi")])).template_digest == ""


async def test_a_head_rendered_with_other_options_is_another_head(model: tuple[Tokenizer, ChatTemplate]) -> None:
    builder = PromptBuilder(model[0], ChatTemplate(OPTIONAL_THINKING, model[0]), SCOPES)
    for tail in ("!", "?", "!", "?", ""):
        prompt = await builder.build(
            A, [Message("system", "x"), Message("user", "hi")], template_options={"tail": tail}
        )
        head = [*turn("system", f"x{tail}"), IM_START, *b"user\n"]
        assert prompt.token_ids == [*head, *b"hi", IM_END, 10, *ANSWER]
        assert [scope.end_token for scope in prompt.scopes] == [len(head), END]


async def test_a_template_option_that_is_not_to_be_set_is_told_by_its_field(builder: PromptBuilder) -> None:
    with pytest.raises(BadRequest, match="must not set 'messages'") as caught:
        await builder.build(A, [Message("user", "hi")], template_options={"messages": "x"}, param="messages")
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "is_in_thread"),
    [
        ([Message("user", "hi")], False),
        ([Message("user", "x" * THREAD_FROM_CHARACTERS)], True),
        ([Message("user", "")] * 200, True),
    ],
    ids=["short", "long", "many"],
)
async def test_what_takes_long_leaves_the_event_loop_free(
    model: tuple[Tokenizer, ChatTemplate], messages: list[Message], is_in_thread: bool
) -> None:
    threads: list[threading.Thread] = []

    class Watched(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> RenderedPrompt:
            threads.append(threading.current_thread())
            return super().render(*args, **kwargs)

    template = Watched("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", model[0])
    await PromptBuilder(model[0], template, SCOPES).build(A, messages)
    assert [t is not threading.main_thread() for t in threads] == [is_in_thread]


def test_kept_answers_are_bounded_in_number_too() -> None:
    kept = KeptAnswers(max_answers=2)
    for text in ("one", "two", "three"):
        kept.remember(b"s", text, [1])
    assert [kept.take(b"s", text) for text in ("one", "two", "three")] == [None, (1,), (1,)]


def test_kept_answers_are_bounded() -> None:
    kept = KeptAnswers(max_tokens=10)
    kept.remember(b"s", "one", [1] * 4)
    kept.remember(b"s", "two", [2] * 4)
    assert kept.take(b"s", "one") == (1,) * 4
    kept.remember(b"s", "three", [3] * 4)
    assert kept.take(b"s", "two") is None, "the one used least recently went"
    assert kept.take(b"s", "one") == (1,) * 4
    kept.remember(b"s", "one", [9] * 6)
    assert (kept.take(b"s", "one"), kept.take(b"s", "three")) == ((9,) * 6, (3,) * 4)
    kept.remember(b"s", "long", [1] * 11)
    kept.remember(b"s", "", [])
    assert len(kept) == 2
    assert kept.take(b"t", "one") is None


def test_common_prefix() -> None:
    assert [num_common(a, b) for a, b in (([1, 2], [1, 3]), ([1], [1, 2]), ([], [1]), ([1, 2], [1, 2]))] == [1, 1, 0, 2]


def test_the_prompt_of_a_model(tmp_path: Path) -> None:
    assert make_byte_model(tmp_path).manifest.name == "byte-model"
