"""What a test needs from the machine. Without it the test is skipped with a reason; under TRUNKLINE_REQUIRE_ALL=1,
which the gate sets, it fails instead, so that nothing goes untested in silence."""

import os
import shutil
from pathlib import Path

import pytest


def need(found: bool, reason: str) -> None:
    """Skips the running test, or the module that is being imported, unless `found`; fails where all is required."""
    if found:
        return
    if os.environ.get("TRUNKLINE_REQUIRE_ALL") == "1":
        pytest.fail(f"TRUNKLINE_REQUIRE_ALL=1, but {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def program(*names: str) -> Path:
    """The first of these programs that PATH has."""
    found = next((path for path in map(shutil.which, names) if path), None)
    need(found is not None, f"no {' or '.join(names)} on PATH")
    return Path(found or "")


def chromium() -> Path:
    """Debian's, not a download of Playwright's own."""
    return program("chromium", "chromium-browser", "google-chrome")


def redis_server() -> Path:
    """A real Redis (or Valkey) beside the embedded one."""
    return program("redis-server", "valkey-server")
