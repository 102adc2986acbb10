"""Reading a shared prefix once against reading it for each row, on our own backend; and how decode falls off by length.

    OMP_WAIT_POLICY=passive python -m benchmarks.grouped --output benchmarks/results/NAME.json

Each figure stands beside the bar it is held to; the exit code is 1 if one does not hold. Some of it can be named alone
(`python -m benchmarks.grouped grouped fall-off`).

* grouped: attention of all layers, nothing else, with the planner's nodes (`--shared-attention auto`) and without
  (`never`), in turn: 32 rows over a trunk of 2,000 tokens.
* never-slower: the same where nodes can gain nothing. `plan_ms` is the planner's time, spent when the rows change.
* fall-off: whole steps of 32 rows, sampling included, over longer trunks and with longer tails.

Processor time decides with `--by-processor`, for a machine that does other things too.
"""

import argparse
import itertools
import sys
from pathlib import Path

from app.demo_model import ensure_demo_model
from benchmarks.attention_bench import AttentionBench
from benchmarks.document import Document, all_hold, bar, new_document, write
from benchmarks.step_bench import StepBench
from benchmarks.step_work import DecodeShape
from benchmarks.turns import Times, ratio, take_turns
from engine.config import EngineConfig
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.shared_attention import SharedAttention

PARTS = ("grouped", "never-slower", "fall-off")
NUM_ROWS = 32
OWN_TOKENS = 104
GROUPED = DecodeShape(NUM_ROWS, 2000, OWN_TOKENS)
NEVER_SLOWER = {
    "one_row": DecodeShape(1, 1000, OWN_TOKENS),
    "prefix_of_16": DecodeShape(NUM_ROWS, 16, OWN_TOKENS),
    "32_tenants": DecodeShape(NUM_ROWS, 500, OWN_TOKENS, NUM_ROWS),
    "nothing_shared": DecodeShape(NUM_ROWS, 0, 300, 0),
}
TRUNKS = (250, 1000, 2000, 4000)
TAILS = (50, 100, 200, 400)
LEAST_GAIN = 2.5
MOST_LOSS = 1.03
MOST_FALL_BY_TRUNK = 0.25
"""Of tokens a second, from the shortest trunk to the longest."""
MOST_FALL_BY_TAIL = 0.15
"""For each doubling."""
ATTENTION_BLOCKS = 1300
STEP_BLOCKS = 3400


class Grouped:
    def __init__(self, model: PreparedModel, config: EngineConfig, num_rounds: int, *, by_processor: bool) -> None:
        self._model = model
        self._config = config
        self._num_rounds = num_rounds
        self._by_processor = by_processor

    def measure(self, parts: list[str]) -> Document:
        document: Document = {}
        if {"grouped", "never-slower"} & set(parts):
            bench = AttentionBench(self._model, self._config, ATTENTION_BLOCKS)
            if "grouped" in parts:
                document["grouped"] = self.flat_over_auto(bench)
            if "never-slower" in parts:
                document["never_slower"] = {name: self.auto_over_flat(bench, s) for name, s in NEVER_SLOWER.items()}
            del bench
        if "fall-off" in parts:
            document["fall_off"] = self.fall_off()
        return document

    def flat_over_auto(self, bench: AttentionBench) -> Document:
        auto, flat, figures = self._attention(bench, GROUPED)
        return {**figures, "flat_over_auto": bar(self._ratio(flat, auto), at_least=LEAST_GAIN)}

    def auto_over_flat(self, bench: AttentionBench, shape: DecodeShape) -> Document:
        auto, flat, figures = self._attention(bench, shape)
        return {**figures, "auto_over_flat": bar(self._ratio(auto, flat), at_most=MOST_LOSS)}

    def fall_off(self) -> Document:
        """Tokens a second of whole steps, all timed in turn."""
        bench = StepBench(self._model, self._config)
        by_trunk = [DecodeShape(NUM_ROWS, trunk, OWN_TOKENS) for trunk in TRUNKS]
        by_tail = [DecodeShape(NUM_ROWS, 1000, tail) for tail in TAILS]
        times = take_turns([bench.decode(shape) for shape in (*by_trunk, *by_tail)], self._num_rounds)
        trunks, tails = times[: len(TRUNKS)], times[len(TRUNKS) :]
        falls = {
            f"{a} to {b}": bar(self._fall(x, y), at_most=MOST_FALL_BY_TAIL)
            for (a, x), (b, y) in itertools.pairwise(zip(TAILS, tails, strict=True))
        }
        return {
            "tok_s_by_trunk": {n: tok_s(each) for n, each in zip(TRUNKS, trunks, strict=True)},
            "trunk_fall": bar(self._fall(trunks[0], trunks[-1]), at_most=MOST_FALL_BY_TRUNK),
            "tok_s_by_tail": {n: tok_s(each) for n, each in zip(TAILS, tails, strict=True)},
            "tail_falls": falls,
        }

    def _attention(self, bench: AttentionBench, shape: DecodeShape) -> tuple[Times, Times, Document]:
        """Times of auto and never, and what to say of them."""
        batches = [bench.plan(shape, mode) for mode in (bench.shared_attention, SharedAttention("never"))]
        auto, flat = take_turns([bench.attention(batch) for batch, _ in batches], self._num_rounds)
        (with_nodes, plan_ms), _ = batches
        figures = {
            "nodes": [f"{len(node.block_ids)} blocks, {len(node.rows)} rows" for node in with_nodes.nodes],
            "plan_ms": round(plan_ms, 3),
            "auto_ms": round(auto.median_ms, 2),
            "flat_ms": round(flat.median_ms, 2),
        }
        return auto, flat, figures

    def _ratio(self, times: Times, base: Times) -> float:
        return ratio(times, base, of_processor=self._by_processor)

    def _fall(self, before: Times, after: Times) -> float:
        """The share of tokens a second that is lost."""
        return 1 - self._ratio(before, after)


def tok_s(times: Times) -> float:
    return round(1000 * NUM_ROWS / times.median_ms, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--by-processor", action="store_true")
    parser.add_argument("--model", help="as `trunkline serve --model` takes it; by default the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--state-dir", type=Path, default=Path(".state"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    source = options.model or str(ensure_demo_model(options.state_dir))
    model = prepare(source, options.state_dir, options.dtype, lambda *_: None)
    config = EngineConfig(
        model_dir=str(model.path),
        device="cpu",
        dtype=options.dtype,
        threads=options.threads,
        num_blocks=STEP_BLOCKS,
        kernels_dir=str(options.state_dir / "kernels"),
    )
    grouped = Grouped(model, config, options.rounds, by_processor=options.by_processor)
    document = {**new_document(), "dtype": options.dtype, **grouped.measure(options.parts)}
    write(document, options.output)
    sys.exit(0 if all_hold(document) else 1)


if __name__ == "__main__":
    main()
