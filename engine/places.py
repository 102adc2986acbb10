"""Where each sequence is, and how it gets from one place to another."""

from engine.counters import SchedulerCounters
from engine.fair_share import FairShare
from engine.followers import Followers
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import FinishReason
from engine.sequence import Sequence, SequenceStatus
from engine.waiting_queue import WaitingQueue


class Places:
    """Decides nothing; keeps blocks, claims and accounts in step with the moves.

    waiting → running → finished, or back to waiting by preemption
    waiting → parked behind the one that computes what it shares → waiting
    """

    def __init__(self, kv: KVCacheManager, fair_share: FairShare, max_num_seqs: int) -> None:
        self.waiting = WaitingQueue()
        self.followers = Followers()
        self.running: list[Sequence] = []
        self.sequences: dict[str, Sequence] = {}
        """By request id, all that have not ended."""
        self.counters = SchedulerCounters()
        self.max_num_seqs = max_num_seqs
        self.num_moves = 0
        """Into `running` and out of it, in all."""
        self._kv = kv
        self._fair_share = fair_share

    @property
    def is_full(self) -> bool:
        return len(self.running) == self.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.followers)

    def add(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self.sequences, f"{sequence.request_id!r} is known already"
        self.sequences[sequence.request_id] = sequence
        self._fair_share.join(sequence.tenant)
        self.waiting.add(sequence)

    def park(self, sequence: Sequence, block_hash: bytes) -> None:
        """It waits for a running one to compute this block."""
        self.waiting.remove(sequence)
        self.followers.park(sequence, block_hash)

    def wake(self, sequences: list[Sequence]) -> None:
        """What these have waited for is there, or nobody computes it any more."""
        for sequence in sequences:
            self.waiting.add(sequence)

    def start(self, sequence: Sequence) -> None:
        """One that waits and has got its blocks."""
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self.num_moves += 1
        self._fair_share.start(sequence)
        self.followers.claim(sequence, self._kv.unpublished_hashes(sequence))
        sequence.num_served_tokens = max(sequence.num_served_tokens, sequence.num_computed_tokens)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            sequence.queue_ms = max(0.0, self._fair_share.time_s - sequence.arrived_s) * 1000
            if sequence.choice == 0 and not sequence.is_trunk and not sequence.resumed_ids:
                self.counters.query_tokens += sequence.num_prompt_tokens
                self.counters.hit_tokens += sequence.num_cached_tokens

    def preempt(self, sequence: Sequence) -> None:
        """Its blocks are freed; it computes again, later, what nobody kept."""
        sequence.num_served_tokens = max(sequence.num_served_tokens, sequence.num_computed_tokens)
        self._leave_running(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        if sequence.num_output_tokens == 0:
            sequence.prompt_logprobs.clear()
        self.counters.preemptions += 1
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            if reason is not FinishReason.ERROR:
                self._kv.commit_end(sequence)
            self._leave_running(sequence)
        elif sequence in self.followers:
            self.followers.discard(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        del self.sequences[sequence.request_id]
        self._fair_share.leave(sequence.tenant)

    def _leave_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.num_moves += 1
        self._fair_share.stop(sequence)
        tails = [tail_hash for _, tail_hash in sequence.unpublished_tails]
        unpublished = sequence.block_hashes[sequence.num_published_blocks :] + tails
        self.wake(self.followers.give_up(sequence, unpublished))
        self._kv.free(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError, with data, unless every sequence is in one place and every block accounted for."""
        self._kv.check_integrity(self.running)
        self.followers.check_integrity(self.running)
        self._fair_share.check_integrity(self.sequences.values(), self.running)
        places = [*self.running, *self.waiting, *self.followers]
        assert len(places) == len(set(places)) == len(self.sequences), [s.request_id for s in places]
        assert set(places) == set(self.sequences.values()), (places, self.sequences)
        for sequence in places:
            is_running = sequence.status is SequenceStatus.RUNNING
            assert is_running == (sequence in self.running), f"{sequence.request_id!r} is {sequence.status}"
            assert is_running or not sequence.block_table, f"{sequence.request_id!r} waits with blocks"
