"""What the engines of tests compute with where a test does not say: what `auto` finds, or the kernels that
TRUNKLINE_TEST_KERNELS names (`tests.conftest` sees to it)."""

import os
from typing import Any

import pytest

NAME = os.environ.get("TRUNKLINE_TEST_KERNELS", "auto")
ORACLE: dict[str, Any] = {} if NAME == "auto" else {"kernels": "reference"}
"""Settings of the engine that says what is right: by `auto` the same one, alone and without a cache."""


def some_of(prompts: list[list[int]], every: int) -> list[list[int]]:
    """All by `auto`; else each so manyth: interpreted, long prompts take seconds each."""
    return prompts if NAME == "auto" else prompts[::every]


def need_auto(what: str) -> None:
    """Skips the running test, which is about one of the CPU's kernels, where others are under test."""
    if NAME != "auto":
        pytest.skip(f"{what}: of no concern to {NAME} kernels")
