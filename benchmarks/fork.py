"""Times a fork of a long known prefix: the lookup and the blocks of a new sequence, on one core, without torch.

    python -m benchmarks.fork [--blocks 500] [--times 2000]

The parent's blocks are all full and the child's tokens are hashed already, as those of a trunk are; beside its blocks
by reference the child gets one of its own. Medians in microseconds. A parent that runs, or is pinned, holds its blocks;
those of one that has ended are free and leave the free list one by one.
"""

import argparse
import gc
import statistics
import time

from engine.block_hash import root_hash
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import END, Scope
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK_SIZE = 16


def make_sequence(num_blocks: int) -> Sequence:
    return Sequence("s", list(range(num_blocks * BLOCK_SIZE + 1)), SamplingParams(), (Scope(END, b""),), 0, 1)


def time_forks(num_blocks: int, times: int, *, is_held: bool) -> tuple[float, float]:
    """Median seconds of the lookup and of the start of a child; its parent holds its blocks, or has ended."""
    kv = KVCacheManager(num_blocks + 16, BLOCK_SIZE, root_hash("benchmark"))
    parent = make_sequence(num_blocks)
    assert kv.try_start(parent, kv.find_longest_prefix(parent))
    parent.num_computed_tokens = parent.num_tokens
    kv.commit_full_blocks(parent)
    if not is_held:
        kv.free(parent)
    lookups, starts = [], []
    for _ in range(times):
        child = make_sequence(num_blocks)
        kv.shareable_hashes(child)
        gc.disable()
        begin = time.perf_counter()
        prefix = kv.find_longest_prefix(child)
        found = time.perf_counter()
        has_started = kv.try_start(child, prefix)
        end = time.perf_counter()
        gc.enable()
        assert has_started
        assert child.num_uncomputed_tokens == 1
        lookups.append(found - begin)
        starts.append(end - found)
        kv.free(child)
    return statistics.median(lookups), statistics.median(starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=500)
    parser.add_argument("--times", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"fork of {arguments.blocks} blocks: lookup + start = total, microseconds")
    for is_held, parent in ((True, "parent runs"), (False, "parent ended")):
        lookup, start = time_forks(arguments.blocks, arguments.times, is_held=is_held)
        print(f"{parent:<14} {lookup * 1e6:6.1f} + {start * 1e6:6.1f} = {(lookup + start) * 1e6:6.1f}")


if __name__ == "__main__":
    main()
