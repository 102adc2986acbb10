"""What sharing saved, and the figures of what it saves now."""

from typing import Any

import msgspec
import pytest

from app.accounting import Savings, kv_bytes_not_duplicated, slot_usage_ratio, trunk_uses
from engine.protocol import BlockStats, EngineStats, TrunkPin, TrunkStats
from tests.byte_model import byte_model_info

INFO = msgspec.structs.replace(byte_model_info(block_size=16), kv_bytes_per_token=100)


def stats(**fields: Any) -> EngineStats:
    numbers = dict.fromkeys(
        (
            *("running", "waiting", "query_tokens", "hit_tokens", "prompt_tokens_computed", "generation_tokens"),
            *("preemptions", "steps"),
        ),
        0,
    )
    blocks = BlockStats(total=10, free=10, cached=0, referenced=0, pinned=0)
    return EngineStats(blocks=blocks, **numbers, **fields)


def row(tenant: str, assistant: str | None, prompt_tokens: int, prefill_seconds: float) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "assistant": assistant,
        "prompt_tokens": prompt_tokens,
        "prefill_seconds": prefill_seconds,
    }


def test_tokens_are_counted_by_tenant_and_assistant() -> None:
    savings = Savings()
    savings.add("b", None, 5)
    savings.add("a", "support", 10)
    savings.add("a", "support", 20)
    savings.add("a", None, 0)
    assert savings.rows() == [row("a", None, 0, 0.0), row("a", "support", 30, 0.0), row("b", None, 5, 0.0)]


def test_seconds_come_at_the_rate_of_the_moment_and_not_before_there_is_one() -> None:
    savings = Savings()
    savings.add("a", "support", 100)
    for rate in (None, 0.0):
        savings.price(rate)
        assert savings.rows() == [row("a", "support", 100, 0.0)]
    savings.price(50.0)
    assert savings.rows() == [row("a", "support", 100, 2.0)]
    savings.price(1.0)
    assert savings.rows() == [row("a", "support", 100, 2.0)], "each token is priced once"
    savings.add("a", "support", 10)
    savings.price(100.0)
    assert savings.rows() == [row("a", "support", 110, 2.1)]


def test_a_trunk_saves_what_its_other_readers_would_take() -> None:
    trunks = [
        TrunkStats(trunk_id="shop@of.a@12ab.0f", state=TrunkPin.PINNED, num_tokens=40, num_blocks=3, readers=5),
        TrunkStats(trunk_id="idle@34cd", state=None, num_tokens=40, num_blocks=3, readers=0),
    ]
    busy, idle = trunk_uses(stats(trunks=trunks), INFO)
    assert (busy.assistant, busy.version, busy.state) == ("shop@of.a", "12ab", "pinned")
    assert (busy.num_tokens, busy.num_blocks, busy.readers) == (40, 3, 5)
    assert busy.kv_bytes_not_duplicated == (5 - 1) * 40 * 100
    assert (idle.state, idle.kv_bytes_not_duplicated) == ("computing", 0)


def test_a_trunk_that_two_engines_hold_is_one_row() -> None:
    trunks = [
        TrunkStats(trunk_id="shop@12ab.0f", state=state, num_tokens=40, num_blocks=3, readers=readers)
        for state, readers in ((None, 0), (TrunkPin.PINNED, 5), (TrunkPin.OVER_BUDGET, 2))
    ]
    (use,) = trunk_uses(stats(trunks=trunks), INFO)
    assert (use.state, use.num_tokens, use.num_blocks, use.readers) == ("pinned", 40, 9, 7)
    assert use.kv_bytes_not_duplicated == (4 + 1) * 40 * INFO.kv_bytes_per_token


def test_bytes_and_slots_of_the_whole_engine() -> None:
    assert kv_bytes_not_duplicated(stats(not_duplicated_blocks=7), INFO) == 7 * 16 * 100
    assert slot_usage_ratio(stats(slots_allocated=64, slots_used=62)) == pytest.approx(0.96875)
    assert slot_usage_ratio(stats()) == 1.0, "nothing is held, so nothing is wasted"
