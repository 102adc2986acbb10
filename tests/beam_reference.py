"""Beam search written down plainly, with everything kept and nothing stopped early: what the real one must come to."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.sampling_params import MAX_LOGPROBS


class Found(NamedTuple):
    token_ids: tuple[int, ...]
    """Output, an end id included."""
    cum_logprob: float
    has_ended: bool

    def score(self, num_prompt_tokens: int, length_penalty: float) -> float:
        return self.cum_logprob / (num_prompt_tokens + len(self.token_ids) - self.has_ended) ** length_penalty


def search_plainly(
    next_logprobs: Callable[[tuple[int, ...]], Sequence[float]],
    num_prompt_tokens: int,
    width: int,
    max_tokens: int,
    end_ids: frozenset[int] = frozenset(),
    length_penalty: float = 1.0,
) -> list[Found]:
    """`next_logprobs(output ids)`: of every token of the vocabulary, by id."""
    num_candidates = min(MAX_LOGPROBS, max(2 * width, width + len(end_ids)))
    live, ended = [Found((), 0.0, False)], []
    for _ in range(max_tokens):
        grown = []
        for beam in live:
            ranked = sorted(enumerate(next_logprobs(beam.token_ids)), key=lambda pair: -pair[1])
            for token_id, logprob in ranked[:num_candidates]:
                grown.append(Found((*beam.token_ids, token_id), beam.cum_logprob + logprob, token_id in end_ids))
        ended += [found for found in grown if found.has_ended]
        live = sorted((found for found in grown if not found.has_ended), key=lambda found: -found.cum_logprob)[:width]
    return sorted([*ended, *live], key=lambda found: -found.score(num_prompt_tokens, length_penalty))[:width]
