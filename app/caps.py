"""How many websockets and running answers a tenant has at once, on all gateways that share a Redis.

Each gateway says how many it has itself: again at each change, and every few seconds so that it is known to live. So a
message that is lost or comes twice does no harm, and what a dead gateway had is soon forgotten. While Redis does not
answer, each gateway counts for itself.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from app.disconnect import cancel_and_wait
from app.errors import RateLimited
from app.quota import Quota
from app.redis_commands import SessionsUnavailable
from app.tenant_store import TenantStore
from app.tenants import Tenant

logger = logging.getLogger(__name__)

LEASE_S = 15.0
RETRY_AFTER_S = 2
Kind = Literal["connections", "answers"]
NAMES: Mapping[Kind, str] = {"connections": "websockets open", "answers": "answers running"}


@dataclass(eq=False, slots=True)
class Place:
    """One of those that a tenant may have at once."""

    _release: Callable[[], None] | None

    def release(self) -> None:
        """Only the first call counts."""
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(slots=True)
class _Held:
    """What one tenant has on this gateway."""

    own: dict[Kind, int] = field(default_factory=lambda: {"connections": 0, "answers": 0})
    is_said: bool = False
    """Whether the others were told of it."""
    saying: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One message at a time: the last one that arrives is the last one that was sent."""

    @property
    def is_empty(self) -> bool:
        return not any(self.own.values())


class Caps:
    """`now` gives seconds since 1970, for the store too; without it the store goes by its server's clock."""

    def __init__(
        self, store: TenantStore | None, *, now: Callable[[], float] | None = None, lease_s: float = LEASE_S
    ) -> None:
        self._store = store
        self._now = now
        self._lease_s = lease_s
        self._owner = secrets.token_hex(8)
        self._held: dict[str, _Held] = {}
        """By tenant; only of those that have something here."""
        self._unsaid: set[str] = set()
        """Tenants of which the others are to be told."""
        self._saying: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Tells the others what is still unsaid."""
        if self._renewing is not None:
            await cancel_and_wait(self._renewing)
        while self._saying is not None:
            await asyncio.wait({self._saying})

    def num_held(self, tenant_id: str, kind: Kind) -> int:
        """On this gateway."""
        held = self._held.get(tenant_id)
        return 0 if held is None else held.own[kind]

    async def take(self, tenant: Tenant, kind: Kind) -> Place:
        """One place more. Raises RateLimited."""
        limit = _limit(tenant.quota, kind)
        mine = self.num_held(tenant.id, kind) + 1
        if limit is not None and mine > limit:
            raise _full(kind, limit)
        held = self._held.setdefault(tenant.id, _Held())
        held.own[kind] = mine
        place = Place(lambda: self._leave(tenant.id, kind))
        if limit is None:
            return place
        try:
            others = await self._say(tenant.id, held)
        except BaseException:
            place.release()
            raise
        # those that came after this one do not stand in its way
        if min(mine, held.own[kind]) + others[kind] > limit:
            place.release()
            raise _full(kind, limit)
        return place

    def adopt(self, tenant: Tenant, kind: Kind) -> Place:
        """The place of something that was let in at a gateway which has gone: whatever the limit is, it is there."""
        held = self._held.setdefault(tenant.id, _Held())
        held.own[kind] += 1
        if held.is_said or _limit(tenant.quota, kind) is not None:
            self._say_later(tenant.id)
        return Place(lambda: self._leave(tenant.id, kind))

    def _leave(self, tenant_id: str, kind: Kind) -> None:
        held = self._held[tenant_id]
        held.own[kind] -= 1
        if held.is_said:
            self._say_later(tenant_id)
        elif held.is_empty:
            del self._held[tenant_id]

    def _say_later(self, tenant_id: str) -> None:
        self._unsaid.add(tenant_id)
        if self._saying is None:
            self._saying = asyncio.create_task(self._say_unsaid(), name="places that changed")

    async def _say_unsaid(self) -> None:
        try:
            while self._unsaid:
                tenant_id = self._unsaid.pop()
                held = self._held.get(tenant_id)
                if held is None:
                    continue
                await self._say(tenant_id, held)
                self._forget_if_empty(tenant_id, held)
        finally:
            self._saying = None

    def _forget_if_empty(self, tenant_id: str, held: _Held) -> None:
        """Where the others know that it is, and nobody is about to tell them something else."""
        if held.is_empty and not held.saying.locked() and tenant_id not in self._unsaid:
            self._held.pop(tenant_id, None)

    async def _say(self, tenant_id: str, held: _Held) -> Mapping[Kind, int]:
        """Tells the others what is here now; what they have."""
        nobody: Mapping[Kind, int] = {"connections": 0, "answers": 0}
        if self._store is None:
            return nobody
        async with held.saying:
            held.is_said = True
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._renew(), name="places that are held")
            try:
                now = None if self._now is None else self._now()
                own = held.own["connections"], held.own["answers"]
                connections, answers = await self._store.hold(tenant_id, self._owner, own, self._lease_s, now)
            except SessionsUnavailable as e:
                logger.warning("places are counted by this gateway alone: %s", e.reason)
                return nobody
        return {"connections": connections, "answers": answers}

    async def _renew(self) -> None:
        """Lives while the others were told of something that is here."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            said = [(tenant_id, held) for tenant_id, held in self._held.items() if held.is_said]
            if not said:
                return
            for tenant_id, held in said:
                await self._say(tenant_id, held)
                self._forget_if_empty(tenant_id, held)


def _limit(quota: Quota, kind: Kind) -> int | None:
    return quota.max_connections if kind == "connections" else quota.max_answers


def _full(kind: Kind, limit: int) -> RateLimited:
    return RateLimited(
        f"There are {limit} {NAMES[kind]} for this key's owner, which is the most there can be at once.",
        code="concurrency_limit_exceeded",
        retry_after_s=RETRY_AFTER_S,
    )
