"""The engine's numbers, as of the last look, for a Prometheus server."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.accounting import kv_bytes_not_duplicated, kv_bytes_not_read, slot_usage_ratio, trunk_uses
from engine.protocol import EngineInfo, EngineStats


class EngineMetrics(Collector):
    """Tenants and assistants are those of the configuration, so that labels are few."""

    def __init__(self) -> None:
        self._seen: tuple[EngineStats, EngineInfo] | None = None

    def see(self, seen: tuple[EngineStats, EngineInfo] | None) -> None:
        """None: no engine answers, and its numbers are left out."""
        self._seen = seen

    def collect(self) -> Iterable[Metric]:
        up = self._seen is not None
        yield GaugeMetricFamily("trunkline_engine_up", "Whether an engine answers", value=float(up))
        if self._seen is None:
            return
        stats, info = self._seen
        yield from _gauges(stats, info)
        yield from _counters(stats, info)
        yield from _labelled_gauges(stats, info)


def _gauges(stats: EngineStats, info: EngineInfo) -> Iterable[Metric]:
    gauges = {
        "requests_running": ("Sequences that the engine computes", stats.running),
        "requests_waiting": ("Sequences that wait for the engine", stats.waiting),
        "kv_blocks": ("KV blocks", stats.blocks.total),
        "kv_blocks_free": ("KV blocks that no sequence holds, cached ones included", stats.blocks.free),
        "kv_blocks_cached": ("KV blocks found by hash", stats.blocks.cached),
        "kv_blocks_pinned": ("KV blocks that assistants keep", stats.blocks.pinned),
        "kv_cache_usage_ratio": ("Share of the KV blocks that are held", _usage_ratio(stats)),
        "kv_slots_allocated": ("KV slots of the blocks that sequences and pins hold", stats.slots_allocated),
        "kv_slots_used": ("Those of them that are there for a token", stats.slots_used),
        "kv_slot_usage_ratio": ("KV slots used over allocated", slot_usage_ratio(stats)),
        "kv_bytes_not_duplicated": (
            "KV bytes that the running sequences would take more if nothing were shared between them",
            kv_bytes_not_duplicated(stats, info),
        ),
        "host_blocks": ("Blocks that fit into the host tier", stats.host.total),
        "host_blocks_used": ("Blocks in the host tier", stats.host.used),
    }
    if stats.prefill_tokens_per_s is not None:
        gauges["prefill_tokens_per_second"] = ("Rate at which prompts are computed", stats.prefill_tokens_per_s)
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"trunkline_{name}", text, value=value)


def _counters(stats: EngineStats, info: EngineInfo) -> Iterable[Metric]:
    counters = {
        "prefix_cache_query_tokens": ("Prompt tokens looked up in the prefix cache", stats.query_tokens),
        "prefix_cache_hit_tokens": ("Prompt tokens found in the prefix cache", stats.hit_tokens),
        "prefill_tokens": ("Prompt tokens computed", stats.prompt_tokens_computed),
        "engine_generation_tokens": ("Tokens drawn", stats.generation_tokens),
        "preemptions": ("Sequences set back to waiting", stats.preemptions),
        "engine_steps": ("Steps", stats.steps),
        "kv_bytes_not_read": (
            "KV bytes that attention did not read because sequences that share blocks had them read once",
            kv_bytes_not_read(stats, info),
        ),
        "host_blocks_swapped_out": ("Blocks copied to the host tier", stats.host.swapped_out),
        "host_blocks_swapped_in": ("Blocks copied back from it", stats.host.swapped_in),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"trunkline_{name}", text, value=value)


def _labelled_gauges(stats: EngineStats, info: EngineInfo) -> Iterable[Metric]:
    cache = (info.kv_dtype, str(info.block_size))
    yield _family("kv_cache_info", "How KV is kept", ("kv_dtype", "block_size"), [cache], [1.0])
    uses = trunk_uses(stats, info)
    names = [(use.assistant, use.version) for use in uses]
    yield _family("trunk_readers", "Chats that read a trunk", _TRUNK, names, [use.readers for use in uses])
    yield _family("trunk_blocks", "Blocks that hold a trunk", _TRUNK, names, [use.num_blocks for use in uses])
    yield _family(
        "trunk_kv_bytes_not_duplicated",
        "KV bytes of a trunk that its readers would take more if each had its own",
        _TRUNK,
        names,
        [use.kv_bytes_not_duplicated for use in uses],
    )
    tenants = [(tenant.tenant,) for tenant in stats.tenants]
    yield _family("tenant_requests_running", "", _TENANT, tenants, [tenant.running for tenant in stats.tenants])
    yield _family("tenant_requests_waiting", "", _TENANT, tenants, [tenant.waiting for tenant in stats.tenants])
    yield _family("tenant_kv_blocks", "Blocks of its own", _TENANT, tenants, [t.blocks for t in stats.tenants])
    yield _family("tenant_service", "Its virtual token counter", _TENANT, tenants, [t.service for t in stats.tenants])


_TRUNK = ("assistant", "version")
_TENANT = ("tenant",)


def _family(
    name: str, text: str, labels: Sequence[str], rows: Sequence[Sequence[str]], values: Sequence[float]
) -> Metric:
    family = GaugeMetricFamily(f"trunkline_{name}", text, labels=labels)
    for row, value in zip(rows, values, strict=True):
        family.add_metric(row, value)
    return family


def _usage_ratio(stats: EngineStats) -> float:
    return stats.blocks.referenced / stats.blocks.total if stats.blocks.total else 0.0
