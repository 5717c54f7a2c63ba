"""Trace builds (`plan(…, trace=True)`): kernels in which every role instance notes when it comes from one thing to the next.

What a trace build has beside the normal one: after each step that takes time, or after a run of steps of one kind, the first thread of
the instance stores the SM's clock (`Mark`). Which marks follow one another without a jump is known from the program, so only the first
of such a `Run` says which it is. Products and TMA loads run on by themselves: a product is in flight from the mark of its issue to that
of the `MmaWait` that names its accumulator, a load from the mark of its issue to the first one of a `Wait` for its barrier. So the
marks tell everything; `fagen.explore.trace` reads them.

Reading a clock is a place that ptxas moves no instruction across: a trace shows the program in the order in which it is written, also
where the normal build has waits moved up in front of arithmetic (the fault early-wait of its report). The roles get no more registers
than in the normal build; the largest tiles spill a little (at most `SPILL_BYTES`), which the report tells.

The buffer, in 32-bit words, E = `TRACE_WORDS`; a lane is a role instance of one of the `TRACE_CTAS` CTAs from `trace_first` on, L lanes
  E · L   what the lanes noted, from the end to the beginning: the n-th word of lane i is word (E − 1 − n) · L + i, so that room is
          what lies above one and the same address for all lanes
  8 · L   of lane i at its start: global timer (low, high), clock, SM number; at its end: timer (low, high), clock, words noted
A run's first word is code << ARGUMENT_BITS | argument, the code of its first mark; then the low word of the clock at each of its marks.
A run around a vote has the code of the first mark on the side `then` where that side was taken. Somewhere in a run, best where it costs
nothing, its first word is noted and room asked for the next one, for as many words as the longest run has; without it the rest of the
run and all later ones are counted, not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .errors import InternalError
from .plan import quantise_steps as qs
from .plan import steps as st
from .plan.expr import Expr, as_expr, sym
from .plan.kernel import KernelPlan

SPILL_BYTES = 64
"""What `compile.build` allows a trace build (`allow_spill_bytes`): most do not spill at all."""

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
class Told:
    """What stands in a run's first word, which is `at` words of the lane behind the one where its next run begins, as known then.

    `words`: of the run, to be left behind; 0: it has been, and a vote's other side only changes what the run is called."""

    code: int
    argument: Expr
    variable: str
    at: int
    words: int


@dataclass(frozen=True, kw_only=True)
class Mark(st.Step):
    """The first thread of the instance notes the time. The steps `group` stand since the mark before, and their `what` has ended.

    `argument`, the value of the variable `variable` ("": none), is that of its run. Kind "tile": the variables of a tile are set, which
    begins here."""

    code: int
    what: str
    group: tuple[st.Step, ...]
    argument: Expr
    variable: str
    of_last_tile: bool
    """What has ended belongs to the tile before the one that began last."""
    slot: int = 0
    """Word of its run in which its clock stands."""
    at: int = 0
    """The same word, counted backwards from where the lane's next run begins, as known then: that is the run itself until it is told."""
    tells: Told | None = None
    """Noted after its clock."""
    joint: bool = False
    """The last one of a vote's side: both sides make theirs behind the vote, in the same word, since there it is one instruction less."""


@dataclass(frozen=True)
class Run:
    """Marks of a role that follow one another whenever its first one is made, and the words of the buffer that hold it."""

    role: str
    words: int
    marks: tuple[Mark, ...]


def marked(kernel: KernelPlan) -> KernelPlan:
    """The kernel with its marks; codes count from 0 in printed order."""
    return _marked(kernel)[0]


def runs_of(kernel: KernelPlan) -> dict[int, Run]:
    """The runs of a kernel's marks by the codes that tell them."""
    return _marked(kernel)[1]


def marks_of(kernel: KernelPlan) -> tuple[tuple[st.Role, Mark], ...]:
    """The marks of a kernel by their codes, each with its role."""
    return tuple((role, step) for role in marked(kernel).roles for step in st.walk(role.body) if isinstance(step, Mark))


def longest_run(kernel: KernelPlan) -> int:
    """Words that the longest run of a kernel takes."""
    return max(run.words for run in runs_of(kernel).values())


def _marked(kernel: KernelPlan) -> tuple[KernelPlan, dict[int, Run]]:
    codes, runs, roles = iter(range(1 << CODE_BITS)), dict[int, Run](), []
    for role in kernel.roles:
        body = tuple(_Marker(codes).body(role.body, (), frozenset()))
        roles.append(replace(role, body=_Placer(role.name, runs).body(body)))
    return replace(kernel, roles=tuple(roles)), runs


def instances_of(kernel: KernelPlan) -> tuple[tuple[st.Role, int], ...]:
    """The role instances in the order of a CTA's lanes."""
    return tuple((role, w) for role in kernel.roles for w in range(role.count))


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
            argument=sym(variable) if variable else as_expr(0),
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


# ---------------------------------------------------------------------------------------------------------------- runs


class _Placer:
    """Joins a role's marks to runs: in one block, with no loop, condition or way out between them that has marks of its own. A vote may
    have: the marks of either side go on with the run, in the same words, and the last ones are one."""

    def __init__(self, role: str, runs: dict[int, Run]):
        self._role, self._runs = role, runs

    def body(self, body: st.Body) -> st.Body:
        steps, run = list(body), list[int]()

        def close() -> None:
            if run:
                self._place(steps, run)
            run.clear()

        for i, step in enumerate(steps):
            if isinstance(step, Mark):
                if not _joins(step, [steps[k] for k in run]):
                    close()
                run.append(i)
            elif _is_fork(step) and run and not any(_is_fork(steps[k]) for k in run):
                run.append(i)
            elif _marks_in(step):
                close()
                inner: dict[str, Any] = {n: self.body(b) for n, b in st.bodies(step)}
                steps[i] = replace(step, **inner)
            elif isinstance(step, st.Break):
                close()
        close()
        return tuple(steps)

    def _place(self, steps: list[st.Step], run: list[int]) -> None:
        """Gives the steps `run`, marks and at most one vote, their words."""
        parts = [steps[i] for i in run]
        words, first, variable = 1 + sum(map(_words, parts)), parts[0], _variable(parts)
        assert isinstance(first, Mark)
        argument = sym(variable) if variable else as_expr(0)
        teller, slot = _teller(parts), 1
        codes, sides = (
            [first.code],
            (list[Mark](), list[Mark]()),
        )  # past a vote's `orelse`, which is the usual one, and past its `then`
        for k, (i, step) in enumerate(zip(run, parts)):
            if isinstance(step, Mark):
                told = Told(first.code, argument, variable, 0, words) if k == teller else None
                steps[i] = mark = replace(step, slot=slot, at=(words if k > teller else 0) - slot, tells=told)
                for side in sides:
                    side.append(mark)
            elif isinstance(step, st.Vote):
                end = slot + _words(step)
                usual, other = _side(step.orelse, slot, end, words), _side(step.then, slot, end, words)
                code = _own_marks(other)[0].code
                other = _renaming(other, Told(code, argument, variable, words, 0))
                steps[i] = replace(step, then=other, orelse=usual)
                for side, body in zip(sides, (usual, other)):
                    side.extend(_own_marks(body))
                codes.append(code)
            slot += _words(step)
        assert slot == words
        for code, side in zip(codes, sides):
            self._runs[code] = Run(self._role, words, tuple(side))


def _side(body: st.Body, slot: int, end: int, words: int) -> st.Body:
    """Of a vote, in a run of `words` that has been told: its marks from word `slot` on, the last one in front of word `end`."""
    marks = _own_marks(body)
    slots = {id(m): i for i, m in zip([*range(slot, slot + len(marks) - 1), end - 1], marks)}
    placed = {id(m): replace(m, slot=i, at=words - i, joint=m is marks[-1]) for m, i in ((m, slots[id(m)]) for m in marks)}
    return tuple(placed.get(id(step), step) for step in body)


def _renaming(body: st.Body, told: Told) -> st.Body:
    """With what the first mark tells."""
    first = _own_marks(body)[0]
    return tuple(replace(first, tells=told) if step is first else step for step in body)


def _joins(mark: Mark, run: list[st.Step]) -> bool:
    """A run has one argument, which is told before a vote; each tile is told."""
    variable = _variable(run)
    if mark.variable in ("", variable):
        return not (mark.what == "tile" and variable)
    return not variable and not any(map(_is_fork, run))


def _teller(run: list[st.Step]) -> int:
    """The mark after which a run is told: from where its variable is there, and before a vote; best in front of a softmax, under whose
    exponentials it may hide. A tile's number is told at once, since it need not live through the tile."""
    named = next((k for k, step in enumerate(run) if _variable([step])), 0)
    before = next((k for k, step in enumerate(run) if _is_fork(step)), len(run))
    softmax = [k for k in range(named, before - 1) if getattr(run[k + 1], "what", "") == "softmax"]
    return softmax[0] if softmax and not _is_tile(run[named]) else named


def _own_marks(body: st.Body) -> tuple[Mark, ...]:
    return tuple(step for step in body if isinstance(step, Mark))


def _marks_in(step: st.Step) -> tuple[Mark, ...]:
    return tuple(s for _, body in st.bodies(step) for s in st.walk(body) if isinstance(s, Mark))


def _is_fork(step: st.Step) -> bool:
    """A vote both sides of which end with a mark, and make marks in no deeper block."""
    sides = [body for _, body in st.bodies(step)] if isinstance(step, st.Vote) else []
    ends = bool(sides) and all(body and isinstance(body[-1], Mark) for body in sides)
    return ends and sum(len(_own_marks(body)) for body in sides) == len(_marks_in(step))


def _is_tile(step: st.Step) -> bool:
    return isinstance(step, Mark) and step.what == "tile"


def _variable(run: list[st.Step]) -> str:
    """What the argument of a run is, "" if none of its marks has one."""
    marks = (m for step in run for m in ((step,) if isinstance(step, Mark) else _marks_in(step)))
    return next((m.variable for m in marks if m.variable), "")


def _words(step: st.Step) -> int:
    return 1 if isinstance(step, Mark) else max(len(_own_marks(body)) for _, body in st.bodies(step))
