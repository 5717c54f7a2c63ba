"""Contexts: many ways to reach a step, as rows of NumPy arrays; expressions evaluated on all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..plan.expr import Const, Expr, Op, Sym

Array = npt.NDArray[np.int64]
Values = dict[str, "int | Array"]
"""Variable → its value, the same in all contexts or one for each."""

_UFUNC: dict[str, Any] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.floor_divide,
    "%": np.remainder,
    "<": np.less,
    ">": np.greater,
    "<=": np.less_equal,
    ">=": np.greater_equal,
    "==": np.equal,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
    "where": np.where,
    "min": np.minimum,
    "max": np.maximum,
}


def evaluate(e: Expr, values: Mapping[str, int | Array]) -> int | Array:
    """`Expr.eval` for arrays of values; a division outside the non-negative range is an InternalError here too."""
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Sym):
        if e.name not in values:
            raise InternalError(f"no value for symbol {e.name!r}")
        return values[e.name]
    if not isinstance(e, Op) or e.op not in _UFUNC:
        raise InternalError(f"cannot evaluate {e} on arrays")
    args = [evaluate(x, values) for x in e.args]
    if e.op in ("/", "%") and (np.any(np.less(args[0], 0)) or np.any(np.less_equal(args[1], 0))):
        raise InternalError(f"division outside the non-negative range in {e.c()}")
    result = _UFUNC[e.op](*args)
    return result.astype(np.int64) if isinstance(result, np.ndarray) else int(result)


def closure(symbols: frozenset[str], behind: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The symbols and all that stand behind them."""
    while True:
        more = symbols.union(*(behind[name] for name in symbols if name in behind))
        if more == symbols:
            return symbols
        symbols = more


def distinct(values: Values, live: frozenset[str], n: int) -> tuple[Values, npt.NDArray[np.intp], int]:
    """The contexts that differ in a live value: (their values, which of them each of the `n` is, how many there are)."""
    kept = {k: v for k, v in values.items() if not isinstance(v, np.ndarray)}
    varying = {k: v for k, v in values.items() if isinstance(v, np.ndarray) and k in live}
    code: npt.NDArray[np.int64] = np.zeros(n, np.int64)
    for column in varying.values():
        if n:
            low, high = int(column.min()), int(column.max())
            code = np.unique(code, return_inverse=True)[1].reshape(-1) * (high - low + 1) + (column - low)
    _, where, back = np.unique(code, return_index=True, return_inverse=True)
    return {**kept, **{k: v[where] for k, v in varying.items()}}, back.reshape(-1), len(where)
