"""First layer: values of knobs are Python's own."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import Any

from ...attention import Attention
from ...errors import Violation
from ...schedule import Schedule
from .common import shown
from .values import values


def types(attention: Attention, schedule: Schedule) -> Iterator[Violation]:
    """Values of other libraries, as NumPy's int64, are not Python's: plans are compared, hashed and printed by their fields."""
    mine: dict[str, object] = {}
    found: dict[str, str] = {}
    for name, value in (*vars(attention).items(), *vars(schedule).items()):
        foreign = next((x for x in (value if isinstance(value, tuple) else (value,)) if _is_foreign(x)), None)
        if foreign is not None:
            mine[name] = tuple(map(_own, value)) if isinstance(value, tuple) else _own(value)
            found[name] = (
                f"{shown(value)} holds a {type(foreign).__module__}.{type(foreign).__name__}; knobs are plain Python values"
            )
    if not found:
        return
    of_a = {n: x for n, x in mine.items() if n in Attention.field_names()}
    of_s = {n: x for n, x in mine.items() if n not in of_a}
    wrong = {v.field: v.nearest for v in values(attention.replace(**of_a), schedule.replace(**of_s))}
    for name, message in found.items():
        yield Violation("python-value", name, message, wrong.get(name, (mine[name],)))


def _is_foreign(x: Any) -> bool:
    if isinstance(x, (int, float)):  # NumPy's float64 is one
        return False
    return isinstance(x, numbers.Real) or type(x).__module__ == "numpy" and getattr(x, "ndim", 1) == 0


def _own(x: Any) -> Any:
    if not _is_foreign(x):
        return x
    if isinstance(x, numbers.Integral):
        return int(x)
    if isinstance(x, numbers.Real):
        try:
            return float(x)
        except OverflowError:
            return -math.inf if x < 0 else math.inf
    return x.item()  # NumPy's bool, or text
