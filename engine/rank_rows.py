"""The rows of the last step, as both ends know them, so that a step of the same rows is told by what is new in it.

Most steps are such: every row goes on by a token. Told whole, 32 rows of 8,000 tokens are 16,000 block ids.
"""

import numpy as np

from engine.batch_tensors import BatchTensors
from engine.rank_messages import RankAdvance, RankStep, read_array
from engine.scheduled_batch import ScheduledBatch
from kernels.batch import AttentionBatch, Extend, Int32Array, Node, Tail


class ToldRows:
    """At the first rank: turns steps into messages, each of which has to be sent."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: tuple[ScheduledBatch, BatchTensors] | None = None

    def tell(self, batch: ScheduledBatch, tensors: BatchTensors | None) -> RankStep | RankAdvance:
        """`tensors`: of the batch; None: it has no rows."""
        if tensors is None:
            return RankStep.of(batch.transfers)
        last, self._last = self._last, (batch, tensors)
        return (last and self._try_advance(*last, batch, tensors)) or RankStep.of(batch.transfers, tensors)

    def _try_advance(
        self, last_batch: ScheduledBatch, last: BatchTensors, batch: ScheduledBatch, tensors: BatchTensors
    ) -> RankAdvance | None:
        """None: the rows are others, or did not just go on by a token each.

        A batch has the same rows, with tables that have only grown, if it holds the very same tuple of them
        (`engine.steady_decode`).
        """
        if batch.sequences is not last_batch.sequences or batch.num_decodes != len(batch.sequences):
            return None
        if batch.nodes != last_batch.nodes or not np.array_equal(tensors.positions, last.positions + 1):
            return None
        blocks = tensors.slots // self._block_size
        begins = tensors.positions % self._block_size == 0
        if not np.array_equal(blocks[~begins], last.slots[~begins] // self._block_size):
            return None  # a row writes to its own copy of a block from now on
        [rows] = begins.nonzero()
        return RankAdvance(*batch.transfers, tensors.token_ids.tobytes(), [(int(r), int(blocks[r])) for r in rows])


class KnownRows:
    """At a rank behind the first: turns messages, in their order, into steps."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._positions: Int32Array = np.empty(0, dtype=np.int32)
        self._blocks: Int32Array = np.empty(0, dtype=np.int32)
        """Which each row writes to."""
        self._tails: list[tuple[list[int], int]] = []
        self._nodes: list[Node] = []

    def take(self, step: RankStep | RankAdvance) -> tuple[Int32Array, Int32Array, AttentionBatch]:
        """Token ids, positions and what attention reads, of a step with rows."""
        token_ids = read_array(step.token_ids)
        if isinstance(step, RankStep):
            self._positions, slots = read_array(step.positions), read_array(step.slots)
            self._blocks = slots // self._block_size
            self._tails = [(list(block_ids), num_tokens) for block_ids, num_tokens in step.tails]
            self._nodes = [Node(*node) for node in step.nodes]
            extends = [Extend(*extend) for extend in step.extends]
        else:
            self._positions = self._positions + 1
            for row, block in step.new_blocks:
                self._blocks[row] = block
                self._tails[row][0].append(block)
            self._tails = [(block_ids, num_tokens + 1) for block_ids, num_tokens in self._tails]
            slots = self._blocks * self._block_size + self._positions % self._block_size
            extends = []
        tails = [Tail(*tail) for tail in self._tails]
        return token_ids, self._positions, AttentionBatch(slots, tails, self._nodes, extends)
