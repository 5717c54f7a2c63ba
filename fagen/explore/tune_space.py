"""What tuning tries: a space of values for each knob around a given schedule, enumerated or sampled, and which of it is legal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..attention import Attention
from ..errors import InputError, ScheduleError
from ..plan.rules import check
from ..plan.steps import DTYPE_BYTES
from ..schedule import Schedule

Axes = Mapping[str, Sequence[Any]]
"""Knob → the values to try; all combinations."""

WGMMA_AXES: dict[int, dict[str, tuple[Any, ...]]] = {
    64: {"consumers": (1, 2, 3, 4), "tile_kv": (48, 64, 96, 128, 160, 192), "stages": (1, 2, 3, 4)},
    128: {"consumers": (1, 2, 3), "tile_kv": (64, 80, 96, 112, 128, 144, 160, 176), "stages": (1, 2, 3, 4)},
    256: {"consumers": (1, 2), "tile_kv": (32, 48, 64, 80, 96, 112), "stages": (1, 2, 3, (2, 3))},
}
"""By head_dim, for 16-bit types. Larger blocks need more registers, of which each consumer has the fewer the more there are."""
E4M3_TILE_KV: dict[int, tuple[int, ...]] = {64: (64, 96, 128, 160, 192), 128: (64, 96, 128, 160, 192, 224), 256: (64, 96, 128)}
SOFTMAX_AXES: dict[str, tuple[Any, ...]] = {
    "overlap": ("none", "within", "pingpong", "both"),
    "reference": ("running", "stale"),
    "fuse_tiles": (False, True),
    "stages_q": (None, 2),
    "parallelism": ("persistent_dynamic", "persistent_static", "query_tiles"),
}
MMA_SYNC_AXES: dict[str, tuple[Any, ...]] = {
    "tile_q": (32, 64, 128),
    "warps": (4, 8),
    "tile_kv": (32, 64, 128),
    "stages": (1, 2, 3),
}
MOST_ENUMERATED = 20000
"""Combinations that are all looked at (one takes less than a millisecond); of a larger space so many are drawn."""


@dataclass(frozen=True)
class Space:
    """The candidates for one attention. `combinations`: what the axes span; `enumerated`: those looked at, all of them or a sample;
    `illegal`: code → how many broke that rule (one may break several); `excluded`: legal ones left out because they are known; `sampled`: there are
    combinations that nobody looked at."""

    attention: Attention
    candidates: tuple[Schedule, ...]
    enumerated: int
    illegal: dict[str, int]
    combinations: int
    excluded: int = 0
    sampled: bool = False
    known: tuple[Schedule, ...] = ()
    """Those that are left out wherever they turn up."""


def default_axes(attention: Attention, base: Schedule) -> dict[str, tuple[Any, ...]]:
    """What is tried when nothing is said."""
    if base.mma != "wgmma":
        return dict(MMA_SYNC_AXES)
    axes = dict(WGMMA_AXES.get(attention.head_dim, WGMMA_AXES[128]))
    if attention.value_dtype == "e4m3":
        axes["tile_kv"] = E4M3_TILE_KV.get(attention.head_dim, E4M3_TILE_KV[128])
    if DTYPE_BYTES[attention.dtype] == 1:  # in 16 bits Q takes twice the registers and saves half as much: never the fastest
        axes["q_operand"] = (None, "registers")
    if attention.causal:
        axes["skip_masked"] = (False, True)
    return axes | SOFTMAX_AXES


def enumerate_space(
    attention: Attention,
    base: Schedule,
    axes: Axes,
    also: Iterable[Schedule] = (),
    *,
    exclude: Collection[Schedule] = (),
    most: int = MOST_ENUMERATED,
    seed: int = 0,
) -> Space:
    """`base`, its neighbours (one knob changed), the combinations of the axes around it (`most` of them, drawn at random, where there are
    more), and `also`; without repeats, without what is not legal and without `exclude`.

    With wgmma, tile_q follows consumers (64 rows each) unless it is an axis. InputError if an axis is empty or nothing legal is left;
    ScheduleError for a knob that does not exist.
    """
    for name, values in axes.items():
        if not values:
            raise InputError(name, "has no values to try")
    combinations = 1
    for values in axes.values():
        combinations *= len(values)
    found = [base, *neighbours(base, axes)]
    found += base.sweep(**axes) if combinations <= most else _sample(base, axes, most, seed)
    unique = tuple(dict.fromkeys([*(_followed(s, base, axes) for s in found), *also]))
    legal, illegal, first = _judged(attention, unique)
    kept = tuple(s for s in legal if s not in exclude)
    if not legal:
        raise InputError("tune", f"none of {len(unique)} schedules is legal for {attention.label}; the given one itself: {first}")
    if not kept:
        raise InputError("--exclude-known", f"leaves nothing: all {len(legal)} legal schedules are known")
    return Space(
        attention,
        kept,
        len(unique),
        dict(illegal.most_common()),
        combinations,
        len(legal) - len(kept),
        combinations > most,
        tuple(exclude),
    )


def with_neighbours(space: Space, of: Sequence[Schedule], axes: Axes) -> Space:
    """The space with those neighbours of some of its candidates that it lacks."""
    there = {*space.candidates, *space.known}
    found = dict.fromkeys(_followed(n, s, axes) for s in of for n in neighbours(s, axes))
    fresh = [s for s in found if s not in there]
    legal, illegal, _ = _judged(space.attention, fresh)
    counted = dict((Counter(space.illegal) + illegal).most_common())
    return replace(space, candidates=(*space.candidates, *legal), enumerated=space.enumerated + len(fresh), illegal=counted)


def _judged(attention: Attention, schedules: Iterable[Schedule]) -> tuple[list[Schedule], Counter[str], str]:
    """(the legal ones, code → how many broke that rule, the first violation)."""
    illegal: Counter[str] = Counter()
    legal: list[Schedule] = []
    first = ""
    for schedule in schedules:
        try:
            check(attention, schedule)
        except ScheduleError as e:
            illegal.update(set(e.codes))
            first = first or str(e.violations[0])
        else:
            legal.append(schedule)
    return legal, illegal, first


def neighbours(schedule: Schedule, axes: Axes) -> Iterator[Schedule]:
    """The schedules that differ in one knob."""
    for name, values in axes.items():
        for value in values:
            if getattr(schedule, name) != value:
                yield schedule.replace(**{name: value})


def _sample(base: Schedule, axes: Axes, count: int, seed: int) -> list[Schedule]:
    rng = random.Random(seed)
    return [base.replace(**{name: rng.choice(values) for name, values in axes.items()}) for _ in range(count)]


def _followed(schedule: Schedule, base: Schedule, axes: Axes) -> Schedule:
    """A changed number of consumers brings its rows with it."""
    if schedule.mma != "wgmma" or "tile_q" in axes or schedule.consumers in (None, base.consumers):
        return schedule
    return schedule.replace(tile_q=64 * (schedule.consumers or 1))
