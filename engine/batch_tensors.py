"""Turns what the scheduler decided into the arrays of one step."""

from dataclasses import dataclass

import numpy as np

from engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence
from kernels.batch import AttentionBatch, Extend, Int32Array, Node, Tail


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one sequence whose next token is a prompt token, for a request with prompt_logprobs."""

    sequence: Sequence
    first_row: int
    next_ids: list[int]
    """The token that follows each row."""


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """Rows of a step: the decode rows first, one token each, then each extend's tokens in order."""

    token_ids: Int32Array
    """[rows]"""
    positions: Int32Array
    """[rows]"""
    slots: Int32Array
    """[rows]: where K and V of each go, as `attention` says too."""
    attention: AttentionBatch
    sampled: list[Sequence]
    """The sequences that draw a token, in the order of the batch."""
    sample_rows: list[int] | None
    """The row of each one's last token; None: every row, in order."""
    prompt_rows: list[PromptRows]

    @classmethod
    def build(cls, batch: ScheduledBatch, block_size: int, *, all_rows: bool = False) -> "BatchTensors":
        """all_rows: hidden states of all rows are asked for, not only of those that somebody needs."""
        builder = _Builder(block_size, all_rows)
        nodes = [Node(node.block_ids, node.rows) for node in batch.nodes]
        shared: dict[int, int] = {}
        for node in batch.nodes:
            for row in node.rows:
                shared[row] = shared.get(row, 0) + len(node.block_ids)
        for row, scheduled in enumerate(batch.decodes):
            builder.add_decode(scheduled, shared.get(row, 0))
        for scheduled in batch.extends:
            builder.add_extend(scheduled)
        num_rows = len(builder.token_ids)
        slots = np.array(builder.slots, dtype=np.int32)
        return cls(
            token_ids=np.array(builder.token_ids, dtype=np.int32),
            positions=np.array(builder.positions, dtype=np.int32),
            slots=slots,
            attention=AttentionBatch(slots, builder.tails, nodes, builder.extends),
            sampled=builder.sampled,
            sample_rows=None if len(builder.sample_rows) == num_rows else builder.sample_rows,
            prompt_rows=builder.prompt_rows,
        )

    @property
    def num_decodes(self) -> int:
        return self.attention.num_decodes


class _Builder:
    def __init__(self, block_size: int, all_rows: bool) -> None:
        self._block_size = block_size
        self._all_rows = all_rows
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.tails: list[Tail] = []
        self.extends: list[Extend] = []
        self.sampled: list[Sequence] = []
        self.sample_rows: list[int] = []
        self.prompt_rows: list[PromptRows] = []

    def add_decode(self, scheduled: ScheduledSequence, num_shared_blocks: int) -> None:
        sequence = scheduled.sequence
        position = sequence.num_computed_tokens
        block, offset = divmod(position, self._block_size)
        self.token_ids.append(sequence.token_ids[position])
        self.positions.append(position)
        self.slots.append(sequence.block_table[block] * self._block_size + offset)
        num_tokens = position + 1 - num_shared_blocks * self._block_size
        self.tails.append(Tail(sequence.block_table[num_shared_blocks : block + 1], num_tokens))
        self._add_outputs(scheduled, len(self.token_ids) - 1)

    def add_extend(self, scheduled: ScheduledSequence) -> None:
        sequence = scheduled.sequence
        start = sequence.num_computed_tokens
        end = start + scheduled.num_new_tokens
        first_row = len(self.token_ids)
        self.token_ids += sequence.token_ids[start:end]
        self.positions += range(start, end)
        positions = np.arange(start, end)
        table = np.array(sequence.block_table)
        slots = table[positions // self._block_size] * self._block_size + positions % self._block_size
        self.slots += slots.tolist()
        asks_for_all = self._all_rows or sequence.wants_prompt_logprobs
        num_asked = None if asks_for_all else int(scheduled.samples)
        self.extends.append(Extend(end - start, start, sequence.block_table, num_asked))
        self._add_outputs(scheduled, first_row)

    def _add_outputs(self, scheduled: ScheduledSequence, first_row: int) -> None:
        sequence = scheduled.sequence
        if scheduled.samples:
            self.sampled.append(sequence)
            self.sample_rows.append(first_row + scheduled.num_new_tokens - 1)
        if sequence.wants_prompt_logprobs:
            start = sequence.num_computed_tokens
            next_ids = sequence.prompt_ids[start + 1 : start + scheduled.num_new_tokens + 1]
            if next_ids:
                self.prompt_rows.append(PromptRows(sequence, first_row, next_ids))
