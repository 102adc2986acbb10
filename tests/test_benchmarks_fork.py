"""The fork benchmark forks; how fast is not a test's business."""

import pytest

from benchmarks.fork import time_forks


@pytest.mark.parametrize("is_held", [True, False])
def test_both_parts_of_a_fork_are_timed(is_held: bool) -> None:
    lookup, start = time_forks(5, 3, is_held=is_held)
    assert lookup > 0
    assert start > 0
