"""Every Triton kernel against float64, interpreted: the tests are in tests/interpreted/kernels."""

import pytest

from tests.interpreted.child import run_interpreted


def test_kernels() -> None:
    run_interpreted("tests/interpreted/kernels", "-m", "not slow")


@pytest.mark.slow
def test_kernels_in_all_shapes() -> None:
    run_interpreted("tests/interpreted/kernels", "-m", "slow")
