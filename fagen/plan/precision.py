"""Which pair the attention kernel itself computes, where the plan quantises first (`Schedule.precision`)."""

from __future__ import annotations

from ..attention import Attention
from ..schedule import Schedule


def attended(attention: Attention, schedule: Schedule) -> tuple[Attention, Schedule]:
    """The attention on the quantised tensors, and its schedule: the pair itself without `precision`."""
    if schedule.precision is None:
        return attention, schedule
    return (
        attention.replace(dtype=schedule.precision, out_dtype=attention.output_dtype),
        schedule.replace(precision=None, hadamard=False, smooth_k=False),
    )


def names(attention: Attention, schedule: Schedule) -> dict[str, str]:
    """Tensor → what holds it in 8 bits: a workspace, or an output of a plan that only quantises."""
    inner, _ = attended(attention, schedule)
    return {t: f"{t}_{inner.dtype_of(t)}" for t in ("q", "k", "v")}


def granularity(schedule: Schedule) -> str:
    """What shares a scale; of 8-bit products a (batch, KV head) where the schedule does not say."""
    return schedule.scale_granularity or "head"
