"""Bars of a benchmark's document."""

import pytest

from benchmarks.document import all_hold, bar, find_bars


def test_a_bar_holds_up_to_its_limit() -> None:
    assert bar(1.3, at_most=1.3) == {"value": 1.3, "at_most": 1.3, "holds": True}
    assert not bar(1.3001, at_most=1.3)["holds"], "what is shown is rounded, what is judged is not"
    assert bar(2.5, at_least=2.5) == {"value": 2.5, "at_least": 2.5, "holds": True}
    assert not bar(2.4999, at_least=2.5)["holds"]
    assert [bar(x, at_least=1, at_most=2)["holds"] for x in (0, 1, 2, 3)] == [False, True, True, False]


def test_bars_are_found_at_any_depth_under_their_names() -> None:
    good, bad = bar(1, at_most=2), bar(3, at_most=2)
    document = {"date": "today", "cold": [{"computed": good}, {"computed": bad}], "ratio": good, "runs": [1, 2]}
    assert find_bars(document) == [("cold.0.computed", good), ("cold.1.computed", bad), ("ratio", good)]


def test_bars_that_do_not_hold_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert all_hold({"ratio": bar(1, at_most=2)})
    assert capsys.readouterr().err == ""
    assert not all_hold({"ratio": bar(1, at_most=2), "cold": [bar(3, at_most=2)]})
    assert capsys.readouterr().err == 'cold.0 does not hold: {"value": 3, "at_most": 2, "holds": false}\n'
