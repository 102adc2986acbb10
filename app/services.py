"""What the routes of one gateway work with, built once and handed to each of them. Nothing here is global."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.beam_streams import BeamSearchEngine
from app.caps import Caps
from app.config import GatewayConfig
from app.errors import EngineUnavailable
from app.generation import UNAVAILABLE, Generation
from app.live_config import Configured, LiveConfig
from app.metrics import Metrics
from app.prompt_history import PromptHistory
from app.prompts import BuiltPrompt, PromptBuilder
from app.rate_limits import RateLimits
from app.resubmission import Resubmission
from app.tenant_store import TenantStore
from app.tenants import Tenant
from app.tickets import Tickets
from engine.beam_search import BeamSearchParams
from engine.client import EngineClient
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
    """None without a Redis."""

    async def close(self) -> None:
        """What was opened with them; nothing may be under way any more."""
        await self.resubmission.close()
        await self.rate_limits.close()
        await self.caps.close()
        if self.tenant_store is not None:
            await self.tenant_store.close()
        self.prompts.close()

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
    ) -> Generation:
        """A measured generation on this gateway's engine; its choices are the best of `beams`, if that is given.

        Raises ApiError, as `Generation` does.
        """
        return Generation(
            self.resubmission if beams is None else BeamSearchEngine(self.resubmission, beams),
            self.tokenizer,
            prompt,
            params,
            tenant,
            priority=priority,
            continues_text=continues_text,
            metrics=self.metrics,
            history=self.history,
        )
