"""Swap in or compute."""

from engine.prefill_rate import PrefillRate
from engine.swap_cost import SwapCost, SwapTime
from tests.engine.test_prefill_rate import batch


def cost(step_s: float, block_s: float, tokens_per_s: float | None) -> SwapCost:
    rate = PrefillRate()
    if tokens_per_s is not None:
        rate.add(batch(1000), 1000 / tokens_per_s)
    return SwapCost(SwapTime(step_s, block_s), rate, block_size=16)


def test_until_a_prompt_was_measured_the_host_wins():
    assert cost(1.0, 1.0, None).is_cheaper(1)
    assert cost(1.0, 1.0, None).can_pay


def test_what_a_step_costs_has_to_be_worth_it():
    # computing a block takes 16 ms, swapping n of them 30 + 2 n
    few = cost(0.030, 0.002, 1000.0)
    assert [few.is_cheaper(n) for n in (1, 2, 3, 4)] == [False, False, True, True]
    assert few.can_pay


def test_a_slow_way_to_the_host_never_pays():
    slow = cost(0.0, 0.017, 1000.0)
    assert not slow.is_cheaper(1000)
    assert not slow.can_pay
