"""When an answer that nobody reads is paused, goes on and ends."""

from app.grace import Grace, GraceRules, Step
from app.limits import Limits

RULES = GraceRules(grace_s=30, unread_tokens=100, paused_ttl_s=600)


def test_without_a_reader_it_goes_on_for_the_grace_time() -> None:
    grace = Grace(RULES, unread_since=1000)
    assert grace.next_step(1029.9, 99) is None
    assert grace.next_step(1030, 99) is Step.PAUSE


def test_and_for_so_many_tokens() -> None:
    grace = Grace(RULES, unread_since=1000)
    grace.num_readers = 1
    assert grace.next_step(1000, 5000) is None
    grace.num_readers = 0
    grace.left(1001, 5000)
    assert grace.next_step(1001, 5099) is None
    assert grace.next_step(1001, 5100) is Step.PAUSE


def test_a_reader_here_or_elsewhere_holds_it_up_for_ever() -> None:
    for grace in (Grace(RULES, 0, num_readers=1), Grace(RULES, 0, is_read_elsewhere=True)):
        assert grace.is_read
        assert grace.next_step(10**9, 10**9) is None
        grace.paused_at = 5
        assert grace.next_step(10**9, 10**9) is Step.GO_ON


def test_a_paused_one_ends_when_nobody_has_come_back() -> None:
    grace = Grace(RULES, 0, paused_at=40)
    assert grace.next_step(639.9, 10) is None
    assert grace.next_step(640, 10) is Step.END


def test_asking_changes_nothing() -> None:
    grace = Grace(RULES, 0)
    before = repr(grace)
    for _ in range(2):
        assert grace.next_step(1000, 0) is Step.PAUSE
    assert repr(grace) == before


def test_the_rules_are_those_of_the_configuration() -> None:
    assert GraceRules.of(Limits(grace_s=1, grace_tokens=2, paused_ttl_s=3)) == GraceRules(1, 2, 3)
    assert GraceRules.of(Limits()) == GraceRules(30, 2048, 600)
