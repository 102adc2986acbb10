"""The check of a GPU runs from end to end without one, and goes on whatever happens to a section."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.document import Document
from benchmarks.gpu_check import REPOSITORY, SECTIONS, WHOLE_S, Check
from benchmarks.gpu_work import DRY, attention_cases, decode_cases
from tests.interpreted.child import need_triton


def test_a_dry_run_measures_everything(tmp_path: Path) -> None:
    need_triton()
    output, picture = tmp_path / "gpu.json", tmp_path / "gpu.svg"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--output", output, "--picture", picture]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document["wrong"] == []
    assert [name for name in SECTIONS if f"[{name}, " in done.stdout] == list(SECTIONS)
    correctness = document["correctness"]
    assert sum(row["holds"] for row in correctness.values() if isinstance(row, dict)) == 8
    for case in attention_cases(DRY):
        row = document["attention"][case.name]
        assert row["grouped_right"]["holds"]
        assert all(row[name]["ms"] > 0 for name in ("private", "shared", "grouped"))
    for case in decode_cases(DRY):
        row = document["decode"][case.name]
        assert row["graph_gives_the_eager_tokens"]
        assert row["decode"]["steps"] == 2
    prompts = document["prompts"]
    assert [prompts[name]["chunks"] for name in ("cold", "cold in chunks of 16", "hot")] == [[24], [16, 8], [8]]
    assert len({prompts[name]["token"] for name in ("cold", "cold in chunks of 16", "hot")}) == 1
    assert document["draws"]["tokens"] == {"holds": True, "rows": 8, "equal": 8, "equal_but_for_rounding": 8}
    # whether the one node should pay is a matter of how fast a copy was just then
    assert set(document["bars"]) - {"worst_node_that_should_pay"} == {
        "attention_of_copy",
        "shared_over_grouped",
        "step_of_roofline",
        "copy_blocks_of_copy",
        "gather_of_copy",
        "scatter_of_copy",
    }
    assert {*document["ratios"]["attention"]} == {case.name for case in attention_cases(DRY)}
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_torch_triton_and_numpy_are_all_that_is_imported() -> None:
    need_triton()
    program = """
import sys, numpy, torch, triton
before = set(sys.modules)
import benchmarks.gpu_check, benchmarks.gpu_sections
ours = {"benchmarks", "engine", "kernels", "numpy", "torch", "triton", *sys.stdlib_module_names}
sys.exit(", ".join({name.partition(".")[0] for name in set(sys.modules) - before} - ours) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_sections_fit_the_time() -> None:
    assert sum(SECTIONS.values()) <= WHOLE_S < 360


def run(tmp_path: Path, program: str, *names: str, **limits: float) -> list[tuple[str, Document]]:
    """What is reported of sections that a script measures; `say` in it writes its lines at once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, time\n"
        "def say(*whats): os.write(1, ''.join(json.dumps(w) + '\\n' for w in whats).encode())\n"
        "for name in [a.partition('=')[0] for a in sys.argv[1:]]:\n"
        "    done = {'begins': name}, {'ends': name, 'found': {'by': os.getpid()}}\n" + program
    )
    reported: list[tuple[str, Document]] = []

    def report(name: str, found: Document) -> None:
        reported.append((name, found))

    Check([sys.executable, str(script)], dict.fromkeys(names, 0.0), report, **limits).run()
    return reported


def names_and_ends(reported: list[tuple[str, Any]]) -> list[tuple[str, str | None]]:
    return [(name, found.get("killed")) for name, found in reported]


def test_sections_are_measured_by_one_process(tmp_path: Path) -> None:
    reported = run(tmp_path, "    say(*done)\n", "a", "b", "c")
    assert names_and_ends(reported) == [("a", None), ("b", None), ("c", None)]
    assert len({found["by"] for _, found in reported}) == 1


def test_behind_a_process_that_dies_another_goes_on(tmp_path: Path) -> None:
    program = "    if name == 'b':\n        say({'begins': 'b'})\n        os._exit(7)\n    say(*done)\n"
    reported = run(tmp_path, program, "a", "b", "c")
    assert names_and_ends(reported) == [("a", None), ("b", "its process ended with 7"), ("c", None)]
    assert reported[0][1]["by"] != reported[2][1]["by"]


def test_a_device_that_is_lost_between_two_sections_costs_none_of_them(tmp_path: Path) -> None:
    reported = run(tmp_path, "    say(*done)\n    if name == 'b': os._exit(1)\n", "a", "b", "c")
    assert names_and_ends(reported) == [("a", None), ("b", None), ("c", None)]


def test_a_section_that_hangs_is_ended_and_what_it_had_found_is_kept(tmp_path: Path) -> None:
    begins = "say({'begins': 'a'}, {'finds': 'x', 'found': [1, 2]})"
    program = f"    if name == 'a':\n        {begins}\n        time.sleep(3600)\n    say(*done)\n"
    (name, found), *others = run(tmp_path, program, "a", "b", grace_s=0.0)
    assert (name, found) == ("a", {"x": [1, 2], "killed": "it took too long and was ended"})
    assert names_and_ends(others) == [("b", None)]


def test_a_process_that_says_nothing_is_put_down_to_each_section(tmp_path: Path) -> None:
    reported = run(tmp_path, "    sys.exit(3)\n", "a", "b")
    assert names_and_ends(reported) == [("a", "its process ended with 3"), ("b", "its process ended with 3")]


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    reported = run(tmp_path, "    say(*done)\n", "a", "b", whole_s=0.0)
    ended = "not begun: the time of all was used up"
    assert names_and_ends(reported) == [("a", ended), ("b", ended)]
