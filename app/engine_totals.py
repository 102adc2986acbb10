"""The numbers of several engines as those of one."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from engine.protocol import BlockStats, EngineStats, HostStats, TenantStats

S = TypeVar("S", bound=msgspec.Struct)

_SUMMED = (
    *("running", "waiting", "query_tokens", "hit_tokens", "prompt_tokens_computed", "generation_tokens"),
    *("preemptions", "steps", "blocks_not_read", "slots_allocated", "slots_used", "not_duplicated_blocks"),
)


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Of at least one engine. Counts are added; trunks stand once for each engine that holds them; the rate at which
    prompts are computed is the mean of those that are known."""
    if len(stats) == 1:
        return stats[0]
    rates = [s.prefill_tokens_per_s for s in stats if s.prefill_tokens_per_s is not None]
    return EngineStats(
        **{name: sum(map(attrgetter(name), stats)) for name in _SUMMED},
        blocks=_sum(BlockStats, [s.blocks for s in stats]),
        host=_sum(HostStats, [s.host for s in stats]),
        prefill_tokens_per_s=sum(rates) / len(rates) if rates else None,
        trunks=[trunk for s in stats for trunk in s.trunks],
        tenants=_total_tenants(tenant for s in stats for tenant in s.tenants),
    )


def _total_tenants(rows: Iterable[TenantStats]) -> list[TenantStats]:
    by_id: dict[str, list[TenantStats]] = {}
    for row in rows:
        by_id.setdefault(row.tenant, []).append(row)
    return [_sum(TenantStats, same, tenant=tenant) for tenant, same in by_id.items()]


def _sum(kind: type[S], rows: Sequence[S], **named: Any) -> S:
    """All fields added up but those that are `named`."""
    names = [name for name in kind.__struct_fields__ if name not in named]
    return kind(**named, **{name: sum(map(attrgetter(name), rows)) for name in names})
