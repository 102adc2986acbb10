"""What a Prometheus server reads."""

from prometheus_client.parser import text_string_to_metric_families

from app.metrics import AnswerMeter, Metrics
from engine.protocol import BlockStats, EngineStats
from tests.app.clock import Clock
from tests.byte_model import byte_model_info

STATS = EngineStats(
    blocks=BlockStats(total=100, free=75, cached=50, referenced=25, pinned=5),
    running=3,
    waiting=2,
    query_tokens=1000,
    hit_tokens=900,
    prompt_tokens_computed=100,
    generation_tokens=70,
    preemptions=1,
    steps=40,
)


def samples(metrics: Metrics, stats: EngineStats | None = None) -> dict[str, float]:
    metrics.see((stats, byte_model_info()) if stats is not None else None)
    text = metrics.render().decode()
    return {
        s.name + "".join(f"{{{v}}}" for k, v in s.labels.items() if k != "le"): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if "_bucket" not in s.name
    }


def test_the_engines_numbers() -> None:
    values = samples(Metrics(), STATS)
    assert values["trunkline_engine_up"] == 1
    assert values["trunkline_requests_running"] == 3
    assert values["trunkline_requests_waiting"] == 2
    assert values["trunkline_prefix_cache_query_tokens_total"] == 1000
    assert values["trunkline_prefix_cache_hit_tokens_total"] == 900
    assert values["trunkline_kv_cache_usage_ratio"] == 0.25


def test_numbers_of_an_engine_that_has_gone_are_left_out() -> None:
    metrics = Metrics()
    samples(metrics, STATS)
    values = samples(metrics, None)
    assert values["trunkline_engine_up"] == 0
    assert not any("running" in name or "prefix_cache" in name for name in values)


def test_an_answer_is_measured() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    meter = AnswerMeter(metrics, num_choices=2, num_prompt_tokens=10, tenant="a", assistant="support")
    meter.cached(4)
    assert samples(metrics)["trunkline_answers_in_flight"] == 1
    clock.now += 2.0
    meter.tokens(0, 1)
    clock.now += 0.5
    meter.tokens(0, 3)
    meter.tokens(1, 0)
    meter.end("stop")
    meter.leave()
    meter.leave()
    values = samples(metrics)
    assert (
        values["trunkline_time_to_first_token_seconds_sum"],
        values["trunkline_time_to_first_token_seconds_count"],
    ) == (
        2.0,
        1,
    )
    assert values["trunkline_inter_token_latency_seconds_sum"] == 0.5
    assert values["trunkline_generation_tokens_total"] == 4
    assert (values["trunkline_prompt_tokens_total"], values["trunkline_cached_prompt_tokens_total"]) == (10, 4)
    assert values["trunkline_saved_prompt_tokens_total{support}{a}"] == 4
    assert values["trunkline_answers_in_flight"] == 0
    assert (values["trunkline_answers_total{stop}"], values["trunkline_answers_total{abort}"]) == (1, 1)


def test_two_apps_in_one_process() -> None:
    one, two = Metrics(), Metrics()
    one.prompt_tokens.inc(5)
    assert samples(two)["trunkline_prompt_tokens_total"] == 0


def test_in_a_pause_no_time_passes() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    meter = AnswerMeter(metrics, num_choices=1, num_prompt_tokens=10)
    for _ in range(2):
        clock.now += 1.0
        meter.pause()
        clock.now += 100.0
        meter.go_on()
        clock.now += 1.0
        meter.tokens(0, 1)
    meter.end("stop")
    meter.leave()
    values = samples(metrics)
    assert values["trunkline_time_to_first_token_seconds_sum"] == 2.0
    assert values["trunkline_inter_token_latency_seconds_sum"] == 2.0
    assert values["trunkline_answer_seconds_sum"] == 4.0
