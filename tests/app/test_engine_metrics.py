"""The engine's numbers as a Prometheus server reads them."""

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from app.engine_metrics import EngineMetrics
from engine.protocol import HostStats, TenantStats, TrunkPin, TrunkStats
from tests.app.test_accounting import INFO, stats

SEEN = stats(
    slots_allocated=64,
    slots_used=48,
    not_duplicated_blocks=2,
    blocks_not_read=7,
    prefill_tokens_per_s=250.0,
    host=HostStats(total=8, used=3, swapped_out=5, swapped_in=2),
    trunks=[TrunkStats(trunk_id="support@12ab", state=TrunkPin.PINNED, num_tokens=40, num_blocks=3, readers=5)],
    tenants=[TenantStats(tenant="a", running=5, waiting=1, blocks=9, service=12.5)],
)


def lines(metrics: EngineMetrics) -> list[str]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_what_sharing_is_worth_is_shown_live() -> None:
    metrics = EngineMetrics()
    metrics.see((SEEN, msgspec.structs.replace(INFO, kv_dtype="int8")))
    shown = lines(metrics)
    for line in (
        "trunkline_engine_up 1.0",
        'trunkline_kv_cache_info{block_size="16",kv_dtype="int8"} 1.0',
        "trunkline_kv_slots_allocated 64.0",
        "trunkline_kv_slots_used 48.0",
        "trunkline_kv_slot_usage_ratio 0.75",
        "trunkline_kv_bytes_not_duplicated 3200.0",
        "trunkline_kv_bytes_not_read_total 11200.0",
        "trunkline_prefill_tokens_per_second 250.0",
        "trunkline_host_blocks 8.0",
        "trunkline_host_blocks_used 3.0",
        "trunkline_host_blocks_swapped_out_total 5.0",
        "trunkline_host_blocks_swapped_in_total 2.0",
        'trunkline_trunk_readers{assistant="support",version="12ab"} 5.0',
        'trunkline_trunk_blocks{assistant="support",version="12ab"} 3.0',
        'trunkline_trunk_kv_bytes_not_duplicated{assistant="support",version="12ab"} 16000.0',
        'trunkline_tenant_requests_running{tenant="a"} 5.0',
        'trunkline_tenant_requests_waiting{tenant="a"} 1.0',
        'trunkline_tenant_kv_blocks{tenant="a"} 9.0',
        'trunkline_tenant_service{tenant="a"} 12.5',
    ):
        assert line in shown


def test_without_an_engine_or_a_rate_nothing_is_made_up() -> None:
    metrics = EngineMetrics()
    metrics.see((stats(), INFO))
    assert not any("prefill_tokens_per_second" in line for line in lines(metrics))
    metrics.see(None)
    assert lines(metrics) == ["trunkline_engine_up 0.0"]
