"""Numbers of several engines, added up."""

import msgspec

from app.engine_totals import total_stats
from engine.protocol import BlockStats, EngineStats, HostStats, TenantStats, TrunkPin, TrunkStats


def stats(number: int, rate: float | None, tenants: list[str]) -> EngineStats:
    """Each count of it is `number`."""
    counts = {field.name: number for field in msgspec.structs.fields(EngineStats) if field.type is int}
    return EngineStats(
        **counts,
        blocks=BlockStats(total=number, free=number, cached=number, referenced=number, pinned=number),
        host=HostStats(total=number, used=number, swapped_out=number, swapped_in=number),
        prefill_tokens_per_s=rate,
        trunks=[TrunkStats(trunk_id="t", state=TrunkPin.PINNED, num_tokens=9, num_blocks=1, readers=number)],
        tenants=[
            TenantStats(tenant=tenant, running=number, waiting=number, blocks=number, service=float(number))
            for tenant in tenants
        ],
    )


def test_one_engine_is_itself() -> None:
    one = stats(1, 5.0, ["a"])
    assert total_stats([one]) is one


def test_counts_are_added_and_rates_are_not() -> None:
    total = total_stats([stats(1, 100.0, ["a", "b"]), stats(10, None, ["b"]), stats(100, 300.0, [])])
    expected = stats(111, 200.0, [])
    assert msgspec.structs.replace(total, trunks=[], tenants=[]) == msgspec.structs.replace(expected, trunks=[])
    assert [trunk.readers for trunk in total.trunks] == [1, 10, 100]
    assert total.tenants == [
        TenantStats(tenant="a", running=1, waiting=1, blocks=1, service=1.0),
        TenantStats(tenant="b", running=11, waiting=11, blocks=11, service=11.0),
    ]
