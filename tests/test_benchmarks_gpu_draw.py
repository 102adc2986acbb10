"""Whether a token was drawn by the rules is judged by a sort in float64."""

import numpy as np
import pytest

from tests.interpreted.child import need_triton

need_triton()

from benchmarks.gpu_draw import Rule, is_drawn_well  # noqa: E402 it imports triton

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], dtype=np.float32))
"""Ranked 1, 3, 2, 0."""


@pytest.mark.parametrize(
    ("rule", "uniform", "token"),
    [
        (Rule(temperature=0.0), 0.5, 1),
        (Rule(), 1 - 0.05, 0),
        (Rule(), 1 - 0.45, 1),
        (Rule(), 1 - 0.95, 3),
        (Rule(top_k=2), 1 - 0.5, 1),
        (Rule(top_k=2), 0.0, 3),
        (Rule(top_p=0.65), 0.0, 3),
        (Rule(top_p=0.75), 0.0, 2),
        (Rule(min_p=0.6), 0.0, 3),
    ],
)
def test_only_the_token_of_the_rules_is_right(rule: Rule, uniform: float, token: int) -> None:
    assert is_drawn_well(LOGITS, rule, uniform, token) == (True, True)
    for other in {0, 1, 2, 3} - {token}:
        assert is_drawn_well(LOGITS, rule, uniform, other) == (False, False)


def test_on_a_border_both_are_near() -> None:
    border = 1 - 0.1  # between the first id and the second
    judged = [is_drawn_well(LOGITS, Rule(), border, token) for token in range(4)]
    assert [is_near for _, is_near in judged] == [True, True, False, False]
    assert sum(is_equal for is_equal, _ in judged) == 1
