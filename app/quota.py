"""How much a tenant may use, and what is left of it: arithmetic without a store and without a clock.

A minute's limit is a bucket that holds one minute's worth and is refilled evenly. A request takes what it may need at
most (*reserve*) and gives back what it did not need when it ends (*settle*), or owes what it needed beyond that: then
the bucket is below zero and has to be refilled first. A day's budget is counted from midnight UTC to midnight.

A clock may be put back. Then no time has passed: a bucket gets nothing for it and is refilled from the new time on, and
the day's count goes on. So nobody gains by it, and nobody waits until the clock has caught up.
`app/tenant_store.py` does the same in Redis, in Lua; a test holds the two against one another.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Quota:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and answer together; tokens from the cache count too."""
    tokens_per_day: int | None = None
    max_connections: int | None = None
    """Websockets open at once."""
    max_answers: int | None = None
    """Answers running at once, whatever the number of their choices."""

    @property
    def has_rates(self) -> bool:
        return (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day) != (None, None, None)


UNLIMITED = Quota()
Refusal = Literal["requests", "tokens", "day"]


@dataclass(frozen=True, slots=True)
class Levels:
    """What is left at a time. None: nothing was ever taken."""

    at: float
    """Seconds since 1970."""
    requests: float | None = None
    tokens: float | None = None
    day: int = 0
    """Days since 1970."""
    used: float = 0
    """Tokens on that day."""


def refilled(levels: Levels, quota: Quota, now: float) -> Levels:
    """As it is at `now`."""
    elapsed_s = max(0.0, now - levels.at)
    day = math.floor(now / DAY_S)
    return Levels(
        at=now,
        requests=_refill(levels.requests, quota.requests_per_minute, elapsed_s),
        tokens=_refill(levels.tokens, quota.tokens_per_minute, elapsed_s),
        day=day,
        used=0 if day > levels.day else levels.used,
    )


def _refill(left: float | None, per_minute: int | None, elapsed_s: float) -> float | None:
    if per_minute is None:
        return left
    return min(per_minute, (per_minute if left is None else left) + elapsed_s * per_minute / 60)


def reserve(levels: Levels, quota: Quota, num_tokens: int, now: float) -> tuple[Refusal | None, Levels]:
    """Takes one request and `num_tokens`, all or nothing; what stood in the way, and what is left."""
    left = refilled(levels, quota, now)
    if quota.requests_per_minute is not None and left.requests is not None and left.requests < 1:
        return "requests", left
    if quota.tokens_per_minute is not None and left.tokens is not None and left.tokens < num_tokens:
        return "tokens", left
    if quota.tokens_per_day is not None and left.used + num_tokens > quota.tokens_per_day:
        return "day", left
    requests = left.requests
    if quota.requests_per_minute is not None and requests is not None:
        requests -= 1
    tokens = left.tokens
    if quota.tokens_per_minute is not None and tokens is not None:
        tokens -= num_tokens
    return None, replace(left, requests=requests, tokens=tokens, used=left.used + num_tokens)


def settle(levels: Levels, num_back: int, day: int) -> Levels:
    """Gives back so many tokens that were reserved on that day; below zero: takes more."""
    tokens = None if levels.tokens is None else levels.tokens + num_back
    used = max(0, levels.used - num_back) if levels.day == day else levels.used
    return replace(levels, tokens=tokens, used=used)


def wait_s(refusal: Refusal, levels: Levels, quota: Quota, num_tokens: int) -> float:
    """Until the refused request would be let in, if nobody else comes."""
    if refusal == "day":
        return (levels.day + 1) * DAY_S - levels.at
    if refusal == "requests":
        lacking, per_minute = 1 - (levels.requests or 0), quota.requests_per_minute
    else:
        lacking, per_minute = num_tokens - (levels.tokens or 0), quota.tokens_per_minute
    assert per_minute is not None, refusal
    return max(0.0, lacking * 60 / per_minute)


def headers(levels: Levels, quota: Quota) -> Mapping[str, str]:
    """`x-ratelimit-*` as OpenAI sends them, for the minute's limits that there are."""
    found = {}
    for name, limit, left in (
        ("requests", quota.requests_per_minute, levels.requests),
        ("tokens", quota.tokens_per_minute, levels.tokens),
    ):
        if limit is not None and left is not None:
            found[f"x-ratelimit-limit-{name}"] = str(limit)
            found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(left)))
            found[f"x-ratelimit-reset-{name}"] = duration((limit - left) * 60 / limit)
    return found


def duration(seconds: float) -> str:
    """As OpenAI writes it: 17ms, 1.5s, 6m0s, 2h3m0s."""
    if seconds < 1:
        return f"{max(0, math.ceil(seconds * 1000))}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
