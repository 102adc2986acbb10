"""An engine that says what a script tells it, behind the same protocol as the real one. No torch.

In process::

    engine = ScriptedEngineClient(byte_model_info(), script=lambda request: [b"Hel", Pause(), b"lo"])
    ...
    await engine.wait_paused()    # the request stands at its Pause: everything before it has been sent
    engine.release()              # and goes on

and as a process, behind the real `engine.process` loop::

    python -m tests.scripted_engine --address ipc:///tmp/x --script script.json

A script gives, for each request, items: an int (one token id), bytes (their byte tokens, in one output), a list of ids
(in one output), `Pause`, `Fail`, `Die`. After the last item the answer ends as with a model that draws its end token.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.errors import EngineDeadError, RequestError
from engine.protocol import (
    AddRequest,
    BlockStats,
    EngineInfo,
    EngineStats,
    ErrorInfo,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
)
from engine.token_stream import TokenStream
from tests.byte_model import BYTE_VOCAB_SIZE, byte_model_info

# ---- scripts


@dataclass(frozen=True, slots=True)
class Pause:
    """Without seconds: until `release`."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with finish reason ERROR."""

    message: str = "scripted failure"
    code: str = "internal_error"


@dataclass(frozen=True, slots=True)
class Die:
    """The engine dies: all streams fail. A scripted process kills itself with SIGKILL."""

    reason: str = "scripted death"


Item = int | bytes | Sequence[int] | Pause | Fail | Die
Script = Callable[[AddRequest], Iterable[Item]]


def echo(request: AddRequest) -> Iterator[Item]:
    """The bytes of the prompt again, one by one: streams that are mixed up would show it."""
    return (t for t in request.prompt_ids if t < 256)


def say(text: str) -> Script:
    """The same text for everyone, one byte per step."""
    return lambda request: list(text.encode())


@dataclass(eq=False)
class _Running:
    request: AddRequest
    items: Iterator[Item]
    num_output: int = 0
    held: bool = False  # at a Pause without seconds
    due: float = 0.0  # not before this time

    @property
    def max_tokens(self) -> int:
        limit = self.request.params.max_tokens
        return limit if limit is not None else sys.maxsize


@dataclass(eq=False)
class ScriptedCore:
    """What `engine.core.EngineCore` is to the loop of the engine process: add, abort, has_work, step, stats."""

    info: EngineInfo
    script: Script = echo
    num_cached_tokens: int = 0
    """What each first output reports, at most the prompt without its last token."""
    clock: Callable[[], float] = time.monotonic
    requests: list[AddRequest] = field(default_factory=list)
    """All that were added, in order."""
    aborted: list[str] = field(default_factory=list)
    """Those that were aborted while they ran."""
    running: dict[str, _Running] = field(default_factory=dict)
    num_steps: int = 0
    num_generated: int = 0

    def add(self, request: AddRequest) -> RequestOutput | None:
        self.requests.append(request)
        try:
            request.params.validate(self.info.vocab_size)
        except RequestError as e:
            return _error(request.request_id, e.message, e.code, e.param)
        if len(request.prompt_ids) >= self.info.max_model_len:
            message = (
                f"the prompt has {len(request.prompt_ids)} tokens, the context length is {self.info.max_model_len}"
            )
            return _error(request.request_id, message, "context_length_exceeded", None)
        self.running[request.request_id] = _Running(request, iter(self.script(request)))
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    @property
    def has_work(self) -> bool:
        return self.delay_s is not None

    @property
    def delay_s(self) -> float | None:
        """Seconds until some request can go on; None if none will without a release."""
        due = [r.due for r in self.running.values() if not r.held]
        return max(0.0, min(due) - self.clock()) if due else None

    @property
    def num_held(self) -> int:
        return sum(r.held for r in self.running.values())

    def release(self, request_id: str | None = None) -> None:
        """Lets one request (or all) that stands at a Pause go on."""
        for r in self.running.values():
            if request_id is None or r.request.request_id == request_id:
                r.held, r.due = False, 0.0

    def step(self) -> list[RequestOutput]:
        """One item of each request that is due. Raises EngineDeadError at a Die."""
        self.num_steps += 1
        now = self.clock()
        outputs = []
        for running in list(self.running.values()):
            if running.held or running.due > now:
                continue
            output = self._advance(running, now)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    del self.running[running.request.request_id]
        return outputs

    def _advance(self, running: _Running, now: float) -> RequestOutput | None:
        params, request_id = running.request.params, running.request.request_id
        item = next(running.items, None)
        if isinstance(item, Pause):
            running.held, running.due = item.seconds is None, now + (item.seconds or 0.0)
            return None
        if isinstance(item, Fail):
            return _error(request_id, item.message, item.code, None)
        if isinstance(item, Die):
            raise EngineDeadError(item.reason)
        if item is None:
            ids = list(params.eos_token_ids[:1]) if not params.ignore_eos else []
        else:
            ids = [item] if isinstance(item, int) else list(item)
        output = self._output(running, ids)
        if item is None and output.finish_reason is None:
            output.finish_reason = FinishReason.STOP
        return output

    def _output(self, running: _Running, ids: list[int]) -> RequestOutput:
        """Applies the stop rules to `ids`: end ids, stop ids, max_tokens."""
        request, params = running.request, running.request.params
        output = RequestOutput(request_id=request.request_id)
        if running.num_output == 0:
            output.num_cached_tokens = min(self.num_cached_tokens, len(request.prompt_ids) - 1)
            if params.prompt_logprobs is not None:
                rest = [_logprobs(t, params.prompt_logprobs) for t in request.prompt_ids[1:]]
                output.prompt_logprobs = [None, *rest]
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(params.eos_token_ids))
        limit = min(running.max_tokens, self.info.max_model_len - len(request.prompt_ids))
        for token_id in ids:
            output.token_ids.append(token_id)
            running.num_output += 1
            self.num_generated += 1
            if token_id in stops and running.num_output > params.min_tokens:
                output.finish_reason, output.stop_token_id = FinishReason.STOP, token_id
            elif running.num_output >= limit:
                output.finish_reason = FinishReason.LENGTH
            if output.finish_reason is not None:
                break
        if params.logprobs is not None:
            output.logprobs = [_logprobs(t, params.logprobs) for t in output.token_ids]
        return output

    def stats(self) -> EngineStats:
        """One block is referenced for each running request, so an idle engine has none."""
        total, referenced = self.info.num_blocks, min(len(self.running), self.info.num_blocks)
        return EngineStats(
            blocks=BlockStats(total=total, free=total - referenced, cached=0, referenced=referenced, pinned=0),
            running=len(self.running),
            waiting=0,
            query_tokens=sum(len(r.prompt_ids) for r in self.requests if r.choice == 0),
            hit_tokens=0,
            prompt_tokens_computed=sum(len(r.prompt_ids) for r in self.requests),
            generation_tokens=self.num_generated,
            preemptions=0,
            steps=self.num_steps,
        )

    def check_integrity(self) -> None:
        assert all(r.num_output <= r.max_tokens for r in self.running.values()), self.running


def _error(request_id: str, message: str, code: str, param: str | None) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=ErrorInfo(message, code, param))


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The drawn token is the best one with -0.5; the alternatives are the ids after it, each worse by 1."""
    top = [((token_id + i) % BYTE_VOCAB_SIZE, -0.5 - i) for i in range(num_top)]
    return TokenLogprobs(token_id, -0.5, top)


# ---- in process


class ScriptedEngineClient:
    """An `EngineClient` on the test's own event loop. One item of each request per turn of the loop."""

    def __init__(
        self, info: EngineInfo | None = None, script: Script = echo, *, num_cached_tokens: int = 0, ready: bool = True
    ) -> None:
        self.core = ScriptedCore(info or byte_model_info(), script, num_cached_tokens)
        self._streams: dict[str, TokenStream] = {}
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()  # set, and replaced, at each change that a wait_* may look for
        self._task: asyncio.Task[None] | None = None
        if ready:
            self._ready.set()

    # -- EngineClient

    @property
    def info(self) -> EngineInfo:
        if not self.is_ready:
            raise EngineDeadError("the engine is not ready")
        return self.core.info

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    def submit(self, request: AddRequest) -> TokenStream:
        if not self.is_ready:
            raise EngineDeadError("the engine is not ready")
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        stream = TokenStream(request.request_id, self._abort)
        self._streams[request.request_id] = stream
        refusal = self.core.add(request)
        if refusal is not None:
            self._dispatch([refusal])
        self._go()
        return stream

    async def stats(self) -> EngineStats:
        if not self.is_ready:
            raise EngineDeadError("the engine is not ready")
        return self.core.stats()

    async def close(self) -> None:
        self.die("the engine client is closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- for tests

    @property
    def requests(self) -> list[AddRequest]:
        """All that were submitted, in order."""
        return self.core.requests

    @property
    def aborted(self) -> list[str]:
        """Ids of those that were aborted while they ran."""
        return self.core.aborted

    @property
    def num_running(self) -> int:
        return len(self.core.running)

    def release(self, request_id: str | None = None) -> None:
        """Lets one request (or all) that stands at a Pause go on."""
        self.core.release(request_id)
        self._go()

    def die(self, reason: str = "the engine died") -> None:
        """All streams fail, `is_ready` is false until `revive`."""
        self._ready.clear()
        self.core.running.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(reason))
        self._notify()

    def revive(self) -> None:
        self._ready.set()
        self._notify()

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Returns when the condition, of this engine's state, holds; the time only guards against hanging."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

    async def wait_submitted(self, num_requests: int = 1) -> None:
        await self.wait_for(lambda: len(self.requests) >= num_requests)

    async def wait_paused(self, num_requests: int = 1) -> None:
        """Until so many requests stand at a Pause: all that came before it has been put into their streams."""
        await self.wait_for(lambda: self.core.num_held >= num_requests)

    async def wait_aborted(self, num_requests: int = 1) -> None:
        await self.wait_for(lambda: len(self.aborted) >= num_requests)

    async def wait_idle(self) -> None:
        await self.wait_for(lambda: not self.core.running)

    # -- inside

    def _abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self.core.abort([request_id])
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _go(self) -> None:
        self._notify()
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while (delay_s := self.core.delay_s) is not None:
            await asyncio.sleep(delay_s)
            try:
                self._dispatch(self.core.step())
            except EngineDeadError as e:
                self.die(str(e))
            self._notify()

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams[output.request_id]
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)
