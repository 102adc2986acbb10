"""Times what a decode step costs beside its kernels: the engine's own loop, core, runner and socket in this process.

    OMP_WAIT_POLICY=passive python -m benchmarks.host_time PREPARED_MODEL [--rows 1 8 32] [--params '{"top_p": 0.95}']
        [--steps 200] [--threads N] [--profile]

Microseconds a step, the median of all steps; each part without the parts that are called within it:

    schedule, update  of the scheduler          batch   of the runner: arrays, checks, results
    sample            of the sampler            loop    of the process: poll, take in, sort, encode, send
    host              all of these together     kernel  in calls of the C++ library
    gateway           what a gateway must do at least with what was sent: read, decode, acknowledge

Rows hold 1,000 shared tokens and about 100 of their own. With `--profile` what takes the time by function; with
`--idle` the library computes nothing, and what is told is processor time of the loop's thread, for machines that are
busy with other things: take one thread. The processor's caches are then warmer than they would be.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import zmq

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.packed_decoder import PackedDecoder
from engine.prepared import PreparedModel
from engine.process import EngineProcess
from engine.protocol import END, Acknowledge, AddRequest, Scope, StepOutputs, decode_from_engine, encode
from engine.sampling_params import SamplingParams

PARTS = ("schedule", "batch", "sample", "update", "core", "loop")
SHARED_TOKENS, OWN_TOKENS = 1000, 100
WARM_UP_STEPS = 20


class Stopwatch:
    """Seconds of each part; a part that calls another one stands still meanwhile."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._running = ["loop"]
        self._since = clock()

    def _switch(self) -> None:
        now = self._clock()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return work(*arguments)
            finally:
                self._switch()
                self._running.pop()

        return run

    def take(self) -> dict[str, float]:
        """Since the last call."""
        self._switch()
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


class TimedLibrary:
    """The functions of the C++ library, each call counted as kernel; or, `is_idle`, calls that do nothing."""

    def __init__(self, functions: Any, stopwatch: Stopwatch, *, is_idle: bool) -> None:
        self._functions, self._stopwatch, self._is_idle = functions, stopwatch, is_idle

    def __getattr__(self, name: str) -> Any:
        call = (lambda *arguments: 0) if self._is_idle else getattr(self._functions, name)
        timed = self._stopwatch.timed("kernel", call)
        setattr(self, name, timed)
        return timed


class Loop:
    """The engine's process in this thread, with one gateway that reads before each step."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, folder: str, *, is_idle: bool) -> None:
        self._core = EngineCore(config, runner.info, runner, runner.identity, runner.swap_time)
        self._process = EngineProcess(self, runner.info, f"ipc://{folder}/engine", lease_s=config.lease_s)  # type: ignore[arg-type]
        self._context = zmq.Context()
        self._gateway = self._context.socket(zmq.DEALER)
        self._gateway.connect(f"ipc://{folder}/engine")
        self._stopwatch = Stopwatch(time.thread_time if is_idle else time.perf_counter)
        self._steps: list[dict[str, float]] = []
        self._num_steps = 0
        timed = self._stopwatch.timed
        self._step = timed("core", self._core.step)
        self._read = timed("gateway", self._take)
        scheduler: Any = self._core.scheduler
        scheduler.schedule, scheduler.update = timed("schedule", scheduler.schedule), timed("update", scheduler.update)
        inner: Any = runner
        decoder: Any = inner._decoder
        if not isinstance(decoder, PackedDecoder):
            raise SystemExit("the C++ decoder is not used here: see the warning above")
        native: Any = decoder._native
        if isinstance(native._functions, TimedLibrary):
            native._functions = native._functions._functions
        native._functions = TimedLibrary(native._functions, self._stopwatch, is_idle=is_idle)
        if is_idle:
            decoder._logits = torch.randn(config.max_num_seqs, decoder.config.vocab_size).mul_(3)
        sampler, self._core._runner = inner._sampler, _Timed(timed("batch", type(inner).execute), inner)
        sampler.sample = timed("sample", type(sampler).sample.__get__(sampler))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def step(self) -> Any:
        self._read()
        if all(s.num_uncomputed_tokens == 1 for s in self._core.scheduler.running):
            self._steps.append(self._stopwatch.take())
            if len(self._steps) == self._num_steps:
                self._process.stop()
        return self._step()

    def _take(self) -> None:
        while self._gateway.poll(0, zmq.POLLIN):
            message = decode_from_engine(self._gateway.recv())
            if isinstance(message, StepOutputs):
                self._gateway.send(encode(Acknowledge(message.step_id)))

    def run(self, num_rows: int, params: SamplingParams, num_steps: int) -> list[dict[str, float]]:
        """Parts of each step in which all rows decode, the first ones left out."""
        shared = [(7 * i * i + 3) % 40000 for i in range(SHARED_TOKENS)]
        for row in range(num_rows):
            own = [(13 * i + 31 * row) % 40000 for i in range(OWN_TOKENS + row % 16)]
            scopes = [Scope(SHARED_TOKENS, b"trunk"), Scope(END, b"own")]
            request = AddRequest(request_id=str(row), prompt_ids=[*shared, *own], params=params, scopes=scopes)
            self._gateway.send(encode(request))
        self._num_steps = num_steps + WARM_UP_STEPS
        self._process.run()
        self._gateway.close(0)
        self._context.term()
        return self._steps[WARM_UP_STEPS:]


class _Timed:
    """A runner whose `execute` is timed."""

    def __init__(self, execute: Callable[..., Any], runner: ModelRunner) -> None:
        self._execute, self._runner = execute, runner

    def execute(self, batch: Any) -> Any:
        return self._execute(self._runner, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--params", type=json.loads, nargs="+", default=[{"temperature": 0.0}])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--idle", action="store_true", help="the library's calls return at once, logits are noise")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    config = EngineConfig(
        model_dir=str(options.model),
        device="cpu",
        dtype=options.dtype,
        threads=options.threads,
        num_blocks=4000,
        lease_s=1e9,
        max_num_seqs=max(options.rows),
    )
    runner = ModelRunner(PreparedModel.load(options.model), config)
    print(f"microseconds a step, {torch.get_num_threads()} threads")
    columns = ("host", *PARTS, "kernel", "gateway")
    print(f"{'':36}" + "".join(f"{name:>10}" for name in columns))
    for params in options.params:
        for num_rows in options.rows:
            profile = cProfile.Profile() if options.profile else None
            with tempfile.TemporaryDirectory() as folder:
                loop = Loop(runner, config, folder, is_idle=options.idle)
                asked = SamplingParams(max_tokens=None, ignore_eos=True, **params)
                with profile or nullcontext():
                    steps = loop.run(num_rows, asked, options.steps)
            for step in steps:
                step["host"] = sum(step.get(part, 0.0) for part in PARTS)
            medians = (1e6 * statistics.median(step.get(name, 0.0) for step in steps) for name in columns)
            print(f"{num_rows:3} rows, {json.dumps(params):26} " + "".join(f"{x:10.0f}" for x in medians), flush=True)
            if profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
