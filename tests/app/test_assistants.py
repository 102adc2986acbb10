"""Assistants: who may see them, and where their trunks end."""

from pathlib import Path

import pytest

from app.assistants import Assistants
from app.config import AssistantConfig
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


def test_instructions_stay_out_of_logs(assistants: Assistants) -> None:
    assert "Be kind." not in repr(list(assistants))
