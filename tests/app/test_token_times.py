"""Tokens and the times between them, as Prometheus reads them."""

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.registry import Collector

from app.token_times import _BOUNDS_S, TokenTimes

INTERVALS_S = (0.0, 0.002, 0.0021, 0.01, 0.3, 5.0, 6.5)


def samples(collector: Collector) -> list[tuple[str, dict[str, str], float]]:
    """Without the time at which a counter was made."""
    found = [sample for metric in collector.collect() for sample in metric.samples]
    return [(s.name, s.labels, s.value) for s in found if not s.name.endswith("_created")]


def test_tokens_are_counted_and_intervals_sorted_as_a_histogram_of_prometheus_sorts_them() -> None:
    times = TokenTimes()
    name = "trunkline_inter_token_latency_seconds"
    theirs = Histogram(name, "ITL", buckets=_BOUNDS_S, registry=CollectorRegistry())
    times.add(3, None)
    for interval_s in INTERVALS_S:
        times.add(1, interval_s)
        theirs.observe(interval_s)
    tokens, *intervals = samples(times)
    assert tokens == ("trunkline_generation_tokens_total", {}, 3 + len(INTERVALS_S))
    assert sorted(intervals, key=repr) == sorted(samples(theirs), key=repr)
