"""The configuration in force: built whole or not at all, and never changed."""

from pathlib import Path

import pytest

from app.config import ConfigError, FileConfig
from app.tenants import Tenant
from tests.app.serving import make_services
from tests.scripted_engine import ScriptedEngineClient

A, B = Tenant("a"), Tenant("b")
ONE = FileConfig.model_validate(
    {
        "tenants": [{"id": "a", "key": "key-of-a-123"}],
        "assistants": [{"id": "support", "tenant": "a", "instructions": "Be kind."}],
        "limits": {"max_choices": 4},
    }
)


def test_what_cannot_be_built_leaves_the_old_one(tmp_path: Path) -> None:
    live = make_services(tmp_path, ScriptedEngineClient(), ONE).live
    first = live.current
    bad = {"id": "x", "shared": True, "instructions": "x", "template_options": {"messages": 1}}
    with pytest.raises(ConfigError, match="must not set 'messages'"):
        live.build(FileConfig.model_validate({"assistants": [bad]}))
    assert live.current is first


def test_what_is_in_force_changes_as_a_whole_and_only_when_it_is_put_there(tmp_path: Path) -> None:
    live = make_services(tmp_path, ScriptedEngineClient(), ONE).live
    first = live.current
    second = live.build(FileConfig.model_validate({"tenants": [{"id": "b", "key": "key-of-b-123"}]}))
    assert live.current is first
    live.current = second
    assert first.tenants.authenticate("Bearer key-of-a-123") == A
    assert (first.limits.max_choices, first.assistants.find(A, "support") is not None) == (4, True)
    assert second.tenants.authenticate("Bearer key-of-b-123") == B
    assert (second.limits.max_choices, list(second.assistants)) == (128, [])
