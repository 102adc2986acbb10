"""A beam search behind the streams of ordinary choices: its best sequences, each whole and at the search's end."""

from collections.abc import Callable
from functools import partial

import msgspec

from engine.beam_search import Beam, BeamSearch, BeamSearchParams
from engine.client import Submitter
from engine.errors import EngineDeadError
from engine.protocol import AddRequest, EngineInfo, FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from engine.token_stream import TokenStream


class BeamSearchEngine:
    """To a `Generation` an engine whose choice i of a prompt is the i-th best sequence of one search.

    The choices of a prompt must be submitted one after another, from 0 on; the search begins with the first, and ends
    early once all of them have been left.
    """

    def __init__(self, engine: Submitter, params: BeamSearchParams) -> None:
        """`params` must be valid, with a width of at least the number of choices. Its other numbers come with the
        requests: `max_tokens`, `ignore_eos`."""
        self._engine = engine
        self._params = params
        self._search: PromptSearch | None = None

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def submit(self, request: AddRequest) -> TokenStream:
        if request.choice == 0:
            self._search = PromptSearch(self._engine, self._params, request)
        if self._search is None:
            raise ValueError(f"{request.request_id!r} is choice {request.choice}, expected choice 0 first")
        return self._search.add_choice(request.request_id)


class PromptSearch:
    """The search over one prompt, driven by what arrives: it has no task of its own."""

    def __init__(self, engine: Submitter, params: BeamSearchParams, request: AddRequest) -> None:
        """Raises EngineDeadError if the engine is not ready."""
        self._engine = engine
        self._request = request
        asked = request.params
        # at least 1: a prompt that leaves nothing is refused by the engine
        num_left = max(1, engine.info.max_sequence_tokens - len(request.prompt_ids))
        self._beams = BeamSearch(
            params,
            len(request.prompt_ids),
            num_left if asked.max_tokens is None else min(asked.max_tokens, num_left),
            frozenset(asked.stop_token_ids + (() if asked.ignore_eos else asked.eos_token_ids)),
            asked.logprobs,
        )
        self._num_requests = 0
        self._under_way: list[TokenStream] = []
        """Of the live beams, in their order."""
        self._first: RequestOutput | None = None
        """What came for the prompt alone."""
        self._choices: list[TokenStream] = []
        self._num_left = 0
        self._deliver: Callable[[int, TokenStream], None] | None = None
        """How each choice gets what it is to get, once that is known."""
        self._submit_beams()

    def add_choice(self, request_id: str) -> TokenStream:
        choice = TokenStream(request_id, self._leave)
        self._choices.append(choice)
        if self._deliver is not None:
            self._deliver(len(self._choices) - 1, choice)
        return choice

    def _leave(self, request_id: str) -> None:
        self._num_left += 1
        if self._num_left == len(self._choices):
            self._close_requests()

    def _close_requests(self) -> None:
        for stream in self._under_way:
            stream.close()

    def _submit_beams(self) -> None:
        """Raises EngineDeadError, with nothing left under way."""
        params = self._beams.step_params
        if self._first is None:
            params = msgspec.structs.replace(params, prompt_logprobs=self._request.params.prompt_logprobs)
        self._under_way = []
        try:
            for beam in self._beams.live:
                self._under_way.append(self._engine.submit(self._request_of(beam, params)))
        except EngineDeadError:
            self._close_requests()
            raise
        for index, stream in enumerate(self._under_way):
            stream.notify(partial(self._on_arrival, index, stream))

    def _request_of(self, beam: Beam, params: SamplingParams) -> AddRequest:
        self._num_requests += 1
        return msgspec.structs.replace(
            self._request,
            request_id=f"{self._request.request_id}/{self._num_requests}",
            prompt_ids=[*self._request.prompt_ids, *beam.token_ids],
            params=params,
            choice=min(1, len(beam.token_ids)),  # the prompt counts once in the cache's counters
        )

    def _on_arrival(self, index: int, stream: TokenStream) -> None:
        if self._deliver is not None:
            return
        try:
            output = stream.try_take()
            if output is not None:
                self._take(index, output)
        except EngineDeadError as error:
            self._finish(partial(_fail, error))

    def _take(self, index: int, output: RequestOutput) -> None:
        """The one output of a beam's request. Raises EngineDeadError if the next step cannot be submitted."""
        if output.logprobs is None:  # refused, failed or aborted
            self._finish(partial(_put_copy, output))
            return
        self._first = self._first or output
        if not self._beams.take(index, output.logprobs[0]):
            return
        if not self._beams.is_done:
            self._submit_beams()
            return
        self._finish(partial(self._put_best, self._beams.best()))

    def _finish(self, deliver: Callable[[int, TokenStream], None]) -> None:
        self._deliver = deliver
        self._close_requests()
        for i, choice in enumerate(self._choices):
            deliver(i, choice)

    def _put_best(self, best: list[Beam], index: int, choice: TokenStream) -> None:
        """With what the first request said of the prompt."""
        assert self._first is not None
        beam = best[index]
        output = msgspec.structs.replace(
            self._first,
            request_id=choice.request_id,
            token_ids=list(beam.token_ids),
            finish_reason=FinishReason.LENGTH if beam.stop_token_id is None else FinishReason.STOP,
            stop_token_id=beam.stop_token_id,
            logprobs=list(beam.logprobs) if self._request.params.logprobs is not None else None,
        )
        choice.put(output)


def _put_copy(output: RequestOutput, index: int, choice: TokenStream) -> None:
    choice.put(msgspec.structs.replace(output, request_id=choice.request_id))


def _fail(error: EngineDeadError, index: int, choice: TokenStream) -> None:
    choice.fail(error)
