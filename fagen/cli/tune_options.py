"""Options of `fagen tune` as values, and writing a file whole."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from . import common

if TYPE_CHECKING:
    from ..plan.kernel import Problem


def parse_axes(over: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """`--over knob=a:b` … as axes. InputError for what is no knob of a schedule, or given twice."""
    from ..schedule import Schedule

    axes: dict[str, tuple[Any, ...]] = {}
    for text in over:
        knob, equals, values = text.partition("=")
        knob = knob.strip().replace("-", "_")
        if not equals or not values.strip():
            raise InputError("--over", f"{text!r} is not knob=value:value, such as tile_kv=96:128")
        if knob not in Schedule.field_names():
            import difflib

            near = difflib.get_close_matches(knob, Schedule.field_names())
            hint = f"did you mean {' or '.join(near)}?" if near else f"knobs: {', '.join(Schedule.field_names())}"
            raise InputError("--over", f"a schedule has no knob {knob!r}; {hint}")
        if knob in axes:
            raise InputError("--over", f"{knob} is given twice")
        axes[knob] = tuple(dict.fromkeys(common.field_value(knob, v) for v in values.split(":")))
    return axes


def problems_of(item: common.Selected, shapes: Sequence[str], grid: str | None) -> tuple[Problem, ...]:
    from ..check import parse_shape
    from ..explore.bench import grid_problems
    from ..plan.kernel import Problem

    named = grid or (None if shapes else "paper")
    wanted = list(grid_problems(named, item.attention.head_dim)) if named else []
    parsed = [parse_shape(text) for text in shapes]
    wanted += [Problem(p.batch, p.sq, p.sk, p.hq, p.hkv) for p in parsed]
    for p in wanted:
        if min(p.batch, p.sq, p.sk, p.hq) < 1:
            raise InputError("--shape", f"{p}: every size must be at least 1 to be timed")
    return tuple(dict.fromkeys(wanted))


def parse_budget(text: str) -> float:
    """Seconds of 300, 300s or 5m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise InputError("--budget", f"{text!r} is not a time, such as 300s or 5m")
    return float(match[1]) * (60 if match[2] == "m" else 1)


def write_file(path: Path, text: str) -> None:
    """Whole or not at all; InputError naming it."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
            f.write(text)
        os.chmod(f.name, 0o644)
        os.replace(f.name, path)
    except OSError as e:
        raise InputError(str(path), f"cannot be written: {e.strerror or e}") from e
