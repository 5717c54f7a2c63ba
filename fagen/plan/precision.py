"""Which pair the attention kernel itself computes, where the plan quantises first (`Schedule.precision`)."""

from __future__ import annotations

from ..attention import EIGHT_BIT_TYPES, Attention
from ..schedule import Schedule


def attended(attention: Attention, schedule: Schedule) -> tuple[Attention, Schedule]:
    """The attention on the quantised tensors, and its schedule: the pair itself without `precision`."""
    if schedule.precision is None:
        return attention, schedule
    return quantised(attention, schedule.precision), schedule.replace(precision=None, hadamard=False, smooth_k=False)


def quantised(attention: Attention, precision: str) -> Attention:
    """What 16-bit `attention` becomes under a `precision`: "int8_qk" leaves v as it is."""
    types = {"dtype": "int8", "v_dtype": attention.dtype} if precision == "int8_qk" else {"dtype": precision}
    return attention.replace(out_dtype=attention.output_dtype, **types)


def names(attention: Attention, schedule: Schedule) -> dict[str, str]:
    """Tensor → what holds it in 8 bits: a workspace, or an output of a plan that only quantises. Only those that are quantised."""
    inner, _ = attended(attention, schedule)
    types = {t: inner.dtype_of(t) for t in ("q", "k", "v")}
    return {t: f"{t}_{dtype}" for t, dtype in types.items() if dtype in EIGHT_BIT_TYPES}


def granularity(schedule: Schedule) -> str:
    """What shares a scale; of 8-bit products a (batch, KV head) where the schedule does not say."""
    return schedule.scale_granularity or "head"
