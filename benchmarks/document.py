"""The JSON document of a benchmark: where and of what its figures are, the figures, and the bars they are held to."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def new_document() -> Document:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": processor(), "cores": os.cpu_count()},
        "commit": commit(),
    }


def write(document: Document, path: Path | None) -> None:
    """To standard output, and to `path` if there is one."""
    text = json.dumps(document, indent=1)
    print(text)
    if path:
        path.write_text(text + "\n")


def bar(value: float, *, at_most: float | None = None, at_least: float | None = None) -> Document:
    """What was measured beside what it may be; one limit, or both."""
    found: Document = {"value": round(value, 3)}
    if at_most is not None:
        found["at_most"] = round(at_most, 3)
    if at_least is not None:
        found["at_least"] = round(at_least, 3)
    holds = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    return {**found, "holds": holds}


def find_bars(document: Any, name: str = "") -> list[tuple[str, Document]]:
    """All bars of a document, with the names under which they stand, joined by dots."""
    if isinstance(document, list):
        return [bar for i, value in enumerate(document) for bar in find_bars(value, f"{name}.{i}")]
    if not isinstance(document, dict):
        return []
    if "holds" in document:
        return [(name, document)]
    return [bar for key, value in document.items() for bar in find_bars(value, f"{name}.{key}".lstrip("."))]


def all_hold(document: Document) -> bool:
    """Whether all bars of the document hold; those that do not are said on standard error."""
    failed = [(name, found) for name, found in find_bars(document) if not found["holds"]]
    for name, found in failed:
        print(f"{name} does not hold: {json.dumps(found)}", file=sys.stderr)
    return not failed


def commit() -> str:
    """Empty where there is no git, or no repository."""
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def processor() -> str:
    """Its name, and what of it matters for a model in bfloat16."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    features = sorted({"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & set(text.split()))
    return f"{found[1] if found else platform.machine()}, {' '.join(features)}"
