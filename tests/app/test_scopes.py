"""Keys of cache scopes and the secret behind them."""

import stat
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.config import ConfigError
from app.scopes import Narrowing, Scopes, ensure_secret
from app.tenants import Tenant

SCOPES = Scopes(b"s" * 32)


fields = st.none() | st.text("ab", max_size=3)
askers = st.tuples(st.booleans(), st.text("ab", min_size=1, max_size=3), fields, fields, fields)
"""Scoped by user, tenant, user, cache_salt, prompt_cache_key."""


def tenant(name: str, *, by_user: bool = False) -> Tenant:
    return Tenant(name, is_scoped_by_user=by_user)


def private_key(by_user: bool, name: str, user: str | None, salt: str | None, key: str | None) -> bytes:
    return SCOPES.private_key(tenant(name, by_user=by_user), Narrowing(salt, key, user))


@given(askers, askers)
@example((True, "a", "b", None, None), (False, "a", None, "b", None)).via("a user named like a salt")
@example((True, "a", "b", None, None), (True, "a", None, "b", None)).via("within one tenant too")
@example((True, "a", "", None, None), (True, "a", None, None, None)).via("an empty name is a name")
@example((False, "ab", None, "a", None), (False, "a", None, "ba", None)).via("fields that concatenate alike")
@example((False, "a", "x", None, None), (False, "a", "y", None, None)).via("users count only where they are told to")
def test_flipping_any_field_is_another_scope(one: tuple, other: tuple) -> None:
    """Fields that concatenate alike, and a user named like a salt, included."""

    def counts(asker: tuple) -> tuple:
        by_user, name, user, salt, key = asker
        return by_user, name, user if by_user else None, salt, key

    assert (private_key(*one) == private_key(*other)) == (counts(one) == counts(other))


def test_every_difference_is_another_scope() -> None:
    keys = [
        SCOPES.private_key(tenant("a")),
        SCOPES.private_key(tenant("a", by_user=True)),
        SCOPES.owner_key(tenant("a"), None),
        SCOPES.owner_key(tenant("b"), None),
        SCOPES.owner_key(tenant("a", by_user=True), None),
        SCOPES.owner_key(tenant("a", by_user=True), "u"),
        SCOPES.assistant_key("a", "support", "Be kind."),
        SCOPES.assistant_key("b", "support", "Be kind."),
        SCOPES.assistant_key(None, "support", "Be kind."),
        SCOPES.assistant_key("a", "support", "Be brief."),
        SCOPES.assistant_key("a", "other", "Be kind."),
        Scopes(b"t" * 32).private_key(tenant("a")),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(k) == 32 for k in keys)


def test_the_same_is_the_same() -> None:
    assert SCOPES.private_key(tenant("a"), Narrowing("x")) == Scopes(b"s" * 32).private_key(
        tenant("a"), Narrowing("x", None, "a user that does not count")
    )
    assert SCOPES.owner_key(tenant("a"), "x") == SCOPES.owner_key(tenant("a"), "y")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, got 3"):
        Scopes(b"abc")


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    secret = ensure_secret(tmp_path / "state")
    path = tmp_path / "state" / "secret"
    assert len(secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_secret(tmp_path / "state") == secret
    assert [p.name for p in path.parent.iterdir()] == ["secret"]
    assert ensure_secret(tmp_path / "other") != secret


def test_a_spoilt_secret_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="secret must hold 32 bytes, got 3"):
        ensure_secret(tmp_path)
