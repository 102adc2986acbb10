"""What a step moves between blocks before it computes: collected while it is scheduled, settled when it is over."""

from collections.abc import Iterable

from engine.block_pool import Block, BlockPool
from engine.scheduled_batch import NO_TRANSFERS, BlockCopy, Transfers


class PendingTransfers:
    """The blocks of a copy stay referenced until the step is over.

    So no write of the same step can overtake the reading of a source; and a target whose sequence has gone meanwhile
    is given to nobody else while something is still to be written into it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._copies: list[BlockCopy] = []
        self._held: list[Block] = []
        self._targets: set[int] = set()

    def copy(self, source: Block, target: Block) -> None:
        """Takes over one reference to the source, and adds one to the target."""
        self._copies.append(BlockCopy(source.block_id, target.block_id))
        self._pool.add_reference(target)
        self._held += (source, target)
        self._targets.add(target.block_id)

    def take(self) -> Transfers:
        """All that was collected since the last call."""
        if not self._copies:
            return NO_TRANSFERS
        transfers = Transfers(copies=tuple(self._copies))
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
