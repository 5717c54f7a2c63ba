"""Cores and memory: what the machine, its control groups (as a container has them) and other processes leave."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fagen import host

GIB = 1 << 30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:        1048576 kB\nMemAvailable:   33554432 kB\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """16 cores, 32 GiB available, no control group."""
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    write(tmp_path, {"proc/meminfo": MEMINFO})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="ascii")


def v2(folder: str, cpu: str, most: str, now: int = 0, cache: int = 0) -> dict[str, str]:
    files = {
        "cpu.max": cpu,
        "memory.max": most,
        "memory.current": str(now),
        "memory.stat": f"anon 1\nactive_file {cache // 2}\ninactive_file {cache // 2}",
    }
    return {f"groups/{folder}/{name}": text for name, text in files.items()}


def test_of_this_machine() -> None:
    assert 1 <= host.cores() <= (os.cpu_count() or 1) and 1 << 20 < host.available_bytes() < 1 << 50


def test_without_control_groups(machine: Path) -> None:
    assert (host.cores(), host.available_bytes()) == (16, 32 * GIB)


@pytest.mark.parametrize(
    ("cpu", "most", "cores", "available"),
    [
        ("max 100000", "max", 16, 32 * GIB),
        ("400000 100000", str(8 * GIB), 4, 6 * GIB),
        ("150000 100000", str(2 * GIB), 2, 0),
        ("5000 100000", str(1 * GIB), 1, 0),
        ("3200000 100000", str(128 * GIB), 16, 32 * GIB),
    ],
)
def test_a_containers_own_group_is_its_root(machine: Path, cpu: str, most: str, cores: int, available: int) -> None:
    """3 GiB in use, one of which caches files."""
    write(machine, {"proc/self/cgroup": "0::/", **v2("", cpu, most, 3 * GIB, GIB)})
    assert (host.cores(), host.available_bytes()) == (cores, available)


def test_the_tightest_of_the_groups_above_counts(machine: Path) -> None:
    own = v2("user.slice/job", "max 100000", str(16 * GIB), 2 * GIB)
    write(machine, {"proc/self/cgroup": "0::/user.slice/job", **own, **v2("user.slice", "300000 100000", "max")})
    assert (host.cores(), host.available_bytes()) == (3, 14 * GIB)


def test_a_path_that_is_not_there_is_that_of_another_root(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "0::/docker/0123", **v2("", "200000 100000", str(4 * GIB), GIB)})
    assert (host.cores(), host.available_bytes()) == (2, 3 * GIB)


@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("250000", 3)])
def test_version_1(machine: Path, quota: str, cores: int) -> None:
    lines = "4:memory:/job\n3:cpu,cpuacct:/job\n2:pids:/job\n0::/job"
    memory = {
        "limit_in_bytes": str(5 * GIB),
        "usage_in_bytes": str(2 * GIB),
        "stat": f"cache 7\ninactive_file 9\ntotal_inactive_file {GIB}",
    }
    write(machine, {"proc/self/cgroup": lines, **{f"groups/memory/job/memory.{name}": text for name, text in memory.items()}})
    write(machine, {"groups/cpu/job/cpu.cfs_quota_us": quota, "groups/cpu/job/cpu.cfs_period_us": "100000"})
    assert (host.cores(), host.available_bytes()) == (cores, 4 * GIB)


def test_what_cannot_be_read_limits_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is closed to us under one that is not."""
    write(machine, {"proc/self/cgroup": "0::/closed", **v2("closed", "100000 100000", str(GIB)), **v2("", "200000 100000", "max")})
    read = Path.read_text

    def closed(path: Path, *args: Any, **kwargs: Any) -> str:
        if "closed" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", closed)
    assert (host.cores(), host.available_bytes()) == (2, 32 * GIB)


def test_names_of_groups_need_not_be_ascii(machine: Path) -> None:
    write(machine, v2("", "200000 100000", str(4 * GIB), GIB))
    (machine / "proc/self").mkdir()
    (machine / "proc/self/cgroup").write_text("0::/größe\n", encoding="utf-8")
    assert (host.cores(), host.available_bytes()) == (2, 3 * GIB)


def test_what_slows_a_group_down_counts_as_its_limit(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "0::/", **v2("", "max 100000", "max", GIB), "groups/memory.high": str(2 * GIB)})
    assert host.available_bytes() == GIB


def test_where_nothing_says_how_much_memory_there_is(machine: Path) -> None:
    (machine / "proc/meminfo").write_text("MemTotal: 1024 kB\n", encoding="ascii")
    assert host.available_bytes() == sys.maxsize
