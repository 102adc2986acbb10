"""Prompt tokens a second, from steps of prefill."""

from engine.prefill_rate import PrefillRate
from engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from tests.engine.sequences import make_sequence


def batch(num_prompt_tokens: int, num_decodes: int = 0, *, samples: bool = True) -> ScheduledBatch:
    sequence = make_sequence("s", [1])
    rows = [ScheduledSequence(sequence, 1, True)] * num_decodes
    if num_prompt_tokens:
        rows.append(ScheduledSequence(sequence, num_prompt_tokens, samples))
    return ScheduledBatch(tuple(rows), num_decodes)


def test_nothing_is_known_before_a_prompt_was_computed():
    rate = PrefillRate()
    rate.add(batch(0, 40), 1.0)
    rate.add(batch(15), 1.0)  # says more about the step than about its tokens
    rate.add(batch(20, 21), 1.0)  # most of it was decoding
    assert rate.tokens_per_s is None


def test_the_rate_is_of_all_tokens_of_steps_with_prompts():
    rate = PrefillRate()
    rate.add(batch(100), 0.5)
    assert rate.tokens_per_s == 200
    rate.add(batch(0, 64), 9.0)
    assert rate.tokens_per_s == 200
    rate = PrefillRate()
    rate.add(batch(90, 10), 0.5)
    assert rate.tokens_per_s == 200


def test_a_step_that_nobody_waits_for_counts_with_the_next():
    rate = PrefillRate()
    rate.add(batch(500, samples=False), 0.001)
    assert rate.tokens_per_s is None
    rate.add(batch(0, 10), 0.999)
    assert rate.tokens_per_s == 510
    rate.add(batch(0, 10), 100.0)
    assert rate.tokens_per_s == 510


def test_new_measurements_outweigh_old_ones():
    rate = PrefillRate()
    rate.add(batch(10_000), 10.0)
    rate.add(batch(10_000), 1.0)
    assert rate.tokens_per_s == 15_000 / 6.0
