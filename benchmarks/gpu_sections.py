"""The sections of `benchmarks.gpu_check`, and the process that measures them, one after the other.

It says on standard output, a JSON object a line, which section begins, each thing as it is found, and all of them when
the section ends: whoever started it knows, if it ends or hangs, at what, and keeps what there is. A section that fails
has its traceback among what it found; if nothing can be computed on the device after that, the process ends, as no
later section could be measured in it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from benchmarks.document import Document
from benchmarks.gpu_attention import AttentionTimes, NodeTimes, TileTimes
from benchmarks.gpu_correctness import Correctness
from benchmarks.gpu_device import Clock, Device, OutOfTime
from benchmarks.gpu_draw import measure_draws
from benchmarks.gpu_failure import failure_of
from benchmarks.gpu_model import Model, measure_decode, measure_prompts
from benchmarks.gpu_moves import measure_ceilings, measure_moves
from benchmarks.gpu_work import DRY, ON_A_DEVICE, Sizes

Measure = Callable[[Clock, Document], None]
NVIDIA_SMI = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"


class Found(dict[str, Any]):
    """Of a section: says what is put into it, thing by thing."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__()
        self._say = say

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._say(finds=name, found=value)


class Sections:
    def __init__(self, device: Device, sizes: Sizes) -> None:
        self._device = device
        self._sizes = sizes
        self._model: Model | None = None

    def named(self, name: str) -> Measure:
        device, sizes = self._device, self._sizes
        sections: dict[str, Measure] = {
            "machine": self._machine,
            "ceilings": lambda clock, found: measure_ceilings(device, sizes, clock, found),
            "correctness": lambda clock, found: Correctness(device, sizes).measure(clock, found),
            "attention": lambda clock, found: AttentionTimes(device, sizes).measure(clock, found),
            "decode": lambda clock, found: measure_decode(self._loaded(), clock, found),
            "prompts": lambda clock, found: measure_prompts(self._loaded(), clock, found),
            "moves": self._moves,
            "draws": lambda clock, found: measure_draws(device, sizes, clock, found),
            "nodes": lambda clock, found: NodeTimes(device, sizes).measure(clock, found),
            "tiles": lambda clock, found: TileTimes(device, sizes).measure(clock, found),
        }
        return sections[name]

    def _loaded(self) -> Model:
        if self._model is None:
            self._model = Model(self._device, self._sizes)
        return self._model

    def _moves(self, clock: Clock, found: Document) -> None:
        # the weights' room is not needed, but they are soon made again
        self._model = None
        self._device.release()
        measure_moves(self._device, self._sizes, clock, found)

    def _machine(self, clock: Clock, found: Document) -> None:
        found |= {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
        if self._device.is_dry:
            found["gpu"] = "none: a dry run, interpreted"
            return
        properties = torch.cuda.get_device_properties(self._device.device)
        found |= {
            "gpu": properties.name,
            "architecture": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": self._device.l2_bytes,
        }
        try:
            command = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI}", "--format=csv"]
            found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split("\n")
        except (OSError, subprocess.SubprocessError) as error:
            found["nvidia_smi"] = str(error)


def measure(sections: Sections, device: Device, name: str, clock: Clock, found: Document) -> bool:
    """Whether the device still computes."""
    start = time.perf_counter()
    try:
        sections.named(name)(clock, found)
        device.synchronize()
    except OutOfTime as error:
        found["out_of_time"] = str(error)
    except Exception as error:  # noqa: BLE001 a section that fails must not hide the others
        found["failure"] = failure_of(error)
    found["section_s"] = round(time.perf_counter() - start, 2)
    try:
        device.release()
        device.random(16)
        device.synchronize()
    except RuntimeError as error:
        found["device_lost"] = str(error)[:300]
        return False
    return True


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", metavar="NAME=SECONDS")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    # what kernels and compilers print must not come between the lines
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if options.dry_run:
        torch.set_num_threads(1)
    device = Device(is_dry=options.dry_run)
    sections = Sections(device, DRY if options.dry_run else ON_A_DEVICE)

    def say(**what: Any) -> None:
        print(json.dumps(what), file=lines, flush=True)

    for argument in options.sections:
        name, _, seconds = argument.partition("=")
        say(begins=name)
        found = Found(say)
        is_well = measure(sections, device, name, Clock(float(seconds)), found)
        say(ends=name, found=found)
        if not is_well:
            sys.exit(1)


if __name__ == "__main__":
    main()
