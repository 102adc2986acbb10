"""The engine over interpreted Triton kernels."""

import pytest

from tests.interpreted.child import run_interpreted


def test_some_prompts_in_every_way() -> None:
    run_interpreted("tests/interpreted/engine")


@pytest.mark.slow
def test_what_is_tested_of_the_core_over_a_real_model_holds_over_triton_too() -> None:
    run_interpreted(
        "tests/engine/test_core_with_model.py", "-k", "not compute_in_c_plus_plus", TRUNKLINE_TEST_KERNELS="triton"
    )
