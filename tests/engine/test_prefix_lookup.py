"""What is known of a beginning, on the device and behind that on the host: blocks of four tokens.

More of it, through the manager that publishes, is in test_kv_cache_manager and test_swapping.
"""

from engine.block import Block
from engine.host_tier import HostTier
from engine.prefill_rate import PrefillRate
from engine.prefix_cache import Entry, Prefix, PrefixCache, Tail
from engine.prefix_lookup import PrefixLookup
from engine.sequence_hashes import SequenceHashes
from engine.swap_cost import SwapCost, SwapTime
from tests.engine.sequences import make_sequence
from tests.engine.test_prefill_rate import batch

ROOT = b"root"


class Known:
    """Blocks 1, 2, … of the tokens 0, 1, … on the device, and those behind them on the host."""

    def __init__(self, num_device_blocks: int, *host_indexes: int, block_s: float = 0.0) -> None:
        self.hashes = SequenceHashes(4, ROOT)
        self.cache, self.host = PrefixCache(), HostTier(8)
        rate = PrefillRate()
        rate.add(batch(100), 100.0)  # a block costs four seconds to compute
        self.lookup = PrefixLookup(
            self.hashes, self.cache, self.host, SwapCost(SwapTime(0.0, block_s), rate, 4), block_size=4
        )
        sequence = make_sequence("s", list(range(100)))
        self.chain = self.hashes.first(sequence, 25)
        for index in range(num_device_blocks):
            parent = self.hashes.parent(sequence, index)
            assert self.cache.publish(Entry(self.chain[index], parent, 4, Block(index + 1)))
        for index in host_indexes:
            assert self.host.try_write(self.chain[index]) is not None
        self.host.settle(has_succeeded=True)

    def find(self, num_tokens: int, **more: object) -> Prefix:
        return self.lookup.find_longest_prefix(make_sequence("x", list(range(num_tokens)), **more))

    def found(self, num_tokens: int) -> tuple[tuple[int, ...], int, int]:
        """Ids of device blocks, blocks of the host, tokens."""
        prefix = self.find(num_tokens)
        assert [block.block_id for block in prefix.blocks] == list(prefix.block_ids)
        return prefix.block_ids, len(prefix.host_hashes), prefix.num_tokens


def test_the_host_goes_on_where_the_device_ends():
    known = Known(2, 2, 3)
    assert known.found(30) == ((1, 2), 2, 16)
    assert known.find(30).host_hashes == tuple(known.chain[2:4])


def test_all_of_it_may_be_on_the_host():
    assert Known(0, 0, 1).found(30) == ((), 2, 8)


def test_a_gap_ends_it():
    assert Known(1, 2, 3).found(30) == ((1,), 0, 4)
    assert Known(1, 1, 3).found(30) == ((1,), 1, 8)


def test_what_the_device_has_is_not_taken_from_the_host():
    assert Known(3, 0, 1, 2, 3).found(30) == ((1, 2, 3), 1, 16)


def test_the_last_token_is_left_to_compute():
    known = Known(1, 1, 2)
    assert known.found(12) == ((1,), 1, 8)
    assert known.found(13) == ((1,), 2, 12)


def test_a_host_that_costs_more_than_computing_is_left_alone():
    assert Known(1, 1, 2, block_s=3.9).found(30) == ((1,), 2, 12)
    assert Known(1, 1, 2, block_s=4.1).found(30) == ((1,), 0, 4)


def test_a_full_block_of_the_host_is_longer_than_any_tail():
    for host_indexes, expected in (((), ((1, 9), 0, 7)), ((1,), ((1,), 1, 8))):
        known = Known(1, *host_indexes)
        known.cache.publish_tail(Tail(known.chain[0], b"", (4, 5, 6), Block(9)))
        assert known.found(30) == expected


def test_where_every_position_is_computed_nothing_is_found():
    known = Known(2, 2)
    assert known.find(30, prompt_logprobs=0) == Prefix()
    sequence = make_sequence("x", list(range(30)), prompt_logprobs=0)
    assert known.lookup.shareable_hashes(sequence) == []
    assert known.lookup.shareable_tails(sequence, 0) == []


def test_a_prefix_without_its_tail_is_what_needs_no_copy():
    known = Known(1)
    known.cache.publish_tail(Tail(known.chain[0], b"", (4, 5, 6), Block(9)))
    prefix = known.find(30)
    assert prefix.without_tail(4) == known.cache.find_full_blocks(known.chain[:1])
    assert prefix.without_tail(4).without_tail(4) == prefix.without_tail(4)
