"""Blocks for sequences: ten blocks of four tokens, ids 1 to 10."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_hash import root_hash
from engine.kv_cache_manager import KVCacheManager
from engine.prefix_cache import MAX_TAILS
from engine.protocol import END, Scope
from engine.scheduled_batch import BlockCopy, Transfers
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
    kv.ensure_writable(sequence)
    assert kv.take_transfers() == Transfers()
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


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (3, 0), (4, 3), (5, 4), (8, 7), (9, 8)])
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

    assert cached(Scope(5, b"assistant"), Scope(END, b"tenant a")) == 11
    assert cached(Scope(5, b"assistant"), Scope(END, b"tenant b")) == 4
    assert cached(Scope(5, b"another"), Scope(END, b"tenant a")) == 0
    assert cached(Scope(END, b"tenant a")) == 0
    # the block of tokens 4 to 7 passes the assistant's end at 5, so that it is the tenant's
    assert cached(Scope(4, b"assistant"), Scope(END, b"tenant a")) == 11
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


def begin(kv: KVCacheManager, sequence: Sequence) -> list[BlockCopy] | None:
    """As the scheduler admits one: claims follow its blocks."""
    if not kv.try_start(sequence, kv.find_longest_prefix(sequence)):
        return None
    kv.unpublished_hashes(sequence)
    return list(kv.take_transfers().copies)


def prefill(kv: KVCacheManager, sequence: Sequence, copies: list[BlockCopy] | None = None) -> Sequence:
    """Cold, or with exactly these copies: started, all its tokens computed, blocks and tails published."""
    assert begin(kv, sequence) == (copies or [])
    compute(kv, sequence)
    kv.commit_tails(sequence)
    kv.settle_transfers(has_succeeded=True)
    return sequence


def test_a_prompt_that_ends_in_mid_block_is_known_to_its_last_token():
    kv = make_manager()
    parent = prefill(kv, make_sequence("parent", [1, 2, 3, 4, 5, 6]))
    child = make_sequence("child", [1, 2, 3, 4, 5, 6, 7])
    assert begin(kv, child) == [BlockCopy(2, 3)]
    assert (parent.block_table, child.block_table) == ([1, 2], [1, 3])
    assert (child.num_computed_tokens, child.num_published_blocks) == (6, 1)
    # source and target of the copy stay referenced until the step is over
    assert [kv.pool.blocks[i].ref_count for i in (1, 2, 3)] == [2, 2, 2]
    kv.check_integrity([parent, child])
    kv.settle_transfers(has_succeeded=True)
    kv.check_integrity([parent, child])
    kv.free(parent)
    kv.free(child)
    assert free_ids(kv)[-2:] == [2, 1]  # found by nobody yet, the child's third goes first
    kv.check_integrity([])


def test_what_is_not_copied_yet_is_not_published_by_an_abort():
    kv = make_manager()
    kv.free(prefill(kv, make_sequence("parent", [1, 2, 3, 4, 5, 6, 7])))
    child = make_sequence("child", [1, 2, 3, 4, 5, 6, 7])  # takes six of the seven tokens
    assert begin(kv, child) == [BlockCopy(2, 3)]
    kv.commit_end(child)
    kv.free(child)
    kv.settle_transfers(has_succeeded=True)
    assert kv.find_longest_prefix(make_sequence("x", [1, 2, 3, 4, 5, 6, 9])).num_tokens == 4
    assert free_ids(kv)[0] == 3


def test_the_longest_tail_is_found_and_never_half_of_one():
    kv = make_manager()
    for prompt_ids in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]):
        sequence = make_sequence("s", prompt_ids)
        copies = [BlockCopy(2, 3)] if len(prompt_ids) == 7 else []
        kv.free(prefill(kv, sequence, copies))

    def cached(*token_ids: int) -> int:
        return kv.find_longest_prefix(make_sequence("x", list(token_ids))).num_tokens

    assert cached(1, 2, 3, 4, 5, 6, 7, 8) == 7
    assert cached(1, 2, 3, 4, 5, 6, 7) == 6  # at most the last token but one: the leading part of the longer tail
    assert cached(1, 2, 3, 4, 5, 6, 9) == 5
    assert cached(1, 2, 3, 4, 9, 6) == 4
    assert cached(5, 6, 7) == 0  # equal tokens under another parent


def test_equally_long_tails_are_told_apart_by_their_tokens():
    kv = make_manager()
    for token_id in (5, 6):
        kv.free(prefill(kv, make_sequence("s", [1, 2, 3, 4, token_id])))
    for token_id, block_id in ((5, 2), (6, 3)):
        prefix = kv.find_longest_prefix(make_sequence("x", [1, 2, 3, 4, token_id, 7]))
        assert [block.block_id for block in prefix.blocks] == [1, block_id]


def test_a_tail_is_found_in_the_scope_in_which_it_ends():
    kv = make_manager()
    trunk, a, b = Scope(6, b"assistant"), Scope(END, b"a"), Scope(END, b"b")
    kv.free(prefill(kv, make_sequence("s", list(range(11)), scopes=(trunk, a))))

    def cached(num_tokens: int, *scopes: Scope) -> int:
        return kv.find_longest_prefix(make_sequence("x", [*range(num_tokens), 99], scopes=scopes)).num_tokens

    assert cached(11, trunk, a) == 11
    assert cached(11, trunk, b) == 6  # the part of the second block that the trunk's tail vouches for
    assert cached(6, trunk, b) == 6
    assert cached(5, trunk, b) == 4
    assert cached(11, Scope(5, b"assistant"), b) == 4  # token 5 is not the assistant's for this reader
    assert cached(11, a) == cached(11, b) == 0


def test_what_a_sequence_has_computed_is_known_when_it_ends():
    kv = make_manager()
    a = prefill(kv, make_sequence("a", [1, 2, 3, 4, 5]))
    a.token_ids += [6, 7]
    compute(kv, a, 6)
    kv.commit_end(a)
    kv.free(a)
    assert kv.find_longest_prefix(make_sequence("next", [1, 2, 3, 4, 5, 6, 7, 8])).num_tokens == 6
    assert kv.find_longest_prefix(make_sequence("again", [1, 2, 3, 4, 5, 9])).num_tokens == 5
    assert kv.stats().cached == 2  # both tails stand in block 2


def test_under_one_parent_the_last_used_tails_stay():
    kv = make_manager(40)
    for i in range(MAX_TAILS):
        kv.free(prefill(kv, make_sequence("s", [1, 2, 3, 4, 10 + i])))

    def is_known(i: int) -> bool:
        return kv.find_longest_prefix(make_sequence("x", [1, 2, 3, 4, 10 + i, 0])).num_tokens == 5

    again = make_sequence("again", [1, 2, 3, 4, 10, 0])
    assert [copy.source for copy in begin(kv, again)] == [2]
    kv.settle_transfers(has_succeeded=True)
    kv.free(again)
    kv.free(prefill(kv, make_sequence("s", [1, 2, 3, 4, 50])))
    assert [i for i in range(MAX_TAILS) if not is_known(i)] == [1]
    assert is_known(40)
    assert free_ids(kv)[0] == 3  # whose tail made room
    kv.check_integrity([])


def test_a_tail_under_an_evicted_block_goes_with_it():
    kv = make_manager(3)
    kv.free(prefill(kv, make_sequence("s", [1, 2, 3, 4, 5])))
    assert free_ids(kv) == [3, 2, 1]
    kv.pool.reuse_first(kv.pool.blocks[1])
    run(kv, [77])
    assert kv.find_longest_prefix(make_sequence("x", [1, 2, 3, 4, 5, 6])).num_tokens == 0
    assert kv.stats().cached == 0
    assert free_ids(kv) == [2, 3]


def test_a_tail_is_left_where_there_is_no_block_for_its_copy():
    kv = make_manager(3)
    kv.free(prefill(kv, make_sequence("s", list(range(10)))))
    again = make_sequence("again", list(range(11)))
    assert kv.find_longest_prefix(again).num_tokens == 10
    assert begin(kv, again) == []
    assert (again.block_table, again.num_computed_tokens) == ([1, 2, 3], 8)
    kv.check_integrity([again])


STEPS = st.lists(
    st.tuples(st.sampled_from("sssaaaef"), st.integers(0, 9), st.lists(st.integers(0, 1), min_size=1, max_size=6)),
    max_size=60,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS)
def test_b07_forks_appends_and_frees_against_a_model_of_references(steps):
    """`s`tart behind a beginning of another sequence's tokens, `a`ppend, `e`nd or `f`ail; the model knows only tables.

    A shadow of the blocks has the tokens that were written: what is taken from the cache must read as one's own.
    """
    kv = make_manager()
    shadow: dict[int, list[int]] = {block_id: [-1] * 4 for block_id in range(11)}
    live: list[Sequence] = []
    known: list[list[int]] = [[1, 2, 3, 4, 1, 2]]

    def write(sequence: Sequence) -> None:
        for token in range(sequence.num_computed_tokens, sequence.num_tokens):
            shadow[sequence.block_table[token // 4]][token % 4] = sequence.token_ids[token]
        compute(kv, sequence)
        kv.commit_tails(sequence)

    for action, number, token_ids in steps:
        if action == "s":
            parent = known[number % len(known)]
            sequence = make_sequence("s", [*parent[: len(parent) - number % 4], *token_ids])
            copies = begin(kv, sequence)
            if copies is None:
                continue
            for copy in copies:
                shadow[copy.target] = list(shadow[copy.source])
            write(sequence)
            kv.settle_transfers(has_succeeded=True)
            live.append(sequence)
            known.append(sequence.token_ids)
        elif live and action == "a":
            sequence = live[number % len(live)]
            if kv.try_allocate_slots(sequence, sequence.num_tokens + len(token_ids)) is None:
                continue
            sequence.token_ids += token_ids
            write(sequence)
        elif live:
            sequence = live.pop(number % len(live))
            if action == "e":
                kv.commit_end(sequence)
            kv.free(sequence)
        kv.check_integrity(live)
        for sequence in live:
            read = [shadow[sequence.block_table[token // 4]][token % 4] for token in range(sequence.num_tokens)]
            assert read == sequence.token_ids
            last = sequence.num_computed_tokens // 4
            assert all(kv.pool.blocks[i].ref_count == 1 for i in sequence.block_table[last:])
    for sequence in live:
        kv.free(sequence)
    assert (kv.stats().free, kv.stats().referenced) == (10, 0)
    kv.check_integrity([])


KEYS = st.sampled_from([b"", b"a", b"b", b"ab"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    ends=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    assistants=st.tuples(KEYS, KEYS),
    privates=st.tuples(KEYS.map(b"private ".__add__), KEYS.map(b"private ".__add__)),
    num_prompt_tokens=st.integers(1, 22),
    num_output_tokens=st.integers(0, 6),
    other_from=st.integers(0, 30),
)
def test_nothing_that_reaches_past_a_trunk_is_found_in_another_private_scope(
    ends, assistants, privates, num_prompt_tokens, num_output_tokens, other_from
):
    """Whatever one left, at whatever length; the other reads the same tokens up to `other_from`, then others."""
    kv = make_manager()
    writer = make_sequence(
        "writer", list(range(num_prompt_tokens)), scopes=(Scope(ends[0], assistants[0]), Scope(END, privates[0]))
    )
    prefill(kv, writer)
    writer.token_ids += range(num_prompt_tokens, num_prompt_tokens + num_output_tokens)
    kv.try_allocate_slots(writer, writer.num_tokens)
    compute(kv, writer)
    kv.commit_end(writer)
    kv.free(writer)
    token_ids = [token if token < other_from else 100 + token for token in range(30)]
    reader = make_sequence("reader", token_ids, scopes=(Scope(ends[1], assistants[1]), Scope(END, privates[1])))
    found = kv.find_longest_prefix(reader).num_tokens
    assert found <= min(writer.num_tokens, other_from)
    if assistants[0] != assistants[1]:
        assert found == 0
    elif privates[0] != privates[1]:
        assert found <= min(ends)
        if ends[0] == ends[1] <= min(num_prompt_tokens, other_from):
            assert found == ends[0]
    elif ends[0] == ends[1] and other_from >= writer.num_tokens:
        assert found == writer.num_tokens


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
