"""How well the KV memory that is given out is used: counted when somebody asks, not in each step."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv_cache_manager import KVCacheManager
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SlotUse:
    allocated: int
    """KV slots of the blocks that sequences and pins hold."""
    used: int
    """Those of them that are there for a token: all but the room at the ends of tables and of pinned trunks."""
    not_duplicated_blocks: int
    """That the running sequences would hold more if each had its own: readers - 1, summed over all blocks they hold."""


def count_slots(kv: KVCacheManager, running: Iterable[Sequence], num_unused_pinned_slots: int) -> SlotUse:
    """Between two steps."""
    num_entries = num_unfilled = 0
    for sequence in running:
        num_entries += len(sequence.block_table)
        # the newest token may be waiting for its block still
        num_unfilled += max(len(sequence.block_table) * kv.block_size - sequence.num_tokens, 0)
    num_held = kv.pool.num_referenced
    allocated = num_held * kv.block_size
    return SlotUse(
        allocated=allocated,
        used=allocated - num_unfilled - num_unused_pinned_slots,
        not_duplicated_blocks=num_entries - (num_held - kv.pins.count_unread()),
    )
