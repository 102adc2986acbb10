"""Keys of cache scopes and the secret behind them."""

import stat
from pathlib import Path

import pytest

from app.config import ConfigError
from app.scopes import Scopes, ensure_secret

SCOPES = Scopes(b"s" * 32)


def test_every_difference_is_another_scope() -> None:
    keys = [
        SCOPES.private_key("a"),
        SCOPES.private_key("b"),
        SCOPES.private_key("a", None, None),
        SCOPES.private_key("a", "salt", None),
        SCOPES.private_key("a", None, "salt"),
        SCOPES.private_key("a", "", None),
        SCOPES.private_key("as", "alt", None),
        SCOPES.private_key("b", "salt", None),
        SCOPES.assistant_key("a", "support", "Be kind."),
        SCOPES.assistant_key("b", "support", "Be kind."),
        SCOPES.assistant_key(None, "support", "Be kind."),
        SCOPES.assistant_key("a", "support", "Be brief."),
        SCOPES.assistant_key("a", "other", "Be kind."),
        Scopes(b"t" * 32).private_key("a"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(k) == 32 for k in keys)


def test_the_same_is_the_same() -> None:
    assert SCOPES.private_key("a", "x") == Scopes(b"s" * 32).private_key("a", "x")


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
