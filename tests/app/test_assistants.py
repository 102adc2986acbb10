"""Assistants: who may see them, and where their trunks end."""

import pytest

from app.assistants import Assistants
from app.config import AssistantConfig
from app.scopes import Scopes
from app.tenants import Tenant

SCOPES = Scopes(b"s" * 32)
CONFIGS = [
    AssistantConfig(id="support", tenant="a", instructions="Be kind."),
    AssistantConfig(id="support", tenant="b", instructions="Be brief."),
    AssistantConfig(id="everybody", shared=True, instructions="Be there."),
]


@pytest.fixture
def assistants() -> Assistants:
    return Assistants.build(CONFIGS, lambda text: list(text.encode()), SCOPES)


def test_each_tenant_finds_its_own(assistants: Assistants) -> None:
    assert [assistants.find(Tenant(t), "support").instructions for t in "ab"] == ["Be kind.", "Be brief."]  # type: ignore[union-attr]
    assert assistants.find(Tenant("c"), "support") is None
    assert assistants.find(Tenant("a"), "nobody") is None
    assert [a.id for a in assistants.visible_to(Tenant("a"))] == ["support", "everybody"]
    assert [a.id for a in assistants.visible_to(Tenant("c"))] == ["everybody"]


def test_trunks_and_scopes(assistants: Assistants) -> None:
    assert [bytes(a.trunk_ids) for a in assistants] == [b"Be kind.", b"Be brief.", b"Be there."]
    assert len({a.scope_key for a in assistants}) == 3
    assert [a.is_shared for a in assistants] == [False, False, True]


def test_instructions_stay_out_of_logs(assistants: Assistants) -> None:
    assert "Be kind." not in repr(list(assistants))
