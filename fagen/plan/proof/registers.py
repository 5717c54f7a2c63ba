"""Rule (c): what a step reads and writes in registers, and which registers an asynchronous product still owns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import quantise_steps as Q
from .. import steps as S

Uses = tuple[tuple[str, ...], tuple[str, ...]]

_USES: dict[type[S.Step], Callable[[Any], Uses]] = {
    S.LoadFrag: lambda s: ((), (s.dst,)),
    S.StoreOut: lambda s: ((s.src,), ()),
    S.StoreRow: lambda s: ((s.src,), ()),
    S.LoadScale: lambda s: ((), ()),
    S.ScaleShift: lambda s: ((), ()),
    S.Promote: lambda s: ((s.total, s.o), (s.total,)),
    S.Fill: lambda s: ((), (s.dst,)),
    S.Opaque: lambda s: (s.reads, s.changes),
    S.Limits: lambda s: ((), (s.dst,)),
    S.Mask: lambda s: ((s.s, s.limits), (s.s,)),
    S.IntToFloat: lambda s: ((s.src,), (s.dst,)),
    S.OnlineSoftmax: lambda s: ((s.s,), (s.s, s.m, s.l)) if s.first else ((s.s, s.m, s.l), (s.s, s.m, s.l, s.alpha)),
    S.Pack: lambda s: ((s.s,), (s.p,)),
    S.StaleSoftmax: lambda s: ((s.s, s.m), (s.e, s.part)),
    S.Calm: lambda s: (_given(s.alpha, s.limits), ()),
    S.Hold: lambda s: ((s.row,), ()),
    S.CopyRow: lambda s: ((s.src,), (s.dst,)),
    S.AddSums: lambda s: ((s.l, s.part), (s.l,)),
    S.Move: lambda s: ((s.src,), (s.dst,)),
    S.Rescale: lambda s: ((s.o, s.alpha), (s.o,)),
    S.StoreScores: lambda s: ((s.src,), ()),
    S.StoreAcc: lambda s: ((s.src,), ()),
    S.LoadAcc: lambda s: ((), (s.dst,)),
    S.LoadRow: lambda s: ((), (s.dst,)),
    S.SumRow: lambda s: ((s.src,), (s.dst,)),
    S.MulRow: lambda s: ((s.dst, s.src), (s.dst,)),
    S.Reciprocal: lambda s: ((s.src,), (s.dst,)),
    S.LogSumExp: lambda s: ((s.m, s.l), (s.lse,)),
    S.RowPass: lambda s: _ROW_PASS[s.op](s.m, s.l),
    S.StoreStats: lambda s: ((s.m, s.l), ()),
    S.MergeStats: lambda s: ((s.m, s.l, s.part), (s.m, s.l, s.alpha, s.beta)),
    S.StoreFrag: lambda s: ((s.src,), ()),
    S.AddParts: lambda s: ((s.dst,), (s.dst,)),
    Q.LoadRows: lambda s: ((), (s.dst,)),
    Q.LoadFlips: lambda s: ((), (s.dst,)),
    Q.AbsMax: lambda s: (_given(s.m, _frag(s.x), s.flips, s.centre), (s.m,)),
    Q.ColumnStats: lambda s: (_given(s.x, s.flips, s.sum, s.high, s.fall), _given(s.sum, s.high, s.fall)),
    Q.ShareMax: lambda s: ((s.m,), ()),
    Q.TakeMax: lambda s: ((), (s.m,)),
    Q.ShareColumns: lambda s: ((s.src,), ()),
    Q.StoreMax: lambda s: ((s.m,), ()),
    Q.ReduceParts: lambda s: ((), (s.m,)),
    Q.ColumnMean: lambda s: ((), () if s.high is None else (s.m,)),
    Q.LoadColumns: lambda s: ((), (s.dst,)),
    Q.Descale: lambda s: ((s.m,), ()),
    Q.QuantiseRows: lambda s: (_given(_frag(s.x), s.flips, s.centre, s.dots), ()),
}


def _frag(x: str | Q.Staged) -> str | None:
    return x if isinstance(x, str) else None


def _given(*frags: str | None) -> tuple[str, ...]:
    return tuple(f for f in frags if f is not None)


_ROW_PASS: dict[str, Callable[[str, str], Uses]] = {
    "max": lambda m, l: ((), (m,)),
    "sum": lambda m, l: ((m,), (l,)),
    "max_sum": lambda m, l: ((), (m, l)),
    "exponentials": lambda m, l: ((m,), ()),
}
_LADDER_STEPS = (
    *(S.SumRow, S.MulRow, S.Reciprocal, S.LogSumExp, S.StoreScores, S.RowPass),
    *(S.StoreAcc, S.LoadAcc, S.LoadRow),
)
_QUANTISING_STEPS = (
    *(
        Q.LoadRows,
        Q.LoadFlips,
        Q.AbsMax,
        Q.ColumnStats,
        Q.StoreMax,
        Q.ReduceParts,
        Q.ColumnMean,
        Q.LoadColumns,
        Q.Descale,
        Q.LoadScalar,
    ),
    *(Q.QuantiseRows, Q.AddShift),
)
REGISTER_STEPS = (
    S.LoadScale,
    S.Opaque,
    S.ScaleShift,
    S.Promote,
    S.Fill,
    S.Limits,
    S.Mask,
    S.IntToFloat,
    S.OnlineSoftmax,
    S.StaleSoftmax,
    S.AddSums,
    S.Calm,
    S.Hold,
    S.CopyRow,
    S.Move,
    S.Pack,
    S.Rescale,
    S.StoreOut,
    S.StoreRow,
    *_LADDER_STEPS,
    *_QUANTISING_STEPS,
)
"""Steps that touch registers and global memory only: outputs that no other thread reads before the kernel ends, and workspaces, of
which `ladder` checks the order."""


def frag_uses(step: S.Step) -> Uses:
    """(Frags read, Frags written) by a step; both empty for steps that touch none. An Mma's operands are its own affair."""
    if isinstance(step, S.Mma):
        a = (step.a,) if isinstance(step.a, str) else ()
        return (*a, step.d) if step.accumulate else a, (step.d,)
    uses = _USES.get(type(step))
    return uses(step) if uses else ((), ())


@dataclass(frozen=True)
class Group:
    """An in-flight product: its accumulator, its register operand and the event of its completion."""

    d: str
    a: str | None
    done: int
    name: str

    @property
    def frags(self) -> frozenset[str]:
        return frozenset((self.d,) if self.a is None else (self.d, self.a))


@dataclass
class Registers:
    """The register tiles of one thread of control."""

    known: frozenset[str]
    """Names of the role's Frags."""
    integers: frozenset[str] = frozenset()
    """Those of integers."""
    defined: set[str] = field(default_factory=set)
    unconverted: set[str] = field(default_factory=set)
    """Integer sums of products that no IntToFloat has used up."""
    flight: list[Group] = field(default_factory=list)

    def touch(self, step: S.Step) -> str | None:
        """Account for a step's registers; returns what is wrong with it, or None."""
        reads, writes = frag_uses(step)
        asynchronous = isinstance(step, S.Mma) and step.unit == "wgmma"
        for frag in (*reads, *writes):
            if frag not in self.known:
                return f"uses {frag}, which the role does not declare"
            for g in self.flight:
                shared_operand = asynchronous and frag not in writes and frag != g.d
                continued = isinstance(step, S.Mma) and asynchronous and frag == step.d == g.d and frag != step.a
                if frag in g.frags and not shared_operand and not continued:
                    return f"touches {frag} while {g.name} is still in flight"
        for frag in reads:
            if frag not in self.defined:
                return f"reads {frag} before anything has written it"
        self.defined.update(writes)
        if isinstance(step, S.Mma) and step.d in self.integers:
            if step.d in self.unconverted:
                return f"overwrites {step.d}, whose integers nothing has converted"
            self.unconverted.add(step.d)
        elif isinstance(step, S.IntToFloat):
            self.unconverted.discard(step.src)
            self.defined.discard(step.src)
        return None

    def wait(self, step: S.MmaWait) -> tuple[list[int], str | None]:
        """Complete all but the youngest `pending` groups; returns their completion events and what is wrong, or None."""
        n = len(self.flight) - step.pending
        done, self.flight = (self.flight[:n], self.flight[n:]) if n > 0 else ([], self.flight)
        busy = frozenset().union(*(g.frags for g in self.flight))
        ready = frozenset().union(*(g.frags for g in done)) - busy
        if ready != set(step.ready):
            return [], f"names {_list(step.ready)} as ready, but completes {_list(ready)}"
        return [g.done for g in done], None


def _list(frags: frozenset[str] | tuple[str, ...]) -> str:
    return ", ".join(sorted(frags)) or "nothing"
