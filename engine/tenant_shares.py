"""What each tenant may have of this engine: weights and limits, as the gateways say them."""

import logging
from collections.abc import Iterable
from functools import lru_cache

from engine.protocol import TenantShare

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""So far apart that counters of both still differ by a token (engine.fair_share)."""

log = logging.getLogger(__name__)


class TenantShares:
    """Shares by tenant; the scheduler and the KV cache manager look them up whenever they decide."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantShare] = {}

    def of(self, tenant: str) -> TenantShare:
        """The defaults for one that nobody named."""
        return self._shares.get(tenant) or _default_share(tenant)

    def max_blocks(self, tenant: str) -> int | None:
        """As in `of`, at each block that a sequence gets: for one that nobody named, no share is made up."""
        share = self._shares.get(tenant)
        return share.max_blocks if share is not None else None

    def set(self, shares: Iterable[TenantShare]) -> None:
        """In place of all that was said before. One that makes no sense is passed over, and logged."""
        self._shares = {}
        for share in shares:
            if _makes_sense(share):
                self._shares[share.tenant] = share
            else:
                log.warning("passed over a share that makes no sense: %s", share)


@lru_cache(maxsize=1024)
def _default_share(tenant: str) -> TenantShare:
    return TenantShare(tenant=tenant)


def _makes_sense(share: TenantShare) -> bool:
    is_weight = MIN_WEIGHT <= share.weight <= MAX_WEIGHT
    is_maximum = all(limit is None or limit >= 1 for limit in (share.max_running, share.max_blocks))
    return is_weight and is_maximum and share.guaranteed_blocks >= 0
