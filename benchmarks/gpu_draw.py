"""Draws of the next tokens on the device, against a ranking by a sort in float64, and how long they take."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.document import Document
from benchmarks.gpu_device import Clock, Device
from benchmarks.gpu_work import Sizes
from engine import philox
from kernels.batch import DrawBatch
from kernels.triton.draw import draw

TOLERANCE = 1e-5
"""Of the whole mass: a token whose border is so near to the number drawn may be drawn too, as masses are fp32 there."""


@dataclass(frozen=True, slots=True)
class Rule:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


RULES = (
    Rule(temperature=0.0),
    Rule(),
    Rule(temperature=0.7),
    Rule(top_k=40),
    Rule(top_p=0.9),
    Rule(min_p=0.02),
    Rule(temperature=1.3, top_k=1000, top_p=0.95, min_p=0.001),
    Rule(temperature=0.6, top_p=0.5),
)


def draw_batch(rules: tuple[Rule, ...], num_rows: int) -> DrawBatch:
    """Row i draws by rule i, over and over; seeds are those of `Draws`."""
    rows = [rules[i % len(rules)] for i in range(num_rows)]

    def column(name: str, dtype: Any) -> Any:
        return np.array([getattr(rule, name) for rule in rows], dtype=dtype)

    return DrawBatch(
        temperatures=column("temperature", np.float32),
        top_ks=column("top_k", np.int32),
        top_ps=column("top_p", np.float64),
        min_ps=column("min_p", np.float64),
        seeds=np.arange(num_rows, dtype=np.int64) * 7919 + 1,
        choices=np.arange(num_rows, dtype=np.int32) % 3,
        positions=np.arange(num_rows, dtype=np.int64) + 100,
    )


def is_drawn_well(logits: np.ndarray[Any, Any], rule: Rule, uniform: float, token: int) -> tuple[bool, bool]:
    """Whether it is the token that the rules give, and whether it is so but for `TOLERANCE`. logits: of one row."""
    best = int(logits.argmax())
    if rule.temperature == 0.0:
        return token == best, token == best
    # rounded as the kernel rounds them, so that equal values are equal here too
    scaled = (logits - logits[best]) / np.float32(rule.temperature)
    masses = np.exp(scaled.astype(np.float64))
    is_filtered = rule.top_k > 0 or rule.top_p < 1.0 or rule.min_p > 0.0
    order = np.argsort(-scaled, kind="stable") if is_filtered else np.arange(len(logits))
    sums = masses[order].cumsum()
    kept = int(np.count_nonzero(masses >= rule.min_p))
    if rule.top_k:
        kept = min(kept, rule.top_k)
    slack = TOLERANCE * sums[-1]
    widest = kept
    if rule.top_p < 1.0:
        goal = rule.top_p * sums[kept - 1]
        kept, widest = (min(kept, int(sums.searchsorted(g)) + 1) for g in (goal, goal + slack))
    target = (1.0 - uniform) * sums[kept - 1]
    exact = int(order[min(int(sums.searchsorted(target)), kept - 1)])
    place = int(np.flatnonzero(order == token)[0])
    before = sums[place - 1] if place else 0.0
    is_near = place < widest and before - slack <= target <= sums[place] + slack
    return token == exact, bool(is_near)


def measure_draws(device: Device, sizes: Sizes, clock: Clock, found: Document) -> None:
    """All rules over one vocabulary; then the time of each rule alone, all rows alike."""
    num_rows = 8 if device.is_dry else 128
    vocab_size = sizes.llama.vocab_size
    # rounded as a model's are, so that many are equal
    logits = device.random(num_rows, vocab_size, scale=3.0).float()
    batch = draw_batch(RULES, num_rows)
    tokens, is_finite = draw(logits, batch).tolist()
    uniforms = philox.uniforms(batch.seeds.tolist(), batch.choices.tolist(), batch.positions.tolist())
    rows = logits.cpu().numpy()
    judged = [is_drawn_well(rows[i], RULES[i % len(RULES)], uniforms[i], tokens[i]) for i in range(num_rows)]
    found["tokens"] = {
        "holds": all(is_near for _, is_near in judged) and all(is_finite),
        "rows": num_rows,
        "equal": sum(is_equal for is_equal, _ in judged),
        "equal_but_for_rounding": sum(is_near for _, is_near in judged),
    }
    clock.check()
    if device.is_dry:
        return  # each rule was drawn by above
    rules = {"greedy": RULES[0], "plain": RULES[1], "top_k": RULES[3], "top_p": RULES[4], "all": RULES[6]}
    batches = {name: draw_batch((rule,), num_rows) for name, rule in rules.items()}
    calls = {name: (lambda b=batch: draw(logits, b)) for name, batch in batches.items()}
    found["ms"] = {name: timing.document() for name, timing in device.times(calls).items()}
