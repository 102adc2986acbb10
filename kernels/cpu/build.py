"""Compiles the C++ decoder on the machine it runs on: once, with that machine's compiler, kept by its digest.

Nothing compiled is ever shipped: a library is good for one set of sources, flags and compiler. Before its first use it
computes a small model in a child process, so that a broken compiler costs a warning and not the engine.
"""

import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kernels.cpu.native import NativeLibrary

_log = logging.getLogger(__name__)

Isa = Literal["amx_bf16", "avx512_bf16", "avx512", "avx2"]
ISAS: tuple[Isa, ...] = get_args(Isa)
"""Best first."""
ElementType = Literal["bfloat16", "float32"]

_AVX2 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}
_NEEDED: dict[Isa, set[str]] = {
    "amx_bf16": _AVX512_BF16 | {"amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
}
_BF16_ONLY: tuple[Isa, ...] = ("amx_bf16", "avx512_bf16")
_FLAGS: dict[Isa, tuple[str, ...]] = {
    "amx_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
}
_REQUEST_TILES = (158, 0x1023, 18)
"""arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)"""
_SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
_COMPILE_TIMEOUT_S = 300
_CHECK_TIMEOUT_S = 120
_RUN_UNTIL_PARENT_DIES = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "  # PR_SET_PDEATHSIG, SIGTERM
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Linux, as all that is compiled for."""


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
        """Of all that decides what comes out. Raises OSError and subprocess.TimeoutExpired."""
        version = subprocess.run(
            [self.compiler, "--version"], capture_output=True, timeout=_CHECK_TIMEOUT_S, check=False
        ).stdout
        digest = hashlib.sha256(version)
        for path in sorted(_SOURCES.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update("\0".join(self.flags).encode())
        return digest.hexdigest()[:20]

    def library_path(self, cache_dir: Path) -> Path:
        """Raises what `digest` does."""
        return cache_dir / f"decoder-{self.element_type}-{self.isa}-{self.digest()}.so"


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


def usable_isa(max_isa: Isa | None = None, element_type: ElementType = "bfloat16") -> Isa | None:
    """The best one that `max_isa` and the system allow: Linux gives tiles to those that ask for them, if at all."""
    flags = cpu_flags()
    if "amx_tile" in flags and ctypes.CDLL(None).syscall(*_REQUEST_TILES) != 0:
        flags.remove("amx_tile")
    isa = best_isa(flags, max_isa)
    # products of bf16 are of no use to floats
    return "avx512" if element_type == "float32" and isa in _BF16_ONLY else isa


def ensure_library(element_type: ElementType, cache_dir: Path, max_isa: Isa | None = None) -> NativeLibrary:
    """The checked library, compiled first if it is not in `cache_dir`. Raises NativeUnavailable.

    Several processes may do so at the same time: each writes the same. A folder that has it is not written to.
    """
    build = _choose_build(element_type, max_isa)
    try:
        library = build.library_path(cache_dir)
        if not _is_checked(library):
            _compile(build, library)
            digest = _sha256(library)
            _check(library, element_type)
            _checked_path(library).write_bytes(digest)
        return NativeLibrary(library)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NativeUnavailable(str(e)) from e


def find_library(element_type: ElementType, cache_dir: Path, max_isa: Isa | None = None) -> NativeLibrary | None:
    """What `ensure_library` made of the same sources with the same compiler, if it is there.

    Raises NativeUnavailable where there can be none.
    """
    build = _choose_build(element_type, max_isa)
    try:
        library = build.library_path(cache_dir)
        return NativeLibrary(library) if _is_checked(library) else None
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NativeUnavailable(str(e)) from e


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _choose_build(element_type: ElementType, max_isa: Isa | None) -> Build:
    isa = usable_isa(max_isa, element_type)
    if isa is None:
        raise NativeUnavailable(f"this processor has none of {', '.join(ISAS)}")
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable(f"there is no C++ compiler on PATH (one of {', '.join(COMPILERS)})")
    return Build(element_type, isa, compiler)


def _checked_path(library: Path) -> Path:
    """Holds the digest of the library that passed its self-test."""
    return library.with_suffix(".checked")


def _is_checked(library: Path) -> bool:
    checked = _checked_path(library)
    return library.exists() and checked.exists() and checked.read_bytes() == _sha256(library)


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _compile(build: Build, library: Path) -> None:
    folder = library.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise NativeUnavailable(f"{folder} cannot be made: {e.strerror}") from e
    if not os.access(folder, os.W_OK):
        raise NativeUnavailable(f"{folder} cannot be written")
    _log.info("compiling the CPU kernels for %s (once; a few seconds)", build.isa)
    # not created here: a compiler that is ended before it links then leaves nothing
    unfinished = library.with_name(f"{library.stem}-{secrets.token_hex(8)}.unfinished")
    command = [build.compiler, *build.flags, str(_SOURCES / "library.cpp"), "-o", str(unfinished)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _RUN_UNTIL_PARENT_DIES, *command],
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise NativeUnavailable(f"{build.compiler} failed ({done.returncode}): {_last_line(done.stderr)}")
        os.replace(unfinished, library)
    finally:
        unfinished.unlink(missing_ok=True)


def _check(library: Path, element_type: ElementType) -> None:
    root = Path(__file__).parents[2]
    program = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from kernels.cpu.native_check import main;"
        f" sys.exit(main({str(library)!r}, {element_type!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise NativeUnavailable(f"its self-test failed ({done.returncode}): {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1]
