"""KV slots given out and used: blocks of 8 tokens."""

from engine.protocol import END, Scope
from tests.engine.fake_runner import Bench, ids

TRUNK = ids(0, 20)


def add_chat(bench: Bench, name: str, num_own_tokens: int = 6) -> None:
    scopes = [Scope(20, b"assistant"), Scope(END, b"private")]
    bench.add(name, [*TRUNK, *ids(500 + 50 * ord(name), num_own_tokens)], 10, scopes=scopes)


def test_nothing_is_used_in_an_idle_engine():
    stats = Bench(8).core.stats()
    assert (stats.slots_allocated, stats.slots_used, stats.not_duplicated_blocks) == (0, 0, 0)


def test_what_is_not_used_is_the_room_at_the_ends_of_tables():
    bench = Bench(40)
    bench.add("a", ids(100, 20), 10)
    bench.add("b", ids(200, 16), 10)
    bench.step()
    stats = bench.core.stats()
    # 21 tokens in three blocks; 17, of which the newest has no slot yet, in two
    assert (stats.slots_allocated, stats.slots_used, stats.not_duplicated_blocks) == (40, 37, 0)


def test_a_pinned_trunk_wastes_the_room_behind_its_end():
    bench = Bench(40)
    assert bench.pinned("t", TRUNK) == ("pinned", 20, 3)
    stats = bench.core.stats()
    assert (stats.slots_allocated, stats.slots_used, stats.not_duplicated_blocks) == (24, 20, 0)


def test_each_block_in_which_trunks_end_wastes_its_room_once():
    bench = Bench(40)
    bench.pinned("t", TRUNK)
    bench.pinned("the same by another name", TRUNK)
    stats = bench.core.stats()
    assert (stats.slots_allocated, stats.slots_used) == (24, 20)
    bench.pinned("shorter, in a block of its own", TRUNK[:18])
    stats = bench.core.stats()
    assert (stats.slots_allocated, stats.slots_used) == (32, 16 + 4 + 2)


def test_blocks_are_not_duplicated_for_each_reader_but_the_first():
    bench = Bench(40)
    bench.pinned("t", TRUNK)
    for name in "abc":
        add_chat(bench, name)
    bench.step()
    stats = bench.core.stats()
    # three chats of four blocks each: two are the trunk's, and two their own
    assert stats.not_duplicated_blocks == 2 * 2
    assert stats.slots_allocated == (3 + 3 * 2) * 8
    # 27 tokens in four blocks, and 20 in the trunk's three
    assert stats.slots_used == stats.slots_allocated - 4 - 3 * 5
    bench.run()
    assert bench.core.stats().not_duplicated_blocks == 0


def test_readers_of_a_trunk_are_counted_whether_it_is_pinned_or_not():
    for pin_budget, state in ((0.2, "pinned"), (0.0, "over_budget")):
        bench = Bench(40, pin_budget=pin_budget)
        bench.pinned("t", TRUNK)
        for name in "ab":
            add_chat(bench, name)
        bench.step()
        [trunk] = bench.core.stats().trunks
        assert (trunk.trunk_id, trunk.state, trunk.num_tokens, trunk.num_blocks) == ("t", state, 20, 3)
        assert trunk.readers == 2
        bench.run()
        [trunk] = bench.core.stats().trunks
        assert trunk.readers == 0


def test_a_trunk_that_is_computed_for_the_first_time_has_no_state():
    bench = Bench(40, max_num_batched_tokens=16)
    bench.pin("t", TRUNK)
    bench.step()
    [trunk] = bench.core.stats().trunks
    assert (trunk.state, trunk.num_blocks, trunk.readers) == (None, 3, 0)
