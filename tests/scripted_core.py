"""Scripts and what plays them: the part of the scripted engine that is an `engine.core.EngineCore` to its caller."""

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
    PinTrunk,
    RequestOutput,
    TenantShare,
    TenantStats,
    TokenLogprobs,
    TrunkPin,
    TrunkState,
)
from tests.byte_model import BYTE_VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Pause:
    """Without seconds: until `release`; one that came before the Pause counts."""

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
    num_releases: int = 0  # that came before the Pause they are for
    due: float = 0.0  # not before this time

    @property
    def max_tokens(self) -> int:
        limit = self.request.params.max_tokens
        return limit if limit is not None else sys.maxsize


@dataclass(eq=False)
class ScriptedCore:
    """What `engine.core.EngineCore` is to the loop of the engine process: add, abort, pin, has_work, step, stats."""

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
    trunks: dict[str, PinTrunk] = field(default_factory=dict)
    """What is pinned, in the order in which it came."""
    trunk_pin: TrunkPin = TrunkPin.PINNED
    """What every pin is answered with."""
    shares: list[TenantShare] = field(default_factory=list)
    """Of the tenants, as they were said last."""
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
        items = _skip(iter(self.script(request)), len(request.output_ids))
        self.running[request.request_id] = _Running(request, items, len(request.output_ids))
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def pin(self, message: PinTrunk) -> TrunkState | None:
        if self.trunk_pin is not TrunkPin.FAILED:
            self.trunks[message.trunk_id] = message
        num_tokens = len(message.token_ids)
        return TrunkState(message.trunk_id, self.trunk_pin, num_tokens, -(-num_tokens // self.info.block_size))

    def unpin(self, trunk_id: str) -> None:
        self.trunks.pop(trunk_id, None)

    def set_tenants(self, shares: Iterable[TenantShare]) -> None:
        self.shares = list(shares)

    def take_trunk_news(self) -> list[TrunkState]:
        return []

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
        """Lets one request (or all that run) pass one Pause: the one it stands at, else the next it comes to."""
        for r in self.running.values():
            if request_id is None or r.request.request_id == request_id:
                if r.held:
                    r.held = False
                else:
                    r.num_releases += 1

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
            if item.seconds is not None:
                running.due = now + item.seconds
            elif running.num_releases > 0:
                running.num_releases -= 1
            else:
                running.held = True
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
        if running.num_output == len(request.output_ids):
            output.num_cached_tokens = min(self.num_cached_tokens, len(request.prompt_ids) - 1)
            first = request.scopes[0]
            trunk_end = first.end_token if first.key != request.scopes[-1].key else 0
            output.num_cached_trunk_tokens = min(output.num_cached_tokens, trunk_end)
            if params.prompt_logprobs is not None and not request.output_ids:
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
        """One block is referenced for each running request and each pinned trunk; tenants are those of the shares."""
        total, pinned = self.info.num_blocks, len(self.trunks)
        referenced = min(len(self.running) + pinned, total)
        return EngineStats(
            blocks=BlockStats(total=total, free=total - referenced, cached=0, referenced=referenced, pinned=pinned),
            running=len(self.running),
            waiting=0,
            query_tokens=sum(len(r.prompt_ids) for r in self.requests if r.choice == 0),
            hit_tokens=0,
            prompt_tokens_computed=sum(len(r.prompt_ids) for r in self.requests),
            generation_tokens=self.num_generated,
            preemptions=0,
            steps=self.num_steps,
            tenants=[TenantStats(tenant=s.tenant, running=0, waiting=0, blocks=0, service=0.0) for s in self.shares],
        )

    def check_integrity(self) -> None:
        assert all(r.num_output <= r.max_tokens for r in self.running.values()), self.running


def _skip(items: Iterator[Item], num_tokens: int) -> Iterator[Item]:
    """What comes after so many tokens, which an earlier life has said; whatever else stood between them too."""
    while num_tokens > 0 and (item := next(items, None)) is not None:
        if isinstance(item, Pause | Fail | Die):
            continue
        ids = [item] if isinstance(item, int) else list(item)
        if len(ids) > num_tokens:
            yield ids[num_tokens:]
        num_tokens -= len(ids)
    yield from items


def _error(request_id: str, message: str, code: str, param: str | None) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=ErrorInfo(message, code, param))


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The drawn token is the best one with -0.5; the alternatives are the ids after it, each worse by 1."""
    top = [((token_id + i) % BYTE_VOCAB_SIZE, -0.5 - i) for i in range(num_top)]
    return TokenLogprobs(token_id, -0.5, top)
