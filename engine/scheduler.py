"""Decides what each step computes, and takes in what it brought. Never touches a tensor.

There is no prefill phase and no decode phase: `num_computed_tokens` of each sequence chases its `num_tokens` under one
token budget. Chunked prefill, prefix cache hits and resuming after a preemption need no case of their own.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator

from engine.admission import Admission, Draft
from engine.drawn_token import failure, take_token
from engine.errors import EngineError
from engine.fair_share import DECODE_TOKEN, TRUNKS, FairShare
from engine.forest import EVERYTHING_THAT_PAYS, SharedNode, count_blocks_not_read, find_shared_nodes
from engine.kv_cache_manager import KVCacheManager
from engine.places import Places
from engine.preemption import Preemption
from engine.protocol import ErrorInfo, FinishReason, RequestOutput, TenantStats
from engine.scheduled_batch import SampledToken, ScheduledBatch, ScheduledSequence, StepResult
from engine.sequence import Sequence, SequenceStatus
from engine.shared_attention import SharedAttention
from engine.tenant_shares import TenantShares


class Scheduler:
    """Decode rows first; what the token budget leaves goes to prompts by turns of their tenants (engine.admission).

    A sequence gets the blocks for all its tokens when it is admitted, and further ones one by one as it grows. When
    none is free one is preempted (engine.preemption): its blocks are freed and it computes again, later, what nobody
    kept. With `runs_ahead` a row that fills its last block gets the next one a step early, if it can be had.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        shares: TenantShares,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        shared_attention: SharedAttention = EVERYTHING_THAT_PAYS,
        runs_ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise EngineError(
                "max_num_seqs must be from 1 to max_num_batched_tokens, so that each running sequence can have a token "
                f"in each step; got {max_num_seqs} and {max_num_batched_tokens}"
            )
        self.kv = kv
        self.fair_share = FairShare(shares, kv, clock)
        self.places = Places(kv, self.fair_share, max_num_seqs)
        self.counters = self.places.counters
        self.running = self.places.running
        self.waiting = self.places.waiting
        self.followers = self.places.followers
        self._preemption = Preemption(kv, self.fair_share, self.places, quantum=max_num_batched_tokens)
        self._admission = Admission(kv, self.fair_share, self.places, self._preemption)
        # of the last step: most often the next one has the same decode rows
        self._decodes: list[Sequence] = []
        self._decode_rows: tuple[ScheduledSequence, ...] = ()
        self._num_decodes: dict[str, int] = {}
        self._nodes: tuple[SharedNode, ...] = ()
        self._num_blocks_not_read = 0
        self._shared_attention = shared_attention
        self._num_moves = -1
        """Of `places` when a step had been scheduled that has decode rows only; else -1."""
        self._filled: list[Sequence] = []
        """Decode rows of the last step that may have filled their last block."""
        self._max_num_batched_tokens = max_num_batched_tokens
        self._runs_ahead = runs_ahead

    @property
    def num_waiting(self) -> int:
        return self.places.num_waiting

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.places.sequences

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self.places.sequences)

    def add(self, sequence: Sequence) -> None:
        self.places.add(sequence)

    def abort(self, request_id: str) -> None:
        """Between steps, or between a step and its `update`. An unknown id is no error."""
        sequence = self.places.sequences.get(request_id)
        if sequence is not None:
            self.places.finish(sequence, FinishReason.ABORT)

    def tenant_stats(self) -> list[TenantStats]:
        """Of the tenants with requests."""
        return self.fair_share.stats()

    # ---- schedule

    def schedule(self) -> ScheduledBatch:
        """What the next step computes; empty only when there is nothing to do."""
        self.fair_share.pass_time()
        num_preemptions = self.counters.preemptions
        decodes, extends = self._grow_running()
        is_tight = self.counters.preemptions != num_preemptions
        if is_tight:
            decodes = [sequence for sequence in decodes if sequence.status is SequenceStatus.RUNNING]
            extends = [sequence for sequence in extends if sequence.status is SequenceStatus.RUNNING]
        self._charge_decodes(decodes)
        draft = Draft(self._max_num_batched_tokens - len(decodes), decodes, is_tight=is_tight)
        self._admission.share_budget(draft, extends)
        while not decodes and not draft.chunks and self.waiting and self._make_room():
            draft = Draft(self._max_num_batched_tokens, decodes)
            self._admission.share_budget(draft, [])
        if decodes != self._decodes:
            # Tables grow at their ends only, by blocks of their own, and lose their blocks only together with their
            # place among the rows: what rows share changes only with the rows, not when one of them fills a block.
            self._decodes = decodes
            self._decode_rows = tuple(ScheduledSequence(sequence, 1, True) for sequence in decodes)
            self._num_decodes = Counter(sequence.tenant for sequence in decodes)
            self._nodes = find_shared_nodes(decodes, self.kv.block_size, self._shared_attention)
            self._num_blocks_not_read = count_blocks_not_read(self._nodes)
        self._num_moves = self.places.num_moves if not draft.chunks else -1
        may_come_again = self._runs_ahead and not draft.chunks and not self.num_waiting
        if may_come_again:
            self._grow_ahead(decodes)
        scheduled = (*self._decode_rows, *draft.chunks) if draft.chunks else self._decode_rows
        assert scheduled or not len(self), f"{self.num_waiting} wait, {len(self.running)} run, nothing to do"
        transfers = self.kv.take_transfers()
        return ScheduledBatch(
            scheduled, len(decodes), transfers, self._nodes, self._num_blocks_not_read, may_come_again
        )

    def _grow_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Gets running sequences the blocks for their newest tokens; returns decode rows and those with more to do.

        Some may have been preempted meanwhile. Where nothing but decode rows ran in the last step, and all of them
        still do, only those that may have filled a block are looked at.
        """
        if self.places.num_moves == self._num_moves:
            for sequence in self._filled:
                self._grow(sequence)
            return self._decodes.copy(), []
        decodes: list[Sequence] = []
        extends: list[Sequence] = []
        block_size = self.kv.block_size
        for sequence in tuple(self.running):
            num_tokens = len(sequence.token_ids)
            if num_tokens <= len(sequence.block_table) * block_size or self._grow(sequence):
                if num_tokens - sequence.num_computed_tokens == 1 and not sequence.is_trunk:
                    decodes.append(sequence)
                else:
                    extends.append(sequence)
        return decodes, extends

    def _grow_ahead(self, decodes: list[Sequence]) -> None:
        """Gets rows that fill their last block in this step the next one, where one is free: nobody is preempted."""
        for sequence in decodes:
            num_tokens = len(sequence.token_ids)
            if num_tokens % self.kv.block_size == 0 and sequence.num_output_tokens + 1 < sequence.max_output_tokens:
                self.kv.try_allocate_slots(sequence, num_tokens + 1)

    def _charge_decodes(self, decodes: list[Sequence]) -> None:
        is_same = decodes == self._decodes
        num_decodes = self._num_decodes if is_same else Counter(sequence.tenant for sequence in decodes)
        for tenant, num_rows in num_decodes.items():
            self.fair_share.charge(self.fair_share[tenant], num_rows * DECODE_TOKEN)

    def _grow(self, sequence: Sequence) -> bool:
        """Gets a running sequence the block for its newest token; False if it was preempted itself."""
        if sequence.status is not SequenceStatus.RUNNING:
            return False  # preempted a moment ago, for one before it
        while self.kv.try_allocate_slots(sequence, sequence.num_tokens) is None:
            if len(self.running) == 1 and self.kv.pins.try_drop_newest():
                continue
            assert len(self.running) > 1, f"{sequence.request_id!r} does not fit though it runs alone"
            victim = self._preemption.find_victim_of_growth(sequence)
            self.places.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _make_room(self) -> bool:
        """Nothing runs, and nothing that waits fits beside the pins: they give way to requests, but not to trunks."""
        if TRUNKS in self.waiting.tenants:
            self.places.finish(self.waiting.of(TRUNKS)[0], FinishReason.ERROR)
            return True
        return self.kv.pins.try_drop_newest()

    # ---- update

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[RequestOutput]:
        """Takes in what the step computed: publishes blocks that are full now, appends tokens, ends sequences."""
        num_samples = batch.num_decodes + sum(scheduled.samples for scheduled in batch.extends)
        assert len(result.tokens) == num_samples, f"{len(result.tokens)} tokens from the runner, expected {num_samples}"
        self.kv.settle_transfers(has_succeeded=True)
        self.counters.steps += 1
        self.counters.blocks_not_read += batch.num_blocks_not_read
        outputs: list[RequestOutput] = []
        tokens = iter(result.tokens)
        self._take_decodes(batch, tokens, outputs, result)
        for sequence, num_new_tokens, samples in batch.extends:
            sampled = next(tokens) if samples else None
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                self._take_prompt_chunk(sequence, num_new_tokens, result)
            else:
                sequence.num_computed_tokens += num_new_tokens
                self.places.wake(self.followers.publish(self.kv.commit_full_blocks(sequence)))
            if sampled is not None:
                output = take_token(sequence, sampled)
                outputs.append(output)
                if output.finish_reason is not None:
                    self._end(sequence, output)
        self.counters.generation_tokens += len(outputs)
        return outputs

    def _take_decodes(
        self, batch: ScheduledBatch, tokens: Iterator[SampledToken], outputs: list[RequestOutput], result: StepResult
    ) -> None:
        """Of each step there are hundreds: what most of them do is done here and not in a call."""
        block_size, running = self.kv.block_size, SequenceStatus.RUNNING
        self._filled = filled = []
        for (sequence, _, _), sampled in zip(batch.decodes, tokens, strict=False):
            if sequence.status is not running:
                continue  # aborted while the step ran
            num_computed = sequence.num_computed_tokens + 1
            if num_computed <= sequence.num_prompt_tokens:
                self._take_prompt_chunk(sequence, 1, result)
                filled.append(sequence)
            else:
                sequence.num_computed_tokens = num_computed
                if num_computed // block_size > sequence.num_published_blocks:
                    self.places.wake(self.followers.publish(self.kv.commit_full_blocks(sequence)))
                    if num_computed % block_size == 0:
                        filled.append(sequence)
            output = take_token(sequence, sampled)
            outputs.append(output)
            if output.finish_reason is not None:
                self._end(sequence, output)

    def _end(self, sequence: Sequence, output: RequestOutput) -> None:
        """With its last output."""
        assert output.finish_reason is not None, output
        self.places.finish(sequence, output.finish_reason)
        if output.error is not None:
            self.counters.generation_tokens -= 1  # the output that has no token is counted with the others

    def _take_prompt_chunk(self, sequence: Sequence, num_new_tokens: int, result: StepResult) -> None:
        start = sequence.num_computed_tokens
        end = min(start + num_new_tokens, sequence.num_prompt_tokens)
        self.counters.prompt_tokens_computed += end - start
        sequence.num_computed_tokens = start + num_new_tokens
        self.places.wake(self.followers.publish(self.kv.commit_full_blocks(sequence)))
        self.places.wake(self.followers.publish(self.kv.commit_tails(sequence)))
        if sequence.is_trunk and sequence.num_uncomputed_tokens == 0:
            self.places.finish(sequence, FinishReason.STOP)
        if not sequence.wants_prompt_logprobs:
            return
        entries = result.prompt_logprobs.get(sequence.request_id, [])
        expected = min(end, sequence.num_prompt_tokens - 1) - start
        assert len(entries) == expected, (
            f"{sequence.request_id!r}: {len(entries)} prompt logprobs for tokens {start} to {end}, expected {expected}"
        )
        sequence.prompt_logprobs += entries

    def fail(self, batch: ScheduledBatch, error: ErrorInfo) -> list[RequestOutput]:
        """The step failed: its sequences end with `error`, and nothing that it may have written is published."""
        self.kv.settle_transfers(has_succeeded=False)
        outputs = []
        for sequence, _, _ in batch.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self.places.finish(sequence, FinishReason.ERROR)
                if not sequence.is_trunk:
                    outputs.append(failure(sequence, error))
        return outputs

    def check_integrity(self) -> None:
        """Raises AssertionError, with data, unless every sequence is in one place and every block accounted for."""
        self.places.check_integrity()
