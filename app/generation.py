"""One answer being generated: one or several choices, as text, until it ends or its reader leaves."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

from app.cached_tokens import CachedTokens
from app.choice import Choice, ChoiceDelta
from app.drain import Drain
from app.errors import ApiError, EngineUnavailable, ShuttingDown
from app.metrics import AnswerMeter, Metrics
from app.progress import FirstToken, Midway, Progress
from app.prompt_history import PromptHistory, PromptRecord
from app.prompts import BuiltPrompt
from app.resubmission import Resubmission
from app.servable import check_servable
from app.submission import UNAVAILABLE, Submission
from app.tenants import Tenant
from app.usage_record import AnswerTimes, Outcome
from engine.client import Submitter
from engine.errors import EngineDeadError
from engine.protocol import RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

UNLIMITED_TOKENS = 512
"""Set aside for an answer whose length nobody limits; it may be longer."""

__all__ = ["UNAVAILABLE", "ChoiceDelta", "Generation"]


class Generation:
    """Runs `n` choices over each prompt and gives their text as it comes.

    A context manager: entering submits the requests, leaving aborts what has not ended. Everything that can be
    refused is refused by an ApiError before the first delta.

    Choice indices are `prompt index * n + choice`.
    """

    def __init__(
        self,
        engine: Submitter,
        tokenizer: Tokenizer,
        prompt: BuiltPrompt | Sequence[BuiltPrompt],
        params: SamplingParams,
        tenant: Tenant,
        *,
        priority: int = 0,
        request_id: str | None = None,
        continues_text: bool = False,
        metrics: Metrics | None = None,
        history: PromptHistory | None = None,
        on_end: Callable[["Generation", Outcome], None] | None = None,
        drain: Drain | None = None,
        midway: Midway | None = None,
        pausable: Resubmission | None = None,
    ) -> None:
        """`continues_text`: the answer goes on with the prompt's text (completions), it is no turn of its own.
        `on_end` is called once, when its numbers are final, if it was entered. `drain`: when its time is over, the
        answer ends with ShuttingDown. `midway`: of one choice that began at another gateway, and was let in there.
        `pausable`: has what was submitted; without it nothing is paused.

        Raises ValueError for a `midway` that cannot be gone on with here, ApiError if the request could never be
        served, EngineUnavailable if the engine is not there.
        """
        self._tokenizer = tokenizer
        self._prompts = [prompt] if isinstance(prompt, BuiltPrompt) else list(prompt)
        self._params = params
        self._tenant = tenant
        self._submission = Submission(
            engine,
            tokenizer,
            self._prompts,
            params,
            tenant.id,
            priority=priority,
            request_id=request_id,
            continues_text=continues_text,
        )
        self._metrics = metrics
        self._history = history
        self._on_end = on_end
        self._drain = drain
        self._pausable = pausable
        self._is_paused = False
        self._meter: AnswerMeter | None = None
        self._choices: list[Choice] = []
        self._arrived: set[Choice] = set()
        """Choices whose streams may have something to take."""
        self._arrival = asyncio.Event()
        self._give: Callable[[ChoiceDelta], None] | None = None
        """Takes each delta at once."""
        self._failure: Exception | None = None
        self._leave = ExitStack()
        self.times = AnswerTimes(time.monotonic, time.monotonic())
        self._cached: dict[int, CachedTokens] = {}
        """By prompt; of its first choice."""
        self._is_disowned = False
        self._midway = midway
        if midway is not None:
            self.block_size = midway.block_size
            """Of the engine's KV blocks, in tokens."""
            self._max_model_len = sum(len(p.token_ids) for p in self._prompts)
            self._restore(midway)
            return
        try:
            info = engine.info
        except EngineDeadError:
            raise EngineUnavailable(UNAVAILABLE) from None
        for one in self._prompts:
            check_servable(info, one, params)
        self._max_model_len = info.max_model_len
        self.block_size = info.block_size

    def _restore(self, midway: Midway) -> None:
        choice = self._submission.make_choice(0)
        choice.restore(midway)
        self._choices.append(choice)
        self.times.begun -= midway.age_s
        if (first := midway.so_far.first) is not None:
            self._cached[0] = first.cached
            self.times.restore(first.queue_ms, first.prefill_ms)

    # ---- numbers; final after the last delta

    @property
    def num_choices(self) -> int:
        return len(self._prompts) * self._params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, whatever n is."""
        return sum(len(p.token_ids) for p in self._prompts)

    @property
    def cached(self) -> CachedTokens:
        """Prompt tokens taken from the prefix cache, of the first choice of each prompt."""
        return sum(self._cached.values(), start=CachedTokens())

    @property
    def is_computed(self) -> bool:
        """Whether each prompt is: its first token is there, and what was cached of it is known."""
        return len(self._cached) == len(self._prompts)

    @property
    def assistant_id(self) -> str | None:
        return self._prompts[0].assistant_id

    @property
    def num_output_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self._choices)

    @property
    def num_wanted_tokens(self) -> int:
        """What it may use at most, prompts and answers; an answer without a limit counts as UNLIMITED_TOKENS."""
        most = UNLIMITED_TOKENS if self._params.max_tokens is None else self._params.max_tokens
        lengths = [len(p.token_ids) for p in self._prompts]
        return sum(n + self._params.n * min(most, self._max_model_len - n) for n in lengths)

    @property
    def num_used_tokens(self) -> int:
        """What it has used so far, prompts and answers; nothing before it was submitted."""
        return self.num_prompt_tokens + self.num_output_tokens if self._choices else 0

    def text(self, index: int = 0) -> str:
        """The text so far."""
        return self._choices[index].detokenizer.text

    def output_ids(self, index: int = 0) -> list[int]:
        """All output ids so far, the end id included."""
        return self._choices[index].token_ids

    def kept_ids(self, index: int = 0) -> list[int]:
        """Ids whose text is the text so far: see `Choice.kept_ids`."""
        return self._choices[index].kept_ids(self._tokenizer)

    def take_progress(self) -> Progress:
        """What has come of the first choice since this was asked last."""
        return self._choices[0].take_progress(FirstToken(self.cached, self.times.queue_ms, self.times.prefill_ms))

    def disown(self) -> None:
        """Somebody else goes on with it, and tells what it used: `on_end` is not called."""
        self._is_disowned = True

    def prompt_logprobs(self, index: int = 0) -> list[TokenLogprobs | None] | None:
        """One entry for each prompt token (None for the first), there with the first delta if asked for."""
        return self._choices[index].prompt_logprobs

    # ---- running

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._drain is not None:
                stack.callback(self._drain.at_cut(self._arrival.set))
            choices = self._choices
            if self._midway is None:
                self.times.begun = self.times.clock()
                choices = [self._submission.make_choice(index) for index in range(self.num_choices)]
            for choice in choices:
                if not choice.is_done:
                    stack.enter_context(self._submission.submit(choice))
                    choice.stream.notify(partial(self._on_arrival, choice))
            self._choices = choices
            self._leave = stack.pop_all()
        if self._metrics is not None:
            self._meter = AnswerMeter(
                self._metrics,
                self.num_choices,
                self.num_prompt_tokens,
                tenant=self._tenant.id,
                assistant=self.assistant_id,
                is_midway=self._midway is not None,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave.close()
        self._remember(has_failed=error is not None)
        if self._meter is not None:
            self._meter.leave("error" if isinstance(error, ApiError) else "abort")
        if self._on_end is not None and not self._is_disowned:
            has_completed = all(choice.is_done for choice in self._choices)
            outcome: Outcome = "completed" if has_completed and error is None else "aborted"
            self._on_end(self, "failed" if isinstance(error, ApiError) else outcome)

    def pause(self) -> None:
        """Nothing more comes until `go_on`: the engine forgets what has not ended."""
        if self._pausable is not None and not self._is_paused:
            self._is_paused = True
            self.times.pause()
            if self._meter is not None:
                self._meter.pause()
            for choice in self._choices:
                self._pausable.pause(choice.stream.request_id)

    def go_on(self) -> None:
        """With the next token: the engine computes again what it does not hold any more."""
        if self._pausable is not None and self._is_paused:
            self._is_paused = False
            self.times.go_on()
            if self._meter is not None:
                self._meter.go_on()
            for choice in self._choices:
                self._pausable.go_on(choice.stream.request_id)

    def _remember(self, *, has_failed: bool) -> None:
        """Prompts that were computed, each with the first choice of its answers."""
        if self._history is None:
            return
        for p in self._cached:
            choice = self._choices[p * self._params.n]
            ended = choice.is_done and not has_failed and choice.detokenizer.stop_string is None
            self._history.add(self._tenant.id, PromptRecord.of(self._prompts[p], choice.token_ids, ended=ended))

    def _on_arrival(self, choice: Choice) -> None:
        if self._give is not None:
            self._hand_over((choice,), self._give)
        else:
            self._arrived.add(choice)
            self._arrival.set()

    def _hand_over(self, choices: Iterable[Choice], give: Callable[[ChoiceDelta], None]) -> None:
        has_news = False
        try:
            for delta in self._take_from(choices):
                give(delta)
                has_news = has_news or delta.finish_reason is not None
        except Exception as e:  # noqa: BLE001 it is for the reader, not for whoever brought the output
            self._failure, self._give, has_news = e, None, True
        if has_news:
            self._arrival.set()

    @property
    def _is_done(self) -> bool:
        return all(choice.is_done for choice in self._choices)

    async def run(self, give: Callable[[ChoiceDelta], None]) -> None:
        """Gives each delta in the moment in which it comes, without a turn of the event loop. Returns at the end.

        Raises what iterating over it would raise, and what `give` raises.
        """
        self._give = give
        self._hand_over(sorted(self._arrived, key=lambda choice: choice.index), give)
        try:
            while self._failure is None and not self._is_done:
                self._check_drain()
                self._arrival.clear()
                await self._arrival.wait()
        finally:
            self._give = None
        if self._failure is not None:
            raise self._failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        """What came since the last call, one delta for each choice that has something new, by index.

        Raises ApiError if the engine fails one of the choices or dies, or the gateway ends.
        """
        while not self._is_done:
            deltas = self._take_from(sorted(self._arrived, key=lambda choice: choice.index))
            self._arrived.clear()
            if deltas:
                return deltas
            self._check_drain()
            self._arrival.clear()
            await self._arrival.wait()
        raise StopAsyncIteration

    def _check_drain(self) -> None:
        if self._drain is not None and self._drain.is_cut:
            raise ShuttingDown("The server was shut down while it answered.")

    def _take_from(self, choices: Iterable[Choice]) -> list[ChoiceDelta]:
        """Never waits; empty if nothing has come."""
        deltas: list[ChoiceDelta] = []
        for choice in choices:
            if choice.is_done:
                continue  # woken by its own end
            try:
                output = choice.stream.try_take()
            except EngineDeadError:
                raise EngineUnavailable("The engine died while it answered.", code="engine_died") from None
            if output is not None:
                deltas.append(self._take(choice, output))
        return deltas

    def _take(self, choice: Choice, output: RequestOutput) -> ChoiceDelta:
        is_first = choice.index % self._params.n == 0 and choice.index // self._params.n not in self._cached
        if output.num_cached_tokens is not None and is_first:
            self._cached[choice.index // self._params.n] = CachedTokens.of(output)
            if self._meter is not None:
                self._meter.cached(output.num_cached_tokens)
        if output.token_ids:
            self.times.tokens_came(output.queue_ms)
        delta = choice.take(output)
        if self._meter is not None:
            self._meter.tokens(choice.index, len(delta.token_ids))
            if delta.finish_reason is not None:
                self._meter.end(delta.finish_reason)
        return delta
