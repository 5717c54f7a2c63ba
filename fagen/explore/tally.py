"""A program's quantities summed over its loops for one problem, without running it iteration by iteration.

A *context* is one way to reach a step: values of the variables in scope. Contexts are rows of NumPy arrays; a loop turns each into as
many as it has iterations, those that the body cannot tell apart are evaluated once, and results flow back to where they came from. So
16384 tokens under a causal mask are some thousand distinct contexts instead of a million iterations, and every CTA's own sum is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..plan.expr import Const, Expr, Op, Sym
from ..plan.kernel import KernelPlan
from ..plan.steps import Body, Elected, Forever, If, Let, Loop, Role, Step, Var, Vote, bodies, walk
from .quantities import Key, Quantity, quantities

Array = npt.NDArray[np.int64]
Values = dict[str, "int | Array"]
Tally = dict[tuple[Any, ...], Array]
"""Key → one number a context. Beside the `Key`s of the quantities: ("first", "in" | "out", tensor, symbols), the bytes touched without
those touched before, where `symbols` are what their place depends on; ("all", …) the same with those touched before; ("again", …, tensor),
those touched again by the same body."""

CHUNK = 1 << 17
"""CTAs that are evaluated together; bounds the memory of a large grid."""


@dataclass
class Work:
    """What a kernel does for one problem. Arrays have one number a unit: a CTA, or a tile where tiles are claimed at run time."""

    total: dict[Key, int]
    units: dict[Key, Array]
    claimed: bool
    """Units are tiles that CTAs claim, not CTAs."""
    touched: dict[tuple[str, str], int]
    """("in" | "out", tensor) → bytes; what the instances of a role touch alike is counted for one of them."""
    first: dict[tuple[str, str], int]
    """Of those, each byte once for a CTA (or claimed tile) however often it comes back to it."""
    again: dict[tuple[str, str], int]
    """Likewise the bytes that a step touches right after a sibling did."""
    again_at_once: int
    """What a CTA's instances come back to so, side by side: the most at any time."""


def tally(kernel: KernelPlan, scalars: Mapping[str, int]) -> Work:
    """`scalars`: the kernel's parameters and `n_ctas`, as `plan.kernel.scalar_env` gives them."""
    parts = []
    for start in range(0, scalars["n_ctas"], CHUNK):
        parts.append(_chunk(kernel, scalars, np.arange(start, min(start + CHUNK, scalars["n_ctas"]), dtype=np.int64)))
        if parts[-1].claimed:  # tiles belong to all CTAs together
            break
    if len(parts) == 1:
        return parts[0]
    sizes = [len(next(iter(p.units.values()), ())) for p in parts]
    keys = {k for p in parts for k in p.units}
    units = {k: np.concatenate([p.units.get(k, np.zeros(n, np.int64)) for p, n in zip(parts, sizes)]) for k in keys}
    total, touched, first, again = (_add(getattr(p, name) for p in parts) for name in ("total", "touched", "first", "again"))
    return Work(total, units, False, touched, first, again, max(p.again_at_once for p in parts))


def _add(parts: Iterable[dict[Any, int]]) -> dict[Any, int]:
    out: dict[Any, int] = {}
    for part in parts:
        for key, n in part.items():
            out[key] = out.get(key, 0) + n
    return out


def _chunk(kernel: KernelPlan, scalars: Mapping[str, int], ctas: Array) -> Work:
    units: dict[Key, Array] = {}
    touched: dict[tuple[str, str], int] = {}
    first: dict[tuple[str, str], int] = {}
    again: dict[tuple[str, str], int] = {}
    claimed, at_once = False, 0
    for role in kernel.roles:
        count = role.count
        values: Values = {**scalars, "cta": np.repeat(ctas, count), "w": np.tile(np.arange(count, dtype=np.int64), len(ctas))}
        walker = _Walker(kernel, role)
        found = walker.body(role.body, values, len(ctas) * count)
        if walker.claimed is not None:
            found, claimed = walker.claimed, True
        at_once = max(at_once, walker.again_at_once * count)
        for key, numbers in found.items():
            table = numbers.reshape(-1, count)
            if key[0] in ("first", "all"):
                kind, direction, tensor, symbols = key
                into = first if kind == "first" else touched
                # Instances whose places do not depend on which instance it is touch the same bytes.
                n = table.sum() if "w" in symbols else table.max(axis=1).sum()
                into[direction, tensor] = into.get((direction, tensor), 0) + int(n)
            elif key[0] == "again":
                again[key[1], key[2]] = again.get((key[1], key[2]), 0) + int(numbers.sum())
            else:
                units[key] = units.get(key, 0) + table.sum(axis=1)
    return Work({k: int(n.sum()) for k, n in units.items()}, units, claimed, touched, first, again, at_once)


# expressions on arrays ------------------------------------------------------------------------------------------------------

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
    a, b = (evaluate(x, values) for x in e.args)
    if e.op in "/%" and (np.any(np.less(a, 0)) or np.any(np.less_equal(b, 0))):
        raise InternalError(f"division outside the non-negative range in {e.c()}")
    result = _UFUNC[e.op](a, b)
    return result.astype(np.int64) if isinstance(result, np.ndarray) else int(result)


# the walk -------------------------------------------------------------------------------------------------------------------


@dataclass
class _Walker:
    kernel: KernelPlan
    role: Role
    claimed: Tally | None = None
    """Of the body that runs once for each claimed tile: (tile, instance) in order."""
    again_at_once: int = 0
    """The most bytes that one step comes back to right after a sibling."""
    _costs: dict[str, tuple[Quantity, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = list(walk(self.role.body))
        for step in steps:
            if not isinstance(step, CONTAINERS):
                if bodies(step):
                    raise InternalError(f"{step.id}: nobody has said how often the bodies of a {step.kind} run")
                self._costs[step.id] = quantities(self.kernel, self.role, step)
        self._lets = {s.var: s.value.symbols() for s in steps if isinstance(s, (Let, Var))}
        self._needed = closure(frozenset().union(*(self._reads(s) for s in steps)), self._lets)
        # Where instances run different iterations, a place that depends on the loop's variable depends on the instance.
        behind = dict(self._lets)
        for s in steps:
            if isinstance(s, Loop) and "w" in closure(s.first.symbols() | s.last.symbols(), self._lets):
                behind[s.var] = behind.get(s.var, frozenset()) | {"w"}
        self._behind = behind

    def _reads(self, step: Step) -> frozenset[str]:
        """Symbols that decide how often something runs or how much it uses."""
        if isinstance(step, Loop):
            by = step.step.symbols() if isinstance(step.step, Expr) else frozenset()
            return step.first.symbols() | step.last.symbols() | by
        if isinstance(step, If):
            return step.cond.symbols()
        if isinstance(step, Forever):
            return frozenset(("w",))
        if isinstance(step, Elected):
            return frozenset(("w",))
        costs = self._costs.get(step.id, ())
        instance = frozenset(("w",)) if any(q.shared for q in costs) and self.role.count > 1 else frozenset()
        return frozenset().union(instance, *(q.amount.symbols() for q in costs))

    def _live(self, body: Body) -> frozenset[str]:
        """Symbols whose values can change what the body uses."""
        names: set[str] = set()
        for step in walk(body):
            names |= self._reads(step)
            if isinstance(step, (Let, Var)) and step.var in self._needed:
                names |= step.value.symbols()
        return frozenset(names)

    def body(self, steps: Body, values: Values, n: int) -> Tally:
        """What the steps use in each of `n` contexts."""
        values = dict(values)
        total: Tally = {}
        touched: set[tuple[Any, ...]] = set()
        for step in steps:
            if isinstance(step, (Let, Var)):
                if step.var in self._needed:
                    values[step.var] = evaluate(step.value, values)
            elif isinstance(step, Loop):
                _into(total, self._loop(step, values, n))
            elif isinstance(step, Forever):
                _into(total, self._forever(step, values, n))
            elif isinstance(step, If):
                chosen = np.broadcast_to(np.asarray(evaluate(step.cond, values)) != 0, (n,))
                _into(total, self._where(step.then, values, chosen))
                _into(total, self._where(step.orelse, values, ~chosen))
            elif isinstance(step, Elected):
                _into(total, self._where(step.body, values, np.broadcast_to(np.equal(values["w"], 0), (n,))))
            elif isinstance(step, Vote):
                _into(total, self.body(step.orelse, values, n))  # the exact step is rare
            else:
                for q in self._costs[step.id]:
                    _into(total, self._quantity(q, values, n, touched))
        return total

    def _quantity(self, q: Quantity, values: Values, n: int, touched: set[tuple[Any, ...]]) -> Tally:
        amount = np.broadcast_to(np.asarray(evaluate(q.amount, values), np.int64), (n,))
        if q.shared and self.role.count > 1:
            amount = amount * np.equal(values["w"], 0)
        if not q.place:
            return {q.key: amount}
        here = (*q.key, q.place)
        symbols = closure(frozenset().union(*(e.symbols() for e in q.place)), self._behind)
        everything, first, again = ("all", *q.key, symbols), ("first", *q.key, symbols), ("again", *q.key)
        found: Tally = {q.key: amount, everything: amount}
        if here in touched:
            found[again] = amount
            self.again_at_once = max(self.again_at_once, int(amount.max()))
        else:
            found[first] = amount
        touched.add(here)
        return found

    def _where(self, body: Body, values: Values, chosen: npt.NDArray[np.bool_]) -> Tally:
        if not body or not chosen.any():
            return {}
        inner = {k: v[chosen] if isinstance(v, np.ndarray) else v for k, v in values.items()}
        found = self.body(body, inner, int(chosen.sum()))
        out: Tally = {}
        for key, numbers in found.items():
            out[key] = np.zeros(len(chosen), np.int64)
            out[key][chosen] = numbers
        return out

    def _loop(self, loop: Loop, values: Values, n: int) -> Tally:
        live = self._live((loop,)) - {loop.var}
        outer, back, m = _distinct(values, live, n)
        first, last = (np.broadcast_to(np.asarray(evaluate(e, outer)), (m,)) for e in (loop.first, loop.last))
        by = np.broadcast_to(np.asarray(evaluate(loop.step, outer) if isinstance(loop.step, Expr) else loop.step), (m,))
        trips = np.maximum((last - first + by) // by, 0)
        parent = np.repeat(np.arange(m), trips)
        turn = np.arange(len(parent)) - np.repeat(np.cumsum(trips) - trips, trips)
        inner: Values = {k: v[parent] if isinstance(v, np.ndarray) else v for k, v in outer.items()}
        inner[loop.var] = first[parent] + turn * by[parent]
        inner, inside, k = _distinct(inner, self._live(loop.body), len(parent))
        if not k:
            return {}
        out: Tally = {}
        for key, numbers in self.body(loop.body, inner, k).items():
            each = numbers[inside]
            gathered = np.zeros(m, np.int64)
            if key[0] == "first" and loop.var not in key[3]:
                np.maximum.at(gathered, parent, each)  # every iteration comes back to the same place
            else:
                np.add.at(gathered, parent, each)
            out[key] = gathered[back]
        return out

    def _forever(self, loop: Forever, values: Values, n: int) -> Tally:
        """Tiles handed out at run time: each once, to whichever CTA. Booked under the first CTA; `claimed` has them one by one."""
        stop = next((s.cond for s in loop.body if s.kind == "Break"), None)  # type: ignore[attr-defined]
        if not (isinstance(stop, Op) and stop.op == ">=" and isinstance(stop.args[0], Sym)):
            raise InternalError(f"{loop.id}: its Break is not `tile >= bound`, so nobody knows how often it runs")
        count, tiles = self.role.count, evaluate(stop.args[1], values)
        if isinstance(tiles, np.ndarray):
            raise InternalError(f"{loop.id}: its bound {stop.args[1]} is not the same in all CTAs")
        inner: Values = {k: v for k, v in values.items() if not isinstance(v, np.ndarray)}
        inner[stop.args[0].name] = np.repeat(np.arange(tiles, dtype=np.int64), count)
        inner["w"] = np.tile(np.arange(count, dtype=np.int64), tiles)
        self.claimed = self.body(loop.body, inner, tiles * count)
        out: Tally = {}
        for key, numbers in self.claimed.items():
            out[key] = np.zeros(n, np.int64)
            out[key][:count] = numbers.reshape(-1, count).sum(axis=0)
        return out


CONTAINERS = (Loop, Forever, If, Elected, Vote)


def closure(symbols: frozenset[str], behind: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The symbols and all that stand behind them."""
    while True:
        more = symbols.union(*(behind[name] for name in symbols if name in behind))
        if more == symbols:
            return symbols
        symbols = more


def _into(total: Tally, more: Tally) -> None:
    for key, numbers in more.items():
        total[key] = total[key] + numbers if key in total else numbers


def _distinct(values: Values, live: frozenset[str], n: int) -> tuple[Values, npt.NDArray[np.intp], int]:
    """The contexts that differ in a live value: (their values, which of them each of the `n` is, how many there are)."""
    kept = {k: v for k, v in values.items() if not isinstance(v, np.ndarray)}
    varying = {k: v for k, v in values.items() if isinstance(v, np.ndarray) and k in live}
    code = np.zeros(n, np.int64)
    for column in varying.values():
        if n:
            low, high = int(column.min()), int(column.max())
            code = np.unique(code, return_inverse=True)[1].reshape(-1) * (high - low + 1) + (column - low)
    _, where, back = np.unique(code, return_index=True, return_inverse=True)
    return {**kept, **{k: v[where] for k, v in varying.items()}}, back.reshape(-1), len(where)
