"""What is compiled, kept and checked; and each thing that can be missing."""

import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.cpu import build, native_check
from kernels.cpu.build import NativeUnavailable, best_isa, ensure_library, find_library
from kernels.interface import find_native_library
from tests.conftest import REPOSITORY
from tests.kernels.libraries import ELEMENT_TYPES, KINDS, compiler, library

AVX2 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "sse4_2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


def test_the_best_instructions_of_the_processor_are_taken_up_to_a_cap() -> None:
    assert best_isa(AMX) == "amx_bf16"
    assert best_isa(AMX, "avx512_bf16") == "avx512_bf16"
    assert best_isa(AMX - {"amx_tile"}) == "avx512_bf16"
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
        self.bin = path / "bin"
        self.bin.mkdir()
        self.log = path / "log"
        self.cache = path / "cache"
        self.real_path = os.environ["PATH"]
        monkeypatch.setenv("PATH", str(self.bin))

    def add(self, name: str, script: str) -> None:
        program = self.bin / name
        program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo {name} >> {self.log}\n{script}\n')
        program.chmod(0o755)

    def suffixes(self) -> list[str]:
        return sorted(path.suffix for path in self.cache.iterdir())

    def ran(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def refusal(self) -> str:
        with pytest.raises(NativeUnavailable) as refused:
            ensure_library("float32", self.cache)
        return str(refused.value)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if best_isa(build.cpu_flags()) is None:
        pytest.skip("this processor is not one that anything is compiled for")
    return Machine(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def avx2_library() -> Path:
    return library(torch.float32, "avx2").path


@pytest.fixture
def machine_with_compiler(avx2_library: Path, machine: Machine) -> Machine:
    """It writes what the real one has written before, which takes less time."""
    write = f'while [ "$1" != -o ]; do shift; done; cp {avx2_library} "$2"'
    machine.add("c++", f'PATH={machine.real_path}; [ "$1" = --version ] || {{ {write}; }}')
    return machine


def test_no_compiler(machine: Machine) -> None:
    assert machine.refusal() == "there is no C++ compiler on PATH (one of c++, g++, clang++)"


def test_a_compiler_that_fails_says_its_last_error(machine: Machine) -> None:
    machine.add("g++", "echo 'x.cpp:1: error: no such thing' >&2; echo 'compilation terminated.' >&2; exit 3")
    assert machine.refusal().endswith("g++ failed (3): x.cpp:1: error: no such thing")
    assert list(machine.cache.iterdir()) == []


def test_a_compiler_that_writes_nonsense(machine: Machine) -> None:
    machine.add("g++", 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')
    assert "its self-test failed (1): OSError" in machine.refusal()


def test_a_folder_that_cannot_be_made_or_written(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("g++", "exit 0")
    machine.cache.write_text("a file")
    assert machine.refusal().endswith("cache cannot be made: File exists")
    machine.cache.unlink()
    access = os.access  # refuses root nothing
    monkeypatch.setattr(os, "access", lambda path, mode: path != machine.cache and access(path, mode))
    assert machine.refusal().endswith("cache cannot be written")
    assert machine.ran() == []


def test_a_compiler_that_cannot_be_run(machine: Machine) -> None:
    machine.add("g++", "")
    (machine.bin / "g++").write_text("not a program")
    assert "Exec format error" in machine.refusal()


def test_a_library_is_compiled_and_checked_once(
    machine_with_compiler: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_with_compiler
    assert find_library("float32", machine.cache, "avx2") is None
    assert machine.ran() == []
    first = ensure_library("float32", machine.cache, "avx2")
    assert machine.ran() == ["c++"]
    found = find_library("float32", machine.cache, "avx2")
    assert found is not None
    assert found.path == first.path
    assert machine.suffixes() == [".checked", ".so"]
    last_written_ns = machine.cache.stat().st_mtime_ns
    monkeypatch.setattr(build, "_check", None)
    assert ensure_library("float32", machine.cache, "avx2").path == first.path
    assert machine.ran() == ["c++"]
    assert machine.cache.stat().st_mtime_ns == last_written_ns  # a folder that is read only serves too


def test_a_library_that_is_not_what_was_checked_is_compiled_again(machine_with_compiler: Machine) -> None:
    machine = machine_with_compiler
    path = ensure_library("float32", machine.cache, "avx2").path
    whole = path.read_bytes()
    path.unlink()  # not written over: this process has it mapped
    path.write_bytes(whole[: len(whole) // 2])
    ensure_library("float32", machine.cache, "avx2")
    assert machine.ran() == ["c++", "c++"]
    assert path.read_bytes() == whole


def test_two_engines_that_start_together_write_the_same(avx2_library: Path, machine: Machine) -> None:
    both_compile = f"until [ $(wc -l < {machine.log}) = 2 ]; do sleep 0.01; done"
    write = f'while [ "$1" != -o ]; do shift; done; cp {avx2_library} "$2"'
    machine.add("c++", f'PATH={machine.real_path}; [ "$1" = --version ] || {{ {both_compile}; {write}; }}')
    with ThreadPoolExecutor(2) as threads:
        starts = [threads.submit(ensure_library, "float32", machine.cache, "avx2") for _ in range(2)]
    assert starts[0].result().path == starts[1].result().path
    assert machine.suffixes() == [".checked", ".so"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_compiler_ends_with_its_engine_and_leaves_nothing(machine: Machine, number: signal.Signals) -> None:
    fifo = machine.bin / "fifo"
    os.mkfifo(fifo)
    compiling = f"exec > {fifo}; echo compiling; PATH={machine.real_path} exec sleep 1000"
    machine.add("c++", f'[ "$1" = --version ] || {{ {compiling}; }}')
    program = f"from kernels.cpu.build import *; ensure_library('float32', Path({str(machine.cache)!r}))"
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY) as engine, fifo.open() as compiler_output:
        assert compiler_output.readline() == "compiling\n"
        engine.send_signal(number)
        assert compiler_output.read() == ""  # its end comes when nobody has it open any more
    assert list(machine.cache.iterdir()) == []


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = str(compiler())
    before = build.Build("float32", "avx2", program).digest()
    assert build.Build("float32", "avx512", program).digest() != before
    changed = copied_sources(tmp_path, monkeypatch)
    assert build.Build("float32", "avx2", program).digest() == before
    for path in sorted(changed.iterdir()):
        path.write_text(path.read_text() + "\n")
        assert build.Build("float32", "avx2", program).digest() != before
        before = build.Build("float32", "avx2", program).digest()


def test_every_source_is_compiled() -> None:
    included = set(re.findall(r'#include "(.+)"', "".join(p.read_text() for p in build._SOURCES.iterdir())))
    assert included | {"library.cpp"} == {p.name for p in build._SOURCES.iterdir()}


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
    compiler()
    source = copied_sources(tmp_path, monkeypatch) / file
    text = source.read_text()
    assert right in text
    source.write_text(text.replace(right, wrong))
    with pytest.raises(NativeUnavailable, match="its self-test failed"):
        ensure_library("float32", tmp_path / "cache", "avx2")
    assert list((tmp_path / "cache").glob("*.checked")) == []


def test_what_cannot_be_had_costs_one_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert find_native_library(torch.float32, machine.cache) is None
    assert find_native_library(torch.float16, machine.cache) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "torch's operators are, two to four times slower: there is no C++ compiler on PATH" in record.getMessage()


def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "csrc"
    shutil.copytree(build._SOURCES, copy)
    monkeypatch.setattr(build, "_SOURCES", copy)
    return copy
