"""Assistants: who may see them, and where their trunks end."""

from pathlib import Path

import pytest

from app.assistants import Assistants
from app.config import AssistantConfig, ConfigError
from app.scopes import Scopes
from app.tenants import Tenant
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.byte_model import IM_END, IM_START, make_byte_model

SCOPES = Scopes(b"s" * 32)
CONFIGS = [
    AssistantConfig(id="support", tenant="a", instructions="Be kind."),
    AssistantConfig(id="support", tenant="b", instructions="Be brief."),
    AssistantConfig(id="everybody", shared=True, instructions="Be there."),
]


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    prepared = make_byte_model(tmp_path)
    return ChatTemplate(prepared.chat_template or "", Tokenizer.load(prepared))


@pytest.fixture
def assistants(template: ChatTemplate) -> Assistants:
    return Assistants.build(CONFIGS, template, SCOPES)


def test_each_tenant_finds_its_own(assistants: Assistants) -> None:
    assert [assistants.find(Tenant(t), "support").instructions for t in "ab"] == ["Be kind.", "Be brief."]  # type: ignore[union-attr]
    assert assistants.find(Tenant("c"), "support") is None
    assert assistants.find(Tenant("a"), "nobody") is None
    assert [a.id for a in assistants.visible_to(Tenant("a"))] == ["support", "everybody"]
    assert [a.id for a in assistants.visible_to(Tenant("c"))] == ["everybody"]


def test_trunks_and_scopes(assistants: Assistants) -> None:
    texts = (b"Be kind.", b"Be brief.", b"Be there.")
    assert [list(a.trunk_ids) for a in assistants] == [
        [IM_START, *b"system\n", *text, IM_END, 10, IM_START, *b"user\n"] for text in texts
    ]
    assert len({a.scope_key for a in assistants}) == 3
    assert [a.tenant for a in assistants] == ["a", "b", None]
    assert next(a.head_runs for a in assistants)["system\nBe kind."] == [*b"system\nBe kind."]


def test_another_text_other_options_and_another_owner_are_other_versions(template: ChatTemplate) -> None:
    def build(scopes: Scopes = SCOPES, **changes: object) -> tuple[str, bytes]:
        config = AssistantConfig.model_validate(
            {"id": "x", "instructions": "Be kind.", "shared": "tenant" not in changes, **changes}
        )
        (assistant,) = Assistants.build([config], template, scopes)
        return assistant.version, assistant.scope_key

    options = [{}, {"a": False}, {"a": 0}, {"a": 0.0}, {"a": "0"}, {"b": False}, {"a": False, "b": False}]
    seen = [
        *(build(template_options=some) for some in options),
        build(instructions="Be brief."),
        build(tenant="a"),
        build(tenant="b"),
        build(id="y"),
        build(Scopes(b"t" * 32)),
    ]
    assert len({version for version, _ in seen}) == len({key for _, key in seen}) == len(seen)
    assert build(template_options={"b": 1, "a": 2}) == build(template_options={"a": 2, "b": 1})


def test_what_has_not_changed_is_not_made_again(template: ChatTemplate, assistants: Assistants) -> None:
    edited = CONFIGS[2].model_copy(update={"instructions": "Be everywhere."})
    again = Assistants.build([*CONFIGS[:2], edited], template, SCOPES, assistants)
    same = [new is old for new, old in zip(again, assistants, strict=True)]
    assert same == [True, True, False]
    assert list(again)[2].instructions == "Be everywhere."


def test_what_the_template_refuses_is_a_mistake_in_the_configuration(template: ChatTemplate) -> None:
    config = AssistantConfig(id="x", shared=True, instructions="x", template_options={"messages": "y"})
    with pytest.raises(ConfigError, match="assistants: 'x': chat_template_kwargs must not set 'messages'"):
        Assistants.build([config], template, SCOPES)


def test_instructions_stay_out_of_logs(assistants: Assistants) -> None:
    assert "Be kind." not in repr(list(assistants))


def test_a_trunk_ends_where_the_first_variable_begins_and_holds_what_is_fixed(template: ChatTemplate) -> None:
    config = AssistantConfig(
        id="x",
        shared=True,
        instructions="Of {{shop}}, for {{who}}.",
        variables=("who",),
        fixed_variables={"shop": "Harbour {{line}}"},
    )
    (assistant,) = Assistants.build([config], template, SCOPES)
    assert list(assistant.trunk_ids) == [IM_START, *b"system\nOf Harbour {{line}}, for "]
    assert assistant.filled({"who": "{{shop}}"}) == "Of Harbour {{line}}, for {{shop}}."


def test_variables_have_their_placeholders() -> None:
    for fields in ({"variables": ("who",)}, {"fixed_variables": {"who": "x"}}):
        with pytest.raises(ValueError, match=r"no placeholder \{\{who\}\}"):
            AssistantConfig(id="x", shared=True, instructions="For {who}.", **fields)
    with pytest.raises(ValueError, match="comes twice"):
        AssistantConfig(
            id="x", shared=True, instructions="For {{who}}.", variables=("who",), fixed_variables={"who": "x"}
        )
