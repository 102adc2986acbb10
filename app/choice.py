"""One choice of an answer: ids in, text out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from app.errors import from_error_info
from app.progress import FirstToken, Midway, Progress
from engine.protocol import ErrorInfo, FinishReason, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopAutomaton
from engine.text.tokenizer import Tokenizer
from engine.token_stream import TokenStream


@dataclass(slots=True)
class ChoiceDelta:
    """What is new in one choice. `text` may be empty: a token can end in the middle of a character."""

    index: int
    text: str
    token_ids: list[int]
    """Ids that came with this delta, the end id included. Text may lag behind them."""
    logprobs: list[TokenLogprobs] | None = None
    """Of the tokens whose text is now complete, in order; None where they were not asked for."""
    end_logprobs: TokenLogprobs | None = None
    """Of the end or stop id, which has no text: with the last delta of a choice that such an id ended."""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    """The stop string or stop id that ended the choice; None for an end of turn."""


@dataclass(eq=False)
class Choice:
    """The state of one choice. Ids in order; `logprobs` waits for the text of its tokens."""

    index: int
    stream: TokenStream
    detokenizer: IncrementalDetokenizer
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    """All output ids, the end id included."""
    unsent_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the last of them."""
    num_logprobs_sent: int = 0
    is_done: bool = False
    finish_reason: Literal["stop", "length"] | None = None
    stop_token_id: int | None = None
    """The id that ended it, if one did."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_told: int = 0
    """Of its ids: those of which `take_progress` has told."""

    def __post_init__(self) -> None:
        self._is_plain = not self.params.stop and self.params.logprobs is None

    @classmethod
    def begin(
        cls,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stops: StopAutomaton,
        prompt_suffix_ids: Sequence[int] = (),
    ) -> Self:
        """A new one; nothing is asked of an engine yet. `prompt_suffix_ids`: as the detokenizer takes them."""
        detokenizer = IncrementalDetokenizer(
            tokenizer,
            stop=stops,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            prompt_suffix_ids=prompt_suffix_ids,
        )
        return cls(index, TokenStream("", _ignore), detokenizer, params)

    def take(self, output: RequestOutput) -> ChoiceDelta:
        """The delta that `output` makes. Raises ApiError where the engine reports a failure."""
        if self._is_plain and output.finish_reason is None and output.prompt_logprobs is None and output.error is None:
            ids = output.token_ids
            self.token_ids += ids
            return ChoiceDelta(self.index, self.detokenizer.append(ids), ids)
        if output.error is not None or output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.is_done = True
            raise from_error_info(output.error or ErrorInfo("The engine aborted the answer.", "aborted"))
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        ids = output.token_ids
        text, num_taken = self._append(ids, output.stop_token_id)
        finish_reason: Literal["stop", "length"] | None = None
        stop_reason: int | str | None = None
        if self.detokenizer.stop_string is not None:
            ids = ids[:num_taken]  # what came after the stop string was never asked for
            finish_reason, stop_reason = "stop", self.detokenizer.stop_string
        elif output.finish_reason is not None:
            text += self.detokenizer.finish()
            finish_reason = "stop" if output.finish_reason is FinishReason.STOP else "length"
            if output.stop_token_id not in self.params.eos_token_ids:
                stop_reason = output.stop_token_id
        self.token_ids += ids
        if finish_reason is not None:
            self.is_done = True
            self.finish_reason = finish_reason
            self.stop_token_id = None if self.detokenizer.stop_string is not None else output.stop_token_id
            self.stream.close()
        logprobs, end_logprobs = self._settled_logprobs(output, num_taken)
        return ChoiceDelta(self.index, text, ids, logprobs, end_logprobs, finish_reason, stop_reason)

    def kept_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Ids whose text is the text so far: output ids up to the last one whose text lies wholly in it, no end id.

        Where a stop string cut a token, what is left of that token is encoded anew.
        """
        kept = self.token_ids[: self.detokenizer.num_settled_tokens]
        text = self.detokenizer.text
        head = tokenizer.decode(kept, skip_special_tokens=self.params.skip_special_tokens)
        if len(head) < len(text) and text.startswith(head):
            return tokenizer.encode_runs([kept, text[len(head) :]])
        return kept

    def take_progress(self, first: FirstToken) -> Progress:
        """What has come since this was asked last; with the first of it what was known `first`."""
        num_told, self.num_told = self.num_told, len(self.token_ids)
        return Progress(
            token_ids=self.token_ids[num_told:],
            unsettled=self.unsent_logprobs,
            first=None if num_told else first,
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
        )

    def restore(self, midway: Midway) -> None:
        """Brings a new choice to where it stood at another gateway. Raises ValueError if it says another text now."""
        so_far = midway.so_far
        reason = None if so_far.finish_reason is None else FinishReason(so_far.finish_reason)
        ids = list(so_far.token_ids)
        self.take(RequestOutput(request_id="", token_ids=ids, finish_reason=reason, stop_token_id=so_far.stop_token_id))
        self.num_told = len(self.token_ids)
        self.unsent_logprobs = list(so_far.unsettled)
        self.num_logprobs_sent = len(self.token_ids) - len(self.unsent_logprobs)
        text = self.detokenizer.text
        if text != midway.text or len(self.token_ids) != len(ids):
            raise ValueError(f"the {len(ids)} ids of {midway.text[-40:]!r} say {text[-40:]!r} here")

    def _append(self, ids: list[int], stop_token_id: int | None) -> tuple[str, int]:
        """The new text, and how many of `ids` it took: the count ends with the token that completed a stop string.

        So it does not depend on how many tokens arrive together.
        """
        if not self.params.stop or len(ids) <= 1:
            return self.detokenizer.append(ids, stop_token_id=stop_token_id), len(ids)
        text = ""
        for num_taken, token_id in enumerate(ids, 1):
            text += self.detokenizer.append([token_id], stop_token_id=stop_token_id if num_taken == len(ids) else None)
            if self.detokenizer.stop_string is not None:
                return text, num_taken
        return text, len(ids)

    def _settled_logprobs(
        self, output: RequestOutput, num_taken: int
    ) -> tuple[list[TokenLogprobs] | None, TokenLogprobs | None]:
        """Entries of tokens whose text is wholly out by now, at the end of all; and that of the id that ended it."""
        if self.params.logprobs is None:
            return None, None
        unsent = [*self.unsent_logprobs, *(output.logprobs or [])[:num_taken]]
        num_settled, end = self.detokenizer.num_settled_tokens - self.num_logprobs_sent, None
        if self.is_done and self.detokenizer.stop_string is None:
            num_settled = len(unsent)
            if unsent and output.stop_token_id is not None and not self._shows(output.stop_token_id):
                num_settled -= 1
                end = unsent[-1]
        entries, self.unsent_logprobs = unsent[:num_settled], unsent[num_settled:]
        self.num_logprobs_sent += len(entries)
        return entries, end

    def _shows(self, stop_token_id: int) -> bool:
        """Whether the id that ended the choice is part of its text."""
        return self.params.include_stop_str_in_output and stop_token_id not in self.params.eos_token_ids


def _ignore(request_id: str) -> None:
    """Nothing was asked for, so nothing is to be aborted."""
