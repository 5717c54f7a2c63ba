"""What tuning tries: schedules around a given one, and which of them are legal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..attention import Attention
from ..errors import InputError, ScheduleError
from ..plan.rules import check
from ..schedule import Schedule

Axes = Mapping[str, Sequence[Any]]
"""Knob → the values to try; all combinations."""

WGMMA_AXES: dict[int, dict[str, tuple[Any, ...]]] = {
    64: {"consumers": (2, 3, 4), "tile_kv": (48, 64, 96, 128, 160), "stages": (2, 4)},
    128: {
        "consumers": (2,),
        "tile_kv": (80, 96, 112, 128, 144, 160, 176),
        "stages": (2,),
        "parallelism": ("persistent_dynamic", "persistent_static", "query_tiles"),
    },
    256: {"consumers": (2,), "tile_kv": (32, 48, 64, 80, 96), "stages": (1, 2)},
}
"""By head_dim, for 16-bit types. Larger blocks need more registers, of which each consumer has the fewer the more there are.
A third stage was never faster at head_dim 128; there, a fixed order of tiles was for few and equal ones, a CTA a tile for long ones."""
E4M3_TILE_KV: dict[int, tuple[int, ...]] = {64: (96, 128, 160, 192), 128: (128, 160, 192, 224), 256: (64, 96, 128)}
SOFTMAX_AXES: dict[str, tuple[Any, ...]] = {
    "overlap": ("within", "both"),
    "reference": ("running", "stale"),
    "fuse_tiles": (False, True),
    "skip_masked": (False, True),
}
MMA_SYNC_AXES: dict[str, tuple[Any, ...]] = {
    "tile_q": (64, 128),
    "warps": (4, 8),
    "tile_kv": (32, 64, 128),
    "stages": (1, 2, 3),
}


@dataclass(frozen=True)
class Space:
    """The candidates for one attention. `enumerated`: combinations looked at; `illegal`: code → how many broke that rule (one may break
    several)."""

    attention: Attention
    candidates: tuple[Schedule, ...]
    enumerated: int
    illegal: dict[str, int]


def default_axes(attention: Attention, base: Schedule) -> dict[str, tuple[Any, ...]]:
    """What is tried when nothing is said. The mask does not matter for what may be fast, only for what is."""
    if base.mma != "wgmma":
        return dict(MMA_SYNC_AXES)
    axes = dict(WGMMA_AXES.get(attention.head_dim, WGMMA_AXES[128]))
    if attention.dtype == "e4m3":
        axes["tile_kv"] = E4M3_TILE_KV.get(attention.head_dim, E4M3_TILE_KV[128])
    return axes | SOFTMAX_AXES


def enumerate_space(
    attention: Attention, base: Schedule, axes: Axes, pinned: Iterable[str] = (), also: Iterable[Schedule] = ()
) -> Space:
    """Every combination of the axes around `base`, and `also`, without repeats and without what is not legal.

    `pinned` knobs keep the base's value. With wgmma, tile_q follows consumers (64 rows each) unless it is an axis or pinned itself.
    InputError if an axis is empty or nothing legal is left; ScheduleError for a knob that does not exist.
    """
    fixed = set(pinned)
    tried = {name: tuple(values) for name, values in axes.items() if name not in fixed}
    for name, values in tried.items():
        if not values:
            raise InputError(name, "has no values to try")
    follows = base.mma == "wgmma" and not {"tile_q"} & (set(tried) | fixed)
    found = [base, *base.sweep(**tried)]
    found = [s.replace(tile_q=64 * s.consumers) if follows and s.consumers else s for s in found]
    unique = tuple(dict.fromkeys([*found, *also]))
    illegal: Counter[str] = Counter()
    legal: list[Schedule] = []
    first = ""
    for schedule in unique:
        try:
            check(attention, schedule)
        except ScheduleError as e:
            illegal.update(set(e.codes))
            first = first or str(e.violations[0])
        else:
            legal.append(schedule)
    if not legal:
        raise InputError("tune", f"none of {len(unique)} schedules is legal for {attention.label}; the given one itself: {first}")
    return Space(attention, tuple(legal), len(unique), dict(illegal.most_common()))
