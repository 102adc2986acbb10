"""Tests over interpreted Triton kernels, which `tests.interpreted.child` runs; any other process leaves them out."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*/test_*.py"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny tensors on a shared machine: a second thread would mostly be waited for."""
    torch.set_num_threads(1)
