"""Compiles the C++ decoder on the machine it runs on: once, with that machine's compiler, kept by its digest.

Nothing compiled is ever shipped: a library is good for one set of sources, flags and compiler. Before its first use it
computes a small model in a child process, so that a broken compiler costs a warning and not the engine.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kernels.cpu.native import NativeLibrary

_log = logging.getLogger(__name__)

Isa = Literal["avx512_bf16", "avx512", "avx2"]
ISAS: tuple[Isa, ...] = get_args(Isa)
"""Best first."""
ElementType = Literal["bfloat16", "float32"]

_AVX2 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NEEDED: dict[Isa, set[str]] = {"avx512_bf16": _AVX512 | {"avx512_bf16"}, "avx512": _AVX512, "avx2": _AVX2}
_FLAGS: dict[Isa, tuple[str, ...]] = {
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
}
_SOURCES = Path(__file__).parent / "csrc"
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_TIMEOUT_S = 300
_CHECK_TIMEOUT_S = 120


class NativeUnavailable(Exception):
    """The C++ decoder cannot be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Build:
    """What is compiled."""

    element_type: ElementType
    isa: Isa
    compiler: str

    @property
    def flags(self) -> tuple[str, ...]:
        is_bf16 = int(self.element_type == "bfloat16")
        common = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
        return (*common, *_FLAGS[self.isa], f"-DELEMENT_IS_BF16={is_bf16}")

    def digest(self) -> str:
        """Of all that decides what comes out."""
        version = subprocess.run([self.compiler, "--version"], capture_output=True, check=False).stdout
        digest = hashlib.sha256(version)
        for path in sorted(_SOURCES.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update("\0".join(self.flags).encode())
        return digest.hexdigest()[:20]


def best_isa(cpu_flags: set[str], max_isa: Isa | None = None) -> Isa | None:
    """The best one that the processor has and `max_isa` allows."""
    allowed = ISAS if max_isa is None else ISAS[ISAS.index(max_isa) :]
    return next((isa for isa in allowed if cpu_flags >= _NEEDED[isa]), None)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """As Linux names them; none on other systems and processors."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    try:
        text = cpuinfo.read_text()
    except OSError:
        return set()
    return next((set(line.split()) for line in text.splitlines() if line.startswith("flags")), set())


def ensure_library(element_type: ElementType, cache_dir: Path, max_isa: Isa | None = None) -> NativeLibrary:
    """The checked library, compiled first if it is not in `cache_dir`. Raises NativeUnavailable."""
    isa = best_isa(cpu_flags(), max_isa)
    if element_type == "float32" and isa == "avx512_bf16":
        isa = "avx512"  # the bf16 product is of no use
    if isa is None:
        raise NativeUnavailable(f"this processor has none of {', '.join(ISAS)}")
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable(f"there is no C++ compiler on PATH (one of {', '.join(_COMPILERS)})")
    build = Build(element_type, isa, compiler)
    library = cache_dir / f"decoder-{element_type}-{isa}-{build.digest()}.so"
    checked = library.with_suffix(".checked")
    if not checked.exists():
        if not library.exists():
            _compile(build, library)
        _check(library, element_type)
        checked.touch()
    try:
        return NativeLibrary(library)
    except OSError as e:
        raise NativeUnavailable(f"{library} cannot be loaded: {e}") from e


def _compile(build: Build, library: Path) -> None:
    _log.info("compiling the CPU kernels for %s (once; a few seconds)", build.isa)
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=library.stem, dir=library.parent)
    except OSError as e:
        raise NativeUnavailable(f"{library.parent} cannot be written: {e}") from e
    os.close(handle)
    command = [build.compiler, *build.flags, str(_SOURCES / "decoder.cpp"), "-o", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise NativeUnavailable(f"{build.compiler} failed ({done.returncode}): {_last_line(done.stderr)}")
        # whoever else compiles it at the same time writes the same
        os.replace(name, library)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NativeUnavailable(f"{build.compiler} failed: {e}") from e
    finally:
        Path(name).unlink(missing_ok=True)


def _check(library: Path, element_type: ElementType) -> None:
    root = Path(__file__).parents[2]
    program = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from kernels.cpu.native_check import main;"
        f" sys.exit(main({str(library)!r}, {element_type!r}))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NativeUnavailable(f"its self-test could not be run: {e}") from e
    if done.returncode != 0:
        raise NativeUnavailable(f"its self-test failed ({done.returncode}): {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1]
