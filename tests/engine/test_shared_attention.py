"""What nodes cost is found from timings, also where some are far off."""

import pytest

from engine.shared_attention import NodeCost, NodeTiming, fit_cost

SIZES = [(1, tokens, readers) for tokens in (16, 64, 192, 512) for readers in (2, 8, 32)] + [(8, 64, 4)]


def timings(read_s: float, merge_s: float, node_s: float, error: float = 0.0) -> list[NodeTiming]:
    """`error`: how much of its time a size is off, up and down in turn."""
    made = []
    for i, (nodes, tokens, readers) in enumerate(SIZES):
        flat_s = nodes * readers * (tokens + 100) * 1e-7
        saved_s = nodes * ((readers - 1) * tokens * read_s - readers * merge_s - node_s)
        made.append(NodeTiming(nodes, tokens, readers, flat_s - saved_s + (-1) ** i * error * flat_s, flat_s))
    return made


def assert_near(cost: NodeCost, *expected: float) -> None:
    assert (cost.read_s, cost.merge_s, cost.node_s) == pytest.approx(expected, rel=0.2, abs=1e-9)


def test_costs_are_found() -> None:
    assert_near(fit_cost(timings(3e-8, 5e-7, 9e-6)), 3e-8, 5e-7, 9e-6)
    assert_near(fit_cost(timings(3e-8, 5e-7, 9e-6, error=0.002)), 3e-8, 5e-7, 9e-6)


def test_one_timing_that_is_far_off_changes_little() -> None:
    for i, timing in enumerate(timings(3e-8, 5e-7, 9e-6)):
        wrong = NodeTiming(timing.num_nodes, timing.num_tokens, timing.num_readers, timing.nodes_s, 3 * timing.flat_s)
        made = timings(3e-8, 5e-7, 9e-6)
        made[i] = wrong
        assert_near(fit_cost(made), 3e-8, 5e-7, 9e-6)


def test_no_cost_is_below_zero() -> None:
    assert_near(fit_cost(timings(3e-8, 0.0, -9e-6)), 3.2e-8, 0.0, 0.0)
    assert fit_cost(timings(-3e-8, 0.0, 0.0)).read_s == 0.0
