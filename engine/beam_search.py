"""Beam search as a decision: which beams go on after a step, and which sequences are the best in the end. No torch.

A step is one ordinary request for each live beam, over the prompt and what the beam has so far, that draws one token
and says the best candidates for it. The KV of a beam is found where the request of its parent published it, so a fork
is the prefix lookup that every request makes: one token to compute, at most one block to copy.
"""

import math
from dataclasses import dataclass
from typing import Self

import msgspec

from engine.errors import InvalidRequest
from engine.protocol import TokenLogprobs
from engine.sampling_params import GREEDY_TEMPERATURE, MAX_LOGPROBS, SamplingParams

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""A step asks for the 2 * width best candidates of each beam: so many may end it, and a width goes on all the same."""
MAX_LENGTH_PENALTY = 10.0
"""Of either sign: with a context of millions the power is still a number."""


class BeamSearchParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How wide and how far to search: vLLM's names. What is drawn at random has no place here."""

    beam_width: int
    """Live beams at most, and sequences in the result."""
    max_tokens: int | None
    """At most this many output tokens; None means all that the context leaves."""
    ignore_eos: bool = False
    length_penalty: float = 1.0
    """A sequence ranks by its log-probability over (prompt and output tokens) ** length_penalty."""
    temperature: float = 0.0
    """For those who give it to vLLM: beams are ranked by the model's own log-probabilities, so it can only be 0."""

    def validate(self) -> Self:
        """Returns itself. Raises InvalidRequest naming the first field that is out of range."""

        def need(ok: bool, param: str, wanted: str) -> None:
            if not ok:
                raise InvalidRequest(f"{param} must be {wanted}, got {getattr(self, param)!r}", param=param)

        need(1 <= self.beam_width <= MAX_BEAM_WIDTH, "beam_width", f"from 1 to {MAX_BEAM_WIDTH}")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        is_in_range = math.isfinite(self.length_penalty) and abs(self.length_penalty) <= MAX_LENGTH_PENALTY
        need(is_in_range, "length_penalty", f"between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}")
        need(0 <= self.temperature < GREEDY_TEMPERATURE, "temperature", "0 in a beam search")
        return self


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of the search, from its first output token on."""

    token_ids: tuple[int, ...] = ()
    """Output only; an end id is the last of them."""
    cum_logprob: float = 0.0
    """Sum of the log-probabilities of `token_ids`."""
    stop_token_id: int | None = None
    """The end id that ended it; None while it is alive, or if it was cut."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each of `token_ids`, if the search keeps them."""

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Without the id that ended it."""
        return self.token_ids if self.stop_token_id is None else self.token_ids[:-1]


class BeamSearch:
    """One prompt's search. The caller asks the engine about each of the `live` beams and `take`s the answers.

    A beam that draws an end id leaves the live ones and stands for election; the best `beam_width` of all that ended
    and of those that are alive at the end are the result, as with vLLM, to the order of equal ones. The search ends
    when `max_tokens` are drawn, when no beam is alive, or when none of them can come into the result any more: so
    what it stops early for changes nothing in it.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        num_prompt_tokens: int,
        max_tokens: int,
        end_ids: frozenset[int],
        num_logprobs: int | None = None,
    ) -> None:
        """`params` must be valid. `max_tokens`: those of `params`, clamped to what context and pool leave.

        `num_logprobs`: keep entries with so many alternatives for each token; None: keep none.
        """
        self.live: tuple[Beam, ...] = (Beam(),)
        """Those that live, most probable first."""
        width, penalty = params.beam_width, params.length_penalty
        # even if all end ids are among the candidates of a beam, it can go on in `width` ways
        num_candidates = min(MAX_LOGPROBS, max(2 * width, width + len(end_ids)))
        self.step_params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=max(num_candidates, num_logprobs or 0)
        )
        """What to ask the engine for, for each live beam."""
        self._width = width
        self._length_penalty = penalty
        self._num_candidates = num_candidates
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._num_logprobs = num_logprobs
        self._num_steps = 0
        self._ended: list[Beam] = []
        """The best `width` of those that have ended, best first; of equal ones the earlier first."""
        self._arrived: dict[int, TokenLogprobs] = {}

    @property
    def is_done(self) -> bool:
        if not self.live or self._num_steps == self._max_tokens:
            return True
        return len(self._ended) == self._width and self.score(self._ended[-1]) >= self._best_attainable()

    def take(self, index: int, entry: TokenLogprobs) -> bool:
        """What the engine says of live beam `index`. True if it was the last one: `live` are the next step's now.

        Raises ValueError if there is no such beam, or if it was taken already.
        """
        if not 0 <= index < len(self.live) or index in self._arrived:
            raise ValueError(f"beam {index} of {len(self.live)} was not asked for, or was taken already")
        self._arrived[index] = entry
        if len(self._arrived) < len(self.live):
            return False
        entries, self._arrived = [self._arrived[i] for i in range(len(self.live))], {}
        self._advance(entries)
        return True

    def best(self) -> list[Beam]:
        """At most `beam_width` sequences, best first; final when the search is done."""
        return sorted([*self._ended, *self.live], key=self.score, reverse=True)[: self._width]

    def score(self, beam: Beam) -> float:
        """vLLM's: the prompt's tokens count for the length, the id that ended the sequence does not."""
        num_tokens = self._num_prompt_tokens + len(beam.text_ids)
        return float(beam.cum_logprob / num_tokens**self._length_penalty)

    def _advance(self, entries: list[TokenLogprobs]) -> None:
        candidates: list[tuple[float, int, int, float]] = []
        for index, (beam, entry) in enumerate(zip(self.live, entries, strict=True)):
            for token_id, logprob in entry.top[: self._num_candidates]:
                if token_id in self._end_ids:
                    self._ended.append(self._extend(beam, entry, token_id, logprob))
                else:
                    candidates.append((beam.cum_logprob + logprob, index, token_id, logprob))
        self._ended = sorted(self._ended, key=self.score, reverse=True)[: self._width]
        # all live beams are of one length, so that no penalty changes their order
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        self.live = tuple(
            self._extend(self.live[index], entries[index], token_id, logprob)
            for _, index, token_id, logprob in candidates[: self._width]
        )
        self._num_steps += 1

    def _extend(self, beam: Beam, entry: TokenLogprobs, token_id: int, logprob: float) -> Beam:
        logprobs = beam.logprobs
        if self._num_logprobs is not None:
            logprobs = (*logprobs, TokenLogprobs(token_id, logprob, entry.top[: self._num_logprobs]))
        stop_token_id = token_id if token_id in self._end_ids else None
        return Beam((*beam.token_ids, token_id), beam.cum_logprob + logprob, stop_token_id, logprobs)

    def _best_attainable(self) -> float:
        """No live beam can come to a better score: log-probabilities only sink, and lengths lie within known bounds."""
        num_output_tokens = self._max_tokens if self._length_penalty > 0 else self._num_steps
        num_tokens = self._num_prompt_tokens + num_output_tokens
        return float(self.live[0].cum_logprob / num_tokens**self._length_penalty)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """vLLM's names: as there, `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    """Prompt and output, without the id that ended it."""
    text: str
    """All of `tokens`, control tokens included."""
    cum_logprob: float
    """Of the output, the id that ended it included."""
    num_prompt_tokens: int
    output_text: str
    """What came after the prompt, without control tokens."""
    finish_reason: str
    """stop or length."""
    stop_reason: int | None
    """The id that ended it."""

    @property
    def token_ids(self) -> list[int]:
        """Of `tokens` the output."""
        return self.tokens[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What came of one prompt."""

    sequences: list[BeamSearchSequence]
    """`beam_width` of them, best first."""
