"""What is compiled, kept and checked; and each thing that can be missing."""

import shutil
from pathlib import Path

import pytest
import torch

from kernels.cpu import build, native_check
from kernels.cpu.build import NativeUnavailable, best_isa, ensure_library
from kernels.interface import find_native_library
from tests.kernels.libraries import ELEMENT_TYPES, KINDS, library

COMPILER = shutil.which("c++") or ""
AVX2 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "sse4_2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def test_the_best_instructions_of_the_processor_are_taken_up_to_a_cap() -> None:
    assert best_isa(AVX512 | {"avx512_bf16"}) == "avx512_bf16"
    assert best_isa(AVX512 | {"avx512_bf16"}, "avx512") == "avx512"
    assert best_isa(AVX512 | {"avx512_bf16"}, "avx2") == "avx2"
    assert best_isa(AVX512) == "avx512"
    assert best_isa(AVX512 - {"avx512bw"}) == "avx2"
    assert best_isa(AVX2 - {"fma"}) is None
    assert best_isa(set()) is None


def test_flags_are_read_of_an_x86_processor_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fma avx2\n\nprocessor\t: 1\nflags\t\t: fma avx2\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert build.cpu_flags(cpuinfo) == {"flags", ":", "fma", "avx2"}
    assert build.cpu_flags(tmp_path / "absent") == set()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert build.cpu_flags(cpuinfo) == set()


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=str)
def test_each_kind_passes_its_self_test(dtype: torch.dtype, isa: build.Isa) -> None:
    path = library(dtype, isa).path
    assert native_check.main(str(path), ELEMENT_TYPES[dtype]) == 0


class Machine:
    """Its programs are scripts that write down that they ran."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bin = path / "bin"
        self._bin.mkdir()
        self._log = path / "log"
        self.cache = path / "cache"
        monkeypatch.setenv("PATH", str(self._bin))

    def add(self, name: str, script: str) -> None:
        program = self._bin / name
        program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo {name} >> {self._log}\n{script}\n')
        program.chmod(0o755)

    def ran(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []

    def refusal(self) -> str:
        with pytest.raises(NativeUnavailable) as refused:
            ensure_library("float32", self.cache)
        return str(refused.value)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if best_isa(build.cpu_flags()) is None:
        pytest.skip("this processor is not one that anything is compiled for")
    return Machine(tmp_path, monkeypatch)


def test_no_compiler(machine: Machine) -> None:
    assert machine.refusal() == "there is no C++ compiler on PATH (one of c++, g++, clang++)"


def test_a_compiler_that_fails_says_its_last_error(machine: Machine) -> None:
    machine.add("g++", "echo 'x.cpp:1: error: no such thing' >&2; echo 'compilation terminated.' >&2; exit 3")
    assert machine.refusal().endswith("g++ failed (3): x.cpp:1: error: no such thing")
    assert list(machine.cache.iterdir()) == []


def test_a_compiler_that_writes_nonsense(machine: Machine) -> None:
    machine.add("g++", 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')
    assert "its self-test failed (1): OSError" in machine.refusal()


def test_a_folder_that_cannot_be_written(machine: Machine, tmp_path: Path) -> None:
    machine.add("g++", "exit 0")
    machine.cache.write_text("a file")
    assert "cannot be written" in machine.refusal()


def test_a_library_is_compiled_and_checked_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("c++", f'PATH={Path(COMPILER).parent} exec {COMPILER} "$@"')
    first = ensure_library("float32", machine.cache, "avx2")
    assert machine.ran() == ["c++"]
    assert sorted(p.suffix for p in machine.cache.iterdir()) == [".checked", ".so"]
    monkeypatch.setattr(build, "_check", None)
    assert ensure_library("float32", machine.cache, "avx2").path == first.path
    assert machine.ran() == ["c++"]


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.Build("float32", "avx2", COMPILER).digest()
    assert build.Build("float32", "avx512", COMPILER).digest() != before
    changed = copied_sources(tmp_path, monkeypatch)
    assert build.Build("float32", "avx2", COMPILER).digest() == before
    (changed / "plan.h").write_text((changed / "plan.h").read_text() + "\n")
    assert build.Build("float32", "avx2", COMPILER).digest() != before


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("decoder.cpp", "fma(high, c, low * s)", "fma(high, c, low)"),
        ("linear.h", "if (num_rows <= MAX_ROWS)", "if (*(volatile int*)nullptr == 0)"),
    ],
    ids=["wrong", "crash"],
)
def test_a_wrong_library_fails_its_self_test(
    file: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if best_isa(build.cpu_flags()) is None:
        pytest.skip("this processor is not one that anything is compiled for")
    source = copied_sources(tmp_path, monkeypatch) / file
    text = source.read_text()
    assert right in text
    source.write_text(text.replace(right, wrong))
    for _ in range(2):  # what has failed is not taken for checked the next time
        with pytest.raises(NativeUnavailable, match="its self-test failed"):
            ensure_library("float32", tmp_path / "cache", "avx2")


def test_what_cannot_be_had_costs_one_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert find_native_library(torch.float32, machine.cache) is None
    assert find_native_library(torch.float16, machine.cache) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "torch's operators are, several times slower: there is no C++ compiler on PATH" in record.getMessage()


def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "csrc"
    shutil.copytree(build._SOURCES, copy)
    monkeypatch.setattr(build, "_SOURCES", copy)
    return copy
