"""KV blocks of many chats over one prompt, on the engine's own scheduler and block manager without a model."""

import random

from benchmarks.document import Document, bar
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import END, AddRequest, EngineInfo, PinTrunk, Scope
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SampledToken, ScheduledBatch, StepResult

BLOCK_SIZE = 16
NUM_BLOCKS = 4000
VOCAB_SIZE = 1000
PROMPT_TOKENS, OUTPUT_TOKENS = (1, 60), (40, 120)
"""Of a chat, beyond the trunk; both ends included."""


class NoModel:
    """Any token will do."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        num_samples = sum(scheduled.samples for scheduled in batch.sequences)
        return StepResult([SampledToken(0)] * num_samples)


class TrunkWithChats:
    """All chats are added at once behind a pinned trunk."""

    def __init__(self, num_trunk_tokens: int, num_chats: int, seed: int) -> None:
        config = EngineConfig(model_dir="", max_num_seqs=num_chats, max_num_batched_tokens=8192)
        info = EngineInfo(
            model_name="none",
            fingerprint="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
        )
        self._chance = random.Random(seed)
        self._core = EngineCore(config, info, NoModel())
        self._num_trunk_tokens = num_trunk_tokens
        trunk_ids = self._ids(num_trunk_tokens)
        self._core.pin(PinTrunk(trunk_id="trunk", token_ids=trunk_ids, scopes=[Scope(END, b"trunk")]))
        while self._core.has_work:
            self._core.step()
        for number in range(num_chats):
            params = SamplingParams(max_tokens=self._chance.randint(*OUTPUT_TOKENS), ignore_eos=True)
            refusal = self._core.add(
                AddRequest(
                    request_id=str(number),
                    prompt_ids=trunk_ids + self._ids(self._chance.randint(*PROMPT_TOKENS)),
                    params=params,
                    scopes=[Scope(num_trunk_tokens, b"trunk"), Scope(END, b"private")],
                )
            )
            if refusal is not None:
                raise RuntimeError(f"chat {number} was refused: {refusal.error}")

    def most_beyond_needed(self) -> float:
        """Blocks held beyond those that trunk and own tokens need, for each running chat; the most of all steps."""
        most = -float("inf")
        trunk_blocks = _blocks_for(self._num_trunk_tokens)
        while self._core.has_work:
            self._core.step()
            running = self._core.scheduler.running
            if running:
                own = [sequence.num_computed_tokens - self._num_trunk_tokens for sequence in running]
                needed = trunk_blocks + sum(_blocks_for(num_tokens) for num_tokens in own)
                most = max(most, (self._core.stats().blocks.referenced - needed) / len(running))
        self._core.check_integrity()
        return most

    def _ids(self, num_tokens: int) -> list[int]:
        return [self._chance.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def kv_memory(num_chats: int, least_trunk_tokens: int, seed: int) -> Document:
    """Trunks of each length that differs in how full the last block is."""
    lengths = range(least_trunk_tokens, least_trunk_tokens + BLOCK_SIZE)
    beyond = {length: TrunkWithChats(length, num_chats, seed).most_beyond_needed() for length in lengths}
    return {
        "chats": num_chats,
        "trunk_tokens": [lengths[0], lengths[-1]],
        "blocks_a_chat_beyond_needed": {
            "trunk_ends_a_block": bar(max(b for n, b in beyond.items() if n % BLOCK_SIZE == 0), at_most=1),
            "trunk_ends_in_a_block": bar(max(b for n, b in beyond.items() if n % BLOCK_SIZE), at_most=1),
        },
    }


def _blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
