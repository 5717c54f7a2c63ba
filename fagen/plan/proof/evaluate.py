"""Exprs as closures: a proof evaluates the same few expressions thousands of times."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from operator import itemgetter

from ...errors import InternalError
from ..expr import Const, Expr, Op, Sym, _apply

Evaluate = Callable[[Mapping[str, int]], int]

_FAST: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "&": operator.and_,
    "|": operator.or_,
    "min": min,
    "max": max,
}


class Evaluator:
    """Remembers the closure of every Expr object it has seen. Same values and errors as `Expr.eval`."""

    def __init__(self) -> None:
        self._closures: dict[int, tuple[Expr, Evaluate]] = {}  # by identity: hashing a tree costs more than evaluating it

    def __call__(self, expr: Expr, env: Mapping[str, int]) -> int:
        known = self._closures.get(id(expr))
        if known is None:
            known = self._closures[id(expr)] = (expr, _closure(expr))
        try:
            return known[1](env)
        except KeyError:
            raise InternalError(f"no value for a symbol of {expr}; known: {', '.join(sorted(env))}") from None


def _closure(expr: Expr) -> Evaluate:
    if isinstance(expr, Const):
        value = expr.value
        return lambda env: value
    if isinstance(expr, Sym):
        return itemgetter(expr.name)
    assert isinstance(expr, Op)
    if len(expr.args) == 2 and expr.op in _FAST:
        fast, a, b = _FAST[expr.op], _closure(expr.args[0]), _closure(expr.args[1])
        return lambda env: fast(a(env), b(env))
    op, args = expr.op, [_closure(x) for x in expr.args]
    return lambda env: _apply(op, [x(env) for x in args])
