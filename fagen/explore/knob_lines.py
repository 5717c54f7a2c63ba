"""Which knob is behind which line of the generated code: a line belongs to a knob if another legal value of that knob, everything else
alike, changes it or takes it away. Found by emitting the neighbours of a pair, so that it cannot be out of date.

Some knobs cannot change alone (`mma` brings `movement` and `arch`). Where a value needs other knobs changed as well, what those change
by themselves is not counted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from ..attention import Attention
from ..emit import Source, emit
from ..emit.roles import opening_lines
from ..errors import ScheduleError
from ..plan import Plan, assemble
from ..plan.rules import CHOICES
from ..schedule import Schedule

Changes = dict[str, Any]
MOST = 3
"""Other values of a knob that are looked at: more of them change the same lines."""


def knob_lines(plan: Plan, source: Source) -> dict[int, tuple[str, ...]]:
    """Line of the source (from 1) → the knobs behind it, in the order of the fields; lines of no knob are left out."""
    base = _code(source.text)
    found: dict[int, list[str]] = {}
    known: dict[tuple[tuple[str, Any], ...], frozenset[int] | None] = {}

    def changed(changes: Changes) -> frozenset[int] | None:
        key = tuple(sorted(changes.items(), key=lambda item: item[0]))
        if key not in known:
            known[key] = _changed(base, plan, changes)
        return known[key]

    for knob in (*Attention.field_names(), *Schedule.field_names()):
        lines: set[int] = set()
        for options in _values(plan, knob):
            for changes in options:
                mine = changed(changes)
                if mine is None:
                    continue
                others = {k: v for k, v in changes.items() if k != knob}
                lines |= mine - ((changed(others) if others else None) or frozenset())
                break
        for line in lines:
            found.setdefault(line, []).append(knob)
    return {line: tuple(knobs) for line, knobs in sorted(found.items())}


def step_lines(plan: Plan, source: Source) -> dict[tuple[str, str], int]:
    """(kernel, id of a step) → the line of the source (from 1) where what it prints begins."""
    lines, at = _code(source.text), 0
    out: dict[tuple[str, str], int] = {}
    for kernel in plan.kernels:
        at = next(i for i in range(at, len(lines)) if lines[i].startswith(f"{kernel.name}("))
        for step, first in opening_lines(kernel):
            if not first:
                continue
            if at and lines[at - 1].endswith(f") {first}"):  # behind its condition, on the same line
                out[kernel.name, step.id] = at
                continue
            there = next((i for i in range(at, len(lines)) if lines[i] == first), None)
            if there is not None:
                out[kernel.name, step.id], at = there + 1, there + 1
    return out


def _code(text: str) -> list[str]:
    """Lines without comments and indentation."""
    return [line.split("//", 1)[0].strip() for line in text.splitlines()]


def _changed(base: list[str], plan: Plan, changes: Changes) -> frozenset[int] | None:
    """Lines of `base` that the changed pair does not have at that place; None where it is not legal."""
    fields = Attention.field_names()
    attention = plan.attention.replace(**{k: v for k, v in changes.items() if k in fields})
    schedule = plan.schedule.replace(**{k: v for k, v in changes.items() if k not in fields})
    try:
        other = assemble(attention, schedule)
    except ScheduleError:
        return None
    blocks = difflib.SequenceMatcher(None, base, _code(emit(other).text), autojunk=False).get_matching_blocks()
    same = {i for b in blocks for i in range(b.a, b.a + b.size)}
    return frozenset(i + 1 for i, line in enumerate(base) if i not in same and line.strip("{};"))


def _values(plan: Plan, knob: str) -> Iterator[list[Changes]]:
    """Other values of a knob, each as ways to have it, of which the first legal one counts."""
    a, s = plan.attention, plan.schedule
    now = getattr(a, knob) if knob in Attention.field_names() else getattr(s, knob)
    for value in _others(plan, knob, now):
        alone: Changes = {knob: value}
        yield [alone, *({**alone, **tied} for tied in _ties(s, knob, value))]


def _others(plan: Plan, knob: str, now: Any) -> list[Any]:
    s = plan.schedule
    step = 32 if plan.attention.value_dtype == "e4m3" else 16
    numbers: dict[str, tuple[Any, ...]] = {
        "head_dim": (64, 128, 256),
        "scale": (0.25,),
        "tile_q": tuple(64 * n for n in (1, 2, 3, 4)) if s.mma == "wgmma" else (16, 32, 64, 128),
        "tile_kv": (s.tile_kv - step, s.tile_kv + step, s.tile_kv // 2),
        "stages": (1, 2, 3),
        "stages_q": (None, 2),
        "registers": ((24, 232), (40, 224), (32, 152)),
    }
    return [v for v in (numbers.get(knob) or CHOICES.get(knob) or ()) if v != now][:MOST]


def _ties(s: Schedule, knob: str, value: Any) -> list[Changes]:
    """What else to change for a value that may not be legal alone."""
    alone = {"both": "within", "pingpong": "none"}.get(s.overlap, s.overlap)
    if knob == "roles" and value == "uniform":
        plain = {"overlap": alone, "registers": None, "stages_q": None}
        return [plain, {**plain, "fuse_tiles": False}, {**plain, "v_transposed": True}]
    if s.mma == "wgmma" and knob in ("tile_q", "consumers") and value:
        n = value if knob == "consumers" else value // 64
        return [{"tile_q": 64 * n, "consumers": n}, {"tile_q": 64 * n, "consumers": n, "overlap": alone}]
    if s.mma == "mma_sync" and knob in ("tile_q", "warps"):
        return [{"warps": n} for n in (4, 2, 1)] if knob == "tile_q" else [{"tile_q": 64}, {"tile_q": 32}, {"tile_q": 128}]
    if knob in ("reference", "stages_q", "q_operand") and value in ("stale", 2, "registers"):
        return [{"tile_kv": n} for n in range(s.tile_kv - 16, 16, -16)]
    if knob == "movement" and s.mma == "mma_sync":
        return [{"stages": 1}]
    if knob == "overlap" and value in ("none", "pingpong") and s.reference == "stale":
        return [{"reference": "running", "fuse_tiles": False}]
    return []
