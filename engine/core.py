"""The engine without processes and sockets: requests in, outputs out, one step at a time."""

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from engine.block_hash import root_hash
from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineError, InvalidRequest, Overloaded, RequestError, RequestTooLarge
from engine.fair_share import TRUNKS
from engine.kv_cache_manager import KVCacheManager
from engine.prefill_rate import PrefillRate
from engine.protocol import (
    END,
    AddRequest,
    EngineInfo,
    EngineStats,
    ErrorInfo,
    FinishReason,
    PinTrunk,
    RequestOutput,
    Scope,
    TenantShare,
    TrunkState,
)
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Sequence, find_trunk_end
from engine.shadow_kv import ShadowKV
from engine.shared_attention import DETERMINISTIC_TOKENS, USUAL_NODE_COST, NodeCost, SharedAttention
from engine.slot_use import count_slots
from engine.swap_cost import SwapCost, SwapTime
from engine.tenant_shares import TenantShares
from engine.trunks import Trunks

log = logging.getLogger(__name__)

NO_TIME = SwapTime()
NO_TOKEN = SamplingParams()
"""Of a trunk, which draws none."""


class Runner(Protocol):
    """Has the model and the KV tensors. `engine.model_runner.ModelRunner`, or something tiny in a test."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Moves blocks, computes the batch's new tokens, draws the next ones.

        Raises EngineDeadError if no further step can work; any other exception fails this batch only.
        """
        ...


class EngineCore:
    """Synchronous, for one thread.

    `identity`: what KV depends on beside the model's fingerprint, `swap_time`: what the host tier costs,
    `node_cost`: what reading blocks once for several rows does, `runs_ahead`: whether it launches steps before they are
    scheduled (see ModelRunner). `clock` counts seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        runner: Runner,
        identity: Iterable[str] = (),
        swap_time: SwapTime = NO_TIME,
        clock: Callable[[], float] = time.perf_counter,
        node_cost: NodeCost = USUAL_NODE_COST,
        runs_ahead: bool = False,
    ) -> None:
        self.info = info
        self._runner = runner
        self._clock = clock
        root = root_hash(info.fingerprint, *identity)
        if not 0 <= config.pin_budget <= 1:
            raise EngineError(f"pin_budget must be a share from 0 to 1, got {config.pin_budget}")
        pin_budget_blocks = int(config.pin_budget * info.num_blocks) if config.enable_prefix_caching else 0
        self._shares = TenantShares()
        self._prefill_rate = PrefillRate()
        kv = KVCacheManager(
            info.num_blocks,
            info.block_size,
            root,
            config.enable_prefix_caching,
            pin_budget_blocks,
            num_host_blocks=info.num_host_blocks,
            swap_cost=SwapCost(swap_time, self._prefill_rate, info.block_size),
            shares=self._shares,
        )
        self.scheduler = Scheduler(
            kv,
            self._shares,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            shared_attention=SharedAttention(
                config.shared_attention, node_cost, DETERMINISTIC_TOKENS if config.deterministic else 1
            ),
            runs_ahead=runs_ahead,
            clock=clock,
        )
        self.trunks = Trunks(self.scheduler, self._make_trunk_sequence)
        self._max_waiting = config.max_waiting
        self._limits = {
            "this model's context": info.max_model_len,
            "the KV cache of this engine": info.max_tokens_in_pool,
        }
        self._shadow: ShadowKV | None = None
        if config.check_kv:
            self._shadow = ShadowKV(info.num_blocks, info.block_size, info.num_host_blocks)
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return len(self.scheduler) > 0

    def add(self, request: AddRequest) -> RequestOutput | None:
        """None: accepted. A request that is wrong or can never fit is refused at once, by its last output."""
        try:
            sequence = self._make_sequence(request)
        except RequestError as error:
            return RequestOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.ERROR,
                error=ErrorInfo(error.message, error.code, error.param),
            )
        self.scheduler.add(sequence)
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends them without a further output. Unknown ids are no error: their last output may be on its way."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)

    def pin(self, message: PinTrunk) -> TrunkState | None:
        """The trunk's state if it is known at once; else `take_trunk_news` brings it after some step."""
        return self.trunks.pin(message)

    def unpin(self, trunk_id: str) -> None:
        """An unknown id is no error. Chats that read the trunk keep its blocks until they end."""
        self.trunks.unpin(trunk_id)

    def take_trunk_news(self) -> list[TrunkState]:
        """States of trunks that have changed since the last call."""
        return self.trunks.take_news()

    def set_tenants(self, shares: Iterable[TenantShare]) -> None:
        """In place of all shares said before."""
        self._shares.set(shares)

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, update. Outputs of the requests for which it brought something; [] without work."""
        if not self.has_work:
            return []
        outputs = self._step()
        self.trunks.settle()
        return outputs

    def _step(self) -> list[RequestOutput]:
        batch = self.scheduler.schedule()
        if self._shadow is not None:
            self._shadow.execute(batch)
        start = self._clock()
        try:
            result = self._runner.execute(batch)
        except EngineDeadError:
            raise
        except KeyboardInterrupt as error:
            self.fail_batch(batch, error)  # whoever interrupted an offline run may go on with this core
            raise
        except Exception as error:  # noqa: BLE001 whatever it was, the requests of other steps can go on
            return self.fail_batch(batch, error)
        self._prefill_rate.add(batch, self._clock() - start)
        return self.scheduler.update(batch, result)

    def fail_batch(self, batch: ScheduledBatch, error: BaseException) -> list[RequestOutput]:
        """Ends the batch's requests with an error; nothing that the step may have written becomes findable."""
        log.error("a step of %d sequences failed", len(batch.sequences), exc_info=error)
        if self._shadow is not None:
            self._shadow.forget(batch)
        return self.scheduler.fail(batch, ErrorInfo("the engine failed while it computed this request", "engine_error"))

    def stats(self) -> EngineStats:
        """Between two steps."""
        counters, kv, running = self.scheduler.counters, self.scheduler.kv, self.scheduler.running
        slots = count_slots(kv, running, self.trunks.count_unused_pinned_slots())
        return EngineStats(
            blocks=kv.stats(),
            running=len(running),
            waiting=self.scheduler.num_waiting,
            query_tokens=counters.query_tokens,
            hit_tokens=counters.hit_tokens,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            blocks_not_read=counters.blocks_not_read,
            prefill_tokens_per_s=self._prefill_rate.tokens_per_s,
            slots_allocated=slots.allocated,
            slots_used=slots.used,
            not_duplicated_blocks=slots.not_duplicated_blocks,
            host=kv.host.stats(),
            trunks=self.trunks.stats(),
            tenants=self.scheduler.tenant_stats(),
        )

    def check_integrity(self) -> None:
        """For when a step is not under way, at the latest when idle. Raises AssertionError with data."""
        self.scheduler.check_integrity()
        stats = self.stats()
        blocks = stats.blocks
        assert blocks.free + blocks.referenced == blocks.total, blocks
        if not self.has_work:
            assert (stats.running, stats.waiting, blocks.referenced) == (0, 0, blocks.pinned), stats

    def _make_sequence(self, request: AddRequest) -> Sequence:
        """Raises RequestError for what should not have been sent and for what could never be served."""
        info, params, prompt_ids = self.info, request.params, request.prompt_ids
        is_new = not request.output_ids  # one that had its place already is not turned away for want of it
        if is_new and self.scheduler.fair_share.count_waiting(request.tenant) >= self._max_waiting:
            raise Overloaded(self._max_waiting)
        if request.request_id in self.scheduler:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        self._check_prompt(prompt_ids, request.scopes)
        params.validate(info.vocab_size)
        max_output_tokens = self._find_max_output_tokens(
            len(prompt_ids), params.max_tokens, self._find_limits(request.tenant, request.scopes)
        )
        if not is_new:
            self._check_ids(request.output_ids, "output_ids")
            if len(request.output_ids) >= max_output_tokens:
                raise InvalidRequest(
                    f"of {max_output_tokens} output tokens {len(request.output_ids)} are there: nothing is to be added",
                    param="output_ids",
                )
        self._num_arrivals += 1
        return Sequence(
            request_id=request.request_id,
            prompt_ids=prompt_ids,
            params=params,
            scopes=tuple(request.scopes),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_output_tokens=max_output_tokens,
            choice=request.choice,
            tenant=request.tenant,
            priority=request.priority,
            arrival=self._num_arrivals,
            arrived_s=self._clock(),
            resumed_ids=request.output_ids,
        )

    def _make_trunk_sequence(self, message: PinTrunk) -> Sequence:
        """Raises RequestError for what no request could begin with."""
        self._check_prompt(message.token_ids, message.scopes)
        self._find_max_output_tokens(len(message.token_ids), None, self._limits)
        self._num_arrivals += 1
        return Sequence(
            request_id=f"\0trunk {message.trunk_id}",
            prompt_ids=message.token_ids,
            params=NO_TOKEN,
            scopes=tuple(message.scopes),
            seed=0,
            max_output_tokens=0,
            tenant=TRUNKS,
            arrival=self._num_arrivals,
            is_trunk=True,
        )

    def _check_prompt(self, prompt_ids: list[int], scopes: list[Scope]) -> None:
        if not prompt_ids:
            raise InvalidRequest("the prompt must have at least one token, got none", param="prompt")
        self._check_ids(prompt_ids, "prompt")
        ends = [scope.end_token for scope in scopes]
        if not ends or ends != sorted(ends) or ends[-1] != END:
            raise InvalidRequest(f"scopes must ascend to one without an end, got ends {ends}", param="scopes")

    def _check_ids(self, token_ids: list[int], param: str) -> None:
        """`token_ids`: not empty."""
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.info.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequest(
                f"the {param} must be made of token ids from 0 to {self.info.vocab_size - 1}, got {wrong}", param=param
            )

    def _find_limits(self, tenant: str, scopes: list[Scope]) -> dict[str, int]:
        """Tokens that a request may have, by what holds them."""
        max_blocks, block_size = self._shares.of(tenant).max_blocks, self.info.block_size
        if max_blocks is None:
            return self._limits
        # the blocks of a trunk are not the tenant's own
        limit = (max_blocks + find_trunk_end(scopes) // block_size) * block_size
        return {**self._limits, "the tenant's share of the KV cache": limit}

    @staticmethod
    def _find_max_output_tokens(num_prompt_tokens: int, max_tokens: int | None, limits: dict[str, int]) -> int:
        """What context, pool and share leave for the output, so that a request which runs alone always ends."""
        what, limit = min(limits.items(), key=lambda item: item[1])
        if num_prompt_tokens >= limit:
            wanted = "the rest" if max_tokens is None else str(max_tokens)
            raise RequestTooLarge(
                f"{what} holds {limit} tokens, of which one at least must be output; this request has "
                f"{num_prompt_tokens} prompt tokens and asks for {wanted} output tokens: make the prompt shorter",
                needed_tokens=num_prompt_tokens + 1,
                limit_tokens=limit,
                param="prompt",
            )
        rest = limit - num_prompt_tokens
        return rest if max_tokens is None else min(max_tokens, rest)
