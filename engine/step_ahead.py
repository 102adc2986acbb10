"""The step behind one that is still computed, launched before it is known what that one draws.

Most steps have the rows of the one before, each one token further. Such a step reads its ids where the one before draws
them, on the device, so that the host's work between the two takes no time of it. What it writes lies behind all that is
computed so far, in blocks that its rows had when it was launched: a row that turns out to have ended, or to be computed
otherwise, leaves nothing that anybody reads, and whoever gets such a block writes to it later.
"""

from dataclasses import dataclass, replace

import numpy as np

from engine.batch_tensors import BatchTensors
from engine.decode_graphs import DecodeGraphs, GraphStep
from engine.scheduled_batch import ScheduledBatch
from engine.sequence import Sequence
from kernels.batch import AttentionBatch, DrawBatch, Tail


@dataclass(frozen=True, slots=True)
class StepAhead:
    step: GraphStep
    tensors: BatchTensors
    """Without token ids. A row that is sure to have ended has a slot of -1, and stays where it was."""
    draw: DrawBatch

    @classmethod
    def launch(
        cls, graphs: DecodeGraphs, tensors: BatchTensors, draw: DrawBatch, block_size: int
    ) -> "StepAhead | None":
        """Behind the step of decode rows `tensors`, which was the last one launched; None, and nothing is done, if a
        row has no slot for its next token, or no graph holds the step."""
        ahead = _one_token_further(tensors, block_size)
        if ahead is None:
            return None
        draw = replace(draw, positions=draw.positions + 1)
        step = graphs.try_write(None, ahead.positions, ahead.attention, draw)
        if step is None:
            return None
        step.launch()
        return cls(step, ahead, draw)

    def find_rows(self, batch: ScheduledBatch, block_size: int) -> list[int] | None:
        """Where the batch's rows are among those computed; None if not all of them are, as the batch wants them."""
        if batch.num_decodes != len(batch.sequences) or any(batch.transfers):
            return None
        places = {id(sequence): row for row, sequence in enumerate(self.tensors.sampled)}
        rows = []
        for sequence, _, _ in batch.sequences:
            row = places.get(id(sequence))
            if row is None or _next_slot(sequence, sequence.num_computed_tokens, block_size) != self.tensors.slots[row]:
                return None
            if sequence.num_computed_tokens != self.tensors.positions[row]:
                return None
            rows.append(row)
        return rows


def _one_token_further(tensors: BatchTensors, block_size: int) -> BatchTensors | None:
    attention, positions = tensors.attention, tensors.positions.copy()
    slots, tails = np.full_like(tensors.slots, -1), list(attention.tails)
    for row, sequence in enumerate(tensors.sampled):
        if sequence.num_output_tokens + 1 >= sequence.max_output_tokens:
            continue
        positions[row] = position = int(positions[row]) + 1
        slot = _next_slot(sequence, position, block_size)
        if slot is None:
            return None
        slots[row] = slot
        tail = tails[row]
        num_node_blocks = (position - tail.num_tokens) // block_size
        blocks = sequence.block_table[num_node_blocks : position // block_size + 1]
        tails[row] = Tail(blocks, tail.num_tokens + 1)
    return replace(tensors, positions=positions, slots=slots, attention=AttentionBatch(slots, tails, attention.nodes))


def _next_slot(sequence: Sequence, position: int, block_size: int) -> int | None:
    block, offset = divmod(position, block_size)
    if block >= len(sequence.block_table):
        return None
    return sequence.block_table[block] * block_size + offset
