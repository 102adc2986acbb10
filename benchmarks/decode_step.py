"""Times a step of the demo model without scheduler and processes: decode rows over a shared prefix, and a prefill.

    OMP_WAIT_POLICY=passive python -m benchmarks.decode_step PREPARED_MODEL [--dtype bfloat16] [--rows 1 8 32]
        [--variants '{}' '{"shared_attention": "never"}' '{"threads": 1}' '{"deterministic": true}']

Every row holds the same 1,008 tokens and 104 of its own; medians in milliseconds, and the tokens a second that they
come to. Processor time is that of all threads together. A variant is a setting of `EngineConfig`, as JSON; several are
timed in turn, step by step, so that what else the machine does falls on all of them; what the others cost is given
against the first. (`threads` of the last holds for what torch does in all of them; the C++ step has its own.)
"""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.step_bench import GREEDY, StepBench
from benchmarks.step_work import DecodeShape
from benchmarks.turns import Step, ratio, take_turns
from engine.config import EngineConfig
from engine.prepared import PreparedModel
from engine.sampling_params import SamplingParams

SHARED_TOKENS = 1008
OWN_TOKENS = 104


def compare(label: str, steps: list[Step], num_rounds: int, num_tokens: int) -> None:
    """Prints the medians of each, and how many times as long the others take as the first."""
    times = take_turns(steps, num_rounds)
    columns = []
    for each in times:
        text = f"{each}, {1000 * num_tokens / each.median_ms:.0f} tok/s"
        if columns:
            by_clock, by_processor = ratio(each, times[0]), ratio(each, times[0], of_processor=True)
            text += f" ({by_clock:.3f}x, processor {by_processor:.3f}x)"
        columns.append(text)
    print(f"{label:30} {' | '.join(columns)}", flush=True)


def variant(config: EngineConfig, text: str) -> EngineConfig:
    """Raises ValueError for what is no setting or no JSON."""
    changes: dict[str, Any] = json.loads(text)
    return msgspec.convert({**msgspec.to_builtins(config), **_known(changes)}, EngineConfig)


def _known(changes: dict[str, Any]) -> dict[str, Any]:
    unknown = changes.keys() - set(EngineConfig.__struct_fields__)
    if unknown:
        raise ValueError(f"EngineConfig has no {', '.join(sorted(unknown))}")
    return changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--variants", nargs="+", default=["{}"])
    parser.add_argument("--profile", action="store_true", help="where the time of the last kind of step goes")
    options = parser.parse_args()
    plain = EngineConfig(model_dir=str(options.model), device="cpu", dtype=options.dtype, num_blocks=2000)
    configs = [variant(plain, text) for text in options.variants]
    benches = [StepBench(PreparedModel.load(options.model), config) for config in configs]
    print(f"{options.dtype}: {' | '.join(options.variants)}")
    print("milliseconds, median (least - most)")

    def decode(what: str, num_rows: int, params: SamplingParams) -> list[Step]:
        shape = DecodeShape(num_rows, SHARED_TOKENS, OWN_TOKENS)
        for bench in benches:
            bench.free_all()
        steps = [bench.decode(shape, params) for bench in benches]
        compare(f"decode {num_rows:3} rows, {what}", steps, options.times, num_rows)
        return steps

    for rows in options.rows:
        last = decode("greedy", rows, GREEDY)
    for params in ({}, {"top_p": 0.95}, {"top_k": 50}):
        decode(str(params or "plain"), options.rows[-1], SamplingParams(temperature=0.8, **params))
    for num_tokens, num_computed in ((1000, 0), (512, 0), (488, 512), (128, 872), (16, 1008)):
        for bench in benches:
            bench.free_all()
        steps = [bench.prefill(num_tokens, num_computed) for bench in benches]
        compare(f"prefill {num_tokens:4} after {num_computed:4}", steps, 5, num_tokens)
    if options.profile:
        with torch.profiler.profile() as profile:
            for _ in range(5):
                last[0]()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


if __name__ == "__main__":
    main()
