"""Descales: the float32 numbers that 8-bit q, k and v stand for multiples of, and which of them a caller may give.

Each is one number (None: 1), or an array, of which the schedule's `scale_granularity` says what an element covers (`plan.scales`):
"tensor": an array of one element; "head": (batch, kv_heads), so that the query heads of a group share q's; "block": q's (batch, heads,
query tiles), k's and v's (batch, kv_heads, key blocks). The oracle knows no tiles: it takes numbers, (batch, kv_heads), or one for each
row (batch, heads, seqlen), which `by_row` makes of blocks. Scores are multiplied by q's and k's, the output by v's.
"""

from __future__ import annotations

import math
import numbers
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

from .attention import Attention
from .errors import InputError
from .plan import scales
from .plan.kernel import DESCALES, Problem
from .schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt


class Descales(TypedDict, total=False):
    """Keyword arguments of the oracle's functions: numbers, or NumPy float32 arrays."""

    q_descale: Any
    k_descale: Any
    v_descale: Any


LARGEST = 3.4028234663852886e38
"""Of float32."""


def refuse_unless_8_bit(attention: Attention, given: dict[str, Any]) -> None:
    """An InputError for the first descale that is given (not None) of a 16-bit tensor."""
    for name, value in given.items():
        if value is not None and name not in attention.descales:
            where = f"beside a {attention.value_dtype} v" if attention.has_descales else f"with {attention.dtype} inputs"
            raise InputError(name, f"given {where}; only e4m3 and int8 tensors have a descale")


@dataclass(frozen=True)
class Form:
    """What an array of a descale must look like: one of these shapes, with their dimensions' names (none: any shape of one element)."""

    shapes: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    contiguous: bool = False
    signed: bool = False
    """See `is_signed`."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) == 1 if not self.shapes else any(shape == s for s, _ in self.shapes)

    def __str__(self) -> str:
        return " or ".join(f"{s} ({', '.join(dims)})" for s, dims in self.shapes) or "an array of one element"


def forms(schedule: Schedule, problem: Problem) -> dict[str, Form]:
    """Of the arrays that a kernel of the schedule takes."""
    out = {}
    for name in DESCALES:
        shape, by_block = scales.shape(name, schedule, problem), schedule.scale_granularity == "block"
        shapes = () if shape is None else ((shape, scales.dims(name, schedule)),)
        out[name] = Form(shapes, contiguous=by_block, signed=is_signed(name, schedule))
    return out


def is_signed(name: str, schedule: Schedule) -> bool:
    """Whether a negative descale has a meaning: of v, where it multiplies the output."""
    return name == DESCALES[2] and schedule.scale_granularity != "block"


def oracle_forms(problem: Problem) -> dict[str, Form]:
    """Of the arrays that the oracle takes."""
    p, head = problem, ((problem.batch, problem.hkv), ("batch", "kv_heads"))
    rows = dict.fromkeys(DESCALES, ((p.batch, p.hkv, p.sk), ("batch", "kv_heads", "seqlen_k")))
    rows[DESCALES[0]] = ((p.batch, p.hq, p.sq), ("batch", "heads", "seqlen_q"))
    return {n: Form((head, rows[n]), signed=n == DESCALES[2]) for n in DESCALES}


def by_row(schedule: Schedule, problem: Problem, given: Descales) -> Descales:
    """The descales that a kernel of the schedule takes, as the oracle does: those of blocks repeated for each of their rows."""
    values: dict[str, Any] = dict(given)
    out: dict[str, Any] = {}
    for name, value in values.items():
        is_array = getattr(value, "ndim", 0) > 0
        if schedule.scale_granularity == "tensor" and is_array:
            out[name] = value.item()
        elif schedule.scale_granularity == "block" and is_array:
            mine = name == DESCALES[0]
            rows, length = (schedule.tile_q, problem.sq) if mine else (schedule.tile_kv, problem.sk)
            out[name] = value.repeat(rows, axis=2)[:, :, :length]
        else:
            out[name] = value
    return cast(Descales, out)


def as_number(name: str, value: Any, signed: bool) -> float | None:
    """A Python or NumPy number (or 0-d NumPy array) as the kernel takes it; None if it is something else, such as a tensor.

    InputError: NaN, beyond float32, or negative where that has no meaning (see `is_signed`).
    """
    if type(value) is not float:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.ndim == 0:
            value = value.item()
        if type(value) is bool or not isinstance(value, numbers.Real):
            return None
        try:
            value = float(value)
        except OverflowError:  # an int beyond float64
            raise InputError(name, "is too large; a descale is a finite float32 number") from None
    if not abs(value) <= LARGEST:
        raise InputError(name, f"is {value}; a descale is a finite float32 number")
    if value < 0 and not signed:
        why = "of v's blocks becomes part of P, which is positive"
        if name != DESCALES[2]:
            why = f"of {name[0]} would turn every row's largest score into its smallest"
        raise InputError(name, f"is {value:g}; a negative descale {why}")
    return float(value)


def as_array(name: str, array: npt.NDArray[Any], form: Form) -> npt.NDArray[np.float32]:
    """A NumPy array of that form, its values checked as those of a number."""
    import numpy as np

    check_form(name, array.shape, form)
    if array.dtype != np.float32:
        raise InputError(name, f"is {array.dtype}; a descale is float32")
    at = np.argwhere(~np.isfinite(array) | ((array < 0) & (not form.signed)))
    if len(at):
        where = tuple(int(i) for i in at[0])
        rule = "finite" if form.signed else "finite and not negative"
        raise InputError(name, f"is {array[where]} at {where}; a descale of {name[0]} is {rule}")
    return array


def check_form(name: str, shape: tuple[int, ...], form: Form) -> None:
    """InputError for an array of another shape."""
    if not form.fits(tuple(shape)):
        raise InputError(name, f"has shape {tuple(shape)}; expected {form}, or one number")


def as_arrays(attention: Attention, given: Descales, forms: Mapping[str, Form]) -> dict[str, npt.NDArray[np.float32]]:
    """Every descale that is given, as an array (a number: 0-d); InputError as `as_number` and `as_array`."""
    import numpy as np

    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    unknown = set(values) - set(DESCALES)
    if unknown:
        raise TypeError(f"no descale is called {', '.join(sorted(unknown))}; there are {', '.join(DESCALES)}")
    refuse_unless_8_bit(attention, values)
    arrays = {}
    for name, value in values.items():
        number = as_number(name, value, forms[name].signed)
        arrays[name] = as_array(name, _as_numpy(name, value), forms[name]) if number is None else np.array(number, np.float32)
    return arrays


def _as_numpy(name: str, value: Any) -> npt.NDArray[Any]:
    import numpy as np

    try:
        array = np.asarray(value)
    except ValueError as e:  # a ragged list
        raise InputError(name, _no_array(value)) from e
    if array.dtype.kind in "OSUb":
        raise InputError(name, _no_array(value))
    return array


def _no_array(value: Any) -> str:
    return f"is a {type(value).__name__} that is no array of numbers; expected float32 (batch, kv_heads) or another form, or one number"
