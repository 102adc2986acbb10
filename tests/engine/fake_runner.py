"""A runner without a model whose next token depends on every token it reads through the block tables.

It keeps token ids where a model keeps keys and values. So a wrong, stale or overwritten block shows up as other output
than `continuation` gives, which reads no blocks at all.
"""

import struct
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import Literal
from zlib import crc32

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import (
    END,
    AddRequest,
    EngineInfo,
    FinishReason,
    PinTrunk,
    RequestOutput,
    Scope,
    TokenLogprobs,
    TrunkState,
)
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import SampledToken, ScheduledBatch, StepResult
from engine.swap_cost import SwapTime
from tests.engine.sequences import check_nodes

FREE = SwapTime()
VOCAB_SIZE = 1000
EMPTY = -1


def next_token(token_ids: Ids[int], seed: int = 0, choice: int = 0) -> int:
    return crc32(struct.pack(f"<{len(token_ids) + 2}q", *token_ids, seed, choice)) % VOCAB_SIZE


def continuation(prompt_ids: Ids[int], num_tokens: int, seed: int = 0, choice: int = 0) -> list[int]:
    """What the fake model says after the prompt, computed without any cache."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed, choice))
    return token_ids[len(prompt_ids) :]


class FakeRunner:
    """Remembers each batch; raises `self.failure`, once, after half of the step's writes if one was set."""

    def __init__(self, info: EngineInfo) -> None:
        self._block_size = info.block_size
        self.slots = [EMPTY] * ((info.num_blocks + 1) * info.block_size)
        self.host_slots = [EMPTY] * (info.num_host_blocks * info.block_size)
        self.batches: list[ScheduledBatch] = []
        self.failure: Exception | None = None

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.batches.append(batch)
        check_nodes([s.sequence for s in batch.decodes], batch.nodes, self._block_size)
        size = self._block_size
        swap_outs, swap_ins, copies = batch.transfers
        for source, target in swap_outs:
            self.host_slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        for source, target in swap_ins:
            self.slots[target * size : (target + 1) * size] = self.host_slots[source * size : (source + 1) * size]
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        for index, (sequence, num_new_tokens, _) in enumerate(batch.sequences):
            start = sequence.num_computed_tokens
            for token in range(start, start + num_new_tokens):
                self.slots[self._slot(sequence.block_table, token)] = sequence.token_ids[token]
            if self.failure is not None and (index + 1) * 2 >= len(batch.sequences):
                failure, self.failure = self.failure, None
                raise failure
        result = StepResult([])
        for sequence, num_new_tokens, samples in batch.sequences:
            end = sequence.num_computed_tokens + num_new_tokens
            if samples:
                read = [self.slots[self._slot(sequence.block_table, token)] for token in range(end)]
                result.tokens.append(SampledToken(next_token(read, sequence.params.seed or 0, sequence.choice)))
            if sequence.wants_prompt_logprobs:
                targets = sequence.prompt_ids[sequence.num_computed_tokens + 1 : end + 1]
                result.prompt_logprobs[sequence.request_id] = [TokenLogprobs(t, -1.0, []) for t in targets]
        return result

    def _slot(self, block_table: list[int], token: int) -> int:
        return block_table[token // self._block_size] * self._block_size + token % self._block_size

    @property
    def rows(self) -> list[list[tuple[str, int]]]:
        """For each step: request id and number of new tokens of each row."""
        return [[(s.sequence.request_id, s.num_new_tokens) for s in batch.sequences] for batch in self.batches]


class Bench:
    """An engine core over a fake runner: adds requests in one line, checks integrity after every step."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 8,
        max_model_len: int = 10_000,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        max_waiting: int = 100,
        enable_prefix_caching: bool = True,
        pin_budget: float = 0.2,
        num_host_blocks: int = 0,
        swap_time: SwapTime = FREE,
        shared_attention: Literal["auto", "always", "never"] = "always",
        deterministic: bool = False,
        runs_ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.info = EngineInfo(
            model_name="fake",
            fingerprint="f",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
        )
        config = EngineConfig(
            model_dir="",
            block_size=block_size,  # type: ignore[arg-type]  tests take tiny blocks too
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
            enable_prefix_caching=enable_prefix_caching,
            pin_budget=pin_budget,
            shared_attention=shared_attention,
            deterministic=deterministic,
            check_kv=True,
        )
        self.runner = FakeRunner(self.info)
        self.core = EngineCore(config, self.info, self.runner, (), swap_time, clock, runs_ahead=runs_ahead)
        self.trunk_news: list[TrunkState] = []
        self.outputs: dict[str, RequestOutput] = {}
        """All that came for each request, merged."""

    def add(
        self,
        request_id: str,
        prompt_ids: Ids[int],
        max_tokens: int | None = 4,
        *,
        choice: int = 0,
        tenant: str = "",
        priority: int = 0,
        scopes: list[Scope] | None = None,
        output_ids: Ids[int] = (),
        **params: object,
    ) -> RequestOutput | None:
        refusal = self.core.add(
            AddRequest(
                request_id=request_id,
                prompt_ids=list(prompt_ids),
                params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),  # type: ignore[arg-type]
                scopes=scopes or [Scope(END, tenant.encode())],
                choice=choice,
                tenant=tenant,
                priority=priority,
                output_ids=list(output_ids),
            )
        )
        if refusal is not None:
            self.outputs[request_id] = refusal
        return refusal

    def pin(self, trunk_id: str, token_ids: Ids[int], scope: bytes = b"assistant") -> TrunkState | None:
        return self.core.pin(PinTrunk(trunk_id, list(token_ids), [Scope(END, scope)]))

    def pinned(self, trunk_id: str, token_ids: Ids[int], scope: bytes = b"assistant") -> tuple[str, int, int]:
        """State, tokens and blocks of a trunk when all work is done."""
        state = self.pin(trunk_id, token_ids, scope)
        if state is None:
            self.run()
            state = [news for news in self.trunk_news if news.trunk_id == trunk_id][-1]
        return str(state.state), state.num_tokens, state.num_blocks

    def step(self, num_steps: int = 1) -> list[RequestOutput]:
        """Outputs of the last step."""
        outputs: list[RequestOutput] = []
        for _ in range(num_steps):
            outputs = self.core.step()
            self.core.check_integrity()
            self.trunk_news += self.core.take_trunk_news()
            for output in outputs:
                if output.request_id in self.outputs:
                    self.outputs[output.request_id].merge(output)
                else:
                    self.outputs[output.request_id] = output
        return outputs

    def run(self, max_steps: int = 2000) -> None:
        """Steps until there is no work; the core's check that an idle pool holds nothing comes with each step."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.core.stats()}")

    def ask(self, prompt_ids: Ids[int], max_tokens: int = 4, **more: object) -> RequestOutput:
        """One request, alone, to its end."""
        request_id = f"ask-{len(self.outputs)}"
        self.add(request_id, prompt_ids, max_tokens, **more)  # type: ignore[arg-type]
        self.run()
        return self.outputs[request_id]

    def assert_complete(self, request_id: str, prompt_ids: Ids[int], num_tokens: int, choice: int = 0) -> None:
        """It ended by length with exactly what the fake model says without a cache."""
        output = self.outputs[request_id]
        assert output.finish_reason == FinishReason.LENGTH, output
        assert output.token_ids == continuation(prompt_ids, num_tokens, choice=choice)

    def table(self, request_id: str) -> list[int]:
        [sequence] = [s for s in self.core.scheduler.running if s.request_id == request_id]
        return sequence.block_table

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.core.scheduler.running]

    @property
    def free_ids(self) -> list[int]:
        """Free blocks in the order of their next use."""
        return [block.block_id for block in self.core.scheduler.kv.pool.free_list]


def ids(start: int, num_tokens: int) -> list[int]:
    """Token ids `start`, `start + 1`, ...: prompts with different starts share nothing."""
    return [(start + i) % VOCAB_SIZE for i in range(num_tokens)]
