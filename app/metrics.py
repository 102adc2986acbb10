"""What a Prometheus server reads. One registry for each app, names of our own; times are of one monotonic clock."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from app.accounting import Savings
from app.engine_metrics import EngineMetrics
from app.token_times import TokenTimes
from engine.protocol import EngineInfo, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ANSWER_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters and histograms of one gateway, and the engine's numbers as of the last look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock
        self.savings = Savings()
        self.token_times = TokenTimes()
        self._engine = EngineMetrics()
        self.registry.register(self._engine)
        self.registry.register(self.savings)
        self.registry.register(self.token_times)
        self.http_requests = Counter(
            "trunkline_http_requests", "HTTP requests answered", ["method", "route", "status"], registry=self.registry
        )
        self.answers = Counter(
            "trunkline_answers", "Choices by how they ended", ["finish_reason"], registry=self.registry
        )
        self.prompt_tokens = Counter("trunkline_prompt_tokens", "Prompt tokens of all requests", registry=self.registry)
        self.cached_prompt_tokens = Counter(
            "trunkline_cached_prompt_tokens", "Prompt tokens taken from the prefix cache", registry=self.registry
        )
        self.answers_in_flight = Gauge("trunkline_answers_in_flight", "Generations now open", registry=self.registry)
        self.ttft = Histogram("trunkline_time_to_first_token_seconds", "TTFT", buckets=_TTFT_S, registry=self.registry)
        self.answer_seconds = Histogram(
            "trunkline_answer_seconds", "From submission to the last token", buckets=_ANSWER_S, registry=self.registry
        )

    def see(self, seen: tuple[EngineStats, EngineInfo] | None) -> None:
        """What the engine says now; None: none is there, and its numbers are left out."""
        self._engine.see(seen)
        if seen is not None:
            self.savings.price(seen[0].prefill_tokens_per_s)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


class AnswerMeter:
    """Measures one generation. `leave` may be called at any moment, more than once."""

    def __init__(
        self,
        metrics: Metrics,
        num_choices: int,
        num_prompt_tokens: int,
        *,
        tenant: str = "",
        assistant: str | None = None,
        is_midway: bool = False,
    ) -> None:
        """`is_midway`: it began at another gateway, which has counted its prompt and seen its first token."""
        self._metrics = metrics
        self._tenant = tenant
        self._assistant = assistant
        self._start = metrics.clock()
        self._paused_at = self._start
        self._last: list[float | None] = [self._start if is_midway else None] * num_choices
        self._num_running = num_choices
        self._is_open = True
        metrics.answers_in_flight.inc()
        if not is_midway:
            metrics.prompt_tokens.inc(num_prompt_tokens)

    def cached(self, num_tokens: int) -> None:
        self._metrics.cached_prompt_tokens.inc(num_tokens)
        self._metrics.savings.add(self._tenant, self._assistant, num_tokens)

    def tokens(self, choice: int, num_tokens: int) -> None:
        """So many tokens of a choice arrived."""
        if num_tokens == 0:
            return
        now, last = self._metrics.clock(), self._last[choice]
        if last is None:
            self._metrics.ttft.observe(now - self._start)
        self._metrics.token_times.add(num_tokens, None if last is None else now - last)
        self._last[choice] = now

    def pause(self) -> None:
        """From now until `go_on` no time passes for it."""
        self._paused_at = self._metrics.clock()

    def go_on(self) -> None:
        gap = self._metrics.clock() - self._paused_at
        self._start += gap
        self._last = [None if last is None else last + gap for last in self._last]

    def end(self, finish_reason: str) -> None:
        """A choice ended."""
        self._num_running -= 1
        self._metrics.answers.labels(finish_reason).inc()
        self._metrics.answer_seconds.observe(self._metrics.clock() - self._start)

    def leave(self, finish_reason: str = "abort") -> None:
        """Nobody reads any more; choices that still run end with `finish_reason`."""
        if self._is_open:
            self._is_open = False
            self._metrics.answers_in_flight.dec()
            self._metrics.answers.labels(finish_reason).inc(self._num_running)
