"""Figures of a served model beside another server's."""

from typing import Any

from benchmarks.document import all_hold, find_bars
from benchmarks.peers import GOALS, figures, flat, own_bars, peer_bars, table
from benchmarks.served import costs


def served(**tok_s: float) -> dict[str, Any]:
    medians = {"ttft_p50_ms": 300.0, "itl_p50_ms": 25.0, "peak_rss_mib": 1000.0}
    return {name: {"median": {"tok_s": value, **medians}} for name, value in tok_s.items()}


DOCUMENT = {
    "date": "today",
    **served(W1=1100, W6=800, W7=1000),
    "cold-hot": {"cold_ttft_ms": 200.0, "hot_ttft_ms": 30.0},
    "hot-lengths": {"ratio": 1.2},
    "start": {"seconds_to_ready": 6.0},
}
PEER = {
    "label": "other",
    "W1": {"tokens_per_s": 500.0, "ttft_p50_ms": 400.0, "itl_p50_ms": 50.0},
    "W2": {"tokens_per_s": 500.0},
    "cold_ms": 250.0,
}


def test_figures_and_goals_have_the_same_names() -> None:
    found = figures({**DOCUMENT, **served(**{f"W{i}": 1.0 for i in range(1, 8)})})
    assert GOALS.keys() <= found.keys()
    assert flat(PEER).keys() <= found.keys()


def test_bars_without_a_peer() -> None:
    bars = own_bars(DOCUMENT)
    assert {name: found["holds"] for name, found in bars.items()} == {
        "W1.itl_p50_ms": True,
        "start_s": False,
        "fall_from_250_to_4000": True,
        "hot_4000_over_250": True,
    }
    assert bars["fall_from_250_to_4000"]["value"] == 0.2
    assert own_bars({"date": "today"}) == {}


def test_ratios_are_held_to_a_bar_where_there_is_a_goal() -> None:
    against = peer_bars(DOCUMENT, PEER)
    assert list(against) == ["W1.tokens_per_s", "W1.ttft_p50_ms", "W1.itl_p50_ms", "cold_ms"]
    assert against["W1.tokens_per_s"]["ratio"] == {"value": 2.2, "at_least": 2.0, "holds": True}
    assert against["W1.ttft_p50_ms"]["ratio"] == {"value": 0.75, "at_most": 0.6, "holds": False}
    assert against["W1.itl_p50_ms"]["ratio"] == {"value": 0.5}
    assert not all_hold({"bars": against})
    assert len(find_bars(against)) == 3


def test_the_table_has_a_line_for_each_figure() -> None:
    lines = table(own_bars(DOCUMENT), peer_bars(DOCUMENT, PEER)).splitlines()
    assert {line.count("|") for line in lines} == {7}
    assert "| W1.tokens_per_s | 1100 | 500 | 2.2 | ≥ 2 | yes |" in lines
    assert "| W1.ttft_p50_ms | 300 | 400 | 0.75 | ≤ 0.6 | **no** |" in lines
    assert "| W1.itl_p50_ms | 25 | 50 | 0.5 |  |  |" in lines
    assert "| start_s | 6 | | | ≤ 5 | **no** |" in lines


def test_further_options_cost_a_share_of_tokens_a_second() -> None:
    assert costs(DOCUMENT, {"serve": "--deterministic", **served(W1=990)}) == {"W1": 0.9}
