"""The rows of an accuracy table: a kernel, and how 16-bit tensors become its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..attention import Attention
from ..errors import ScheduleError
from ..oracle.quantise import Quantiser
from ..plan import plan
from ..schedule import Schedule

SET_BY_RECIPES = ("dtype", "v_dtype", "precision", "scale_granularity", "hadamard", "smooth_k", "promote_every")
"""Fields that the table varies, so that a caller may not set them."""


@dataclass(frozen=True)
class Way:
    """A way of quantising."""

    label: str
    granularity: str
    hadamard: bool = False
    smooth_k: bool = False


WAYS = (
    Way("per tensor", "tensor"),
    Way("per head", "head"),
    Way("per block", "block"),
    Way("per tensor, Hadamard", "tensor", hadamard=True),
    Way("per head, Hadamard", "head", hadamard=True),
    Way("per block, Hadamard", "block", hadamard=True),
    Way("per block, Hadamard, smooth K", "block", hadamard=True, smooth_k=True),
)
INT8_WAYS = (WAYS[1], WAYS[4], WAYS[5], WAYS[6])
"""Of q and k in int8, v in e4m3: as far as a tensor's scale is not too coarse for integers."""
INT8_QK_WAYS = (WAYS[1], WAYS[4], WAYS[5], WAYS[6])
"""Of q and k in int8, v left in the tensors' 16-bit type."""
PLAIN = WAYS[0]
"""The row that the others are compared with."""

PROMOTIONS: tuple[int | None, ...] = (None, 8, 1)
"""Key blocks between two promotions of the accumulator; None: never."""


@dataclass(frozen=True)
class Recipe:
    """One row. `quantiser` None: the kernel takes the 16-bit tensors as they are."""

    label: str
    attention: Attention
    schedule: Schedule
    quantiser: Quantiser | None
    refused: str = ""
    """Why the kernel is not legal; "" if it is."""


def recipes(attention: Attention, schedule: Schedule, dtype: str) -> tuple[Recipe, ...]:
    """A 16-bit schedule: one row, in the type `dtype` of the tensors. One for 8-bit tensors: a row for each of `WAYS`, in e4m3, and one
    for each of `INT8_WAYS` and, with v and out in the type of the tensors, of `INT8_QK_WAYS`."""
    if not attention.has_descales:
        kernel = attention.replace(dtype=dtype, out_dtype=None)
        return (Recipe(dtype, kernel, schedule, None, _refused(kernel, schedule)),)
    in_e4m3 = _in_e4m3(attention)
    integers = in_e4m3.replace(dtype="int8")
    half_v = integers.replace(v_dtype=dtype, out_dtype=None)
    return (
        *(_eight_bit(in_e4m3, schedule, way, way.label) for way in WAYS),
        *(_eight_bit(integers, schedule, way, f"int8 {way.label}") for way in INT8_WAYS),
        *(_eight_bit(half_v, schedule, way, f"int8_qk {way.label}") for way in INT8_QK_WAYS),
    )


def long_recipes(attention: Attention, schedule: Schedule, dtype: str) -> tuple[Recipe, ...]:
    """Rows for long keys: as `recipes` of a 16-bit schedule; of one for 8-bit tensors the most exact way in e4m3, with and without
    promotion of the accumulator, all with the largest blocks that leave registers for a copy of it."""
    if not attention.has_descales:
        return recipes(attention, schedule, dtype)
    attention = _in_e4m3(attention)
    way, roomy = WAYS[5], _with_room(attention, schedule)
    return tuple(_eight_bit(attention, roomy, way, f"{way.label}, {_promotion(every)}", every) for every in PROMOTIONS)


def _in_e4m3(attention: Attention) -> Attention:
    return attention.replace(dtype="e4m3", v_dtype=None, out_dtype=attention.output_dtype)


def _promotion(every: int | None) -> str:
    return "no promotion" if every is None else f"promoted every {every} blocks" if every > 1 else "promoted every block"


def _eight_bit(attention: Attention, schedule: Schedule, way: Way, label: str, promote_every: int | None = None) -> Recipe:
    chosen = _fitting(attention, schedule.replace(scale_granularity=way.granularity, promote_every=promote_every))
    tile_q, tile_kv = (chosen.tile_q, chosen.tile_kv) if way.granularity == "block" else (None, None)
    quantiser = Quantiser(
        granularity=way.granularity,
        hadamard=way.hadamard,
        smooth_k=way.smooth_k,
        tile_q=tile_q,
        tile_kv=tile_kv,
        dtype=attention.dtype,
        v_dtype="e4m3" if attention.value_dtype == "e4m3" else None,
    )
    return Recipe(label, attention, chosen, quantiser, _refused(attention, chosen))


def _with_room(attention: Attention, schedule: Schedule) -> Schedule:
    """The schedule with tiles small enough for every way of promotion: smaller blocks or, if none will do, fewer warpgroups too, which
    leaves each of their threads more registers."""
    fewer = (schedule.replace(consumers=n, tile_q=64 * n) for n in range((schedule.consumers or 1) - 1, 0, -1))
    for tiles in (schedule, *fewer):
        ways = [_fitting(attention, tiles.replace(scale_granularity="block", promote_every=every)) for every in PROMOTIONS]
        if not any(_refused(attention, way) for way in ways):
            return tiles.replace(tile_kv=min(way.tile_kv for way in ways))
    return schedule


def _fitting(attention: Attention, schedule: Schedule) -> Schedule:
    """The schedule, its blocks as much smaller as makes it legal; as it is where that does not help."""
    return next((s for s in _smaller(schedule) if not _refused(attention, s)), schedule)


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    for tile_kv in range(schedule.tile_kv, 0, -32):
        yield schedule.replace(tile_kv=tile_kv)


def _refused(attention: Attention, schedule: Schedule) -> str:
    try:
        plan(attention, schedule)
    except ScheduleError as e:
        return "; ".join(str(v) for v in e.violations)
    return ""
