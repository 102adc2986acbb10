"""Answers that outlive the engine they began on: what was lost with it is submitted again and goes on where it stopped.

A reader sees one unbroken stream. Noise is a function of seed, choice and position, so the tokens are those that would
have come. A request by which engines break does not come back for ever (`judge`). In the same way an answer can be
paused: the engine forgets it, and its blocks can be evicted, until it is submitted again.
"""

import asyncio
import collections
import contextlib
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from engine.client import EngineClient
from engine.errors import EngineDeadError
from engine.protocol import AddRequest, EngineInfo, ErrorInfo, FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from engine.token_stream import TokenStream

logger = logging.getLogger(__name__)

MAX_CRASHES = 2
POISON = ErrorInfo(
    "The engine crashed again and again while it computed this request, so it is not tried any more.",
    "request_crashes_engine",
)
SHUT_DOWN = "this server shuts down"
LEASE_EXPIRED = "lease_expired"
"""The engine's code for what it gave up because this process was silent for too long."""


def with_seed(params: SamplingParams) -> SamplingParams:
    """The same, so that they give the same tokens again."""
    if params.seed is not None or params.is_greedy:
        return params
    return msgspec.structs.replace(params, seed=secrets.randbits(63))


@dataclass(eq=False, slots=True)
class Answer:
    """One request through as many lives of an engine as it takes."""

    request: AddRequest
    """As it is to be repeated: with its seed."""
    stream: TokenStream
    """The reader's."""
    token_ids: list[int] = field(default_factory=list)
    """All that the reader was given."""
    has_begun: bool = False
    """The reader was given an output, so what was cached of the prompt."""
    num_lives: int = 1
    num_crashes: int = 0
    """That may be its fault."""
    under_way: TokenStream | None = None
    """From the engine; None while there is none."""
    is_paused: bool = False
    """Until `go_on`: it waits for no engine."""

    def next_request(self) -> AddRequest:
        """An id is never used again: outputs of an earlier life may still be on their way."""
        self.num_lives += 1
        return msgspec.structs.replace(
            self.request,
            request_id=f"{self.request.request_id}~{self.num_lives}",
            output_ids=[*self.request.output_ids, *self.token_ids],
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    poison: list[Answer]
    suspects: list[Answer]
    """To be tried one after another."""
    others: list[Answer]


def judge(lost: Mapping[Answer, bool], on_trial: Answer | None) -> Verdict:
    """Who is to blame. `lost`: each answer whose engine has gone, and whether that may have broken by it.

    After a first crash all go on together. Those that ran in a second one too are suspects; a single one is poison. One
    that is on trial explains the crash; without such one whoever has been a suspect before is poison, so that nobody
    takes down engines for ever. Where somebody is found, nobody else is charged with the crash.
    """
    crashed = [answer for answer, is_crash in lost.items() if is_crash]
    suspects: list[Answer] = []
    poison = [on_trial] if on_trial in crashed else [answer for answer in crashed if answer.num_crashes >= MAX_CRASHES]
    if not poison:
        suspects = [answer for answer in crashed if answer.num_crashes == MAX_CRASHES - 1]
        if len(suspects) == 1:
            poison, suspects = suspects, []
        else:
            for answer in crashed:
                answer.num_crashes += 1
    return Verdict(poison, suspects, [answer for answer in lost if answer not in poison and answer not in suspects])


class Resubmission:
    """Takes requests for an engine, or for whoever has several of them.

    A suspect's trial is its next life, up to its first output; no other suspect runs meanwhile. An answer is bounded,
    and so is what is kept of it here.
    """

    def __init__(self, engine: EngineClient, *, patience_s: float) -> None:
        """An engine that is away for longer than `patience_s` fails what waits for it."""
        self._engine = engine
        self._patience_s = patience_s
        self._answers: dict[str, Answer] = {}
        self._lost: dict[Answer, bool] = {}
        """To be judged, each with whether by a crash."""
        self._waiting: dict[Answer, None] = {}
        """Judged to be innocent, in the order in which they were lost."""
        self._suspects: collections.deque[Answer] = collections.deque()
        self._on_trial: Answer | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    def submit(self, request: AddRequest) -> TokenStream:
        """As an engine client's. The stream fails with EngineDeadError only if no engine comes back in time."""
        request = msgspec.structs.replace(request, params=with_seed(request.params))
        answer = Answer(request, TokenStream(request.request_id, self._leave))
        self._start(answer, request)
        return answer.stream

    def pause(self, request_id: str) -> None:
        """The engine forgets it, and nothing more comes until `go_on`. One that is not under way is left alone."""
        answer = self._answers.get(request_id)
        if answer is not None and not answer.is_paused:
            self._withdraw(answer)
            answer.is_paused = True

    def go_on(self, request_id: str) -> None:
        """It is submitted again with what has come of it, as soon as an engine is there."""
        answer = self._answers.get(request_id)
        if answer is None or not answer.is_paused:
            return
        answer.is_paused = False
        if answer.num_crashes >= MAX_CRASHES:
            self._suspects.append(answer)
        else:
            self._waiting[answer] = None
        self._ensure_recovery()

    def submit_accepted(self, request: AddRequest) -> TokenStream:
        """One whose client has been told that it is taken, or that has begun elsewhere: where no engine is there it
        waits for one, like those that lost theirs."""
        answer = Answer(request, TokenStream(request.request_id, self._leave))
        try:
            self._start(answer, request)
        except EngineDeadError:
            if self._is_closed:
                raise
            self._answers[request.request_id] = answer
            self._waiting[answer] = None
            self._ensure_recovery()
        return answer.stream

    async def close(self) -> None:
        """What has no engine fails, and what loses its engine from now on."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for answer in self._answers.values():
            answer.is_paused = False
        self._give_up(SHUT_DOWN)

    def _start(self, answer: Answer, request: AddRequest) -> None:
        """Raises EngineDeadError, with nothing changed."""
        answer.under_way = self._engine.submit(request)
        self._answers[answer.request.request_id] = answer
        answer.under_way.notify(partial(self._on_arrival, answer, answer.under_way))

    # ---- what comes

    def _on_arrival(self, answer: Answer, stream: TokenStream) -> None:
        try:
            while (output := stream.try_take()) is not None:
                self._take(answer, output)
        except EngineDeadError as error:
            self._lose(answer, is_crash=error.is_crash)

    def _take(self, answer: Answer, output: RequestOutput) -> None:
        if output.error is not None and output.error.code == LEASE_EXPIRED:
            self._lose(answer, is_crash=False)
            return
        if answer.num_lives > 1:
            output.request_id = answer.request.request_id
        if answer.has_begun and output.num_cached_tokens is not None:
            # its prompt was reported with its first output; what a later life found in its cache is nobody's hit
            output.num_cached_tokens = output.num_cached_trunk_tokens = output.num_cached_host_tokens = None
            output.queue_ms = None
        answer.has_begun = True
        answer.token_ids += output.token_ids
        if output.finish_reason is not None:
            del self._answers[output.request_id]
        self._end_trial(answer)
        answer.stream.put(output)

    def _leave(self, request_id: str) -> None:
        """Its reader has gone."""
        self._withdraw(self._answers.pop(request_id))

    def _withdraw(self, answer: Answer) -> None:
        """No engine has it, and it waits for none."""
        self._lost.pop(answer, None)
        self._waiting.pop(answer, None)
        with contextlib.suppress(ValueError):
            self._suspects.remove(answer)
        if answer.under_way is not None:
            answer.under_way.close()
            answer.under_way = None
        self._end_trial(answer)

    def _lose(self, answer: Answer, *, is_crash: bool) -> None:
        answer.under_way = None
        self._lost[answer] = is_crash
        if self._is_closed:
            self._give_up(SHUT_DOWN)
        else:
            self._ensure_recovery()

    def _ensure_recovery(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._recover(), name="resubmission")

    def _end_trial(self, answer: Answer) -> None:
        if answer is self._on_trial:
            self._on_trial = None
            if self._suspects:
                self._ensure_recovery()

    # ---- what is lost

    async def _recover(self) -> None:
        """Lives while something waits for an engine. All that one crash ends is lost before this runs."""
        try:
            while self._lost or self._waiting or (self._suspects and self._on_trial is None):
                self._pass_judgement()
                async with asyncio.timeout(self._patience_s):
                    await self._engine.wait_ready()
                if not self._lost:  # else an engine has come back that broke before this ran
                    self._resubmit()
                await asyncio.sleep(0)
        except TimeoutError:
            self._give_up(f"it did not come back within {self._patience_s:.0f} s")
        finally:
            self._task = None

    def _pass_judgement(self) -> None:
        lost, self._lost = self._lost, {}
        verdict, on_trial = judge(lost, self._on_trial), self._on_trial
        if on_trial in lost:
            self._on_trial = None
        for answer in verdict.poison:
            logger.error("request %s ran whenever an engine crashed: it is given up", answer.request.request_id)
            del self._answers[answer.request.request_id]
            answer.stream.put(
                RequestOutput(request_id=answer.request.request_id, finish_reason=FinishReason.ERROR, error=POISON)
            )
        self._suspects.extend(verdict.suspects)
        for answer in verdict.others:
            if answer is on_trial:
                self._suspects.appendleft(answer)
            else:
                self._waiting[answer] = None

    def _resubmit(self) -> None:
        """What waits, and the next suspect if none is on trial. An engine that has just gone again leaves the rest."""
        with contextlib.suppress(EngineDeadError):
            for answer in list(self._waiting):
                self._start(answer, answer.next_request())
                del self._waiting[answer]
            if self._suspects and self._on_trial is None:
                self._start(self._suspects[0], self._suspects[0].next_request())
                self._on_trial = self._suspects.popleft()

    def _give_up(self, reason: str) -> None:
        """Fails all that waits for an engine."""
        error = EngineDeadError(f"the engine is gone: {reason}")
        answers = [a for a in self._answers.values() if a.under_way is None and not a.is_paused]
        self._lost.clear()
        self._waiting.clear()
        self._suspects.clear()
        for answer in answers:
            del self._answers[answer.request.request_id]
            answer.stream.fail(error)


@dataclass(frozen=True, slots=True)
class SubmitterOfAccepted:
    """Takes requests that nobody can be told to send again."""

    resubmission: Resubmission

    @property
    def info(self) -> EngineInfo:
        return self.resubmission.info

    def submit(self, request: AddRequest) -> TokenStream:
        return self.resubmission.submit_accepted(request)
