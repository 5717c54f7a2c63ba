"""All cases of `fagen check`, on a device that other tests may have at the same time."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from fagen import Schedule
from fagen.check import Item, check_gpu
from fagen.cli import common
from fagen.compile import Built
from fagen.oracle import check_problems

PATIENCE = 90.0
"""Seconds until a launch counts as hung."""
TOGETHER = 3
"""Grids at a time, however many processes run tests: each has a process on every core, of up to half a gigabyte."""
HOW = set(Schedule.field_names()) - {"precision", "scale_granularity", "hadamard", "smooth_k"}
"""Fields that say how 8-bit attention is computed, not what of."""


def select_fp8(changes: Mapping[str, Any]) -> common.Selected:
    """`fa3_fp8` where the changes leave its tiles and order alone; else the paper's form of it, which nearly any knob can change."""
    name = "chain/fa3_to_fa3_fp8_1_e4m3" if any(changes[n] for n in HOW & set(changes)) else "fa3_fp8"
    (item,) = common.select([name], [f"{n}={str(x).lower()}" for n, x in changes.items()])
    return item


def passes_the_grid(b: Built, repeat: int, bundles: Path) -> None:
    """Every case is right, and `repeat` launches of it give the same bits."""
    problems = check_problems(b.plan.attention, b.plan.schedule)
    item = Item(b.source.name, b.plan.attention, b.plan.schedule, problems)
    with one_of(TOGETHER):
        outcome = check_gpu([item], [b], seed=1, repeat=repeat, timeout=PATIENCE, bundles=bundles)
    assert len(outcome.results) == len(problems) >= 60
    assert [(str(r.problem), r.verdict.reason) for r in outcome.results if not r.verdict.passed] == []


@contextmanager
def one_of(places: int) -> Iterator[None]:
    """One of so many places, which the test processes of this machine share; waits for a free one."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(open(Path(tempfile.gettempdir()) / f"fagen-grid-{os.getuid()}-{n}.lock", "w"))
            for n in range(places)
        ]
        while not any(taken(file) for file in files):
            time.sleep(0.1)
        yield


def taken(file: IO[str]) -> bool:
    """Whether the lock of the file is ours now; closing it gives it back."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
