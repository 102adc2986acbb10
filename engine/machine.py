"""What this process may use of the machine: memory and processors, control groups considered. No torch."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can still be taken without swapping: the least of what the system and the control group leave."""
    limits = []
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    if not limits:
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # version 2, then version 1
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(cgroup / limit_file).strip(), _read(cgroup / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            stat = _read((cgroup / limit_file).parent / "memory.stat")
            # page cache counts as usage, but is given back under pressure
            cache = sum(int(x.split()[1]) for x in stat.splitlines() if x.split()[0] == "inactive_file")
            limits.append(max(int(limit) - int(usage) + cache, 0))
    return min(limits)


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Processors this process may run on, its share of time considered; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(cgroup / "cpu.max").split()
    if not quota:
        quota = [_read(cgroup / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
        count = min(count, math.ceil(int(quota[0]) / int(quota[1])))
    return max(count, 1)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
