"""What this process may take of its machine: cores and memory, as far as the scheduler, Linux's control groups (a container's limits) and
other processes leave them.

Control groups: cgroups(7); version 2: `cpu.max`, `memory.max`, `memory.high`, `memory.current` and `memory.stat` of the kernel's cgroup-v2 guide; version 1:
`cpu.cfs_quota_us`, `memory.limit_in_bytes`, `memory.usage_in_bytes`. A container often sees its own group as the root: of the path that
/proc/self/cgroup names, the groups above are read too, as far as they exist.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use at a time, at least 1: its affinity, and the CPU time that its control groups grant."""
    found = [len(os.sched_getaffinity(0))]
    for folder in _groups("cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")  # "max 100000": no limit
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")  # "-1": no limit
        if quota.isdigit() and period.isdigit():
            found.append(math.ceil(int(quota) / int(period)))
    return max(1, min(found))


def available_bytes() -> int:
    """Memory that processes can still take without swapping: MemAvailable of /proc/meminfo (proc(5)), and what the control groups' limits
    leave; what of a group's memory caches files counts as free. Without a number anywhere (Linux before 3.14), sys.maxsize."""
    lines = (line.partition(":") for line in _text(PROC / "meminfo").splitlines())
    found = [int(value.removesuffix("kB")) << 10 for name, _, value in lines if name == "MemAvailable"]
    for folder in _groups("memory"):
        for limit, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.high", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            most, now = _text(folder / limit), _text(folder / used)
            if most.isdigit() and now.isdigit():  # "max": no limit
                stat = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines())
                files = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
                found.append(max(0, int(most) - int(now) + files))
    return min(found, default=sys.maxsize)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it that may hold files of the controller, in either version."""
    for line in _text(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops = [GROUPS, GROUPS / "unified"]
        elif controller in controllers.split(","):
            tops = [GROUPS / controller, GROUPS / controllers]
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        yield from (top / part for top in tops for part in (inside, *inside.parents))


def _text(path: Path) -> str:
    """What a file holds, "" where there is none or it is not for us: which files can be read says which version, and which limits, a
    machine has."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
