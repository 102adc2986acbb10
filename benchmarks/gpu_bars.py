"""What was measured beside what it may be, once all sections are there; and each section in one line."""

from collections.abc import Callable, Iterator

from benchmarks.document import Document, bar
from benchmarks.gpu_work import DTYPE_BYTES, Ceilings, Sizes, attention_cases, decode_cases, decode_floor
from benchmarks.step_work import prefill_work

LEAST_OF_COPY = 0.8
LEAST_GROUPED_GAIN = 3.0
MOST_LOSS = 1.03
LEAST_OF_ROOFLINE = 0.65
NODE_COST_S = 2e-6
"""Of a node in a graph, a layer: what saves less need not be grouped."""


def ceilings_of(document: Document) -> Ceilings | None:
    found = document.get("ceilings", {})
    if "copy" not in found or "product" not in found:
        return None
    return Ceilings(found["copy"]["bytes_per_s"], found["product"]["flops_per_s"])


def ratios_of(document: Document, sizes: Sizes) -> Document:
    """Of everything that was measured; empty without ceilings."""
    ceilings = ceilings_of(document)
    if ceilings is None:
        return {}
    return {
        "attention": _attention(document.get("attention", {}), sizes, ceilings),
        "decode": _decode(document.get("decode", {}), sizes, ceilings),
        "prompts": _prompts(document, sizes, ceilings),
        "moves": {
            name: document["moves"][name]["bytes_per_s"] / ceilings.bytes_per_s
            for name in ("copy_blocks", "gather", "scatter")
            if name in document.get("moves", {})
        },
    }


def _attention(found: Document, sizes: Sizes, ceilings: Ceilings) -> Document:
    rows = {}
    for case in attention_cases(sizes):
        row = found.get(case.name, {})
        if "grouped" not in row:
            continue
        floor = decode_floor(case, ceilings)
        private, shared, grouped = (row[name]["ms"] for name in ("private", "shared", "grouped"))
        rows[case.name] = {
            "private_of_copy": case.flat_bytes / private * 1000 / ceilings.bytes_per_s,
            "private_over_shared": private / shared,
            "shared_over_grouped": shared / grouped,
            "floor_ms": floor.attention_ms,
            "grouped_of_floor": floor.attention_ms / grouped,
        }
    return rows


def _decode(found: Document, sizes: Sizes, ceilings: Ceilings) -> Document:
    rows = {}
    for case in decode_cases(sizes):
        row = found.get(case.name, {})
        if "graph" not in row:
            continue
        floor = decode_floor(case, ceilings)
        graph = row["graph"]["ms"]
        rows[case.name] = {
            "floor_ms": floor.step_ms,
            "graph_of_floor": floor.step_ms / graph,
            "eager_over_graph": row["eager"]["ms"] / graph,
            "flat_over_grouped": row["flat_graph"]["ms"] / graph,
            "decode_over_graph": row["decode"]["s"] * 1000 / row["decode"]["steps"] / graph,
        }
    return rows


def _prompts(document: Document, sizes: Sizes, ceilings: Ceilings) -> Document:
    found = document.get("prompts", {})
    ratios: Document = {}
    for name, row in found.items():
        if isinstance(row, dict) and "chunks" in row and not row["cached"]:
            work = prefill_work(sizes.llama, DTYPE_BYTES, row["chunks"])
            floor_ms = 1000 * work.floor_s(bytes_per_s=ceilings.bytes_per_s, flops_per_s=ceilings.flops_per_s)
            ratios[name] = {"floor_ms": floor_ms, "of_floor": floor_ms / row["ms"]}
    if "hot" in found and "cold" in found:
        ratios["cold_over_hot"] = found["cold"]["ms"] / found["hot"]["ms"]
        swap_in = document.get("moves", {}).get("swap_in")
        if swap_in:
            ratios["recompute_over_swap_in"] = found["cold"]["ms"] / swap_in["ms"]
    return ratios


def bars_of(document: Document, ratios: Document, sizes: Sizes) -> Document:
    """Those that can be told from what was measured; the cases are those that the bars were set for."""
    bars: Document = {}
    model, (short, long), rows = sizes.llama.name, sizes.trunks, sizes.attention_rows[1]
    attention = ratios.get("attention", {})
    if case := attention.get(f"{model} {rows} x {short}"):
        bars["attention_of_copy"] = bar(case["private_of_copy"], at_least=LEAST_OF_COPY)
    if case := attention.get(f"{model} {rows} x {long}"):
        bars["shared_over_grouped"] = bar(case["shared_over_grouped"], at_least=LEAST_GROUPED_GAIN)
    losses = [
        row["grouped"]["ms"] / row["flat"]["ms"]
        for row in document.get("nodes", {}).values()
        if isinstance(row, dict) and "grouped" in row and _pays(row, document)
    ]
    if losses:
        bars["worst_node_that_should_pay"] = bar(max(losses), at_most=MOST_LOSS)
    if decode := ratios.get("decode"):
        worst = min(row["graph_of_floor"] for row in decode.values())
        bars["step_of_roofline"] = bar(worst, at_least=LEAST_OF_ROOFLINE)
    for name, share in ratios.get("moves", {}).items():
        bars[f"{name}_of_copy"] = bar(share, at_least=LEAST_OF_COPY)
    return bars


def _pays(row: Document, document: Document) -> bool:
    ceilings = ceilings_of(document)
    return ceilings is not None and row["saved_bytes"] / row["layers"] / ceilings.bytes_per_s > NODE_COST_S


def wrong_of(document: Document) -> list[str]:
    """Names of what was compared and is not as it should be, or could not be compared."""

    def search(found: Document, name: str) -> Iterator[str]:
        if found.get("holds") is False:
            yield name
        if "failure" in found:
            yield f"{name}: {found['failure']['error'][:120]}"
        for key, value in found.items():
            if isinstance(value, dict):
                yield from search(value, f"{name} / {key}")
            elif value is False and key != "holds":
                yield f"{name}: {key} is false"

    return [each for section, found in document.items() if isinstance(found, dict) for each in search(found, section)]


def summary(name: str, found: Document) -> str:
    """One line."""
    end = "; ".join(f"{key.upper()}: {found[key]}" for key in ("out_of_time", "device_lost", "killed") if key in found)
    if "failure" in found:
        end = f"FAILED {found['failure']['error'][:160]} {end}"
    wrong = wrong_of({name: {key: value for key, value in found.items() if key != "failure"}})
    text = _SUMMARIES.get(name, lambda _: "")(found)
    faults = f" WRONG: {'; '.join(wrong)[:600]}" if wrong else ""
    return f"[{name}, {found.get('section_s', 0):.1f} s] {text}{faults} {end}".rstrip()


def _rows(found: Document, line: Callable[[Document], str], key: str) -> str:
    rows = {name: row for name, row in found.items() if isinstance(row, dict) and key in row}
    return "".join(f"\n  {name}: {line(row)}" for name, row in rows.items())


_SUMMARIES: dict[str, Callable[[Document], str]] = {
    "machine": lambda f: f"{f.get('gpu')}, torch {f.get('torch')}, triton {f.get('triton')}, {f.get('nvidia_smi', '')}",
    "ceilings": lambda f: ", ".join(
        f"{name} {f[name][rate] / 1e12:.3f} T{unit}/s"
        for name, rate, unit in (("copy", "bytes_per_s", "B"), ("product", "flops_per_s", "FLOP"))
        if name in f
    ),
    "correctness": lambda f: f"{sum(1 for row in f.values() if isinstance(row, dict))} kernels and shapes compared",
    "attention": lambda f: _rows(
        f, lambda r: ", ".join(f"{n} {r[n]['ms']:.3f} ms" for n in ("private", "shared", "grouped")), "grouped"
    ),
    "decode": lambda f: _rows(
        f,
        lambda r: (
            f"graph {r['graph']['ms']:.2f}, eager {r['eager']['ms']:.2f}, flat {r['flat_graph']['ms']:.2f}, "
            f"plan {r['plan_ms']:.2f} ms, {r['decode']['tok_s']:.0f} tok/s"
        ),
        "graph",
    ),
    "prompts": lambda f: ", ".join(f"{n} {r['ms']:.2f} ms" for n, r in f.items() if isinstance(r, dict) and "ms" in r),
    "moves": lambda f: ", ".join(
        f"{n} {r['bytes_per_s'] / 1e9:.0f} GB/s" for n, r in f.items() if isinstance(r, dict) and "bytes_per_s" in r
    ),
    "draws": lambda f: (
        f"{f.get('tokens', {}).get('equal')} of {f.get('tokens', {}).get('rows')} equal, "
        + ", ".join(f"{n} {r['ms']:.3f} ms" for n, r in f.get("ms", {}).items())
    ),
    "nodes": lambda f: _rows(f, lambda r: f"grouped over flat {r['grouped']['ms'] / r['flat']['ms']:.3f}", "grouped"),
    "tiles": lambda f: _rows(
        f, lambda r: f"flat {r['flat']['ms']:.3f}, grouped {r['grouped']['ms']:.3f} ms", "grouped"
    ),
}
