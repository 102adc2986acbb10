"""Times a step of the demo model without scheduler and processes: decode rows over a shared prefix, and a prefill.

    OMP_WAIT_POLICY=passive python -m benchmarks.decode_step PREPARED_MODEL [--dtype bfloat16] [--rows 1 8 32]
        [--max-isa auto none]

Every row holds the same 1,000 tokens and 104 of its own; medians in milliseconds. Processor time is that of all threads
together: on a busy machine it says more than the clock. Several instruction sets are timed in turn, step by step, so
that what else the machine does falls on all of them; `none` is torch's operators.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.forest import find_shared_nodes
from engine.model_runner import ModelRunner
from engine.prepared import PreparedModel
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence

SHARED_TOKENS = 1008
OWN_TOKENS = 104


class Bench:
    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._size = runner.info.block_size
        self._next_block = 1 + SHARED_TOKENS // self._size

    def sequence(self, num_tokens: int, params: SamplingParams) -> Sequence:
        """Its first 1,008 tokens lie in blocks 1..63 for all sequences."""
        sequence = Sequence("r", [(7 * i * i + 3) % 40000 for i in range(num_tokens)], params, (), 1, 10**6)
        sequence.block_table = list(range(1, 1 + SHARED_TOKENS // self._size))
        num_blocks = num_tokens // self._size + 1
        while len(sequence.block_table) < num_blocks:
            sequence.block_table.append(self._next_block)
            self._next_block += 1
        return sequence

    def decode(self, num_rows: int, params: SamplingParams, *, with_nodes: bool = True) -> Callable[[], object]:
        self._next_block = 1 + SHARED_TOKENS // self._size
        rows = [self.sequence(SHARED_TOKENS + OWN_TOKENS, params) for _ in range(num_rows)]
        for i, row in enumerate(rows):
            # untouched pages of the cache would all be the same page of zeros, which stays in the processor's caches
            row.num_computed_tokens = SHARED_TOKENS if i else 0
            num_tokens = row.num_uncomputed_tokens - 1
            self.runner.execute(ScheduledBatch((ScheduledSequence(row, num_tokens, False),)))
            row.num_computed_tokens += num_tokens
        nodes = find_shared_nodes(rows, self._size) if with_nodes else ()
        batch = ScheduledBatch(tuple(ScheduledSequence(row, 1, True) for row in rows), num_rows, nodes=nodes)
        return lambda: self.runner.execute(batch)

    def prefill(self, num_tokens: int, num_computed: int) -> Callable[[], object]:
        self._next_block = 1 + SHARED_TOKENS // self._size
        sequence = self.sequence(num_computed + num_tokens, SamplingParams(temperature=0.0))
        sequence.num_computed_tokens = num_computed
        batch = ScheduledBatch((ScheduledSequence(sequence, num_tokens, True),))
        return lambda: self.runner.execute(batch)


Step = Callable[[], object]


def compare(label: str, steps: list[Step], times: int) -> None:
    """Prints the medians of each, and how many times faster the first is than the others."""
    taken: list[list[float]] = [[] for _ in steps]
    processor: list[list[float]] = [[] for _ in steps]
    for round_number in range(times + 1):
        for i, step in enumerate(steps):
            start, processor_start = time.perf_counter(), time.process_time()
            step()
            if round_number:  # the first warms up
                taken[i].append((time.perf_counter() - start) * 1000)
                processor[i].append((time.process_time() - processor_start) * 1000)
    columns = []
    for clock, busy in zip(taken, processor, strict=True):
        median, busy_median = statistics.median(clock), statistics.median(busy)
        ratio = f" ({busy_median / statistics.median(processor[0]):.2f}x)" if columns else ""
        columns.append(f"{median:7.1f} ({min(clock):.1f} - {max(clock):.1f}), processor {busy_median:.1f}{ratio}")
    print(f"{label:30} {' | '.join(columns)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--max-isa", nargs="+", default=["auto"], help="auto, or as EngineConfig has it")
    parser.add_argument("--profile", action="store_true", help="where the time of the last kind of step goes")
    options = parser.parse_args()
    benches = []
    for max_isa in options.max_isa:
        config = EngineConfig(
            model_dir=str(options.model),
            device="cpu",
            dtype=options.dtype,
            threads=options.threads,
            num_blocks=2000,
            max_isa=None if max_isa == "auto" else max_isa,
        )
        benches.append(Bench(ModelRunner(PreparedModel.load(options.model), config)))
    greedy = SamplingParams(temperature=0.0)
    print(f"threads {torch.get_num_threads()}, {options.dtype}, {' | '.join(options.max_isa)}")
    print("milliseconds, median (least - most)")

    def decode(what: str, num_rows: int, params: SamplingParams, *, with_nodes: bool = True) -> list[Step]:
        steps = [bench.decode(num_rows, params, with_nodes=with_nodes) for bench in benches]
        compare(f"decode {num_rows:3} rows, {what}", steps, options.times)
        return steps

    for rows in options.rows:
        last = decode("greedy", rows, greedy)
    for params in ({}, {"top_p": 0.95}, {"top_k": 50}):
        decode(str(params or "plain"), options.rows[-1], SamplingParams(temperature=0.8, **params))
    decode("no nodes", options.rows[-1], greedy, with_nodes=False)
    for num_tokens, num_computed in ((1000, 0), (512, 0), (488, 512), (128, 872), (16, 1008)):
        steps = [bench.prefill(num_tokens, num_computed) for bench in benches]
        compare(f"prefill {num_tokens:4} after {num_computed:4}", steps, 5)
    if options.profile:
        with torch.profiler.profile() as profile:
            for _ in range(5):
                last[0]()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


if __name__ == "__main__":
    main()
