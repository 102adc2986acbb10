"""Decides what each step computes, and takes in what it brought. Never touches a tensor.

There is no prefill phase and no decode phase: `num_computed_tokens` of each sequence chases its `num_tokens` under one
token budget. Chunked prefill, prefix cache hits and resuming after a preemption need no case of their own.
"""

from engine.counters import SchedulerCounters
from engine.errors import EngineError
from engine.followers import Followers
from engine.forest import SharedNode, find_shared_nodes
from engine.kv_cache_manager import KVCacheManager
from engine.prefix_cache import Prefix
from engine.protocol import ErrorInfo, FinishReason, RequestOutput
from engine.scheduled_batch import SampledToken, ScheduledBatch, ScheduledSequence, StepResult
from engine.sequence import Sequence, SequenceStatus
from engine.waiting_queue import WaitingQueue

MAX_BYPASSES = 32
"""Requests admitted past one that waits for blocks; then all wait until enough are free for it."""
MAX_MISFITS = 8
"""Requests tried in one step that do not fit, before looking for smaller ones is given up."""


class Scheduler:
    """Running sequences first, then waiting ones.

    A sequence gets the blocks for all its tokens when it is admitted, and further ones one by one as it grows. When
    none is free the newest is preempted: its blocks are freed and it computes again, later, what nobody kept.
    """

    def __init__(self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise EngineError(
                "max_num_seqs must be from 1 to max_num_batched_tokens, so that each running sequence can have a token "
                f"in each step; got {max_num_seqs} and {max_num_batched_tokens}"
            )
        self.kv = kv
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        self.followers = Followers()
        self.running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        # of the last step: most often the next one has the same decode rows
        self._decodes: list[Sequence] = []
        self._decode_rows: tuple[ScheduledSequence, ...] = ()
        self._nodes: tuple[SharedNode, ...] = ()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.followers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self._sequences, f"{sequence.request_id!r} is known already"
        self._sequences[sequence.request_id] = sequence
        self.waiting.add(sequence)

    def abort(self, request_id: str) -> None:
        """Between steps, or between a step and its `update`. An unknown id is no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    # ---- schedule

    def schedule(self) -> ScheduledBatch:
        """What the next step computes; empty only when there is nothing to do."""
        num_preemptions = self.counters.preemptions
        block_size = self.kv.block_size
        decodes: list[Sequence] = []
        extends: list[Sequence] = []
        for sequence in tuple(self.running):
            num_tokens = len(sequence.token_ids)
            if num_tokens <= len(sequence.block_table) * block_size or self._grow(sequence):
                if num_tokens - sequence.num_computed_tokens == 1 and not sequence.is_trunk:
                    decodes.append(sequence)
                else:
                    extends.append(sequence)
        has_preempted = self.counters.preemptions != num_preemptions
        if has_preempted:
            decodes = [sequence for sequence in decodes if sequence.status is SequenceStatus.RUNNING]
            extends = [sequence for sequence in extends if sequence.status is SequenceStatus.RUNNING]
        budget = self._max_num_batched_tokens - len(decodes)
        chunks: list[ScheduledSequence] = []
        for sequence in extends:
            if budget == 0:
                break
            budget -= self._schedule_chunk(sequence, budget, chunks)
        # who was preempted has the first claim on what is free: nobody else may take it in the same step
        if not has_preempted:
            self._admit(budget, decodes, chunks)
            while not decodes and not chunks and self.waiting and self._make_room():
                self._admit(budget, decodes, chunks)
        if decodes != self._decodes:
            # Tables grow at their ends only, by blocks of their own, and lose their blocks only together with their
            # place among the rows: what rows share changes only with the rows.
            self._decodes = decodes
            self._decode_rows = tuple(ScheduledSequence(sequence, 1, True) for sequence in decodes)
            self._nodes = find_shared_nodes(decodes, block_size)
        scheduled = (*self._decode_rows, *chunks)
        assert scheduled or not self._sequences, f"{self.num_waiting} wait, {len(self.running)} run, nothing to do"
        return ScheduledBatch(scheduled, len(decodes), self.kv.take_transfers(), self._nodes)

    @staticmethod
    def _schedule_chunk(sequence: Sequence, budget: int, chunks: list[ScheduledSequence]) -> int:
        num_uncomputed = sequence.num_uncomputed_tokens
        num_new = min(num_uncomputed, budget)
        chunks.append(ScheduledSequence(sequence, num_new, num_new == num_uncomputed and not sequence.is_trunk))
        return num_new

    def _grow(self, sequence: Sequence) -> bool:
        """Gets a running sequence the block for its newest token; False if it was preempted itself."""
        if sequence.status is not SequenceStatus.RUNNING:
            return False  # preempted a moment ago, for one before it
        while self.kv.try_allocate_slots(sequence, sequence.num_tokens) is None:
            if len(self.running) == 1 and self.kv.pins.try_drop_newest():
                continue
            assert len(self.running) > 1, f"{sequence.request_id!r} does not fit though it runs alone"
            victim = self._find_victim(sequence.tenant if self.kv.is_over_share(sequence) else None)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _make_room(self) -> bool:
        """Nothing runs, and nothing that waits fits beside the pins: they give way to requests, but not to trunks."""
        for sequence in self.waiting:
            if sequence.is_trunk:
                self._finish(sequence, FinishReason.ERROR)
                return True
        return self.kv.pins.try_drop_newest()

    def _find_victim(self, tenant: str | None) -> Sequence:
        """The newest request names the tenant, if none is given; of that tenant's the least urgent goes, and of those
        the newest.
        """
        if tenant is None:
            tenant = max(self.running, key=lambda sequence: sequence.arrival).tenant
        return max(
            (sequence for sequence in self.running if sequence.tenant == tenant),
            key=lambda sequence: (sequence.priority, sequence.arrival),
        )

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_running(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        if sequence.num_output_tokens == 0:
            sequence.prompt_logprobs.clear()
        self.counters.preemptions += 1
        self.waiting.add(sequence)

    def _admit(self, budget: int, decodes: list[Sequence], chunks: list[ScheduledSequence]) -> None:
        """Waiting sequences in order, while there are budget, places and blocks.

        One that shares a block with what a running sequence is computing waits for it and holds nobody up. One that
        is too large for the free blocks is passed by smaller ones, but not for ever.
        """
        if budget == 0 or len(self.running) == self._max_num_seqs or self.kv.num_free_blocks == 0:
            return  # before the queue is looked at, which costs as much as there are tenants
        done: list[Sequence] = []  # no longer in the queue, which cannot change while it is walked
        misfits: list[Sequence] = []
        at_limit: set[str] = set()
        """Tenants that wait for their own sequences to give blocks back: the others need not."""
        for sequence in self.waiting:
            if sequence.tenant in at_limit:
                continue
            if budget == 0 or len(self.running) == self._max_num_seqs or self.kv.num_free_blocks == 0:
                break
            if len(misfits) == MAX_MISFITS or any(misfit.num_bypasses >= MAX_BYPASSES for misfit in misfits):
                break
            prefix = self.kv.find_longest_prefix(sequence)
            block_hash = self._find_what_to_wait_for(sequence, prefix)
            if block_hash is not None:
                self.followers.park(sequence, block_hash)
                done.append(sequence)
                continue
            if not self.kv.try_start(sequence, prefix):
                if self.kv.is_over_share(sequence, prefix):
                    at_limit.add(sequence.tenant)
                else:
                    misfits.append(sequence)
                continue
            for misfit in misfits:
                misfit.num_bypasses += 1
            self._start(sequence)
            done.append(sequence)
            if sequence.num_uncomputed_tokens == 1 and not sequence.is_trunk:
                decodes.append(sequence)
                budget -= 1
            else:
                budget -= self._schedule_chunk(sequence, budget, chunks)
        for sequence in done:
            self.waiting.remove(sequence)

    def _find_what_to_wait_for(self, sequence: Sequence, prefix: Prefix) -> bytes | None:
        """The last block, or tail, behind the known prefix that a running sequence is computing; None if it is none."""
        # what the host has is missing too: somebody may be swapping it in
        num_full = prefix.num_tokens // self.kv.block_size
        missing = self.kv.shareable_hashes(sequence)[num_full - len(prefix.host_hashes) :]
        num_claimed = self.followers.count_claimed(missing)
        index = max(num_full, num_full - len(prefix.host_hashes) + num_claimed)
        num_known = max(prefix.num_tokens, index * self.kv.block_size)
        for end, tail_hash in self.kv.shareable_tails(sequence, index):
            if min(end, sequence.num_tokens - 1) > num_known and self.followers.is_claimed(tail_hash):
                return tail_hash
        return missing[num_claimed - 1] if num_claimed else None

    def _start(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self.followers.claim(sequence, self.kv.unpublished_hashes(sequence))
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if sequence.choice == 0 and not sequence.is_trunk:
                self.counters.query_tokens += sequence.num_prompt_tokens
                self.counters.hit_tokens += sequence.num_cached_tokens

    # ---- update

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[RequestOutput]:
        """Takes in what the step computed: publishes blocks that are full now, appends tokens, ends sequences."""
        num_samples = batch.num_decodes + sum(scheduled.samples for scheduled in batch.extends)
        assert len(result.tokens) == num_samples, f"{len(result.tokens)} tokens from the runner, expected {num_samples}"
        self.kv.settle_transfers(has_succeeded=True)
        counters, block_size, running = self.counters, self.kv.block_size, SequenceStatus.RUNNING
        counters.steps += 1
        outputs: list[RequestOutput] = []
        tokens = iter(result.tokens)
        for sequence, num_new_tokens, samples in batch.sequences:
            sampled = next(tokens) if samples else None
            if sequence.status is not running:
                continue  # aborted while the step ran
            num_computed = sequence.num_computed_tokens
            if num_computed < sequence.num_prompt_tokens:
                self._take_prompt_chunk(sequence, num_new_tokens, result)
            else:
                num_computed += num_new_tokens
                sequence.num_computed_tokens = num_computed
                if num_computed // block_size > sequence.num_published_blocks:
                    self._wake(self.followers.publish(self.kv.commit_full_blocks(sequence)))
            if sampled is not None:
                outputs.append(self._take_token(sequence, sampled))
        return outputs

    def _take_prompt_chunk(self, sequence: Sequence, num_new_tokens: int, result: StepResult) -> None:
        start = sequence.num_computed_tokens
        end = min(start + num_new_tokens, sequence.num_prompt_tokens)
        self.counters.prompt_tokens_computed += end - start
        sequence.num_computed_tokens = start + num_new_tokens
        self._wake(self.followers.publish(self.kv.commit_full_blocks(sequence)))
        self._wake(self.followers.publish(self.kv.commit_tails(sequence)))
        if sequence.is_trunk and sequence.num_uncomputed_tokens == 0:
            self._finish(sequence, FinishReason.STOP)
        if not sequence.wants_prompt_logprobs:
            return
        entries = result.prompt_logprobs.get(sequence.request_id, [])
        expected = min(end, sequence.num_prompt_tokens - 1) - start
        assert len(entries) == expected, (
            f"{sequence.request_id!r}: {len(entries)} prompt logprobs for tokens {start} to {end}, expected {expected}"
        )
        sequence.prompt_logprobs += entries

    def _take_token(self, sequence: Sequence, sampled: SampledToken) -> RequestOutput:
        if sampled.fault is not None:
            return self._fail(sequence, ErrorInfo(sampled.fault, "engine_error"))
        token_id = sampled.token_id
        self.counters.generation_tokens += 1
        sequence.token_ids.append(token_id)
        num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
        output = RequestOutput(request_id=sequence.request_id, token_ids=[token_id])
        if sampled.logprobs is not None:
            output.logprobs = [sampled.logprobs]
        if num_output_tokens == 1:
            output.num_cached_tokens = sequence.num_cached_tokens
            output.num_cached_trunk_tokens = sequence.num_cached_trunk_tokens
            output.num_cached_host_tokens = sequence.num_cached_host_tokens
            if sequence.params.prompt_logprobs is not None:
                output.prompt_logprobs = [None, *sequence.prompt_logprobs]
                sequence.prompt_logprobs = []
        # the sampler masks what may not end the sequence yet; should it be drawn all the same, it ends nothing
        if token_id in sequence.stop_ids and num_output_tokens > sequence.params.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = token_id
            self._finish(sequence, FinishReason.STOP)
        elif num_output_tokens >= sequence.max_output_tokens:
            output.finish_reason = FinishReason.LENGTH
            self._finish(sequence, FinishReason.LENGTH)
        return output

    def fail(self, batch: ScheduledBatch, error: ErrorInfo) -> list[RequestOutput]:
        """The step failed: its sequences end with `error`, and nothing that it may have written is published."""
        self.kv.settle_transfers(has_succeeded=False)
        outputs = []
        for sequence, _, _ in batch.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                output = self._fail(sequence, error)
                if not sequence.is_trunk:
                    outputs.append(output)
        return outputs

    def _fail(self, sequence: Sequence, error: ErrorInfo) -> RequestOutput:
        self._finish(sequence, FinishReason.ERROR)
        return RequestOutput(request_id=sequence.request_id, finish_reason=FinishReason.ERROR, error=error)

    # ---- leaving

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            if reason is not FinishReason.ERROR:
                self.kv.commit_end(sequence)
            self._leave_running(sequence)
        elif sequence in self.followers:
            self.followers.discard(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        del self._sequences[sequence.request_id]

    def _leave_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        tails = [tail_hash for _, tail_hash in sequence.unpublished_tails]
        unpublished = sequence.block_hashes[sequence.num_published_blocks :] + tails
        self._wake(self.followers.give_up(sequence, unpublished))
        self.kv.free(sequence)

    def _wake(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.waiting.add(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError, with data, unless every sequence is in one place and every block accounted for."""
        self.kv.check_integrity(self.running)
        self.followers.check_integrity(self.running)
        places = [*self.running, *self.waiting, *self.followers]
        assert len(places) == len(set(places)) == len(self._sequences), [s.request_id for s in places]
        assert set(places) == set(self._sequences.values()), (places, self._sequences)
        for sequence in places:
            is_running = sequence.status is SequenceStatus.RUNNING
            assert is_running == (sequence in self.running), f"{sequence.request_id!r} is {sequence.status}"
            assert is_running or not sequence.block_table, f"{sequence.request_id!r} waits with blocks"
