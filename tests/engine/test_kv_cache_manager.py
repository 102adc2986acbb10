"""Blocks for sequences: ten blocks of four tokens, ids 1 to 10."""

import pytest

from engine.block_hash import root_hash
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import END, Scope
from engine.scheduled_batch import BlockCopy
from engine.sequence import Sequence
from tests.engine.sequences import make_sequence


def make_manager(num_blocks: int = 10, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, root_hash("model"), enable_prefix_caching)


def compute(kv: KVCacheManager, sequence: Sequence, num_tokens: int | None = None) -> list[bytes]:
    sequence.num_computed_tokens = sequence.num_tokens if num_tokens is None else num_tokens
    return kv.commit_full_blocks(sequence)


def start(kv: KVCacheManager, sequence: Sequence) -> list[int] | None:
    return kv.try_allocate_slots(sequence, sequence.num_tokens, kv.find_longest_prefix(sequence))


def run(kv: KVCacheManager, prompt_ids: list[int], **more) -> Sequence:
    sequence = make_sequence("s", prompt_ids, **more)
    assert start(kv, sequence) is not None
    assert kv.ensure_writable(sequence) == []
    compute(kv, sequence)
    return sequence


def free_ids(kv: KVCacheManager) -> list[int]:
    return [block.block_id for block in kv.pool.free_list]


def test_a_table_grows_block_by_block_at_its_end():
    kv = make_manager()
    sequence = make_sequence("a", [1, 2, 3, 4, 5])
    assert start(kv, sequence) == [1, 2]
    assert kv.try_allocate_slots(sequence, 8) == []
    assert kv.try_allocate_slots(sequence, 9) == [3]
    assert sequence.block_table == [1, 2, 3]
    kv.check_integrity([sequence])


def test_a_known_beginning_is_taken_by_reference():
    kv = make_manager()
    a = run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    b = make_sequence("b", [1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    assert start(kv, b) == [4]
    assert (a.block_table, b.block_table) == ([1, 2, 3], [1, 2, 4])
    assert (b.num_computed_tokens, b.num_published_blocks) == (8, 2)
    assert [kv.pool.blocks[i].ref_count for i in (1, 2, 3, 4)] == [2, 2, 1, 1]
    kv.check_integrity([a, b])


def test_a_beginning_of_a_freed_sequence_is_still_known():
    kv = make_manager()
    a = run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    kv.free(a)
    kv.free(a)  # an empty table: nothing happens
    # never used, then the unpublished third block in front of all, cached ones last and tail first
    assert free_ids(kv) == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]
    b = run(kv, [1, 2, 3, 4, 5, 6])
    assert b.block_table == [1, 3]
    assert free_ids(kv) == [4, 5, 6, 7, 8, 9, 10, 2]
    kv.check_integrity([b])


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_b03_the_last_token_is_always_left_to_compute(num_tokens, num_cached):
    kv = make_manager()
    prompt_ids = list(range(num_tokens))
    kv.free(run(kv, prompt_ids))
    again = make_sequence("again", prompt_ids)
    assert kv.find_longest_prefix(again).num_tokens == num_cached
    assert start(kv, again) is not None
    assert again.num_uncomputed_tokens >= 1


def test_prompt_logprobs_need_every_position():
    kv = make_manager()
    kv.free(run(kv, list(range(9))))
    assert kv.find_longest_prefix(make_sequence("a", list(range(9)), prompt_logprobs=0)).num_tokens == 0


def test_nothing_is_findable_before_it_is_committed():
    kv = make_manager()
    a = make_sequence("a", list(range(10)))
    start(kv, a)
    assert kv.find_longest_prefix(a).num_tokens == 0
    assert len(compute(kv, a, 7)) == 1
    assert kv.find_longest_prefix(a).num_tokens == 4
    assert compute(kv, a, 7) == []
    assert len(compute(kv, a, 10)) == 1
    assert kv.find_longest_prefix(a).num_tokens == 8


def test_output_is_found_like_a_prompt():
    kv = make_manager()
    a = run(kv, [1, 2, 3])
    a.token_ids += [4, 5, 6]
    kv.try_allocate_slots(a, a.num_tokens)
    compute(kv, a)
    assert kv.find_longest_prefix(make_sequence("next turn", [1, 2, 3, 4, 5])).num_tokens == 4


def test_scopes_keep_tenants_apart_and_share_the_assistant():
    kv = make_manager()
    ids = list(range(12))
    run(kv, ids, scopes=(Scope(5, b"assistant"), Scope(END, b"tenant a")))

    def cached(*scopes: Scope) -> int:
        return kv.find_longest_prefix(make_sequence("x", ids, scopes=scopes)).num_tokens

    assert cached(Scope(5, b"assistant"), Scope(END, b"tenant a")) == 8
    assert cached(Scope(5, b"assistant"), Scope(END, b"tenant b")) == 4
    assert cached(Scope(5, b"another"), Scope(END, b"tenant a")) == 0
    assert cached(Scope(END, b"tenant a")) == 0
    # the block of tokens 4 to 7 passes the assistant's end at 5, so that it is the tenant's
    assert cached(Scope(4, b"assistant"), Scope(END, b"tenant a")) == 8
    assert cached(Scope(8, b"assistant"), Scope(END, b"tenant a")) == 4


def test_b04_another_root_shares_nothing():
    one, other = make_manager(), KVCacheManager(10, 4, root_hash("other model"))
    a, b = make_sequence("a", list(range(9))), make_sequence("b", list(range(9)))
    assert not set(one.shareable_hashes(a)) & set(other.shareable_hashes(b))


def test_what_does_not_fit_changes_nothing():
    kv = make_manager(4)
    a = run(kv, list(range(9)))
    kv.free(a)
    b = make_sequence("b", list(range(8)) + [90] * 9)
    assert start(kv, b) is None  # two cached blocks, which are free, and three more
    assert (b.block_table, b.num_computed_tokens) == ([], 0)
    assert kv.find_longest_prefix(b).num_tokens == 8
    kv.check_integrity([])


def test_a_block_that_is_used_again_is_forgotten():
    kv = make_manager(3)
    kv.free(run(kv, list(range(9))))
    assert free_ids(kv) == [3, 2, 1]
    b = run(kv, [50, 51, 52, 53, 54])
    assert b.block_table == [3, 2]
    assert kv.find_longest_prefix(make_sequence("a", list(range(9)))).num_tokens == 4
    kv.check_integrity([b])


def test_blocks_under_an_evicted_one_go_first():
    kv = make_manager(8)
    a, b = make_sequence("a", list(range(5))), make_sequence("b", list(range(13)))
    start(kv, a)
    start(kv, b)  # computes the same, as a has published nothing yet
    assert (a.block_table, b.block_table) == ([1, 2], [3, 4, 5, 6])
    compute(kv, a)
    compute(kv, b)
    kv.free(b)  # block 3 repeats block 1 and was never published; 4 and 5 hang under 1
    kv.free(a)
    assert free_ids(kv) == [2, 3, 6, 7, 8, 5, 4, 1]
    kv.pool.reuse_first(kv.pool.blocks[1])
    c = run(kv, [77])
    assert c.block_table == [1]
    assert free_ids(kv) == [5, 4, 2, 3, 6, 7, 8]
    assert kv.stats().cached == 0
    kv.check_integrity([c])


def test_own_blocks_take_over_from_an_evicted_twin():
    kv = make_manager(8)
    a, b = make_sequence("a", list(range(5))), make_sequence("b", list(range(13)))
    start(kv, a)
    start(kv, b)
    compute(kv, a)
    compute(kv, b, 4)  # a's block 1 is findable, b's block 3 is its twin
    kv.free(a)
    kv.pool.reuse_first(kv.pool.blocks[1])
    c = run(kv, [77])
    assert c.block_table == [1]
    assert kv.find_longest_prefix(b).num_tokens == 0
    compute(kv, b)
    assert [block.block_id for block in kv.find_longest_prefix(b).blocks] == [3, 4, 5]
    kv.check_integrity([b, c])


def test_a_shared_block_is_copied_before_it_is_written():
    """Full blocks are never written, so the case is made by hand: a fork in the middle of block 2."""
    kv = make_manager()
    parent = run(kv, [1, 2, 3, 4, 5, 6])
    child = make_sequence("child", [1, 2, 3, 4, 5, 7])
    for block_id in parent.block_table:
        kv.pool.add_reference(kv.pool.blocks[block_id])
    child.block_table += parent.block_table
    child.num_computed_tokens = 5
    assert kv.ensure_writable(child) == [BlockCopy(2, 3)]
    assert (parent.block_table, child.block_table) == ([1, 2], [1, 3])
    assert kv.pool.blocks[2].ref_count == 2  # the copy's source stays until the step is over
    kv.release_copies([BlockCopy(2, 3)])
    kv.check_integrity([parent, child])


def test_without_prefix_caching_nothing_is_hashed_or_found():
    kv = make_manager(enable_prefix_caching=False)
    a = run(kv, list(range(9)))
    assert (a.block_hashes, kv.unpublished_hashes(a)) == ([], [])
    kv.free(a)
    assert kv.find_longest_prefix(make_sequence("b", list(range(9)))).num_tokens == 0
    assert kv.stats().cached == 0


def test_stats_count_every_block_once():
    kv = make_manager()
    a = run(kv, list(range(9)))
    b = run(kv, list(range(10)))
    stats = kv.stats()
    assert (stats.total, stats.free, stats.referenced, stats.cached, stats.pinned) == (10, 6, 4, 2, 0)
    kv.free(a)
    kv.free(b)
    stats = kv.stats()
    assert (stats.free, stats.referenced, stats.cached) == (10, 0, 2)


def test_check_integrity_sees_a_reference_that_no_table_explains():
    kv = make_manager()
    run(kv, list(range(5)))
    with pytest.raises(AssertionError, match=r"block_id=1.* is held by \[\]"):
        kv.check_integrity([])
