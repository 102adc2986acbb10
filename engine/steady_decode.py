"""A step of decode rows that becomes the next one in place, as long as the rows stay the same. Most steps do."""

import numpy as np

from engine.batch_tensors import BatchTensors
from engine.scheduled_batch import ScheduledBatch
from kernels.cpu.native import StepArrays


class SteadyDecode:
    """What the last step was computed from: only new tokens, positions, slots and a block now and then come in.

    `tensors.attention` stays as it was when the rows came together; the plan made from it moves on.
    """

    def __init__(self, batch: ScheduledBatch, tensors: BatchTensors, plan: StepArrays, block_size: int) -> None:
        self.tensors = tensors
        self.plan = plan
        self._batch = batch
        self._block_size = block_size
        self._positions: list[int] = tensors.positions.tolist()
        self._blocks: list[int] = (tensors.slots // block_size).tolist()
        self._num_node_tokens = tensors.positions + 1 - plan.run_tokens

    @staticmethod
    def fits(batch: ScheduledBatch, tensors: BatchTensors) -> bool:
        """Whether the step after this one can be made from it."""
        return batch.num_decodes == len(batch.sequences) and not tensors.prompt_rows

    def try_advance(self, batch: ScheduledBatch) -> bool:
        """True: tensors and plan are those of `batch`. False: make new ones, and forget these.

        A batch has the same rows if it holds the very same tuple of them: the scheduler makes a new one whenever a row
        joins or leaves, or anything else runs beside them.
        """
        if batch.sequences is not self._batch.sequences or batch.nodes != self._batch.nodes:
            return False
        tensors, size, sequences = self.tensors, self._block_size, self.tensors.sampled
        positions = [sequence.num_computed_tokens for sequence in sequences]
        if not {new - old for new, old in zip(positions, self._positions, strict=True)} <= {0, 1}:
            return False
        tensors.positions[:] = self._positions = positions
        blocks = [s.block_table[p // size] for s, p in zip(sequences, positions, strict=True)]
        if blocks != self._blocks:
            for row, (block, old) in enumerate(zip(blocks, self._blocks, strict=True)):
                if block != old:
                    index = (positions[row] - int(self._num_node_tokens[row])) // size
                    if not self.plan.try_put_block(row, index, block):
                        return False
            self._blocks = blocks
        tensors.token_ids[:] = [s.token_ids[p] for s, p in zip(sequences, positions, strict=True)]
        tensors.slots[:] = [block * size + p % size for block, p in zip(blocks, positions, strict=True)]
        np.subtract(tensors.positions, self._num_node_tokens - 1, out=self.plan.run_tokens)
        return True
