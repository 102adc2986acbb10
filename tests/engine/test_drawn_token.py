"""What a drawn token means for its sequence."""

from engine.drawn_token import take_token
from engine.protocol import FinishReason, RequestOutput, TokenLogprobs
from engine.scheduled_batch import SampledToken
from engine.sequence import Sequence
from tests.engine.sequences import make_sequence


def cached(**params: object) -> Sequence:
    sequence = make_sequence("r", [1, 2, 3], **params)
    sequence.num_cached_tokens, sequence.num_cached_host_tokens = 2, 1
    return sequence


def test_the_first_output_says_what_was_cached_and_later_ones_do_not():
    sequence = cached()
    first = RequestOutput(
        request_id="r",
        token_ids=[7],
        num_cached_tokens=2,
        num_cached_trunk_tokens=0,
        num_cached_host_tokens=1,
        queue_ms=0.0,
    )
    assert take_token(sequence, SampledToken(7)) == first
    assert take_token(sequence, SampledToken(8)) == RequestOutput(request_id="r", token_ids=[8])
    assert sequence.token_ids == [1, 2, 3, 7, 8]


def test_logprobs_come_with_their_token_and_those_of_the_prompt_once():
    sequence = cached(prompt_logprobs=0)
    sequence.prompt_logprobs = [TokenLogprobs(2, -1.0, []), TokenLogprobs(3, -2.0, [])]
    own = TokenLogprobs(7, -0.5, [])
    output = take_token(sequence, SampledToken(7, own))
    assert output.logprobs == [own]
    assert output.prompt_logprobs == [None, TokenLogprobs(2, -1.0, []), TokenLogprobs(3, -2.0, [])]
    assert take_token(sequence, SampledToken(8)).prompt_logprobs is None


def test_a_stop_id_ends_it_from_min_tokens_on():
    sequence = cached(stop_token_ids=(9,), min_tokens=1)
    assert take_token(sequence, SampledToken(9)).finish_reason is None
    last = take_token(sequence, SampledToken(9))
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 9)


def test_its_length_ends_it():
    sequence = cached()
    sequence.max_output_tokens = 2
    assert [take_token(sequence, SampledToken(7)).finish_reason for _ in range(2)] == [None, FinishReason.LENGTH]


def test_a_fault_ends_it_without_a_token():
    sequence = cached()
    output = take_token(sequence, SampledToken(0, fault="not finite"))
    assert (output.token_ids, output.finish_reason, output.error.message) == ([], FinishReason.ERROR, "not finite")
    assert sequence.token_ids == [1, 2, 3]
