"""Lets a tenant's requests in, as many at once and at the rate that its quota says: one account for all gateways in
Redis, and one of this gateway's own while Redis does not answer."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.caps import Caps, Place
from app.errors import RateLimited
from app.quota import Levels, Quota, Refusal, duration, headers, reserve, settle, wait_s
from app.redis_commands import SessionsUnavailable
from app.tenant_store import TenantStore
from app.tenants import Tenant

logger = logging.getLogger(__name__)

AWAY_S = 1.0
"""After a command that failed the store is left alone for so long: requests do not each wait for it in vain."""
NAMES: Mapping[Refusal, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "day": "tokens per day",
}


@dataclass(eq=False, slots=True)
class Reservation:
    """What one request may use. `settle` it once it has ended, whatever became of it."""

    headers: Mapping[str, str]
    num_tokens: int
    """That were reserved."""
    day: int | None
    """Days since 1970: of whose budget they are; None where the tenant has no rates."""
    _settle: Callable[[int | None], None] | None

    def settle(self, num_tokens: int | None) -> None:
        """It has used so many, prompt and answer together. Only the first call counts. None: another gateway goes on
        with it, and settles what was reserved."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(num_tokens)


class RateLimits:
    def __init__(
        self,
        store: TenantStore | None,
        caps: Caps,
        *,
        now: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` gives seconds since 1970, for the store too; without it the store goes by its server's clock."""
        self._store = store
        self._caps = caps
        self._now = now
        self._monotonic = monotonic
        self._away_until = -math.inf
        self._levels: dict[str, Levels] = {}
        """By tenant, so there are as many as were ever configured: as of the last answer of the store, and from then on
        of this gateway's own requests."""
        self._settling: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits until everything is settled."""
        while self._settling:
            await asyncio.wait(self._settling)

    async def reserve(self, tenant: Tenant, num_tokens: int) -> Reservation:
        """For a request that may use so many tokens, prompt and answer together. Raises RateLimited."""
        _check_fits(tenant.quota, num_tokens)
        place = await self._caps.take(tenant, "answers")
        try:
            return await self._reserve(tenant, num_tokens, place)
        except BaseException:
            place.release()
            raise

    async def _reserve(self, tenant: Tenant, num_tokens: int, place: Place) -> Reservation:
        quota = tenant.quota
        if not quota.has_rates:
            return self._reservation(tenant.id, num_tokens, None, place)
        taking = asyncio.create_task(self._take(tenant, num_tokens))
        try:
            refusal, levels = await asyncio.shield(taking)
        except asyncio.CancelledError:
            # nobody is left to use what is being taken
            self._track(asyncio.create_task(self._give_back_all(taking, tenant.id, num_tokens)))
            raise
        told = headers(levels, quota)
        if refusal is not None:
            raise _refused(refusal, levels, quota, num_tokens, told)
        return self._reservation(tenant.id, num_tokens, levels.day, place, told)

    def adopt(self, tenant: Tenant, num_tokens: int, day: int | None) -> Reservation:
        """What a gateway that has gone had reserved for an answer; `day`: as its reservation had it."""
        return self._reservation(tenant.id, num_tokens, day, self._caps.adopt(tenant, "answers"))

    def _reservation(
        self, tenant_id: str, num_tokens: int, day: int | None, place: Place, told: Mapping[str, str] | None = None
    ) -> Reservation:
        def settle_used(num_used: int | None) -> None:
            place.release()
            if day is not None and num_used not in (None, num_tokens):
                self._give_back(tenant_id, num_tokens - (num_used or 0), day)

        return Reservation(told or {}, num_tokens, day, settle_used)

    async def _take(self, tenant: Tenant, num_tokens: int) -> tuple[Refusal | None, Levels]:
        if self._store is not None and self._monotonic() >= self._away_until:
            try:
                now = None if self._now is None else self._now()
                refusal, levels = await self._store.reserve(tenant.id, tenant.quota, num_tokens, now)
            except SessionsUnavailable as e:
                self._is_away(e)
            else:
                self._levels[tenant.id] = levels
                return refusal, levels
        now = (self._now or time.time)()
        known = self._levels.get(tenant.id) or Levels(at=now)
        refusal, self._levels[tenant.id] = reserve(known, tenant.quota, num_tokens, now)
        return refusal, self._levels[tenant.id]

    async def _give_back_all(
        self, taking: asyncio.Task[tuple[Refusal | None, Levels]], tenant_id: str, num_tokens: int
    ) -> None:
        refusal, levels = await taking
        if refusal is None:
            self._give_back(tenant_id, num_tokens, levels.day)

    def _give_back(self, tenant_id: str, num_tokens: int, day: int) -> None:
        if (known := self._levels.get(tenant_id)) is not None:
            self._levels[tenant_id] = settle(known, num_tokens, day)
        if self._store is not None and self._monotonic() >= self._away_until:
            self._track(asyncio.create_task(self._settle_in(self._store, tenant_id, num_tokens, day)))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle_in(self, store: TenantStore, tenant_id: str, num_tokens: int, day: int) -> None:
        try:
            await store.settle(tenant_id, num_tokens, day)
        except SessionsUnavailable as e:
            self._is_away(e)

    def _is_away(self, error: SessionsUnavailable) -> None:
        self._away_until = self._monotonic() + AWAY_S
        logger.warning("limits are kept by this gateway alone for %g s: %s", AWAY_S, error)


def _check_fits(quota: Quota, num_tokens: int) -> None:
    """Raises RateLimited for what would never be let in."""
    for name, limit in (("tokens per minute", quota.tokens_per_minute), ("tokens per day", quota.tokens_per_day)):
        if limit is not None and num_tokens > limit:
            raise RateLimited(
                f"The request is too large for the limit on {name}: limit {limit}, requested {num_tokens}, prompt and"
                " answer together. Shorten the prompt or ask for fewer tokens.",
                retry_after_s=60,
                headers={"x-should-retry": "false"},
            )


def _refused(refusal: Refusal, levels: Levels, quota: Quota, num_tokens: int, told: Mapping[str, str]) -> RateLimited:
    seconds = wait_s(refusal, levels, quota, num_tokens)
    limit, left, requested = {
        "requests": (quota.requests_per_minute, levels.requests, 1),
        "tokens": (quota.tokens_per_minute, levels.tokens, num_tokens),
        "day": (quota.tokens_per_day, (quota.tokens_per_day or 0) - levels.used, num_tokens),
    }[refusal]
    return RateLimited(
        f"Rate limit reached on {NAMES[refusal]}: limit {limit}, left {max(0, math.floor(left or 0))}, requested"
        f" {requested}. Please try again in {duration(seconds)}.",
        code="insufficient_quota" if refusal == "day" else None,
        retry_after_s=max(1, math.ceil(seconds)),
        # the official clients try again at once where they are told to wait for long
        headers={**told, **({"x-should-retry": "false"} if refusal == "day" else {})},
    )
