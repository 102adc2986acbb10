"""A fake engine whose answers are text: letters, one token each, that depend on every token it reads from its KV."""

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import EngineInfo
from engine.scheduled_batch import SampledToken, ScheduledBatch, StepResult
from tests.engine.fake_runner import FakeRunner, next_token

LETTERS = range(ord("a"), ord("z") + 1)
"""With the byte model."""


class LetterRunner(FakeRunner):
    def __init__(self, info: EngineInfo, letters: Sequence[int] = LETTERS) -> None:
        super().__init__(info)
        self._letters = letters

    def execute(self, batch: ScheduledBatch) -> StepResult:
        result = super().execute(batch)
        self.batches.clear()  # a conversation has thousands
        letters = self._letters
        return StepResult([SampledToken(letters[token.token_id % len(letters)]) for token in result.tokens])


def letter_core(info: EngineInfo, letters: Sequence[int] = LETTERS) -> EngineCore:
    """Shadow KV on."""
    return EngineCore(EngineConfig(model_dir="", check_kv=True), info, LetterRunner(info, letters))


def letters_after(
    prompt_ids: Sequence[int], num_tokens: int, letters: Sequence[int] = LETTERS, seed: int | None = None
) -> list[int]:
    """What it says after this prompt, computed without any cache."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(letters[next_token(token_ids, seed or 0) % len(letters)])
    return token_ids[len(prompt_ids) :]
