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
from ..plan.expr import Expr, Op, Sym
from ..plan.kernel import KernelPlan
from ..plan.steps import Body, Break, Elected, Forever, GetTile, If, Let, Loop, Role, Set, Step, Var, Vote, bodies, walk
from .contexts import Array, Values, closure, distinct, evaluate
from .quantities import Key, Quantity, quantities

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
        if walker.rounds and any(isinstance(s, GetTile) for s in walk(role.body)):
            walker.claimed = _by_tile(found, walker.rounds, scalars["total"] * count, len(ctas) * count)
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


def _by_tile(found: Tally, rounds: list[tuple[npt.NDArray[np.intp], Tally]], size: int, contexts: int) -> Tally:
    """What a role did, by (tile, instance) instead of (CTA, instance): round r of context i is of tile-and-instance i + r · contexts.
    What it does before and after its rounds is booked under its first tile."""
    out: Tally = {}
    for key, numbers in found.items():
        out[key] = np.zeros(size, np.int64)
        out[key][:contexts] = numbers
    for r, (active, tally) in enumerate(rounds):
        for key, numbers in tally.items():
            out[key][active] -= numbers
            out[key][active + r * contexts] += numbers
    return out


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
    _given: frozenset[str] = frozenset()
    """Tile numbers that the walk sets itself."""
    rounds: list[tuple[npt.NDArray[np.intp], Tally]] = field(default_factory=list)
    """Where tiles are dealt out round by round: the contexts that took part in a round, and what each did."""
    _gets: int = 0
    """Tiles taken from the ring so far."""

    def __post_init__(self) -> None:
        steps = list(walk(self.role.body))
        for step in steps:
            if not isinstance(step, CONTAINERS):
                if bodies(step):
                    raise InternalError(f"{step.id}: nobody has said how often the bodies of a {step.kind} run")
                self._costs[step.id] = quantities(self.kernel, self.role, step)
        self._lets: dict[str, frozenset[str]] = {}
        for s in steps:
            if isinstance(s, (Let, Var, Set)):
                self._lets[s.var] = self._lets.get(s.var, frozenset()) | s.value.symbols()
            elif isinstance(s, GetTile):
                self._lets[s.var] = frozenset(("cta", "n_ctas"))
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
        if isinstance(step, (If, Break)):
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
            if isinstance(step, (Let, Var, Set)) and step.var in self._needed:
                names |= step.value.symbols()
        return frozenset(names)

    def body(self, steps: Body, values: Values, n: int) -> Tally:
        """What the steps use in each of `n` contexts."""
        return self._steps(steps, dict(values), n)

    def _steps(self, steps: Body, values: Values, n: int) -> Tally:
        """Likewise; leaves in `values` what the steps bind."""
        total: Tally = {}
        touched: set[tuple[Any, ...]] = set()
        for step in steps:
            if isinstance(step, (Let, Var, Set)):
                if step.var in self._needed:
                    values[step.var] = evaluate(step.value, values)
            elif isinstance(step, GetTile):
                if step.var not in self._given:
                    values[step.var] = values["cta"] + self._gets * values["n_ctas"]
                    self._gets += 1
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
        outer, back, m = distinct(values, live, n)
        first, last = (np.broadcast_to(np.asarray(evaluate(e, outer)), (m,)) for e in (loop.first, loop.last))
        by = np.broadcast_to(np.asarray(evaluate(loop.step, outer) if isinstance(loop.step, Expr) else loop.step), (m,))
        trips = np.maximum((last - first + by) // by, 0)
        parent = np.repeat(np.arange(m), trips)
        turn = np.arange(len(parent)) - np.repeat(np.cumsum(trips) - trips, trips)
        inner: Values = {k: v[parent] if isinstance(v, np.ndarray) else v for k, v in outer.items()}
        inner[loop.var] = first[parent] + turn * by[parent]
        inner, inside, k = distinct(inner, self._live(loop.body), len(parent))
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
        """Tiles dealt out one after the other. Where nothing is carried from one to the next, all tiles at once; else round by round."""
        stop = next((s.cond for s in loop.body if isinstance(s, Break)), None)
        if not (isinstance(stop, Op) and stop.op == ">=" and isinstance(stop.args[0], Sym)):
            raise InternalError(f"{loop.id}: its Break is not `tile >= bound`, so nobody knows how often it runs")
        carried = {s.var for s in walk(loop.body) if isinstance(s, Set)} - {stop.args[0].name}
        return self._rounds(loop, values, n) if carried else self._at_once(loop, stop, values, n)

    def _at_once(self, loop: Forever, stop: Op, values: Values, n: int) -> Tally:
        """Each tile once, to whichever CTA. Booked under the first CTA; `claimed` has them one by one."""
        count, tiles = self.role.count, evaluate(stop.args[1], values)
        if isinstance(tiles, np.ndarray):
            raise InternalError(f"{loop.id}: its bound {stop.args[1]} is not the same in all CTAs")
        tile = str(stop.args[0])
        inner: Values = {k: v for k, v in values.items() if not isinstance(v, np.ndarray)}
        inner[tile] = np.repeat(np.arange(tiles, dtype=np.int64), count)
        inner["w"] = np.tile(np.arange(count, dtype=np.int64), tiles)
        self._given = frozenset((tile,))
        self.claimed = self.body(loop.body, inner, tiles * count)
        out: Tally = {}
        for key, numbers in self.claimed.items():
            out[key] = np.zeros(n, np.int64)
            out[key][:count] = numbers.reshape(-1, count).sum(axis=0)
        return out

    def _rounds(self, loop: Forever, values: Values, n: int) -> Tally:
        """A CTA's k-th tile is its number + k · CTAs: what an atomic counter gives where all tiles take alike, and for sums as good as
        any. `values` are left as the last round of each context leaves them."""
        out: Tally = {}
        active = np.arange(n)
        while len(active):
            inner: Values = {k: v[active] if isinstance(v, np.ndarray) else v for k, v in values.items()}
            begun = active
            done: Tally = {}
            for part, end in _split(loop.body):
                for key, numbers in self._steps(part, inner, len(active)).items():
                    whole = np.zeros(n, np.int64)
                    whole[active] = numbers
                    _into(out, {key: whole})
                    _into(done, {key: whole[begun]})
                for name, v in inner.items():
                    if isinstance(v, np.ndarray):
                        column = np.array(np.broadcast_to(values.get(name, 0), (n,)), np.int64)
                        column[active] = v
                        values[name] = column
                if end is not None:
                    stays = np.broadcast_to(np.asarray(evaluate(end.cond, inner)) == 0, (len(active),))
                    active = active[stays]
                    inner = {k: v[stays] if isinstance(v, np.ndarray) else v for k, v in inner.items()}
            self.rounds.append((begun, done))
        return out


def _split(body: Body) -> list[tuple[Body, Break | None]]:
    """The body in parts, each with the Break that ends it."""
    parts: list[tuple[Body, Break | None]] = []
    start = 0
    for i, step in enumerate(body):
        if isinstance(step, Break):
            parts.append((body[start:i], step))
            start = i + 1
    return [*parts, (body[start:], None)]


CONTAINERS = (Loop, Forever, If, Elected, Vote)


def _into(total: Tally, more: Tally) -> None:
    for key, numbers in more.items():
        total[key] = total[key] + numbers if key in total else numbers
