"""What a trace build marks: the steps that take time, and what kind of time it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InternalError
from ..plan import quantise_steps as qs
from ..plan import steps as st
from ..plan.expr import Expr

CODE_BITS, ARGUMENT_BITS = 10, 22
"""Of the word that tells a run."""


# ---------------------------------------------------------------------------------------------------------------- marks

KINDS: dict[type[st.Step], str] = {
    st.Sync: "wait turn",
    st.CtaSync: "wait CTA",
    st.CpWait: "wait data",
    st.MmaWait: "wait product",
    st.TmaLoad: "load",
    **dict.fromkeys((st.CpAsync, st.Copy, st.LoadFrag, st.LoadAcc, st.LoadRow), "load"),
    **dict.fromkeys((qs.LoadRows, qs.StageRows, qs.LoadFlips, qs.LoadColumns, qs.LoadScalar), "load"),
    **dict.fromkeys((qs.AbsMax, qs.ColumnStats, qs.ColumnMean, qs.Descale), "rescale"),
    **dict.fromkeys((qs.ShareMax, qs.TakeMax, qs.ShareColumns, qs.ReduceParts), "merge"),
    **dict.fromkeys((qs.StoreColumns, qs.StoreMax, qs.QuantiseRows, qs.AddShift), "epilogue"),
    st.TransposeV: "transpose",
    **dict.fromkeys((st.IntToFloat, st.Mask, st.OnlineSoftmax, st.StaleSoftmax, st.RowPass, st.SumRow), "softmax"),
    **dict.fromkeys((st.Pack, st.Rescale, st.Promote, st.Move, st.MulRow, st.Reciprocal), "rescale"),
    **dict.fromkeys((st.StoreStats, st.MergeStats, st.StoreFrag, st.AddParts), "merge"),
    **dict.fromkeys((st.StoreOut, st.StoreRow, st.StoreScores, st.StoreAcc, st.LogSumExp), "epilogue"),
}
"""What the time before a mark goes to; Wait and Mma: see `kind_of`."""

SILENT = (
    *(st.Let, st.Var, st.Set, st.Limits, st.Fill, st.LoadScale, st.ScaleShift, st.Calm, st.AddSums, st.Hold, st.CopyRow),
    *(st.Advance, st.CpCommit, st.ProxyFence, st.ClaimTile, st.PutTile, st.GetTile, st.ResetCounter, st.Break, qs.WarpSync),
)
"""Steps of a few instructions: their time goes to what comes after them, or to the run of steps in which they stand."""


def kind_of(step: st.Step) -> str | None:
    """The kind of a step that takes time, None of the others. InternalError: a step that this module does not know."""
    if isinstance(step, st.Wait):
        return "wait slot" if step.bar.endswith("_empty") else "wait tile" if step.bar == "tile_full" else "wait data"
    if isinstance(step, st.Mma):
        return "issue" if step.unit == "wgmma" else "product"
    if isinstance(step, (*SILENT, st.Arrive, st.NArrive)):
        return None
    kind = KINDS.get(type(step))
    if kind is None:
        raise InternalError(f"the trace does not know step kind {step.kind}")
    return kind


@dataclass(frozen=True)
class Note:
    """A store of one to four words into the run, from `word` on: what tells the run, if `code` is not None, then the clocks `clocks` (`Mark.clock`).

    `variable`: that whose value is the run's argument, "" if it has none. `leaves`: words of the run, which the lane leaves behind with
    this store; `left`: those that it has left before."""

    word: int
    clocks: tuple[str, ...]
    code: int | None = None
    variable: str = ""
    leaves: int = 0
    left: int = 0


@dataclass(frozen=True, kw_only=True)
class Mark(st.Step):
    """The instance reads the clock. The steps `group` stand since the mark before, and their `what` has ended.

    `variable` ("": none): its value is the argument of the run. Kind "tile": the variables of a tile are set, which begins here."""

    code: int
    what: str
    group: tuple[st.Step, ...]
    variable: str
    of_last_tile: bool
    """What has ended belongs to the tile before the one that began last."""
    clock: str = ""
    """What the clock read is called."""
    word: int = 0
    """Of its run in which its clock stands."""
    notes: tuple[Note, ...] = ()
    """Stored after it."""
    joint: bool = False
    """The last one of a vote's side: both sides make theirs behind the vote, in the same word, since there it is one instruction less."""


def mark_roles(roles: tuple[st.Role, ...]) -> tuple[st.Role, ...]:
    """With their marks, whose codes count from 0 in printed order."""
    codes = iter(range(1 << CODE_BITS))
    return tuple(replace(role, body=tuple(_Marker(codes).body(role.body, (), frozenset()))) for role in roles)


class _Marker:
    def __init__(self, codes: Iterator[int]):
        self._codes = codes

    def body(self, body: st.Body, loops: tuple[str, ...], known: frozenset[str]) -> Iterator[st.Step]:
        """`loops`: variables of the loops around, `known`: all variables in scope. A block's own are known in the steps after them."""
        group: list[st.Step] = []
        begins = False
        for step in body:
            kind = None if st.bodies(step) else kind_of(step)
            same = bool(group) and kind == kind_of(group[-1])
            passes = isinstance(step, SILENT) and not isinstance(step, st.Break)
            if group and not (same or passes):
                yield self._mark(group, loops, known)
                group = []
            if begins and not passes:
                yield self._mark([], loops, known)
                begins = False
            if isinstance(step, (st.Let, st.Var, st.Set, st.GetTile)):
                known |= {step.var}
                begins |= step.var == "n"
            inside = (*loops, step.var) if isinstance(step, st.Loop) else loops
            inner: dict[str, Any] = {n: tuple(self.body(b, inside, known | {*inside})) for n, b in st.bodies(step)}
            yield replace(step, **inner) if inner else step
            if kind is not None:
                group.append(step)
            if kind is not None and _alone(step, kind):
                yield self._mark(group, loops, known)
                group = []
        if group:
            yield self._mark(group, loops, known)
        elif begins:
            yield self._mark([], loops, known)

    def _mark(self, group: list[st.Step], loops: tuple[str, ...], known: frozenset[str]) -> Mark:
        code = next(self._codes, None)
        if code is None:
            raise InternalError(f"more than {1 << CODE_BITS} marks in a kernel")
        kind = kind_of(group[-1]) if group else "tile"
        assert kind is not None
        named = next((v for v in ("tile", "m") if v in known), "")
        inner = loops[-1] if loops and loops[-1] != named else ""
        variable = named if kind == "tile" else inner  # a tile's number need not live through the tile
        return Mark(
            name="+".join(s.id for s in group) or "tile",
            code=code,
            what=kind,
            group=tuple(group),
            variable=variable,
            of_last_tile=any(map(_of_last_tile, group)),
        )


def _alone(step: st.Step, kind: str) -> bool:
    return kind.startswith("wait") or kind == "issue" or isinstance(step, st.TmaLoad)


def _of_last_tile(step: st.Step) -> bool:
    """Fused tiles: the step works on what was kept of the tile before, variables named old_… and statistics named …_old."""
    values = list(st.step_fields(step).values())
    values += [x for v in values if isinstance(v, st.Slot) for x in (v.holds, v.head, v.batch)]
    symbols = frozenset().union(*(v.symbols() for v in values if isinstance(v, Expr)))
    return any(s.startswith("old_") for s in symbols) or any(isinstance(v, str) and v.endswith("_old") for v in values)
