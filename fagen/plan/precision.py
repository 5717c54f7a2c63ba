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


def granularity(schedule: Schedule) -> str:
    """What shares a scale; of e4m3 products a (batch, KV head) where the schedule does not say."""
    return schedule.scale_granularity or "head"
