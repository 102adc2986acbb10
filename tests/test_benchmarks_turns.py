"""Timing things in turn."""

from benchmarks.turns import Times, ratio, take_turns


def test_each_is_run_once_a_round_and_once_to_warm_up_in_both_orders() -> None:
    calls: list[str] = []
    times = take_turns([lambda: calls.append("a"), lambda: calls.append("b")], 3)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert [len(each.clock_ms) for each in times] == [3, 3]


def test_a_ratio_is_taken_within_a_round() -> None:
    times, base = Times([10.0, 100.0, 30.0], [1.0, 1.0, 1.0]), Times([5.0, 50.0, 10.0], [2.0, 2.0, 2.0])
    assert ratio(times, base) == 2
    assert ratio(times, base, of_processor=True) == 0.5
    assert times.median_ms == 30
