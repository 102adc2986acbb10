"""Attention and whole steps of a run as a picture: a PNG where matplotlib is installed, else an SVG."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.bar_chart import Bar, draw
from benchmarks.document import Document

VARIANTS = ("private", "shared", "grouped")


def draw_picture(document: Document, path: Path) -> str:
    """Where it is; or why there is none."""
    attention = {n: r for n, r in document.get("attention", {}).items() if isinstance(r, dict) and "grouped" in r}
    decode = {n: r for n, r in document.get("decode", {}).items() if isinstance(r, dict) and "graph" in r}
    if not attention and not decode:
        return "none, as neither attention nor steps were measured"
    where = document.get("machine", {}).get("gpu", "")
    floors = document.get("ratios", {})
    if path.suffix == ".png" and find_spec("matplotlib"):
        _draw_png(attention, decode, floors, where, path)
        return str(path)
    path = path.with_suffix(".svg")
    path.write_text(_svg(attention, decode, floors, where))
    return str(path)


def _svg(attention: Document, decode: Document, floors: Document, where: str) -> str:
    """One chart: attention's floor, grouped and shared; where only steps are there, those."""
    if attention:
        bars = []
        for name, row in attention.items():
            floor = floors.get("attention", {}).get(name, {}).get("floor_ms", 0.0)
            grouped, shared = row["grouped"]["ms"], row["shared"]["ms"]
            lengths = (min(floor, grouped), grouped, max(grouped, shared))
            bars.append(Bar(name, lengths, f"{grouped:.3g}, {shared:.3g}, {row['private']['ms']:.3g} ms"))
        parts = ("floor", "grouped", "shared blocks, not grouped")
        return draw(f"Decode attention, all layers; the last figure: own copies. {where}", parts, bars)
    bars = [
        Bar(
            name, (row["graph"]["ms"], max(row["graph"]["ms"], row["flat_graph"]["ms"])), f"{row['graph']['ms']:.3g} ms"
        )
        for name, row in decode.items()
    ]
    return draw(f"Decode steps. {where}", ("grouped", "not grouped"), bars)


def _draw_png(attention: Document, decode: Document, floors: Document, where: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 6), layout="constrained")
    _bars(left, attention, VARIANTS, floors.get("attention", {}), "decode attention, all layers")
    _bars(right, decode, ("flat_graph", "eager", "graph"), floors.get("decode", {}), "decode steps")
    figure.suptitle(where)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes: Any, rows: Document, variants: tuple[str, ...], floors: Document, title: str) -> None:
    """Beside one another on a logarithmic axis, a mark where the floor is."""
    height = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        places = [place + (i - 1) * height for place in range(len(rows))]
        axes.barh(places, [row[variant]["ms"] for row in rows.values()], height, label=variant)
    marks = [(place, floors[name]["floor_ms"]) for place, name in enumerate(rows) if name in floors]
    axes.plot([ms for _, ms in marks], [place for place, _ in marks], "k|", markersize=14, label="floor")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_title(title)
    axes.legend()
