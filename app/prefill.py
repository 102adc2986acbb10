"""Keeps the system prompts of the configured assistants in the engine's cache."""

import asyncio
import logging
import time

from app.assistants import Assistant, Assistants
from app.errors import ApiError
from app.generation import Generation
from app.prompts import PromptBuilder
from app.tenants import Tenant
from engine.client import EngineClient
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

ENGINE_CHECK_S = 1.0
"""How soon it is noticed that an engine has gone; a new one takes longer than that to start."""
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

logger = logging.getLogger(__name__)


class Prefill:
    """Computes each trunk once in each life of the engine."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, prompts: PromptBuilder, assistants: Assistants
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._assistants = assistants

    async def run(self) -> None:
        """Runs until it is cancelled."""
        is_prefilled = False
        while True:
            if not is_prefilled or not self._engine.is_ready:
                await self._engine.wait_ready()
                await self.prefill_all()
                is_prefilled = True
            await asyncio.sleep(ENGINE_CHECK_S)

    async def prefill_all(self) -> None:
        start = time.monotonic()
        num_tokens = sum([await self.prefill(assistant) for assistant in self._assistants])
        logger.info("%d tokens of assistants prefilled in %.1f s", num_tokens, time.monotonic() - start)

    async def prefill(self, assistant: Assistant) -> int:
        """How many tokens of this trunk the engine has now. A failure is logged: the assistant works all the same."""
        if not assistant.trunk_ids:
            return 0
        prompt = self._prompts.trunk_prompt(assistant)
        try:
            with Generation(
                self._engine, self._tokenizer, prompt, _ONE_TOKEN, Tenant(assistant.tenant or "")
            ) as generation:
                async for _ in generation:
                    pass
        except ApiError as e:
            logger.warning("the prompt of assistant %r was not prefilled: %s", assistant.id, e.message)
            return 0
        return len(prompt.token_ids)
