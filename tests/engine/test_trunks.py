"""Trunks of assistants in a core of twenty blocks of eight tokens, at most four of them pinned."""

import pytest

from engine.errors import EngineError
from engine.protocol import END, PinTrunk, Scope
from tests.engine.fake_runner import Bench, continuation, ids

TRUNK = ids(0, 20)


def scopes(tenant: str = "a", end: int = 20, key: bytes = b"assistant") -> list[Scope]:
    return [Scope(end, key), Scope(END, tenant.encode())]


def stats(bench: Bench) -> tuple[int, int, int]:
    """free, referenced, pinned"""
    blocks = bench.core.stats().blocks
    assert blocks.free + blocks.referenced == blocks.total
    return blocks.free, blocks.referenced, blocks.pinned


def test_a_trunk_is_computed_once_and_kept():
    bench = Bench(20, max_num_batched_tokens=16)
    assert bench.pinned("t", TRUNK) == ("pinned", 20, 3)
    assert bench.runner.rows == [[("\0trunk t", 16)], [("\0trunk t", 4)]]
    assert [s.samples for batch in bench.runner.batches for s in batch.sequences] == [False, False]
    assert stats(bench) == (17, 3, 3)
    assert (bench.core.stats().query_tokens, bench.core.stats().generation_tokens) == (0, 0)
    for tenant in ("a", "b"):
        assert bench.ask([*TRUNK, 900], scopes=scopes(tenant)).num_cached_tokens == 20
    assert stats(bench) == (17, 3, 3)


def test_pressure_takes_everything_else_first():
    bench = Bench(20)
    bench.pinned("t", TRUNK)
    for start in (100, 300, 500):
        bench.ask(ids(start, 120), 8)
    assert bench.ask([*TRUNK, 900], scopes=scopes()).num_cached_tokens == 20


def test_many_short_chats_push_no_pinned_tail_out():
    bench = Bench(20)
    bench.pinned("t", TRUNK)
    for i in range(20):
        bench.ask([*TRUNK[:16], 100 + i], 1, scopes=[Scope(END, b"assistant")])
    assert bench.ask([*TRUNK, 900], scopes=scopes()).num_cached_tokens == 20


def test_the_same_trunk_again_is_the_same():
    bench = Bench(20)
    assert bench.pin("t", TRUNK) is None
    assert bench.pin("t", TRUNK) is None
    assert bench.pinned("t", TRUNK) == ("pinned", 20, 3)
    assert bench.pinned("t", TRUNK) == ("pinned", 20, 3)
    assert len(bench.runner.batches) == 1
    assert bench.pinned("t", ids(1, 20)) == ("failed", 0, 0)  # an id stands for one text for ever
    assert bench.pinned("t", TRUNK) == ("pinned", 20, 3)


def test_two_trunks_with_one_text_share_its_blocks():
    bench = Bench(20)
    assert bench.pinned("one", TRUNK) == bench.pinned("two", TRUNK) == ("pinned", 20, 3)
    assert stats(bench) == (17, 3, 3)
    bench.core.unpin("one")
    assert stats(bench) == (17, 3, 3)
    bench.core.unpin("two")
    assert stats(bench) == (20, 0, 0)
    bench.core.check_integrity()


def test_a_trunk_that_chats_have_computed_is_taken_from_them():
    """Its last block is one that nobody fills any more: the chat goes on in its own."""
    bench = Bench(20)
    bench.add("chat", [*TRUNK, 900], 12, scopes=scopes())
    bench.step(2)
    assert bench.pin("t", TRUNK) is None
    bench.step()
    assert bench.runner.rows[-1] == [("chat", 1), ("\0trunk t", 1)]
    assert bench.table("chat") == [1, 2, 3]
    assert [block.block_id for block in bench.core.scheduler.kv.pool.blocks if block.num_pins] == [1, 2, 4]
    bench.run()
    bench.assert_complete("chat", [*TRUNK, 900], 12)
    assert bench.ask([*TRUNK, 901], scopes=scopes("b")).num_cached_tokens == 20


def test_chats_follow_a_trunk_that_is_being_computed():
    bench = Bench(20, max_num_batched_tokens=16)
    bench.pin("t", TRUNK)
    bench.add("a", [*TRUNK, 900], 1, scopes=scopes("a"))
    bench.add("b", [*TRUNK, 901], 1, scopes=scopes("b"))
    bench.run()
    assert bench.runner.rows == [[("\0trunk t", 16)], [("\0trunk t", 4)], [("a", 1), ("b", 1)]]


def test_what_is_over_the_budget_is_served_unpinned_until_there_is_room():
    bench = Bench(20)
    assert bench.pinned("one", TRUNK) == ("pinned", 20, 3)
    assert bench.pinned("two", ids(300, 20)) == ("over_budget", 20, 3)
    assert stats(bench) == (17, 3, 3)
    assert bench.ask([*ids(300, 20), 900], scopes=scopes()).num_cached_tokens == 20
    bench.core.unpin("one")
    bench.run()
    assert [(state.trunk_id, str(state.state)) for state in bench.trunk_news] == [
        ("one", "pinned"),
        ("two", "over_budget"),
        ("two", "pinned"),
    ]
    assert stats(bench) == (17, 3, 3)
    assert bench.runner.rows[-1] == [("\0trunk two", 1)]  # the last token only: the rest was still there


def test_an_old_trunk_goes_with_its_last_chat():
    bench = Bench(20)
    bench.pinned("t@1", TRUNK)
    bench.add("chat", [*TRUNK, 900], 12, scopes=scopes())
    bench.step()
    bench.core.unpin("t@1")
    bench.core.unpin("t@1")
    assert stats(bench)[1:] == (3, 0)  # two of the trunk, and the copy of its tail
    assert bench.pinned("t@2", ids(300, 20), b"edited") == ("pinned", 20, 3)
    bench.run()
    bench.assert_complete("chat", [*TRUNK, 900], 12)
    assert stats(bench) == (17, 3, 3)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_trunk_that_is_taken_back_while_it_is_computed(num_steps):
    bench = Bench(20, max_num_batched_tokens=16)
    bench.pin("t", ids(0, 40))
    bench.step(num_steps)
    bench.core.unpin("t")
    bench.core.check_integrity()
    assert (stats(bench), bench.core.has_work, bench.trunk_news) == ((20, 0, 0), False, [])


def test_a_trunk_whose_step_fails_is_forgotten_and_can_be_asked_for_again():
    bench = Bench(20)
    bench.pin("t", TRUNK)
    bench.add("chat", ids(500, 5), 1)
    bench.runner.failure = RuntimeError("out of luck")
    [output] = bench.step()
    assert output.request_id == "chat"
    assert [(state.trunk_id, str(state.state)) for state in bench.trunk_news] == [("t", "failed")]
    assert bench.pinned("t", TRUNK) == ("pinned", 20, 3)


@pytest.mark.parametrize(
    ("token_ids", "trunk_scopes"),
    [([], [Scope(END, b"")]), ([2000], [Scope(END, b"")]), (ids(0, 160), [Scope(END, b"")]), ([1], [Scope(5, b"")])],
)
def test_what_no_request_could_begin_with_fails_at_once(token_ids, trunk_scopes):
    bench = Bench(20)
    state = bench.core.pin(PinTrunk("t", token_ids, trunk_scopes))
    assert (state.state, bench.core.has_work) == ("failed", False)


def test_without_prefix_caching_no_trunk_is_kept():
    bench = Bench(20, enable_prefix_caching=False)
    assert bench.pinned("t", TRUNK) == ("failed", 0, 0)


def test_a_request_that_needs_every_block_gets_those_of_a_pin_which_comes_back():
    bench = Bench(20)
    bench.pinned("t", TRUNK)
    prompt = ids(300, 100)
    assert bench.ask(prompt, 60).token_ids == continuation(prompt, 60)
    assert [str(state.state) for state in bench.trunk_news] == ["pinned", "over_budget", "pinned"]
    prompt = ids(500, 158)
    assert bench.ask(prompt, 2).token_ids == continuation(prompt, 2)
    assert stats(bench) == (17, 3, 3)


def test_a_trunk_that_fits_only_without_the_others_fails():
    bench = Bench(20, pin_budget=1.0)
    assert bench.pinned("one", TRUNK) == ("pinned", 20, 3)
    assert bench.pinned("two", ids(300, 150)) == ("failed", 0, 0)
    assert stats(bench) == (17, 3, 3)


def test_an_assistant_edited_fifty_times_under_load():
    """Old versions are freed, no chat finds one, and pins stay within the budget at every step."""
    bench = Bench(20, max_num_seqs=4)
    for version in range(50):
        trunk, key = ids(7 * version, 20 + version % 9), b"version %d" % version
        chat = scopes("a", len(trunk), key)
        bench.pin(f"t@{version}", trunk, key)
        bench.add(f"early {version}", [*trunk, 1], 9, scopes=chat)
        bench.step(2)
        assert bench.core.stats().blocks.pinned <= 4
        if version:
            bench.core.unpin(f"t@{version - 1}")
        bench.add(f"late {version}", [*trunk, 2], 9, scopes=chat)
        bench.step(2)
        assert bench.core.stats().blocks.pinned <= 4
    bench.run()
    for version in range(50):
        trunk = ids(7 * version, 20 + version % 9)
        bench.assert_complete(f"early {version}", [*trunk, 1], 9)
        bench.assert_complete(f"late {version}", [*trunk, 2], 9)
    assert stats(bench)[1:] == (3, 3)


@pytest.mark.parametrize("pin_budget", [-0.1, 1.5])
def test_a_budget_that_is_no_share_is_refused(pin_budget):
    with pytest.raises(EngineError, match=f"from 0 to 1, got {pin_budget}"):
        Bench(20, pin_budget=pin_budget)
