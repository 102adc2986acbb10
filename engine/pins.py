"""Which blocks are kept whoever else wants them: those of the assistants' system prompts, within a budget."""

from collections.abc import Iterable, Sequence

from engine.block import Block
from engine.block_pool import BlockPool


class Pins:
    """Blocks by the id of their trunk. A pin is one reference to each; several trunks may pin the same block. What is
    pinned is nobody's own."""

    def __init__(self, pool: BlockPool, budget_blocks: int) -> None:
        self.budget_blocks = budget_blocks
        self._pool = pool
        self._blocks: dict[str, tuple[Block, ...]] = {}
        self._num_blocks = 0
        self.num_dropped = 0
        """Pins dropped for want of blocks, until somebody sets it back."""

    @property
    def num_blocks(self) -> int:
        """Each counted once."""
        return self._num_blocks

    def __contains__(self, trunk_id: str) -> bool:
        return trunk_id in self._blocks

    def can_pin(self, num_blocks: int) -> bool:
        """Whether so many blocks that nobody pins yet are within the budget."""
        return self._num_blocks + num_blocks <= self.budget_blocks

    def try_pin(self, trunk_id: str, blocks: Sequence[Block]) -> bool:
        """False, and nothing changed, if that would be over the budget."""
        assert trunk_id not in self._blocks, f"trunk {trunk_id!r} is pinned already"
        if not self.can_pin(sum(block.num_pins == 0 for block in blocks)):
            return False
        for block in blocks:
            self._pool.add_reference(block)
            self._pool.disown(block)
            self._num_blocks += block.num_pins == 0
            block.num_pins += 1
        self._blocks[trunk_id] = tuple(blocks)
        return True

    def unpin(self, trunk_id: str) -> None:
        """An unknown id is no error: its pin may have been dropped."""
        blocks = self._blocks.pop(trunk_id, ())
        for block in blocks:
            block.num_pins -= 1
            self._num_blocks -= block.num_pins == 0
        self._pool.release(reversed(blocks))

    def try_drop_newest(self) -> bool:
        """For a request that could not run although it is alone: a pin may cost time, but never an answer."""
        if not self._blocks:
            return False
        self.unpin(next(reversed(self._blocks)))
        self.num_dropped += 1
        return True

    def find_blocks(self, trunk_id: str) -> tuple[Block, ...]:
        """Of a trunk, none if it is not pinned."""
        return self._blocks.get(trunk_id, ())

    def count_unread(self) -> int:
        """Blocks that nothing but pins holds."""
        pinned = {block for blocks in self._blocks.values() for block in blocks}
        return sum(block.ref_count == block.num_pins for block in pinned)

    def holders(self) -> Iterable[tuple[str, tuple[Block, ...]]]:
        return self._blocks.items()

    def check_integrity(self) -> None:
        """Raises AssertionError, with data, unless the counts are those of the trunks and within the budget."""
        counts: dict[int, int] = {}
        for blocks in self._blocks.values():
            for block in blocks:
                counts[block.block_id] = counts.get(block.block_id, 0) + 1
        counted = {block.block_id: block.num_pins for block in self._pool.blocks if block.num_pins}
        assert counts == counted, f"pins by block {counted}, of the trunks {counts}"
        assert len(counts) == self._num_blocks <= self.budget_blocks, (counts, self._num_blocks, self.budget_blocks)
