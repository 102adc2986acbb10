"""The area under the curve, its interval, and U."""

import random

import pytest

from benchmarks.rank_statistics import area


def test_the_area_counts_who_is_smaller_and_ties_by_half() -> None:
    found = area([1, 2, 3], [2, 4, 4])
    # 1 is smaller than all three; 2 ties with 2; 3 loses to 2
    assert found["u"] == 3 + 2.5 + 2
    assert found["auc"] == round(7.5 / 9, 4)


def test_kinds_that_do_not_overlap() -> None:
    low, high = list(range(20)), list(range(20, 40))
    assert (area(low, high)["auc"], area(low, high)["interval"]) == (1, [1, 1])
    assert (area(high, low)["auc"], area(high, low)["interval"]) == (0, [0, 0])
    assert area(low, high)["p"] == area(high, low)["p"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_interval_includes_what_is_true_as_often_as_it_says(shift: float) -> None:
    """Normal values a whole standard deviation apart have an area of Phi(1 / sqrt 2) = 0.7602."""
    true_area = {0.0: 0.5, 1.0: 0.7602}[shift]
    chance = random.Random(4)
    num_runs, num_included = 60, 0
    for _ in range(num_runs):
        more = [chance.gauss(shift, 1) for _ in range(60)]
        low, high = area([chance.gauss(0, 1) for _ in range(60)], more)["interval"]
        num_included += low <= true_area <= high
    assert 52 <= num_included <= 60, num_included


def test_there_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="got 3 and 2 measurements"):
        area([1, 2, 3], [1, 2])
