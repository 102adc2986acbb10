"""Bars of a benchmark's document."""

from benchmarks.document import bar, find_bars


def test_a_bar_holds_up_to_its_limit() -> None:
    assert bar(1.3, at_most=1.3) == {"value": 1.3, "at_most": 1.3, "holds": True}
    assert not bar(1.3001, at_most=1.3)["holds"], "what is shown is rounded, what is judged is not"


def test_bars_are_found_at_any_depth_under_their_names() -> None:
    good, bad = bar(1, at_most=2), bar(3, at_most=2)
    document = {"date": "today", "cold": [{"computed": good}, {"computed": bad}], "ratio": good, "runs": [1, 2]}
    assert find_bars(document) == [("cold.0.computed", good), ("cold.1.computed", bad), ("ratio", good)]
