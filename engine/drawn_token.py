"""What a drawn token means for its sequence: it goes to its end, and perhaps ends it."""

from engine.protocol import ErrorInfo, FinishReason, RequestOutput
from engine.scheduled_batch import SampledToken
from engine.sequence import Sequence


def take_token(sequence: Sequence, sampled: SampledToken) -> RequestOutput:
    """The sequence's output; with a finish reason it is to be ended. A fault appends nothing."""
    if sampled.fault is not None:
        return failure(sequence, ErrorInfo(sampled.fault, "engine_error"))
    token_id = sampled.token_id
    token_ids = sequence.token_ids
    token_ids.append(token_id)
    num_output_tokens = len(token_ids) - sequence.num_prompt_tokens
    output = RequestOutput(request_id=sequence.request_id, token_ids=[token_id])
    if sampled.logprobs is not None:
        output.logprobs = [sampled.logprobs]
    if num_output_tokens == 1 + len(sequence.resumed_ids):
        output.num_cached_tokens = sequence.num_cached_tokens
        output.num_cached_trunk_tokens = sequence.num_cached_trunk_tokens
        output.num_cached_host_tokens = sequence.num_cached_host_tokens
        output.queue_ms = sequence.queue_ms
        if sequence.params.prompt_logprobs is not None and not sequence.resumed_ids:
            output.prompt_logprobs = [None, *sequence.prompt_logprobs]
            sequence.prompt_logprobs = []
    # the sampler masks what may not end the sequence yet; should it be drawn all the same, it ends nothing
    if token_id in sequence.stop_ids and num_output_tokens > sequence.params.min_tokens:
        output.finish_reason = FinishReason.STOP
        output.stop_token_id = token_id
    elif num_output_tokens >= sequence.max_output_tokens:
        output.finish_reason = FinishReason.LENGTH
    return output


def failure(sequence: Sequence, error: ErrorInfo) -> RequestOutput:
    return RequestOutput(request_id=sequence.request_id, finish_reason=FinishReason.ERROR, error=error)
