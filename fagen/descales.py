"""Descales: the float32 numbers that 8-bit q, k and v stand for multiples of, and which of them a caller may give.

Each is one number, or an array (batch, kv_heads): the query heads that share a KV head share q's descale too. Scores are multiplied
by q's and k's, the output by v's. None: 1.
"""

from __future__ import annotations

import numbers
import sys
from typing import TYPE_CHECKING, Any, TypedDict

from .attention import Attention
from .errors import InputError
from .plan.kernel import DESCALES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Descales(TypedDict, total=False):
    """Keyword arguments of the oracle's functions: numbers, or NumPy float32 arrays (batch, kv_heads)."""

    q_descale: Any
    k_descale: Any
    v_descale: Any


LARGEST = 3.4028234663852886e38
"""Of float32."""
STANDS_FOR_ZERO = 2.0**-100
"""What a kernel gets for a 0 of q or k: it multiplies masked scores, which are −inf, and 0 · −inf is NaN. Scores times this vanish."""


def refuse_unless_8_bit(attention: Attention, given: dict[str, Any]) -> None:
    """An InputError for the first descale that is given (not None) with 16-bit inputs."""
    for name, value in given.items():
        if value is not None and attention.dtype != "e4m3":
            raise InputError(name, f"given with {attention.dtype} inputs; only e4m3 tensors have a descale")


def as_number(name: str, value: Any) -> float | None:
    """A Python or NumPy number (or 0-d NumPy array) as the kernel takes it; None if it is something else, such as a tensor.

    InputError: NaN, beyond float32, or negative for q or k, which would turn a row's maximum into its minimum.
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
    if name == DESCALES[2]:
        return float(value)
    if value < 0:
        raise InputError(
            name, f"is {value:g}; a negative descale of {name[0]} would turn every row's largest score into its smallest"
        )
    return value or STANDS_FOR_ZERO


def as_array(name: str, array: npt.NDArray[Any], shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """A NumPy array of that shape, (batch, kv_heads), its values checked and 0 replaced as those of a number."""
    import numpy as np

    if array.shape != shape:
        raise wrong_shape(name, array.shape, shape)
    if array.dtype != np.float32:
        raise InputError(name, f"is {array.dtype}; a descale is float32")
    at = np.argwhere(~np.isfinite(array) | ((array < 0) & (name != DESCALES[2])))
    if len(at):
        where = tuple(int(i) for i in at[0])
        rule = "finite" if name == DESCALES[2] else "finite and not negative"
        raise InputError(name, f"is {array[where]} at {where}; a descale of {name[0]} is {rule}")
    return array if name == DESCALES[2] else np.where(array == 0, np.float32(STANDS_FOR_ZERO), array)


def wrong_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> InputError:
    return InputError(name, f"has shape {tuple(shape)}; expected {expected} (batch, kv_heads), or one number")


def as_arrays(attention: Attention, given: Descales, shape: tuple[int, int]) -> dict[str, npt.NDArray[np.float32]]:
    """Every descale that is given, as an array of that shape; InputError as `as_number` and `as_array`."""
    import numpy as np

    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    unknown = set(values) - set(DESCALES)
    if unknown:
        raise TypeError(f"no descale is called {', '.join(sorted(unknown))}; there are {', '.join(DESCALES)}")
    refuse_unless_8_bit(attention, values)
    arrays = {}
    for name, value in values.items():
        number = as_number(name, value)
        arrays[name] = as_array(name, _as_numpy(name, value), shape) if number is None else np.full(shape, number, np.float32)
    return arrays


def _as_numpy(name: str, value: Any) -> npt.NDArray[Any]:
    import numpy as np

    try:
        return np.asarray(value)
    except ValueError as e:  # a ragged list
        raise InputError(
            name, f"is a {type(value).__name__} that is no array; expected float32 (batch, kv_heads), or one number"
        ) from e
