"""Has the engine keep the system prompts of the assistants that are configured now."""

import asyncio
import logging
import time

from app.assistants import Assistant, Assistants, trunk_id
from app.prompts import PromptBuilder
from engine.client import EngineClient
from engine.errors import EngineDeadError
from engine.protocol import TrunkPin

logger = logging.getLogger(__name__)


class Prefill:
    """Pins trunks; the engine's client sends the pins again to each new engine."""

    def __init__(self, engine: EngineClient, prompts: PromptBuilder) -> None:
        self._engine = engine
        self._prompts = prompts
        self._wanted: dict[str, Assistant] = {}
        self._held: set[str] = set()
        """Trunks that were asked for and not given back."""
        self._news = asyncio.Event()
        self._settled = asyncio.Event()

    def keep(self, assistants: Assistants) -> None:
        """From now on the trunks of these, and no others."""
        self._wanted = {trunk_id(assistant): assistant for assistant in assistants if assistant.trunk_ids}
        self._settled.clear()
        self._news.set()

    async def wait_settled(self) -> None:
        """Until each trunk has been answered for, and the others have been given back."""
        await self._settled.wait()

    async def run(self) -> None:
        """Until it is cancelled, or finds the client closed."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                await self._settle(self._wanted)
                if not self._news.is_set():
                    self._settled.set()
        except EngineDeadError:
            return  # the client is closed

    async def _settle(self, wanted: dict[str, Assistant]) -> None:
        """New trunks first, so that an assistant that was edited does not do without one."""
        start = time.monotonic()
        num_tokens = 0
        for new in [trunk for trunk in wanted if trunk not in self._held]:
            self._held.add(new)
            num_tokens += await self._pin(new, wanted[new])
        for old in self._held - wanted.keys():
            self._held.remove(old)
            await self._engine.unpin(old)
        if num_tokens:
            logger.info("%d tokens of assistants prefilled in %.1f s", num_tokens, time.monotonic() - start)

    async def _pin(self, new: str, assistant: Assistant) -> int:
        """How many tokens of this trunk the engine has now. What is not pinned is logged: the assistant works all the
        same, and the engine pins it by itself as soon as there is room."""
        prompt = self._prompts.trunk_prompt(assistant)
        trunk = await self._engine.pin(new, prompt.token_ids, prompt.scopes)
        if trunk.state is TrunkPin.OVER_BUDGET:
            logger.warning(
                "the prompt of assistant %r is over the budget of pinned blocks: it is served, but may be evicted until"
                " there is room (%d tokens, %d blocks)",
                assistant.id,
                trunk.num_tokens,
                trunk.num_blocks,
            )
        elif trunk.state is TrunkPin.FAILED:
            self._held.discard(new)  # the engine has given it up: it is tried again at the next reload
            logger.warning("the prompt of assistant %r was not prefilled", assistant.id)
        return trunk.num_tokens
