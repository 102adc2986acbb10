"""`trunkline doctor`: what this machine has, what of it trunkline will use, and what is wrong."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.demo_model import GGUF_NAME
from app.embedded_redis import NoRedisError, find_server_program
from app.kernels_package import find_kernels_clash
from engine.config import EngineConfig
from engine.errors import ModelNotSupported
from engine.prepared import PreparedModel

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "bf16", "i8mm", "sve")
COMPILERS = ("c++", "g++", "clang++")
_SHAPE_FIELDS = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"),
    "rms_norm_eps",
)
"""Of a model's configuration, for `kernels.cpu.step_time`."""
_MAX_TIMED_BYTES = 400 << 20
"""Twice that is packed, which takes a second."""
_GPU_QUESTION = (
    "import json, torch; print(json.dumps([torch.__version__, "
    "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]]))"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """`bad` keeps trunkline from serving; `note` says what will be missed."""

    what: str
    state: Literal["good", "note", "bad"]
    text: str


Run = Callable[[list[str]], "str | None"]
"""A command's output; None if it cannot be run or fails."""


def run_command(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def examine(state_dir: Path, run: Run = run_command) -> Iterator[Finding]:
    """One finding after another, as they are made: asking torch takes seconds."""
    yield Finding("python", "good", f"{platform.python_version()} at {sys.executable}")
    yield find_processor()
    yield find_memory()
    yield from find_torch(run)
    yield find_compiler(run)
    yield find_redis(run)
    yield find_models(state_dir)
    yield find_threads(state_dir, run)
    clash = find_kernels_clash()
    yield Finding("kernels", "bad", clash) if clash else Finding("kernels", "good", "the package is ours")


def find_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return Finding("processor", "note", f"{platform.machine()}; its features cannot be read")
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    features = [f for f in FEATURES if f in have]
    what = f"{name.group(1) if name else platform.machine()}, {available_cpus()} cores, {' '.join(features) or 'none'}"
    if have & {"avx512_bf16", "amx_bf16", "bf16"}:
        return Finding("processor", "good", f"{what}: bfloat16")
    return Finding("processor", "note", f"{what}: no bfloat16 in hardware, models run in float32")


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    try:
        values = dict(re.findall(r"^(\w+):\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE))
        total, available = int(values["MemTotal"]) * 1024, int(values["MemAvailable"]) * 1024
    except (OSError, KeyError):
        return Finding("memory", "note", "it cannot be read how much there is")
    text = f"{available / 2**30:,.1f} of {total / 2**30:,.1f} GiB available"
    return Finding("memory", "good" if available >= 2 * 2**30 else "note", text)


def find_torch(run: Run) -> Iterator[Finding]:
    answer = run([sys.executable, "-P", "-c", _GPU_QUESTION])
    if answer is None:
        yield Finding("torch", "bad", "torch cannot be loaded: install trunkline again")
        return
    version, gpus = json.loads(answer.splitlines()[-1])
    yield Finding("torch", "good", version)
    if gpus:
        yield Finding("gpu", "good", ", ".join(gpus))
    elif run(["nvidia-smi", "-L"]):
        yield Finding("gpu", "note", "there is one, but this build of torch cannot use it")
    else:
        yield Finding("gpu", "good", "none: the processor is used")


def find_compiler(run: Run) -> Finding:
    for name in COMPILERS:
        if (path := shutil.which(name)) and (version := run([path, "--version"])):
            return Finding("compiler", "good", version.splitlines()[0])
    return Finding(
        "compiler", "note", f"none of {', '.join(COMPILERS)}: steps on a processor take two to four times as long"
    )


def find_redis(run: Run) -> Finding:
    try:
        program = find_server_program()
    except NoRedisError as e:
        return Finding("redis", "bad", str(e))
    version = run([str(program), "--version"])
    if version is None:
        return Finding("redis", "bad", f"{program} cannot be run: give a server of your own with --redis-url")
    return Finding("redis", "good", f"{version.splitlines()[0]} ({program})")


def find_models(state_dir: Path) -> Finding:
    try:
        names = [model.manifest.name for model in _prepared_models(state_dir)]
    except ModelNotSupported as e:
        return Finding("model", "note", str(e))
    if names:
        return Finding("model", "good", f"{', '.join(names)} in {state_dir}")
    if (state_dir / "downloads" / GGUF_NAME).exists():
        return Finding("model", "note", f"the demo model is in {state_dir}; it is prepared at the first start")
    return Finding("model", "note", f"none in {state_dir}; the first start downloads the demo model (about 100 MB)")


def find_threads(state_dir: Path, run: Run) -> Finding:
    """A decode step on one thread and on all, where that takes no time: for a small model that was served before."""
    num_cpus = available_cpus()
    step_ms, what = {}, ""
    if num_cpus > 1 and (timed := _small_model(state_dir)):
        model, dtype = timed
        config = model.manifest.config
        shape = {name: getattr(config, name) for name in _SHAPE_FIELDS} | {
            "block_size": EngineConfig(model_dir="").block_size
        }
        command = [sys.executable, "-P", "-m", "kernels.cpu.step_time", str(state_dir / "kernels"), dtype]
        answer = json.loads(run([*command, json.dumps(shape), "1", str(num_cpus)]) or "null")
        if answer:
            step_ms = {int(count): ms for count, ms in answer["step_ms"].items()}
            what = f"; a step of {answer['rows']} rows of {model.manifest.name} takes"
    if not step_ms:
        return Finding("threads", "good", f"{num_cpus}, one for each core")
    text = f"{num_cpus}, one for each core{what} {step_ms[num_cpus]:.1f} ms with {num_cpus}, {step_ms[1]:.1f} with 1"
    if step_ms[num_cpus] < step_ms[1]:
        return Finding("threads", "good", text)
    return Finding("threads", "note", f"{text}: if other programs keep the cores busy, --threads 1 is better")


def _prepared_models(state_dir: Path) -> list[PreparedModel]:
    """Raises ModelNotSupported if one of them cannot be read."""
    return [PreparedModel.load(path.parent) for path in sorted((state_dir / "models").glob("*/manifest.json"))]


def _small_model(state_dir: Path) -> tuple[PreparedModel, str] | None:
    """The first whose weights are small, and their dtype."""
    with suppress(ModelNotSupported):
        for model in _prepared_models(state_dir):
            for dtype in ("bfloat16", "float32"):
                path = model.weights_path(dtype)
                if path.exists() and path.stat().st_size <= _MAX_TIMED_BYTES:
                    return model, dtype
    return None
