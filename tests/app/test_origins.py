"""Whose pages may speak to the server, and under which names."""

import pytest

from app.origins import Origins


@pytest.mark.parametrize(
    ("is_open", "host", "origin", "allowed"),
    [
        (True, "127.0.0.1:8000", None, True),
        (True, "localhost:8000", "http://localhost:8000", True),
        (True, "[::1]:8000", None, True),
        (True, "127.0.0.1:8000", "http://evil.example", False),
        (True, "127.0.0.1:8000", "null", False),
        (True, "127.0.0.1:8000", "http://127.0.0.1:9999", False),
        (True, "evil.example:8000", "http://evil.example:8000", False),  # resolves to 127.0.0.1
        (True, "chat.example.com", "https://chat.example.com", True),
        (True, "[::1", None, False),
        (True, "localhost:x", None, False),
        (False, "[::1", None, False),
        (False, "chat.internal", "http://[", False),
        (False, "chat.internal", "http://chat.internal:x", False),
        (False, "chat.internal", None, True),
        (False, "chat.internal", "https://chat.internal", True),
        (False, "chat.internal", "https://chat.example.com", True),
        (False, "chat.internal", "https://chat.example.com.evil.example", False),
    ],
)
def test_origins(is_open: bool, host: str, origin: str | None, allowed: bool) -> None:
    origins = Origins(["https://chat.example.com/"], is_open=is_open)
    assert (origins.find_refusal(host, origin) is None) == allowed
