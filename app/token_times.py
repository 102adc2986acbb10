"""Tokens that came and the times between them: counted for each token of each answer, which must cost next to nothing.

Prometheus' own counters lock and look up for each value.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class TokenTimes(Collector):
    """For one thread."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sum_s = 0.0
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        """Of intervals up to each bound, and of longer ones."""

    def add(self, num_tokens: int, interval_s: float | None) -> None:
        """So many tokens of one choice came together; `interval_s`: since the ones before them, None for the first."""
        self._num_tokens += num_tokens
        if interval_s is not None:
            self._sum_s += interval_s
            self._counts[bisect_left(_BOUNDS_S, interval_s)] += 1

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily("trunkline_generation_tokens", "Tokens generated", value=self._num_tokens)
        bounds = [*map(str, _BOUNDS_S), "+Inf"]
        yield HistogramMetricFamily(
            "trunkline_inter_token_latency_seconds",
            "ITL: from one delivery of tokens to the next of the same choice",
            buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum_s,
        )
