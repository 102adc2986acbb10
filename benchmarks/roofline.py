"""How near a step comes to what this machine can do: what it must move and compute, and how long it took.

    OMP_WAIT_POLICY=passive python -m benchmarks.roofline --output benchmarks/results/NAME.json
        --svg benchmarks/results/NAME.svg [--served benchmarks/results/SERVED.json]

The ceilings (`benchmarks/ceilings.py`) are measured in the same run. Steps are those of the workloads of
docs/benchmarks.md in the middle of an answer, decode steps of 1, 8, 32 and 64 rows over 1,000 shared and 104 own
tokens, one of them on one thread too, and a cold prompt of 1,000 tokens in the engine's chunks. All are timed in turn,
sampling and the runner's own work included, scheduler and server not. A step's **floor** is the longer of its bytes at
the rate at which memory is read (huge pages) and of its operations at the rate of a large product; the fraction is
floor over time. Activations count nothing, logits are written once. With a document of `benchmarks/served.py` a
workload's time between tokens is set beside its floor too.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from app.demo_model import ensure_demo_model
from benchmarks.bar_chart import Bar, draw
from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.document import Document, new_document, write
from benchmarks.step_bench import StepBench
from benchmarks.step_work import DecodeShape, Work, decode_work, num_parameters, prefill_work
from benchmarks.turns import Step, Times, take_turns
from benchmarks.workloads import WORKLOADS
from engine.config import EngineConfig, ModelConfig
from engine.machine import available_cpus
from engine.models.prepare import prepare
from engine.prepared import PreparedModel

DECODE_ROWS = (1, 8, 32, 64)
ONE_THREAD_ROWS = 32
PREFILL_TOKENS = 1000
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    work: Callable[[ModelConfig, int], Work]
    """By the model and the bytes of a number."""
    step: Callable[[StepBench], Step]
    num_threads: int


def decode_case(name: str, shape: DecodeShape, num_threads: int) -> Case:
    return Case(name, lambda config, size: decode_work(config, size, shape), lambda b: b.decode(shape), num_threads)


def cases(num_threads: int, chunk_tokens: int) -> list[Case]:
    found = [decode_case(name, work.decode_shape(), num_threads) for name, work in WORKLOADS.items()]
    for num_rows in DECODE_ROWS:
        found.append(decode_case(f"decode {num_rows}", DecodeShape(num_rows, 1000, 104), num_threads))
    if num_threads > 1:
        shape = DecodeShape(ONE_THREAD_ROWS, 1000, 104)
        found.append(decode_case(f"decode {ONE_THREAD_ROWS}, 1 thread", shape, 1))
    whole, rest = divmod(PREFILL_TOKENS, chunk_tokens)
    chunks = [chunk_tokens] * whole + [rest] * bool(rest)
    prefill = Case(
        f"prefill {PREFILL_TOKENS}",
        lambda config, size: prefill_work(config, size, chunks),
        lambda bench: bench.prefill(PREFILL_TOKENS, chunk_tokens=chunk_tokens),
        num_threads,
    )
    return [*found, prefill]


def row(case: Case, work: Work, times: Times, ceilings: Ceilings, dtype: str) -> Document:
    """Times in milliseconds, rates in 10^9 bytes and 10^12 operations a second."""
    small, huge = (ceilings.read_gb_s(huge_pages=h, num_threads=case.num_threads) for h in (False, True))
    # the product was measured on all threads
    tflops = (
        ceilings.matmul_tflops.get(dtype, ceilings.matmul_tflops["float32"]) * case.num_threads / ceilings.num_threads
    )
    floor_ms = 1000 * work.floor_s(bytes_per_s=huge * 1e9, flops_per_s=tflops * 1e12)
    return {
        "threads": case.num_threads,
        "bytes": {**asdict(work), "all": work.num_bytes},
        "bytes_ms": {"huge_pages": ms(work.num_bytes, huge * 1e9), "small_pages": ms(work.num_bytes, small * 1e9)},
        "flops_ms": ms(work.flops, tflops * 1e12),
        "floor_ms": round(floor_ms, 2),
        "step_ms": round(times.median_ms, 2),
        "step_processor_ms": round(times.processor_median_ms, 2),
        "gb_s": round(work.num_bytes / times.median_ms / 1e6, 2),
        "tflops": round(work.flops / times.median_ms / 1e9, 3),
        "fraction": round(floor_ms / times.median_ms, 3),
    }


def ms(amount: float, per_s: float) -> float:
    return round(1000 * amount / per_s, 2)


def add_served(rows: Document, served: Document) -> None:
    """The time between tokens of the workloads that the other document has."""
    for name in WORKLOADS.keys() & served.keys():
        itl_ms = served[name]["median"]["itl_p50_ms"]
        rows[name] |= {"served_itl_ms": itl_ms, "served_fraction": round(rows[name]["floor_ms"] / itl_ms, 3)}


def measure(model: PreparedModel, dtype: str, num_rounds: int) -> Document:
    num_threads = available_cpus()
    ceilings = measure_ceilings(num_threads)
    config = EngineConfig(model_dir=str(model.path), device="cpu", dtype=dtype, threads=num_threads, num_blocks=4200)
    found = cases(num_threads, config.max_num_batched_tokens)
    benches = {1: StepBench(model, config.replace(threads=1, num_blocks=500))} if num_threads > 1 else {}
    benches[num_threads] = StepBench(model, config)  # the last says how many threads torch has
    times = take_turns([case.step(benches[case.num_threads]) for case in found], num_rounds)
    dtype = benches[num_threads].runner.identity[0]
    shape = model.manifest.config
    rows = {
        case.name: row(case, case.work(shape, DTYPE_BYTES[dtype]), each, ceilings, dtype)
        for case, each in zip(found, times, strict=True)
    }
    return {
        "model": {"name": model.manifest.name, "dtype": dtype, "parameters": num_parameters(shape)},
        "ceilings": asdict(ceilings),
        "steps": rows,
    }


def table(rows: Document) -> str:
    """For a person, in columns."""
    lines = [f"{'':20}{'MB':>8}{'GFLOP':>8}{'bytes ms':>10}{'flops ms':>10}{'step ms':>9}{'GB/s':>7}{'fraction':>10}"]
    for name, r in rows.items():
        amounts = f"{r['bytes']['all'] / 1e6:8.0f}{r['bytes']['flops'] / 1e9:8.1f}"
        times = f"{r['bytes_ms']['huge_pages']:10.1f}{r['flops_ms']:10.1f}{r['step_ms']:9.1f}"
        served = f"   served {r['served_itl_ms']:.1f} ms, {r['served_fraction']:.0%}" if "served_itl_ms" in r else ""
        lines.append(f"{name:20}{amounts}{times}{r['gb_s']:7.1f}{r['fraction']:10.0%}{served}")
    return "\n".join(lines)


def chart(document: Document) -> str:
    """The decode steps: beside a prompt's length theirs would not be seen."""
    bars = [
        Bar(name, (r["floor_ms"], max(r["step_ms"], r["floor_ms"])), f"{r['step_ms']:.1f} ms, {r['fraction']:.0%}")
        for name, r in document["steps"].items()
        if not name.startswith("prefill")
    ]
    title = (
        f"{document['model']['name']}, {document['model']['dtype']}: decode steps and their floor, {document['date']}"
    )
    return draw(title, ("floor: what must be moved or computed", "the rest of the step"), bars)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as `trunkline serve --model` takes it; by default the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--state-dir", type=Path, default=Path(".state"))
    parser.add_argument("--served", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    source = options.model or str(ensure_demo_model(options.state_dir))
    model = prepare(source, options.state_dir, options.dtype, lambda *_: None)
    document = {**new_document(), **measure(model, options.dtype, options.rounds)}
    if options.served:
        add_served(document["steps"], json.loads(options.served.read_text()))
    write(document, options.output)
    print(table(document["steps"]))
    if options.svg:
        options.svg.write_text(chart(document))


if __name__ == "__main__":
    main()
