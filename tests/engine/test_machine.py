from pathlib import Path

import pytest

from engine.machine import available_cpus, available_memory_bytes

GIB = 2**30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    return path


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_without_a_control_group_the_system_decides(tmp_path: Path, meminfo: Path) -> None:
    assert available_memory_bytes(tmp_path / "none", meminfo) == 8 * GIB
    unlimited = write(tmp_path / "v2", memory__max="max\n", memory__current="123\n")
    assert available_memory_bytes(unlimited, meminfo) == 8 * GIB


def test_a_control_group_limits_memory_and_its_page_cache_does_not_count(tmp_path: Path, meminfo: Path) -> None:
    group = write(
        tmp_path / "v2",
        memory__max=f"{4 * GIB}\n",
        memory__current=f"{3 * GIB}\n",
        memory__stat=f"anon 5\ninactive_file {GIB}\n",
    )
    assert available_memory_bytes(group, meminfo) == 2 * GIB


def test_version_1_of_control_groups(tmp_path: Path, meminfo: Path) -> None:
    write(tmp_path / "v1" / "memory", memory__limit_in_bytes=f"{2 * GIB}", memory__usage_in_bytes=f"{GIB}")
    assert available_memory_bytes(tmp_path / "v1", meminfo) == GIB


def test_cpus_are_limited_by_affinity_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    assert available_cpus(tmp_path / "none") == 6
    assert available_cpus(write(tmp_path / "a", cpu__max="max 100000")) == 6
    assert available_cpus(write(tmp_path / "b", cpu__max="250000 100000")) == 3
    assert available_cpus(write(tmp_path / "c", cpu__max="1000 100000")) == 1
    write(tmp_path / "v1" / "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert available_cpus(tmp_path / "v1") == 2
