"""Wrong kernels made by rule, to prove the proof: each is flagged, or equivalent to the original for a reason that can be named.

A proof that accepts everything also accepts the right kernel. So `mutants` breaks a kernel in every way its own steps offer (a
step dropped, two neighbours swapped, a count off by one, a phase flipped …) and `run_mutants` demands an answer for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..attention import Attention
from ..errors import InternalError
from ..schedule import Schedule
from . import quantise_steps as Q
from . import steps as S
from .kernel import KernelPlan
from .proof import Case, Cases, prove
from .proof.checks import used_cursors
from .proof.equivalence import Change, Facts, reason
from .proof.evaluate import Evaluator
from .proof.registers import REGISTER_STEPS, frag_uses

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Mutant:
    """`kernel` is the original after `change`."""

    description: str
    kernel: KernelPlan
    change: Change


@dataclass(frozen=True)
class MutantReport:
    """`equivalent` pairs mutants with the reason; `survivors` are neither flagged nor explained: gaps in the proof."""

    total: int
    flagged: int
    equivalent: tuple[tuple[Mutant, str], ...]
    survivors: tuple[Mutant, ...]

    def __str__(self) -> str:
        tail = f", {len(self.survivors)} unexplained" if self.survivors else ""
        return f"{self.total} mutants: {self.flagged} flagged, {len(self.equivalent)} equivalent{tail}"

    def __add__(self, other: MutantReport) -> MutantReport:
        """The report over both sets of mutants."""
        return MutantReport(
            self.total + other.total,
            self.flagged + other.flagged,
            self.equivalent + other.equivalent,
            self.survivors + other.survivors,
        )


def run_mutants(kernel: KernelPlan, attention: Attention, schedule: Schedule) -> MutantReport:
    """Prove every mutant of `kernel`: on the few cases that show most mistakes first, on all of them before it is called equivalent.

    InternalError if `kernel` itself is not proven: its mutants would be flagged for its own fault."""
    evaluate = Evaluator()
    cases = Cases(kernel, attention, schedule)
    few: tuple[Case, ...] = cases.few()
    rest = tuple(c for c in cases.all() if c not in few)
    original = prove(kernel, attention, schedule, (*few, *rest), evaluate)
    if not original.ok:
        raise InternalError(f"{kernel.name} is not synchronised: {original.failures[0]}")
    facts: Facts | None = None
    total, equivalent, survivors = 0, [], []
    for m in mutants(kernel):
        total += 1
        if not all(prove(m.kernel, attention, schedule, part, evaluate).ok for part in (few, rest)):
            continue
        facts = facts or Facts(kernel, attention, schedule, (*few, *rest), evaluate)
        why = reason(m.change, facts)
        if why:
            equivalent.append((m, why))
        else:
            survivors.append(m)
    return MutantReport(total, total - len(equivalent) - len(survivors), tuple(equivalent), tuple(survivors))


def mutants(kernel: KernelPlan) -> Iterator[Mutant]:
    """Every mutant of the rules below, each a kernel that differs from the original in one place."""
    for at, role in enumerate(kernel.roles):
        for change, text, body in _edits(role.body, partial(_in_body, kernel, role)):
            yield Mutant(text, _with_role(kernel, at, replace(role, body=body)), change)
        for i, c in enumerate(role.cursors):
            for field, value in (("start_phase", 1 - c.start_phase), ("stages", c.stages + 1), ("stages", c.stages - 1)):
                cursors = (*role.cursors[:i], _with(c, field, value), *role.cursors[i + 1 :])
                text = f"{role.name}'s cursor {c.name} with {field} = {value}"
                yield Mutant(text, _with_role(kernel, at, replace(role, cursors=cursors)), Change(field, was=c.name))
    for i, bar in enumerate(kernel.mbars):
        for field, value in _count_changes(bar):
            bars = (*kernel.mbars[:i], _with(bar, field, value), *kernel.mbars[i + 1 :])
            yield Mutant(f"{bar.name} with {field} = {value}", replace(kernel, mbars=bars), Change(field, was=bar.name))
    for i, named in enumerate(kernel.nbars):
        for threads in (named.threads - 32, named.threads + 32, named.threads * 2):
            nbars = (*kernel.nbars[:i], replace(named, threads=threads), *kernel.nbars[i + 1 :])
            yield Mutant(f"{named.name} with threads = {threads}", replace(kernel, nbars=nbars), Change("threads", was=named.name))


def _count_changes(bar: S.MBar) -> Iterator[tuple[str, int]]:
    yield "arrivals", bar.arrivals + 1
    yield "arrivals", bar.arrivals - 1
    for tx in (bar.tx_bytes // 2, bar.tx_bytes + 16):
        if tx != bar.tx_bytes:
            yield "tx_bytes", tx


T = TypeVar("T", bound="DataclassInstance")


def _with(value: T, field: str, new: object) -> T:
    changes: dict[str, Any] = {field: new}
    return replace(value, **changes)


def _with_role(kernel: KernelPlan, at: int, role: S.Role) -> KernelPlan:
    return replace(kernel, roles=(*kernel.roles[:at], role, *kernel.roles[at + 1 :]))


# edits of a body --------------------------------------------------------------------------------------------------------

Edit = tuple[Change, str, S.Body]
"""(what changed, description, new body)."""


def _edits(body: S.Body, here: Callable[[S.Body], Iterator[Edit]]) -> Iterator[Edit]:
    """`here`'s edits of this body and of all nested ones, each as an edit of this body."""
    yield from here(body)
    for i, step in enumerate(body):
        for field, inner in S.bodies(step):
            for change, text, new in _edits(inner, here):
                yield change, text, (*body[:i], _with(step, field, new), *body[i + 1 :])


DROPPED = (
    S.Arrive, S.Wait, S.Advance, S.Sync, S.NArrive, S.CtaSync, S.ProxyFence,
    S.MmaWait, S.CpWait, S.CpCommit, S.TmaLoad, S.CpAsync, S.ResetCounter, S.Copy, S.StoreStats, S.StoreFrag, S.StoreAcc,
    Q.StageRows, Q.WarpSync, Q.ShareMax, Q.ShareColumns,
)  # fmt: skip


def _in_body(kernel: KernelPlan, role: S.Role, body: S.Body) -> Iterator[Edit]:
    for i, step in enumerate(body):
        before, after = body[:i], body[i + 1 :]
        if isinstance(step, DROPPED):
            yield Change("drop", (step,)), f"without {step.id}", (*before, *after)
        if after and _entangled(step, after[0]):
            text = f"{after[0].id} before {step.id}"
            yield Change("swap", (step, after[0])), text, (*before, after[0], step, *after[1:])
        for change, text, new in _variants(kernel, role, step):
            yield change, text, (*before, new, *after)


def _variants(kernel: KernelPlan, role: S.Role, step: S.Step) -> Iterator[tuple[Change, str, S.Step]]:
    """(what changed, description, the step changed)."""
    if isinstance(step, (S.CpWait, S.MmaWait)):
        for by in (1, -1) if step.pending else (1,):
            pending = step.pending + by
            yield Change(f"pending{by:+}", (step,)), f"{step.id} with pending = {pending}", replace(step, pending=pending)
    if isinstance(step, S.MmaWait):
        yield Change("ready", (step,)), f"{step.id} that names nothing ready", replace(step, ready=())
    if isinstance(step, S.Arrive) and step.behind is not None:
        yield Change("behind", (step,)), f"{step.id} that waits for no load", replace(step, behind=None)
    if isinstance(step, S.Wait):
        length = kernel.mbar_of(step.bar).stages  # a ring of another length would be no more than a typing mistake
        for bar in kernel.mbars:
            if bar.name != step.bar and bar.stages == length:
                change = Change("bar", (step,), step.bar, bar.name)
                yield change, f"{step.id} that waits for {bar.name}", replace(step, bar=bar.name)
    for field in ("src", "dst", "a", "b"):
        slot = getattr(step, field, None)
        if isinstance(slot, S.Slot) and slot.cursor is not None:
            length = kernel.smem_of(slot.smem).stages
            for c in role.cursors:
                if c.name != slot.cursor and c.stages == length:
                    change = Change("slot", (step,), slot.cursor, c.name)
                    text = f"{step.id} on {slot.smem} at cursor {c.name}"
                    yield change, text, _with(step, field, replace(slot, cursor=c.name))


# which neighbours depend on each other ------------------------------------------------------------------------------------

_SCALAR = (S.Let, S.Var, S.Set, S.Break, S.ClaimTile)
_PARTS = (S.StoreStats, S.MergeStats, S.StoreFrag, S.AddParts)
_CONTAINER = (S.Loop, S.Forever, S.If, S.Vote, S.Elected)


def _entangled(a: S.Step, b: S.Step) -> bool:
    """Whether swapping the neighbours can matter, by what they are: at least one synchronises or moves memory, and they are not of
    the kinds that trivially do not see each other (arithmetic, registers the other does not touch, another ring's cursor)."""
    if isinstance(a, _SCALAR) or isinstance(b, _SCALAR) or replace(a, id="", name="", why="") == replace(b, id="", name="", why=""):
        return False
    for x, y in ((a, b), (b, a)):
        if isinstance(x, S.Advance):
            return x.cursor in _cursors_within(y) and not isinstance(y, S.Advance)
        if isinstance(x, REGISTER_STEPS):  # with what is asynchronous; the order of synchronous steps is for the simulator to test
            asynchronous = isinstance(y, S.MmaWait) or isinstance(y, S.Mma) and y.unit == "wgmma"
            return asynchronous and bool(_frags(x) & _frags(y))
    for x, y in ((a, b), (b, a)):
        if isinstance(x, _PARTS) and isinstance(y, S.Mma) and y.unit == "mma_sync":  # registers of a synchronous product
            return False
    for x, y in ((a, b), (b, a)):
        if isinstance(x, _CONTAINER):
            return not isinstance(y, _CONTAINER) and any(
                not isinstance(s, (*_SCALAR, *_CONTAINER, *REGISTER_STEPS)) for s in S.walk((x,))
            )
    return True


def _cursors_within(step: S.Step) -> frozenset[str]:
    return frozenset().union(*(used_cursors(s) for s in S.walk((step,))))


def _frags(step: S.Step) -> frozenset[str]:
    if isinstance(step, S.MmaWait):
        return frozenset(step.ready)
    reads, writes = frag_uses(step)
    return frozenset((*reads, *writes))
