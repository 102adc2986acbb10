"""Figures of a served model beside those of another server on the same machine, and the bars they are held to.

    python -m benchmarks.peers benchmarks/results/SERVED.json PEER.json

prints a table in Markdown; the exit code is 1 if a bar does not hold. SERVED.json comes from `benchmarks/served.py`,
which prints the same with `--peer`. PEER.json has, as far as it was measured:

    {"W1": {"tokens_per_s": …, "ttft_p50_ms": …, "itl_p50_ms": …}, …, "cold_ms": …, "hot_ms": …, "start_s": …}
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.document import Document, all_hold, bar
from benchmarks.workloads import WORKLOADS

NAMES = {"tok_s": "tokens_per_s", "ttft_p50_ms": "ttft_p50_ms", "itl_p50_ms": "itl_p50_ms"}
"""Of a workload's figures, in a document of `benchmarks/served.py` and here."""
MOST_FALL = 0.25
"""Of tokens a second, from a trunk of 250 tokens to one of 4,000 (W7 and W6)."""
MOST_HOT_RATIO = 1.3
"""Of the time to first token under a cached prompt of 4,000 tokens to that under one of 250."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Of a figure that should be high (more tokens a second) or low (all times)."""

    times_peer: float | None = None
    value: float | None = None


GOALS = {
    "W1.tokens_per_s": Goal(2.0),
    "W1.itl_p50_ms": Goal(value=26),
    "W1.ttft_p50_ms": Goal(0.6),
    "W2.tokens_per_s": Goal(2.0),
    "W3.tokens_per_s": Goal(2.0),
    "W3.ttft_p50_ms": Goal(0.6),
    "W4.tokens_per_s": Goal(2.4),
    "W5.tokens_per_s": Goal(1.5),
    "W6.tokens_per_s": Goal(2.5),
    "W6.ttft_p50_ms": Goal(0.4),
    "W7.tokens_per_s": Goal(1.8),
    "cold_ms": Goal(0.8),
    "hot_ms": Goal(0.5),
    "start_s": Goal(value=5),
}


def figures(document: Document) -> dict[str, float]:
    """What a document of `benchmarks/served.py` has, under the names of the goals."""
    found = {
        f"{name}.{ours}": document[name]["median"][theirs]
        for name in WORKLOADS
        if name in document
        for theirs, ours in NAMES.items()
        if theirs in document[name]["median"]
    }
    if "cold-hot" in document:
        found["cold_ms"] = document["cold-hot"]["cold_ttft_ms"]
        found["hot_ms"] = document["cold-hot"]["hot_ttft_ms"]
    if "start" in document:
        found["start_s"] = document["start"]["seconds_to_ready"]
    return found


def flat(peer: Document) -> dict[str, float]:
    """A peer's document, under the names of the goals."""
    found: dict[str, float] = {}
    for name, value in peer.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": number for key, number in value.items()}
        elif isinstance(value, int | float):
            found[name] = value
    return found


def own_bars(document: Document) -> Document:
    """Those that need no peer."""
    found = figures(document)
    bars = {name: _bar(name, found[name], goal.value) for name, goal in GOALS.items() if goal.value and name in found}
    if "W6" in document and "W7" in document:
        bars["fall_from_250_to_4000"] = bar(1 - found["W6.tokens_per_s"] / found["W7.tokens_per_s"], at_most=MOST_FALL)
    if "hot-lengths" in document:
        bars["hot_4000_over_250"] = bar(document["hot-lengths"]["ratio"], at_most=MOST_HOT_RATIO)
    return bars


def peer_bars(document: Document, peer: Document) -> Document:
    """Ratios to the peer's figures, for all that both have; a bar where there is a goal."""
    ours, theirs = figures(document), flat(peer)
    ratios: Document = {}
    for name in ours.keys() & theirs.keys():
        limit = GOALS[name].times_peer if name in GOALS else None
        value = ours[name] / theirs[name]
        ratios[name] = {"ours": ours[name], "peer": theirs[name], "ratio": _bar(name, value, limit)}
    return {name: ratios[name] for name in ours if name in ratios}


def table(own: Document, against: Document) -> str:
    """In Markdown."""
    lines = ["| figure | ours | peer | ours / peer | bar | holds |", "| --- | --- | --- | --- | --- | --- |"]
    for name, row in against.items():
        lines.append(f"| {name} | {row['ours']:g} | {row['peer']:g} | {_columns(row['ratio'])} |")
    for name, found in own.items():
        value, *rest = _columns(found).split(" | ")
        lines.append(f"| {name} | {value} | | | {' | '.join(rest)} |")
    return "\n".join(lines)


def _columns(found: Document) -> str:
    limits = [f"{sign} {found[key]:g}" for sign, key in (("≥", "at_least"), ("≤", "at_most")) if key in found]
    return f"{found['value']:g} | {', '.join(limits)} | {('yes' if found['holds'] else '**no**') if limits else ''}"


def _bar(name: str, value: float, limit: float | None) -> Document:
    """More tokens a second are better, less of everything else. Without a limit there is nothing that could hold."""
    if limit is None:
        return {"value": round(value, 3)}
    return bar(value, at_least=limit) if name.endswith("tokens_per_s") else bar(value, at_most=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("served", type=Path)
    parser.add_argument("peer", type=Path)
    options = parser.parse_args()
    document = json.loads(options.served.read_text())
    own, against = own_bars(document), peer_bars(document, json.loads(options.peer.read_text()))
    print(table(own, against))
    sys.exit(0 if all_hold({"own": own, "peer": against}) else 1)


if __name__ == "__main__":
    main()
