"""What the routes of one gateway work with, built once and handed to each of them. Nothing here is global."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from app.beam_streams import BeamSearchEngine
from app.caps import Caps
from app.config import GatewayConfig
from app.drain import Drain
from app.errors import EngineUnavailable
from app.generation import UNAVAILABLE, Generation
from app.ledger import Ledger
from app.lifetime import Later
from app.live_config import Configured, LiveConfig
from app.metrics import Metrics
from app.progress import Midway
from app.prompt_history import PromptHistory
from app.prompts import BuiltPrompt, PromptBuilder
from app.rate_limits import RateLimits
from app.resubmission import Resubmission, SubmitterOfAccepted
from app.tenant_store import TenantStore
from app.tenants import Tenant
from app.tickets import Tickets
from app.usage_record import Outcome, UsageRecord, iso_time
from engine.beam_search import BeamSearchParams
from engine.client import EngineClient, Submitter
from engine.errors import EngineDeadError
from engine.prepared import PreparedModel
from engine.protocol import EngineInfo
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Services:
    config: GatewayConfig
    live: LiveConfig
    model: PreparedModel
    tokenizer: Tokenizer
    template: ChatTemplate
    engine: EngineClient
    resubmission: Resubmission
    """Takes the requests for `engine`."""
    prompts: PromptBuilder
    metrics: Metrics
    history: PromptHistory
    tickets: Tickets
    caps: Caps
    rate_limits: RateLimits
    tenant_store: TenantStore | None
    ledger: Ledger | None
    """Both None without a Redis."""
    now: Callable[[], float] = time.time
    """Seconds since 1970."""
    drain: Drain = field(default_factory=Drain)
    later: Later = field(default=lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call))

    async def close(self) -> None:
        """What was opened with them; nothing may be under way any more."""
        await self.resubmission.close()
        await self.rate_limits.close()
        await self.caps.close()
        if self.ledger is not None:
            await self.ledger.close()
        if self.tenant_store is not None:
            await self.tenant_store.close()
        self.prompts.close()

    async def flush_usage(self) -> bool:
        """Returns when the usage of all that has ended is recorded, or could not be recorded now: then it is False."""
        return self.ledger is None or await self.ledger.flush()

    @property
    def current(self) -> Configured:
        """The configuration in force now. A request reads it once."""
        return self.live.current

    @property
    def model_name(self) -> str:
        return self.model.manifest.name

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine serves. Raises EngineUnavailable."""
        try:
            return self.engine.info
        except EngineDeadError:
            raise EngineUnavailable(UNAVAILABLE) from None

    def generation(
        self,
        prompt: BuiltPrompt | Sequence[BuiltPrompt],
        params: SamplingParams,
        tenant: Tenant,
        *,
        priority: int = 0,
        continues_text: bool = False,
        beams: BeamSearchParams | None = None,
        is_told_first: bool = False,
        answer_id: str,
        created_at: float | None = None,
        midway: Midway | None = None,
        takeovers: int = 0,
    ) -> Generation:
        """A measured generation on this gateway's engine; its choices are the best of `beams`, if that is given.
        `is_told_first`: its client learns that it is taken before it is submitted; should the engine go between the
        two, it waits for one. `answer_id`: under which its usage is recorded. `created_at`: in seconds since 1970; now,
        if not given. `midway`: as `Generation` takes it, after so many `takeovers`.

        Raises ApiError and ValueError, as `Generation` does, and ShuttingDown when nothing new is taken any more.
        """
        self.drain.check()
        submitter: Submitter = self.resubmission
        if beams is not None:
            submitter = BeamSearchEngine(self.resubmission, beams)
        elif is_told_first or midway is not None:
            submitter = SubmitterOfAccepted(self.resubmission)
        record = None
        if self.ledger is not None:
            created_at = self.now() if created_at is None else created_at
            record = partial(self._record, self.ledger, answer_id, tenant.id, created_at, takeovers)
        return Generation(
            submitter,
            self.tokenizer,
            prompt,
            params,
            tenant,
            priority=priority,
            continues_text=continues_text,
            metrics=self.metrics,
            history=self.history,
            drain=self.drain,
            pausable=self.resubmission if beams is None else None,
            midway=midway,
            on_end=record,
        )

    def _record(
        self,
        ledger: Ledger,
        answer_id: str,
        tenant: str,
        created: float,
        takeovers: int,
        generation: Generation,
        outcome: Outcome,
    ) -> None:
        times, cached = generation.times, generation.cached
        ledger.add(
            UsageRecord(
                id=answer_id,
                created_at=iso_time(created),
                tenant=tenant,
                assistant=generation.assistant_id,
                model=self.model_name,
                outcome=outcome,
                prompt_tokens=generation.num_prompt_tokens,
                trunk_tokens=cached.trunk,
                history_tokens=cached.history,
                computed_tokens=generation.num_prompt_tokens - cached.total,
                output_tokens=generation.num_output_tokens,
                queue_ms=round(times.queue_ms, 3),
                prefill_ms=round(times.prefill_ms, 3),
                decode_ms=round(times.decode_ms, 3),
                takeovers=takeovers,
            )
        )
