"""A comparison must be able to fail, and what fails must not hide the rest."""

import math

import pytest
import torch

from tests.interpreted.child import need_triton

need_triton()

from benchmarks.gpu_correctness import compared  # noqa: E402 it imports triton
from benchmarks.gpu_device import Device, OutOfTime  # noqa: E402
from benchmarks.gpu_failure import MAX_CHARACTERS, note  # noqa: E402

EXPECTED = torch.tensor([0.5, -2.0, 40.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("got", "holds"),
    [
        ([0.5, -2.0, 40.0], True),
        ([0.5, -2.0, 40.3], True),  # less than a hundredth of 40
        ([0.52, -2.0, 40.0], False),
        ([0.5, -2.0, math.nan], False),
        ([0.5, -2.0, math.inf], False),
    ],
)
def test_compared(got: list[float], holds: bool) -> None:
    assert compared(torch.tensor(got), EXPECTED, 0.01, 0.01)["holds"] is holds


def test_many_small_differences_are_seen_by_their_norm() -> None:
    expected = torch.ones(100, dtype=torch.float64)
    got = torch.full((100,), 1.009)
    assert compared(got, expected, 0.01, 0.01)["holds"]
    assert not compared(got, expected, 0.01, 0.005)["holds"]


def test_a_failure_is_noted_with_the_end_of_its_traceback() -> None:
    def fail() -> dict[str, object]:
        raise ValueError("x" * (2 * MAX_CHARACTERS) + " what the compiler said last")

    found: dict[str, object] = {"before": 1}
    note(Device(is_dry=True), found, "kernel", fail)
    noted = found.pop("kernel")
    assert found == {"before": 1}
    assert isinstance(noted, dict)
    assert not noted["holds"]
    assert len(noted["traceback"]) == MAX_CHARACTERS
    assert noted["traceback"].endswith("what the compiler said last\n")


def test_the_end_of_the_time_is_no_failure() -> None:
    def stop() -> dict[str, object]:
        raise OutOfTime("after 3 s")

    with pytest.raises(OutOfTime):
        note(Device(is_dry=True), {}, "kernel", stop)
