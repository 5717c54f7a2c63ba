"""Ablations: a schedule without one of the things that make it fast, as in the FlashAttention-3 paper's table.

Each is a `replace` of the schedule. What a removal takes with it is changed too, and told: a stale maximum needs the softmax under a
warpgroup's own P·V, ping-pong needs a producer, fused tiles need both a producer and a stale maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..attention import Attention
from ..errors import ScheduleError
from ..plan.rules import check
from ..schedule import Schedule

Changes = dict[str, Any]

WITHOUT_PINGPONG = {"both": "within", "pingpong": "none"}
WITHOUT_WITHIN = {"both": "pingpong", "within": "none"}


@dataclass(frozen=True)
class Ablated:
    """A schedule with something removed. `changed`: in which knobs it differs from the whole one."""

    name: str
    schedule: Schedule
    changed: str


def _no_pingpong(s: Schedule) -> Changes:
    return {"overlap": WITHOUT_PINGPONG[s.overlap]} if s.overlap in WITHOUT_PINGPONG else {}


def _no_within(s: Schedule) -> Changes:
    return {"overlap": WITHOUT_WITHIN[s.overlap], **_running(s)} if s.overlap in WITHOUT_WITHIN else {}


def _no_overlap(s: Schedule) -> Changes:
    return {"overlap": "none", **_running(s)} if s.overlap == "both" else {}


def _no_specialisation(s: Schedule) -> Changes:
    if s.roles != "producer":
        return {}
    return {"roles": "uniform", "registers": None, "fuse_tiles": False, "stages_q": None, "skip_masked": False, **_no_pingpong(s)}


def _running(s: Schedule) -> Changes:
    return {"reference": "running", "fuse_tiles": False} if s.reference == "stale" else {}


def _unfused(s: Schedule) -> Changes:
    return {"fuse_tiles": False} if s.fuse_tiles else {}


def _unskipped(s: Schedule) -> Changes:
    return {"skip_masked": False} if s.skip_masked else {}


ABLATIONS: dict[str, Callable[[Schedule], Changes]] = {
    "no ping-pong": _no_pingpong,
    "no own overlap": _no_within,
    "no overlap": _no_overlap,
    "no specialised warps": _no_specialisation,
    "running maximum": _running,
    "tiles not fused": _unfused,
    "masked blocks computed": _unskipped,
}
"""Name in tables → the changes that remove it from a schedule, {} where the schedule does not have it."""


def ablations(attention: Attention, schedule: Schedule) -> tuple[Ablated, ...]:
    """What can be removed from a legal schedule. Where the rest needs more registers or shared memory than there are, it takes the
    longest blocks of keys that fit; where none does, it is left out."""
    found: list[Ablated] = []
    for name, changes_of in ABLATIONS.items():
        changes = changes_of(schedule)
        fitted = _fitted(attention, schedule.replace(**changes)) if changes else None
        if fitted is not None and fitted not in [a.schedule for a in found]:
            changed = ", ".join(f"{knob}={new}" for knob, (_, new) in schedule.diff(fitted).items())
            found.append(Ablated(name, fitted, changed))
    return tuple(found)


def _fitted(attention: Attention, schedule: Schedule) -> Schedule | None:
    step = 32 if attention.value_dtype == "e4m3" else 16
    for tile_kv in range(schedule.tile_kv, 0, -step):
        smaller = schedule.replace(tile_kv=tile_kv)
        try:
            check(attention, smaller)
        except ScheduleError as e:
            if not set(e.codes) <= {"registers", "smem"}:
                return None
            continue
        return smaller
    return None
