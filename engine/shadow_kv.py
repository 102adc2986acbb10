"""What every slot of the KV tensors ought to hold (`--check-kv`): a digest instead of keys and values.

A slot's digest stands for all tokens up to it, which is what its keys and values depend on; beside it stands the scope
in which its token was written, which must be one that a reader is in. It is written where the runner writes KV, copied
where the runner copies, and compared for every slot that an attention is about to read. So a block that was found too
early, given back twice, overwritten or shown to the wrong tenant is an error in the step that reads it, and not a
strange answer some time later.
"""

from hashlib import blake2b
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence

DIGEST_BYTES = 8
UNKNOWN = 0
"""Nothing was written, or nobody knows what."""

Digests = npt.NDArray[np.uint64]


class ShadowKV:
    """Digests of `num_blocks` blocks (and the null block) of `block_size` slots, and of those that the host holds."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._slots: Digests = np.full((num_blocks + 1, block_size), UNKNOWN, dtype=np.uint64)
        self._scopes: Digests = np.full((num_blocks + 1, block_size), UNKNOWN, dtype=np.uint64)
        """Of the keys of the scopes in which the slots' tokens lie for their writers."""
        self._host_slots: Digests = np.full((num_host_blocks, block_size), UNKNOWN, dtype=np.uint64)
        self._host_scopes: Digests = np.full((num_host_blocks, block_size), UNKNOWN, dtype=np.uint64)
        self._expected: WeakKeyDictionary[Sequence, bytearray] = WeakKeyDictionary()
        """For each sequence the digests of its tokens, as far as they have been needed."""

    def execute(self, batch: ScheduledBatch) -> None:
        """Does to the digests what the runner is about to do to KV: swaps, copies, writes, then the reads of attention.

        Raises AssertionError, naming request, token, block and offset, at the first slot that holds something else.
        """
        for block_id, host_slot in batch.transfers.swap_outs:
            self._host_slots[host_slot] = self._slots[block_id]
            self._host_scopes[host_slot] = self._scopes[block_id]
        for host_slot, block_id in batch.transfers.swap_ins:
            self._slots[block_id] = self._host_slots[host_slot]
            self._scopes[block_id] = self._host_scopes[host_slot]
        for source, target in batch.transfers.copies:
            self._slots[target] = self._slots[source]
            self._scopes[target] = self._scopes[source]
        for scheduled in batch.sequences:
            self._write(scheduled)
        for scheduled in batch.sequences:
            self._compare(scheduled)

    def forget(self, batch: ScheduledBatch) -> None:
        """The step failed: what it wrote may be anything."""
        for _, host_slot in batch.transfers.swap_outs:
            self._host_slots[host_slot] = UNKNOWN
        for _, target in (*batch.transfers.swap_ins, *batch.transfers.copies):
            self._slots[target] = UNKNOWN
        for scheduled in batch.sequences:
            if not scheduled.sequence.block_table:
                continue  # it has ended meanwhile, and published nothing of it
            blocks, offsets = self._new_slots(scheduled)
            self._slots[blocks, offsets] = UNKNOWN

    def _write(self, scheduled: ScheduledSequence) -> None:
        sequence, num_new_tokens, _ = scheduled
        start = sequence.num_computed_tokens
        end = start + num_new_tokens
        num_slots = len(sequence.block_table) * self._block_size
        assert end <= num_slots, f"{sequence.request_id!r} writes token {end - 1}, its table has {num_slots} slots"
        slots = self._new_slots(scheduled)
        self._slots[slots] = self._digests(sequence, end)[start:end]
        ends = [scope.end_token for scope in sequence.scopes]
        keys = np.array([_digest_of_key(scope.key) for scope in sequence.scopes], dtype=np.uint64)
        self._scopes[slots] = keys[np.searchsorted(ends, np.arange(start + 1, end + 1))]

    def _compare(self, scheduled: ScheduledSequence) -> None:
        sequence, num_new_tokens, _ = scheduled
        end = sequence.num_computed_tokens + num_new_tokens
        table = np.asarray(sequence.block_table[: -(-end // self._block_size)], dtype=np.intp)
        held_scopes = self._scopes[table].reshape(-1)[:end]
        is_foreign = np.ones(end, dtype=np.bool_)
        for scope in sequence.scopes:
            is_foreign &= held_scopes != _digest_of_key(scope.key)
        wrong = is_foreign | (self._slots[table].reshape(-1)[:end] != self._digests(sequence, end))
        if wrong.any():
            token = int(wrong.argmax())
            block_id, offset = int(table[token // self._block_size]), token % self._block_size
            held = "nothing" if self._slots[block_id, offset] == UNKNOWN else "the KV of other tokens or another scope"
            raise AssertionError(
                f"{sequence.request_id!r} is about to read token {token} of {end} in block {block_id} at offset "
                f"{offset}, which holds {held} (computed before this step: {sequence.num_computed_tokens}, "
                f"from the prefix cache: {sequence.num_cached_tokens}, table: {sequence.block_table})"
            )

    def _new_slots(self, scheduled: ScheduledSequence) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Block ids and offsets of the tokens computed in this step, int `[num_new_tokens]` each."""
        sequence, num_new_tokens, _ = scheduled
        tokens = np.arange(sequence.num_computed_tokens, sequence.num_computed_tokens + num_new_tokens)
        return np.asarray(sequence.block_table, dtype=np.intp)[tokens // self._block_size], tokens % self._block_size

    def _digests(self, sequence: Sequence, num_tokens: int) -> Digests:
        """Of the first `num_tokens` tokens, uint64 `[num_tokens]`; each is computed once, as tokens only append."""
        known = self._expected.setdefault(sequence, bytearray())
        before = bytes(known[-DIGEST_BYTES:])
        for token in range(len(known) // DIGEST_BYTES, num_tokens):
            before = blake2b(b"%d " % sequence.token_ids[token] + before, digest_size=DIGEST_BYTES).digest()
            known += before
        return np.frombuffer(bytes(known), dtype=np.uint64)[:num_tokens]


def _digest_of_key(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(key, digest_size=DIGEST_BYTES).digest(), "little"))
