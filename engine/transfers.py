"""What a step moves between blocks before it computes: collected while it is scheduled, settled when it is over."""

from collections.abc import Iterable

from engine.block import Block
from engine.block_pool import BlockPool
from engine.scheduled_batch import NO_TRANSFERS, BlockCopy, SwapIn, SwapOut, Transfers


class PendingTransfers:
    """The blocks of a copy, and those that are swapped in, stay referenced until the step is over.

    So no write of the same step can overtake the reading of a source; and a target whose sequence has gone meanwhile
    is given to nobody else while something is still to be written into it. What is swapped out is read first of all,
    so that its block can be given away at once.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._swap_outs: list[SwapOut] = []
        self._swap_ins: list[SwapIn] = []
        self._copies: list[BlockCopy] = []
        self._held: list[Block] = []
        self._targets: set[int] = set()

    def swap_out(self, source: Block, slot: int) -> None:
        """What the block holds before the step goes to a slot of the host tier."""
        self._swap_outs.append(SwapOut(source.block_id, slot))

    def swap_in(self, slot: int, target: Block) -> None:
        """Adds a reference to the target."""
        self._swap_ins.append(SwapIn(slot, target.block_id))
        self._hold_target(target)

    def copy(self, source: Block, target: Block) -> None:
        """Takes over one reference to the source, and adds one to the target."""
        self._copies.append(BlockCopy(source.block_id, target.block_id))
        self._held.append(source)
        self._hold_target(target)

    def take(self) -> Transfers:
        """All that was collected since the last call."""
        if not (self._copies or self._swap_outs or self._swap_ins):
            return NO_TRANSFERS
        transfers = Transfers(tuple(self._swap_outs), tuple(self._swap_ins), tuple(self._copies))
        self._swap_outs.clear()
        self._swap_ins.clear()
        self._copies.clear()
        return transfers

    def settle(self) -> None:
        """The step that made them is over, well or not."""
        if self._held:
            self._pool.release(self._held)
            self._held.clear()
            self._targets.clear()

    def is_target(self, block: Block) -> bool:
        """It is not written before the step is over."""
        return block.block_id in self._targets

    def holders(self) -> Iterable[Block]:
        """One for each reference."""
        return self._held

    def _hold_target(self, target: Block) -> None:
        self._pool.add_reference(target)
        self._held.append(target)
        self._targets.add(target.block_id)
