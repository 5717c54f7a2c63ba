"""What the layers share: which numbers are numbers, the nearest legal ones, and what a schedule lacks."""

from __future__ import annotations

import math

from ...errors import Violation
from ...schedule import Schedule

MOST_SHOWN = 100
"""Characters of a value up to which an error shows it whole."""


def lacking(s: Schedule, **needed: str) -> str:
    """What a schedule lacks of these fields; of the persistent tiles any will do."""
    persistent = s.parallelism.startswith("persistent")
    absent = [f for f, v in needed.items() if not (persistent if f == "parallelism" else getattr(s, f) == v)]
    return ", ".join(f"{f}={needed[f]!r}" for f in absent)


def nearest_int(code: str, field: str, value: object, legal: tuple[int, ...], what: str) -> Violation:
    """All of `legal`, nearest first: `check` offers the first that mend the schedule."""
    near = (
        sorted(legal, key=lambda x: abs(x - value))
        if isinstance(value, int) or isinstance(value, float) and math.isfinite(value)
        else legal
    )
    return Violation(code, field, f"{shown(value)} {what}", tuple(near))


def shown(value: object) -> str:
    """A value as an error says it: the middle of a long one is left out, such as most digits of 10**400."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of too many digits to print"
    return text if len(text) <= MOST_SHOWN else f"{text[:24]}…{text[-8:]} ({len(text)} characters)"


def is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
