"""Which evicted blocks host memory holds, and in which slots. Knows hashes and slots, no tensors."""

from collections import OrderedDict
from collections.abc import Sequence

from engine.protocol import HostStats


class HostTier:
    """`num_blocks` slots, 0 to `num_blocks - 1`, for full blocks by hash; the one used longest ago makes room.

    What a step writes is findable when the step has succeeded, and not before. What it reads stays where it is as long:
    a slot is never read and written in one step. A block that was swapped in keeps its slot, so that evicting it again
    costs nothing.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Findable ones, in the order of their last use."""
        self._free = list(reversed(range(num_blocks)))
        self._writing: dict[bytes, int] = {}
        self._reading: set[bytes] = set()
        self._num_swapped_out = self._num_swapped_in = 0

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def count_known(self, block_hashes: Sequence[bytes], start: int) -> int:
        """How many of the hashes from index `start` on, without a gap. Changes nothing."""
        if not self._slots:
            return 0
        end = start
        while end < len(block_hashes) and block_hashes[end] in self._slots:
            end += 1
        return end - start

    def read(self, block_hash: bytes) -> int:
        """The slot of a known block, which stays as it is until the step under way is over."""
        self._slots.move_to_end(block_hash)
        self._reading.add(block_hash)
        return self._slots[block_hash]

    def try_write(self, block_hash: bytes) -> int | None:
        """The slot in which the step under way is to put a block; None if it is known already or there is no room."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        if block_hash in self._writing:
            return None
        if self._free:
            slot = self._free.pop()
        else:
            # what is read in this step was used last: if the first of all is read, so is about everything
            oldest = next(iter(self._slots), None)
            if oldest is None or oldest in self._reading:
                return None
            slot = self._slots.pop(oldest)
        self._writing[block_hash] = slot
        return slot

    def settle(self, *, has_succeeded: bool) -> None:
        """The step is over: what it wrote can be found, or is forgotten."""
        if has_succeeded:
            self._num_swapped_out += len(self._writing)
            self._num_swapped_in += len(self._reading)
            self._slots.update(self._writing)
        else:
            self._free += self._writing.values()
        self._writing.clear()
        self._reading.clear()

    def stats(self) -> HostStats:
        return HostStats(
            total=self.num_blocks,
            used=len(self._slots),
            swapped_out=self._num_swapped_out,
            swapped_in=self._num_swapped_in,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError, with data, unless every slot is in exactly one place."""
        slots = [*self._slots.values(), *self._free, *self._writing.values()]
        assert sorted(slots) == list(range(self.num_blocks)), (self._slots, self._free, self._writing)
        assert not self._writing.keys() & self._slots.keys(), (self._slots, self._writing)
        assert self._reading <= self._slots.keys(), (self._slots, self._reading)
