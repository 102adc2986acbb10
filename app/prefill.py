"""Has the engine keep the system prompts of the configured assistants."""

import logging
import time
from hashlib import sha256

from app.assistants import Assistant, Assistants
from app.prompts import PromptBuilder
from engine.client import EngineClient
from engine.errors import EngineDeadError
from engine.protocol import TrunkPin

logger = logging.getLogger(__name__)


class Prefill:
    """Pins each trunk; the engine's client sends the pins again to each new engine."""

    def __init__(self, engine: EngineClient, prompts: PromptBuilder, assistants: Assistants) -> None:
        self._engine = engine
        self._prompts = prompts
        self._assistants = assistants

    async def run(self) -> None:
        """Ends when each trunk has been answered for."""
        start = time.monotonic()
        try:
            num_tokens = sum([await self.pin(assistant) for assistant in self._assistants])
        except EngineDeadError:
            return  # the client is closed
        logger.info("%d tokens of assistants prefilled in %.1f s", num_tokens, time.monotonic() - start)

    async def pin(self, assistant: Assistant) -> int:
        """How many tokens of this trunk the engine has now. What is not pinned is logged: the assistant works all the
        same. Raises EngineDeadError if the client is closed."""
        if not assistant.trunk_ids:
            return 0
        prompt = self._prompts.trunk_prompt(assistant)
        trunk = await self._engine.pin(trunk_id(assistant), prompt.token_ids, prompt.scopes)
        if trunk.state is TrunkPin.OVER_BUDGET:
            logger.warning(
                "the prompt of assistant %r is over the budget of pinned blocks: it is served, but may be evicted "
                "(%d tokens, %d blocks)",
                assistant.id,
                trunk.num_tokens,
                trunk.num_blocks,
            )
        elif trunk.state is TrunkPin.FAILED:
            logger.warning("the prompt of assistant %r was not prefilled", assistant.id)
        return trunk.num_tokens


def trunk_id(assistant: Assistant) -> str:
    """Another one for each text, scope and tokenisation; the same in every gateway."""
    digest = sha256(assistant.scope_key)
    digest.update(b"".join(token_id.to_bytes(4, "little") for token_id in assistant.trunk_ids))
    return f"{assistant.id}@{digest.hexdigest()[:32]}"
