"""The arithmetic of limits, for any clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.quota import DAY_S, Levels, Quota, duration, headers, reserve, settle, wait_s

START = 20_000 * DAY_S + 3600.0
QUOTA = Quota(requests_per_minute=6, tokens_per_minute=600, tokens_per_day=10_000)
LIMITS = st.one_of(st.none(), st.integers(1, 50))
QUOTAS = st.builds(Quota, LIMITS, LIMITS, st.one_of(st.none(), st.integers(1, 500)))
STEPS = st.lists(st.tuples(st.floats(-200, 200), st.integers(0, 60)), max_size=40)


def test_a_minutes_worth_at_once_then_evenly() -> None:
    levels, let_in = Levels(at=START), 0
    for _ in range(20):
        refusal, levels = reserve(levels, QUOTA, 10, START)
        let_in += refusal is None
    assert (let_in, refusal) == (6, "requests")
    assert wait_s("requests", levels, QUOTA, 10) == pytest.approx(10)
    assert reserve(levels, QUOTA, 10, START + 9.9)[0] == "requests"
    assert reserve(levels, QUOTA, 10, START + 10.1)[0] is None


def test_what_is_refused_takes_nothing() -> None:
    _, levels = reserve(Levels(at=START), QUOTA, 500, START)
    refusal, after = reserve(levels, QUOTA, 101, START)
    assert refusal == "tokens"
    assert (after.requests, after.tokens, after.used) == (5, 100, 500)
    assert wait_s("tokens", after, QUOTA, 101) == pytest.approx(0.1)
    assert reserve(after, QUOTA, 100, START)[0] is None


def test_settling_gives_back_and_takes_what_was_owed() -> None:
    _, levels = reserve(Levels(at=START), QUOTA, 500, START)
    saved = settle(levels, 450, levels.day)
    assert (saved.tokens, saved.used) == (550, 50)
    owing = settle(levels, -200, levels.day)
    assert (owing.tokens, owing.used) == (-100, 700)
    assert reserve(owing, QUOTA, 0, START)[0] == "tokens"
    assert wait_s("tokens", owing, QUOTA, 0) == pytest.approx(10)


def test_a_day_ends_at_midnight() -> None:
    quota = Quota(tokens_per_day=100)
    _, levels = reserve(Levels(at=START), quota, 90, START)
    refusal, levels = reserve(levels, quota, 11, START + 3600)
    assert refusal == "day"
    assert wait_s("day", levels, quota, 11) == DAY_S - 7200
    refusal, levels = reserve(levels, quota, 100, 20_001 * DAY_S)
    assert (refusal, levels.used) == (None, 100)
    assert settle(levels, 50, 20_000).used == 100, "what was given back was yesterday's"


def test_a_clock_that_is_put_back_over_midnight_gives_no_second_day() -> None:
    quota = Quota(tokens_per_day=100)
    midnight = 20_001 * DAY_S
    _, levels = reserve(Levels(at=midnight), quota, 60, midnight + 1)
    refusal, levels = reserve(levels, quota, 60, midnight - 1)
    assert refusal == "day"
    assert reserve(levels, quota, 60, midnight + 1)[0] is None, "it is a new day, by the clock that is in force now"


def test_a_clock_that_is_put_back_stops_nobody() -> None:
    levels = Levels(at=START)
    for _ in range(6):
        _, levels = reserve(levels, QUOTA, 1, START)
    hour_ago = START - 3600
    refusal, levels = reserve(levels, QUOTA, 1, hour_ago)
    assert refusal == "requests", "it gives nothing"
    assert reserve(levels, QUOTA, 1, hour_ago + 10.1)[0] is None, "and takes nothing"


def test_a_changed_limit_holds_at_once() -> None:
    _, levels = reserve(Levels(at=START), QUOTA, 1, START)
    assert reserve(levels, Quota(tokens_per_minute=10), 11, START)[0] == "tokens"
    more = Quota(requests_per_minute=60)
    for _ in range(5):
        refusal, levels = reserve(levels, more, 1, START)
        assert refusal is None
    assert reserve(levels, more, 1, START)[0] == "requests"
    assert reserve(levels, more, 1, START + 1)[0] is None


@given(QUOTAS, STEPS)
def test_never_more_than_the_limit_and_what_time_has_brought(quota: Quota, steps: list[tuple[float, int]]) -> None:
    """Whatever the clock does: only what it went forward counts."""
    levels, now, forward_s = Levels(at=START), START, 0.0
    requests = tokens = 0
    for step_s, wanted in steps:
        now += step_s
        forward_s += max(0.0, step_s)
        refusal, levels = reserve(levels, quota, wanted, now)
        if refusal is not None:
            assert wait_s(refusal, levels, quota, wanted) >= 0
            continue
        requests, tokens = requests + 1, tokens + wanted
        if quota.requests_per_minute is not None:
            assert requests <= quota.requests_per_minute * (1 + forward_s / 60) + 1e-6
        if quota.tokens_per_minute is not None:
            assert tokens <= quota.tokens_per_minute * (1 + forward_s / 60) + 1e-6
        if quota.tokens_per_day is not None:
            assert levels.used <= quota.tokens_per_day


@given(QUOTAS, STEPS, st.integers(0, 60))
def test_after_the_time_that_it_names_a_request_is_let_in(
    quota: Quota, steps: list[tuple[float, int]], wanted: int
) -> None:
    limits = [limit for limit in (quota.tokens_per_minute, quota.tokens_per_day) if limit is not None]
    wanted = min([wanted, *limits])
    levels, now = Levels(at=START), START
    for step_s, taken in steps:
        now += step_s
        _, levels = reserve(levels, quota, taken, now)
    for _ in range(3):  # one limit after the other
        refusal, levels = reserve(levels, quota, wanted, now)
        if refusal is None:
            return
        now += wait_s(refusal, levels, quota, wanted) + 1e-3
    raise AssertionError(refusal)


@given(QUOTAS, st.integers(0, 50), st.integers(0, 50))
def test_reserving_more_and_giving_it_back_is_reserving_less(quota: Quota, used: int, more: int) -> None:
    start = Levels(at=START)
    refusal, reserved = reserve(start, quota, used + more, START)
    if refusal is None:
        assert settle(reserved, more, reserved.day) == reserve(start, quota, used, START)[1]


def test_headers_as_openai_sends_them() -> None:
    _, levels = reserve(Levels(at=START), QUOTA, 250, START)
    assert headers(levels, QUOTA) == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "350",
        "x-ratelimit-reset-tokens": "25s",
    }
    assert headers(levels, Quota(tokens_per_day=10)) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0162, "17ms"), (1.5, "1.5s"), (59, "59s"), (60, "1m0s"), (359.2, "6m0s"), (7381, "2h3m1s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
