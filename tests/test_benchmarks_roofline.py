"""What is said of a step once its time and the machine's ceilings are known."""

from xml.etree import ElementTree

from benchmarks.ceilings import Ceilings, Reading
from benchmarks.roofline import add_served, cases, chart, row, table
from benchmarks.step_work import Work
from benchmarks.turns import Times

READINGS = [Reading(False, 2, 20.0, 24.0), Reading(True, 1, 15.0, 20.0), Reading(True, 2, 25.0, 36.0)]
CEILINGS = Ceilings(2, READINGS, 22.0, {"bfloat16": 2.0, "float32": 0.3})
WORK = Work(300_000_000, 24_000_000, 30_000_000, 6_000_000, 10_000_000_000)
TIMES = Times([19.0, 20.0, 40.0], [38.0, 40.0, 41.0])


def test_names_of_the_cases_are_told_apart() -> None:
    names = [case.name for case in cases(2, 512)]
    assert names[:7] == [f"W{i}" for i in range(1, 8)]
    assert names[7:] == ["decode 1", "decode 8", "decode 32", "decode 64", "decode 32, 1 thread", "prefill 1000"]
    assert "decode 32, 1 thread" not in [case.name for case in cases(1, 512)]


def test_a_step_beside_its_floor() -> None:
    memory_bound = row(cases(2, 512)[0], WORK, TIMES, CEILINGS, "bfloat16")
    assert memory_bound["bytes"]["all"] == 360_000_000
    assert memory_bound["bytes_ms"] == {"huge_pages": 10.0, "small_pages": 15.0}
    assert (memory_bound["flops_ms"], memory_bound["floor_ms"]) == (5.0, 10.0)
    assert (memory_bound["step_ms"], memory_bound["fraction"], memory_bound["gb_s"]) == (20.0, 0.5, 18.0)
    compute_bound = row(cases(2, 512)[0], WORK, TIMES, CEILINGS, "float32")
    assert compute_bound["floor_ms"] == compute_bound["flops_ms"] == 33.33


def test_one_thread_is_held_to_what_one_thread_can_do() -> None:
    one_thread = next(case for case in cases(2, 512) if case.num_threads == 1)
    found = row(one_thread, WORK, TIMES, CEILINGS, "bfloat16")
    assert found["bytes_ms"]["huge_pages"] == 18.0
    assert found["flops_ms"] == 10.0


def test_without_a_compiler_copying_says_how_fast_memory_is_read() -> None:
    assert Ceilings(2, [], 22.0, {"float32": 0.3}).read_gb_s(huge_pages=True, num_threads=2) == 11.0


def test_table_and_picture_show_every_step() -> None:
    rows = {name: row(cases(2, 512)[0], WORK, TIMES, CEILINGS, "bfloat16") for name in ("W1", "W2 & more")}
    add_served(rows, {"W1": {"median": {"itl_p50_ms": 25.0}}, "date": "today"})
    lines = table(rows).splitlines()
    assert lines[1].split() == [
        "W1",
        "360",
        "10.0",
        "10.0",
        "5.0",
        "20.0",
        "18.0",
        "50%",
        "served",
        "25.0",
        "ms,",
        "40%",
    ]
    assert lines[2].endswith("50%")
    rows["prefill 1000"] = rows["W1"] | {"step_ms": 500.0}
    document = {"date": "today", "model": {"name": "m", "dtype": "bfloat16"}, "steps": rows}
    picture = ElementTree.fromstring(chart(document))
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert {"W1", "W2 & more", "20.0 ms, 50%"} <= set(texts)
    widths = [float(e.get("width") or 0) for e in picture.iter() if e.tag.endswith("rect") and e.get("height") == "16"]
    assert widths == [240.0, 240.0] * 2, "the floor is half of the longest bar, the rest the other half"
