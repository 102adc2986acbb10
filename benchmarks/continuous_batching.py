"""Static against continuous batching on lengths skewed to the right, on the real engine, and Hugging Face `generate`.

    python -m benchmarks.continuous_batching --output benchmarks/results/NAME.json --png benchmarks/results/NAME.png

24 requests in random order, 70% of them with answers of 10 to 40 tokens and 30% with 80 to 150, eight at a time:

* static: eight requests start together, and the next eight only when the longest of them has ended;
* continuous: a request starts in the step after another one has ended;
* generate: static batches of transformers, padded on the left, each run to its longest answer; the same weights and
  dtype, and as many threads.

The three take turns in each of `--runs`; ratios are taken within a run. The engine has no prefix cache here, so that it
computes the prompts each time, as transformers does.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from app.demo_model import ensure_demo_model
from benchmarks.document import Document, new_document, write
from benchmarks.hf_model import load_hf_model
from benchmarks.load import question
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner import ModelRunner
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.protocol import END, AddRequest, Scope
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate, Message
from engine.text.tokenizer import Tokenizer

NUM_REQUESTS = 24
LONG_SHARE = 0.3
SHORT, LONG = (10, 40), (80, 150)
"""Tokens of an answer, both ends included."""
BATCH_SIZE = 8
PAD_ID = 0
MODES = ("static", "continuous", "generate")
LEAST_SAME_STARTS = 0.75
"""Of the answers as many must start with the same token in both implementations; in bfloat16 near ties fall apart."""


@dataclass(frozen=True)
class Work:
    prompt_ids: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.num_output_tokens


@dataclass
class Run:
    """What one way of batching did with all the work."""

    num_slots: int
    wall_s: float = 0.0
    active: list[int] = field(default_factory=list)
    """For each step: slots that brought a token somebody had asked for."""
    kv_allocated: int = 0
    kv_used: int = 0
    """KV slots (one token each), summed over the steps."""
    kv_sequences: int = 0
    """Running sequences, summed likewise."""
    first_tokens: dict[int, int] = field(default_factory=dict)

    @property
    def utilisation(self) -> float:
        return sum(self.active) / (self.num_slots * len(self.active))

    def waste(self, reserved_tokens: int | None = None) -> float:
        """Share of KV slots that hold no token: of the blocks, or if each sequence had that many slots reserved."""
        allocated = self.kv_allocated if reserved_tokens is None else self.kv_sequences * reserved_tokens
        return 1 - self.kv_used / allocated


def skewed_lengths(seed: int, num_requests: int = NUM_REQUESTS) -> list[int]:
    """Tokens of each answer, in the order in which the requests come."""
    chance = random.Random(seed)
    num_long = round(num_requests * LONG_SHARE)
    ranges = [LONG] * num_long + [SHORT] * (num_requests - num_long)
    lengths = [chance.randint(*limits) for limits in ranges]
    chance.shuffle(lengths)
    return lengths


def make_work(model: PreparedModel, seed: int, num_requests: int = NUM_REQUESTS) -> list[Work]:
    tokenizer = Tokenizer.load(model)
    template = ChatTemplate(model.chat_template or "", tokenizer)
    return [
        Work(template.render([Message("user", question(i, 0, seed))]).token_ids, length)
        for i, length in enumerate(skewed_lengths(seed, num_requests))
    ]


def batches_of(work: Sequence[Work], size: int) -> list[list[tuple[int, Work]]]:
    numbered = list(enumerate(work))
    return [numbered[i : i + size] for i in range(0, len(numbered), size)]


def run_engine(runner: ModelRunner, config: EngineConfig, groups: list[list[tuple[int, Work]]]) -> Run:
    """Each group is added when the one before it has ended."""
    core = EngineCore(config, runner.info, runner, runner.identity)
    run = Run(config.max_num_seqs)
    start = time.perf_counter()
    for group in groups:
        for number, work in group:
            params = SamplingParams(temperature=0.0, max_tokens=work.num_output_tokens, ignore_eos=True)
            scopes = [Scope(END, b"benchmark")]
            refusal = core.add(
                AddRequest(request_id=str(number), prompt_ids=work.prompt_ids, params=params, scopes=scopes)
            )
            if refusal is not None:
                raise RuntimeError(f"request {number} was refused: {refusal.error}")
        while core.has_work:
            outputs = core.step()
            run.active.append(sum(len(output.token_ids) for output in outputs))
            for output in outputs:
                run.first_tokens.setdefault(int(output.request_id), output.token_ids[0])
            for sequence in core.scheduler.running:
                run.kv_allocated += len(sequence.block_table) * config.block_size
                run.kv_used += sequence.num_computed_tokens
                run.kv_sequences += 1
    run.wall_s = time.perf_counter() - start
    core.check_integrity()
    return run


def run_generate(model: Any, groups: list[list[tuple[int, Work]]]) -> Run:
    """`model`: a transformers causal language model."""
    run = Run(max(len(group) for group in groups))
    start = time.perf_counter()
    for group in groups:
        width = max(len(work.prompt_ids) for _, work in group)
        padding = [width - len(work.prompt_ids) for _, work in group]
        ids = [[PAD_ID] * p + work.prompt_ids for p, (_, work) in zip(padding, group, strict=True)]
        mask = [[0] * p + [1] * (width - p) for p in padding]
        longest = max(work.num_output_tokens for _, work in group)
        generated = model.generate(
            torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            min_new_tokens=longest,
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=PAD_ID,
        )
        if generated.shape[1] != width + longest:
            raise RuntimeError(f"generate gave {generated.shape[1] - width} tokens, expected {longest}")
        for (number, _), row in zip(group, generated.tolist(), strict=True):
            run.first_tokens[number] = row[width]
        run.active += [sum(work.num_output_tokens > step for _, work in group) for step in range(longest)]
    run.wall_s = time.perf_counter() - start
    return run


def describe(runs: list[Run], num_tokens: int) -> Document:
    wall_s = statistics.median(run.wall_s for run in runs)
    return {
        "wall_s": round(wall_s, 3),
        "tok_s": round(num_tokens / wall_s, 2),
        "slot_utilisation": round(runs[0].utilisation, 4),
        "steps": len(runs[0].active),
        "runs_wall_s": [round(run.wall_s, 3) for run in runs],
    }


def kv_waste(run: Run, work: Sequence[Work], max_model_len: int) -> Document:
    longest = max(w.num_tokens for w in work)
    return {
        "paged": round(run.waste(), 4),
        "reserved_for_the_longest": {"tokens": longest, "waste": round(run.waste(longest), 4)},
        "reserved_for_the_context": {"tokens": max_model_len, "waste": round(run.waste(max_model_len), 4)},
    }


def draw(static: Run, continuous: Run, path: Path) -> None:
    """Occupied slots over the steps, static above, continuous below. Needs the extra `bench`."""
    from matplotlib.figure import Figure  # everything else here works without it

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(2, sharex=True, sharey=True)
    for ax, name, run in zip(axes, ("static", "continuous"), (static, continuous), strict=True):
        num_steps = len(run.active)
        ax.fill_between([0, num_steps], run.num_slots, color="#eeeeee")
        ax.stairs(run.active, range(num_steps + 1), fill=True, color="#2a6f97")
        ax.axvline(num_steps, color="#666666", linewidth=0.8, linestyle="--")
        ax.set_title(f"{name}: {num_steps} steps, {run.utilisation:.0%} of the slots used", loc="left", fontsize=10)
        ax.set_ylabel("slots with work")
        ax.set_ylim(0, run.num_slots)
        ax.set_yticks(range(0, run.num_slots + 1, 2))
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlim(0, len(static.active) * 1.01)
    axes[1].set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def measure(
    model: PreparedModel, config: EngineConfig, *, num_requests: int, seed: int, num_runs: int, png: Path | None
) -> Document:
    runner = ModelRunner(model, config)
    [dtype, *_] = runner.identity
    hf_model = load_hf_model(model, dtype, device=config.device)
    work = make_work(model, seed, num_requests)
    whole, batches = batches_of(work, len(work)), batches_of(work, BATCH_SIZE)
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for _ in range(num_runs + 1):
        runs["static"].append(run_engine(runner, config, batches))
        runs["continuous"].append(run_engine(runner, config, whole))
        runs["generate"].append(run_generate(hf_model, batches))
    static, continuous, generate = (runs[mode][1:] for mode in MODES)  # the first of each warms up
    same = sum(static[0].first_tokens[i] == generate[0].first_tokens[i] for i in range(len(work)))
    if same < LEAST_SAME_STARTS * len(work):
        raise RuntimeError(f"{same} of {len(work)} answers start alike: transformers has another model than the engine")
    if png:
        draw(static[0], continuous[0], png)
    num_tokens = sum(w.num_output_tokens for w in work)

    def ratio(faster: list[Run], slower: list[Run]) -> float:
        return round(statistics.median(s.wall_s / f.wall_s for f, s in zip(faster, slower, strict=True)), 3)

    return {
        "model": model.manifest.name,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "seed": seed,
        "requests": {
            "output_tokens": [w.num_output_tokens for w in work],
            "prompt_tokens": [len(w.prompt_ids) for w in work],
        },
        "static": describe(static, num_tokens),
        "continuous": describe(continuous, num_tokens),
        "generate": describe(generate, num_tokens),
        "continuous_over_static": ratio(continuous, static),
        "static_over_generate": ratio(static, generate),
        "continuous_over_generate": ratio(continuous, generate),
        "answers_that_start_alike": f"{same} of {len(work)}",
        "kv_waste": kv_waste(continuous[0], work, runner.info.max_model_len),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="a Llama as `trunkline serve --model` takes it; by default the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--state-dir", type=Path, default=Path(".state"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    source = options.model or str(ensure_demo_model(options.state_dir))
    model = prepare(source, options.state_dir, options.dtype, lambda *_: None)
    config = EngineConfig(
        model_dir=str(model.path),
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        max_model_len=options.max_model_len,
        max_num_seqs=BATCH_SIZE,
        enable_prefix_caching=False,
    )
    figures = measure(
        model, config, num_requests=options.requests, seed=options.seed, num_runs=options.runs, png=options.png
    )
    write({**new_document(), **figures}, options.output)


if __name__ == "__main__":
    main()
