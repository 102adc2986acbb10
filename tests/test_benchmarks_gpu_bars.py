"""What is said of figures that a device has given."""

import pytest

from benchmarks.gpu_bars import bars_of, ratios_of, summary, wrong_of
from benchmarks.gpu_work import ON_A_DEVICE

CEILINGS = {"copy": {"bytes_per_s": 4e12}, "product": {"flops_per_s": 800e12}}


def ms(value: float) -> dict[str, float]:
    return {"ms": value, "spread": 0.0}


def step(graph: float) -> dict[str, object]:
    return {
        "graph": ms(graph),
        "eager": ms(2 * graph),
        "flat_graph": ms(3 * graph),
        "decode": {"steps": 16, "s": 16 * graph / 1000},
    }


DOCUMENT = {
    "ceilings": CEILINGS,
    "attention": {
        "Llama-3-8B 128 x 2048": {"private": ms(12.0), "shared": ms(6.0), "grouped": ms(2.0)},
        "Llama-3-8B 128 x 8192": {"private": ms(40.0), "shared": ms(16.0), "grouped": ms(4.0)},
    },
    "decode": {"Llama-3-8B 32 x 2048": step(5.0), "Llama-3-8B 256 x 8192": step(20.0), "section_s": 3.0},
    "prompts": {
        "cold": {"chunks": [2048], "cached": 0, "ms": 80.0},
        "hot": {"chunks": [32], "cached": 2016, "ms": 8.0},
    },
    "moves": {"gather": {"bytes_per_s": 3e12, **ms(1.0)}, "swap_in": {"bytes_per_s": 5e10, **ms(5.0)}},
    "nodes": {
        "2 x 16": {"layers": 32, "saved_bytes": 16 * 131072, "flat": ms(1.0), "grouped": ms(2.0)},
        "32 x 4096": {"layers": 32, "saved_bytes": 31 * 4096 * 131072, "flat": ms(4.0), "grouped": ms(4.08)},
    },
}


def test_ratios() -> None:
    ratios = ratios_of(DOCUMENT, ON_A_DEVICE)
    row = ratios["attention"]["Llama-3-8B 128 x 2048"]
    assert row["private_of_copy"] == pytest.approx(128 * 2304 * 131072 / 0.012 / 4e12)
    assert (row["private_over_shared"], row["shared_over_grouped"]) == (2.0, 3.0)
    decode = ratios["decode"]["Llama-3-8B 32 x 2048"]
    assert (decode["eager_over_graph"], decode["flat_over_grouped"]) == (2.0, 3.0)
    assert decode["decode_over_graph"] == pytest.approx(1.0)
    assert decode["graph_of_floor"] == pytest.approx(decode["floor_ms"] / 5.0)
    assert ratios["prompts"]["cold"]["floor_ms"] == pytest.approx(2 * 6.98e9 * 2048 / 800e12 * 1000, rel=0.05)
    assert (ratios["prompts"]["cold_over_hot"], ratios["prompts"]["recompute_over_swap_in"]) == (10.0, 16.0)
    assert ratios["moves"] == {"gather": 0.75}


def test_bars() -> None:
    ratios = ratios_of(DOCUMENT, ON_A_DEVICE)
    bars = bars_of(DOCUMENT, ratios, ON_A_DEVICE)
    worst = min(row["graph_of_floor"] for row in ratios["decode"].values())
    assert bars == {
        "attention_of_copy": {"value": 0.805, "at_least": 0.8, "holds": True},
        "shared_over_grouped": {"value": 4.0, "at_least": 3.0, "holds": True},
        "worst_node_that_should_pay": {"value": 1.02, "at_most": 1.03, "holds": True},
        "step_of_roofline": {"value": round(worst, 3), "at_least": 0.65, "holds": worst >= 0.65},
        "gather_of_copy": {"value": 0.75, "at_least": 0.8, "holds": False},
    }


def test_without_ceilings_there_is_nothing_to_compare_with() -> None:
    document = {**DOCUMENT, "ceilings": {"failure": {"error": "e", "traceback": "t"}}}
    assert ratios_of(document, ON_A_DEVICE) == {}
    assert bars_of(document, {}, ON_A_DEVICE) == {}


def test_what_is_wrong_is_found_at_any_depth() -> None:
    correctness = {
        "tails": {"holds": True, "same_bits_twice": False},
        "norms": {"holds": True, "sum": {"holds": False}},
        "nodes": {"error": "ValueError: x", "traceback": "...", "holds": False},
        "section_s": 3.0,
    }
    attention = {"failure": {"error": "OutOfMemoryError: no", "traceback": "..."}}
    assert wrong_of({"correctness": correctness, "attention": attention, "dry_run": False}) == [
        "correctness / tails: same_bits_twice is false",
        "correctness / norms / sum",
        "correctness / nodes",
        "attention: OutOfMemoryError: no",
    ]


def test_a_section_is_one_line_with_its_faults() -> None:
    line = summary("ceilings", {**CEILINGS, "section_s": 1.25})
    assert line == "[ceilings, 1.2 s] copy 4.000 TB/s, product 800.000 TFLOP/s"
    failed = summary("moves", {"failure": {"error": "E: e", "traceback": ""}, "device_lost": "gone", "section_s": 2.0})
    assert failed == "[moves, 2.0 s]  FAILED E: e DEVICE_LOST: gone"
    assert summary("draws", {"killed": "it hung"}).endswith("KILLED: it hung")
    wrong = summary("correctness", {"tails": {"holds": False}, "section_s": 1.0})
    assert wrong == "[correctness, 1.0 s] 1 kernels and shapes compared WRONG: correctness / tails"
