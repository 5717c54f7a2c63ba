"""The layers one after another, and the ways out that an error offers."""

from __future__ import annotations

from dataclasses import replace

from ...attention import Attention
from ...errors import ScheduleError, Violation
from ...schedule import Schedule
from .python_values import types
from .resources import resources
from .structure import structure
from .values import values

OFFERED = 4
"""How many legal values an error names at most."""


def check(attention: Attention, schedule: Schedule) -> None:
    """Raise ScheduleError with all violations of the first layer that has any."""
    found = _first_layer(attention, schedule)
    if found:
        raise ScheduleError(replace(v, nearest=_ways_out(attention, schedule, v, alone=len(found) == 1)) for v in found)


def _first_layer(attention: Attention, schedule: Schedule) -> tuple[Violation, ...]:
    """All violations of the first layer that has any."""
    for layer in (types, values, structure, resources):
        found = tuple(layer(attention, schedule))
        if found:
            return found
    return ()


def _ways_out(attention: Attention, schedule: Schedule, v: Violation, alone: bool) -> tuple[object, ...]:
    """Of the violation's nearest values, nearest first, those that make the pair legal; if it is not the only mistake, or none of them
    does, those that mend this one."""
    if v.field == "head_dim":  # its tiles come with it where a schedule is loaded
        return v.nearest
    legal, mending = [], []
    for value in v.nearest:
        if isinstance(value, str) and "=" in value:  # another knob, found by trying
            return v.nearest
        part = {v.field: value}
        mine = v.field in Attention.field_names()
        left = _first_layer(attention.replace(**part) if mine else attention, schedule if mine else schedule.replace(**part))
        if (v.code, v.field) not in {(x.code, x.field) for x in left}:
            mending.append(value)
            legal += [value] * (not left)
    return tuple((alone and legal) or mending or v.nearest)[:OFFERED]
