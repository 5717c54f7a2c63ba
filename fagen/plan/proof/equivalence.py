"""Why a mutant that the proof accepts is no mistake: rules that each name a reason, checked on the original's own runs.

Being accepted is not a reason. A mutant may be accepted because it only adds order (a release later, a wait earlier), because it
swaps what does not touch, or because the original says more than its sizes need. Each of these is a rule here; what no rule
covers is a survivor: a gap in the proof, or a step that the kernel should not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...attention import Attention
from ...schedule import Schedule
from .. import quantise_steps as Q
from .. import steps as S
from ..kernel import KernelPlan
from .cases import Case
from .evaluate import Evaluator
from .facts import Observed
from .registers import frag_uses
from .run import Run


@dataclass(frozen=True)
class Change:
    """One edit of a kernel: `rule` ("drop", "swap", "bar" …) applied to `steps` of the original (none where it changes a count or a
    cursor of the plan). `was` and `to` are the names it touched."""

    rule: str
    steps: tuple[S.Step, ...] = ()
    was: str = ""
    to: str = ""


@dataclass(frozen=True)
class Facts:
    """What the original kernel does in its cases; computed when a rule first asks."""

    kernel: KernelPlan
    attention: Attention
    schedule: Schedule
    cases: Sequence[Case]
    evaluate: Evaluator

    @cached_property
    def seen(self) -> Observed:
        """All runs, observed."""
        seen = Observed()
        for case in self.cases:
            run = Run(self.kernel, case.scope(self.kernel), str(case), self.evaluate, seen.step)
            run.execute()
            seen.finish(run)
        return seen

    @cached_property
    def spare(self) -> frozenset[str]:
        """Barriers without which the kernel is proven too: other barriers imply the order they give (if any: the ones that keep
        warpgroups in turn order when products are issued, and no memory)."""
        from . import prove

        filled = {s.full for r in self.kernel.roles for s in S.walk(r.body) if isinstance(s, S.TmaLoad)}
        candidates = [b.name for b in self.kernel.nbars] + [b.name for b in self.kernel.mbars if b.name not in filled]
        spare = []
        for bar in candidates:
            roles = tuple(replace(r, body=_without(r.body, bar)) for r in self.kernel.roles)
            if prove(replace(self.kernel, roles=roles), self.attention, self.schedule, self.cases, self.evaluate).ok:
                spare.append(bar)
        return frozenset(spare)

    def phase_unused(self, cursor: str) -> bool:
        """No step waits by this cursor, so only its slot matters."""
        waits = [s for r in self.kernel.roles for s in S.walk(r.body) if isinstance(s, S.Wait)]
        return all(s.cursor != cursor for s in waits)

    def stages(self, cursor: str) -> int:
        return next(c.stages for r in self.kernel.roles for c in r.cursors if c.name == cursor)


def _without(body: S.Body, bar: str) -> S.Body:
    """The body without the steps of one barrier."""
    kept: list[S.Step] = []
    for step in body:
        if isinstance(step, (S.Sync, S.NArrive, S.Wait, S.Arrive)) and step.bar == bar:
            continue
        nested = {field: _without(inner, bar) for field, inner in S.bodies(step)}
        kept.append(replace(step, **nested) if nested else step)  # type: ignore[arg-type]
    return tuple(kept)


def reason(change: Change, facts: Facts) -> str | None:
    """Why the mutant made by `change`, which the proof accepts, is equivalent; None: no rule knows."""
    for names, text, holds in RULES:
        if change.rule in names and holds(change, facts):
            return text
    return None


def _arrivals(step: S.Step) -> S.Body:
    """The arrivals of a step that does nothing else: itself, or what an If holds."""
    inner = step.then if isinstance(step, S.If) and not step.orelse else (step,)
    return inner if all(isinstance(s, (S.Arrive, S.NArrive)) for s in inner) else ()


def _any(steps: Iterable[S.Step], *kinds: type[S.Step]) -> bool:
    return any(isinstance(s, kinds) for s in S.walk(tuple(steps)))


# rules: each takes a change that the proof accepts ------------------------------------------------------------------------------


def _later_release(c: Change, facts: Facts) -> bool:
    return bool(_arrivals(c.steps[0])) and not isinstance(c.steps[1], S.Advance)


def _earlier_wait(c: Change, facts: Facts) -> bool:
    first, second = c.steps
    if isinstance(second, S.CpWait):
        return not _any((first,), S.CpCommit, S.CpAsync)
    if isinstance(second, S.MmaWait):
        return not _any((first,), S.Mma)
    return isinstance(second, S.Wait) and not isinstance(first, (S.Arrive, S.NArrive, S.Advance))


def _turn(c: Change, facts: Facts) -> bool:
    return any(isinstance(s, (S.Sync, S.NArrive)) and s.bar in facts.spare for s in c.steps)


def _two_loads(c: Change, facts: Facts) -> bool:
    a, b = c.steps
    if isinstance(a, S.TmaLoad) and isinstance(b, S.TmaLoad):
        return a.full != b.full and a.dst.smem != b.dst.smem
    return isinstance(a, S.CpAsync) and isinstance(b, S.CpAsync) and a.dst.smem != b.dst.smem


def _two_products(c: Change, facts: Facts) -> bool:
    a, b = c.steps
    if not (isinstance(a, S.Mma) and isinstance(b, S.Mma)):
        return False
    (reads_a, writes_a), (reads_b, writes_b) = frag_uses(a), frag_uses(b)
    return not set(writes_a) & {*reads_b, *writes_b} and not set(writes_b) & {*reads_a, *writes_a}


def _independent(c: Change, facts: Facts) -> bool:
    """Neither step waits or synchronises, and they share no memory and no registers that one of them writes."""
    a, b = c.steps
    if not (isinstance(a, MEMORY_STEPS) and isinstance(b, MEMORY_STEPS)):
        return False
    (reads_a, writes_a), (reads_b, writes_b) = frag_uses(a), frag_uses(b)
    registers = set(writes_a) & {*reads_b, *writes_b} or set(writes_b) & set(reads_a)
    return not registers and not _rings(a) & _rings(b)


MEMORY_STEPS = (
    *(S.Copy, S.CpAsync, S.Mma, S.LoadFrag, S.StoreStats, S.MergeStats, S.StoreFrag, S.AddParts),
    *(Q.ShareMax, Q.TakeMax, Q.ShareColumns, Q.StoreColumns),
)


def _rings(step: S.Step) -> frozenset[str]:
    """Shared memory that a step reads or writes."""
    slots = (getattr(step, f, None) for f in ("src", "dst", "a", "b"))
    return frozenset(x.smem for x in slots if isinstance(x, S.Slot))


def _older_group(c: Change, facts: Facts) -> bool:
    return isinstance(c.steps[0], S.CpCommit) and _any(c.steps[1:], S.CpAsync) and not _any(c.steps[1:], S.CpCommit, S.CpWait)


def _younger_group(c: Change, facts: Facts) -> bool:
    copies = [s for s in S.walk(c.steps[:1]) if isinstance(s, S.CpAsync)]
    return isinstance(c.steps[-1], S.CpCommit) and bool(copies) and all(facts.seen.slack.get(s.id, 0) >= 1 for s in copies)


def _commit_anywhere(c: Change, facts: Facts) -> bool:
    others = [s for s in c.steps if not isinstance(s, S.CpCommit)]
    return len(others) == 1 and not _any(others, S.CpAsync, S.CpCommit, S.CpWait)


def _idle_wait(c: Change, facts: Facts) -> bool:
    return any(isinstance(s, S.Wait) and s.id not in facts.seen.blocking for s in c.steps)


def _reads_known_over(c: Change, facts: Facts) -> bool:
    """A Wait before a fill, whose reads another barrier has already told to be over."""
    fills = {s.dst.cursor for r in facts.kernel.roles for s in S.walk(r.body) if isinstance(s, S.TmaLoad)}
    waits = [s for s in c.steps if isinstance(s, S.Wait) and s.cursor in fills]
    return bool(waits) and all(s.id not in facts.seen.guarding for s in waits)


def _nothing_read(c: Change, facts: Facts) -> bool:
    """The Wait of steps that pass over a slot: none beside it looks into one."""
    waits = {s.id for s in S.walk(c.steps) if isinstance(s, S.Wait)}
    bodies = [body for r in facts.kernel.roles for s in S.walk(r.body) for _, body in S.bodies(s) if waits & {x.id for x in body}]
    return bool(bodies) and not any(_rings(s) for body in bodies for s in S.walk(body))


def _idle_barrier(c: Change, facts: Facts) -> bool:
    return any(isinstance(s, (S.Arrive, S.Wait)) and s.bar in facts.spare for s in c.steps)


def _stronger_phase(c: Change, facts: Facts) -> bool:
    return (c.steps[0].id, c.to) not in facts.seen.weaker


def _released_twice(c: Change, facts: Facts) -> bool:
    before, arrivals = c.steps[0], _arrivals(c.steps[1])
    reads = {s.id for s in S.walk((before,))} | facts.seen.completed.get(before.id, set())
    found = [bars for (step, _), bars in facts.seen.released.items() if step in reads]
    return bool(found) and any(isinstance(a, S.Arrive) and all(bars - {a.bar} for bars in found) for a in arrivals)


def _idle_copy_wait(c: Change, facts: Facts) -> bool:
    return any(isinstance(s, S.CpWait) and s.id not in facts.seen.completing for s in c.steps)


def _idle_cta_sync(c: Change, facts: Facts) -> bool:
    needed = {bar for bar, _ in facts.seen.separated}
    return any(isinstance(s, S.CtaSync) and s.id not in needed for s in c.steps)


def _other_ring(c: Change, facts: Facts) -> bool:
    """A CTA barrier and an access to a ring for which the barrier is not needed."""
    bars = [s.id for s in c.steps if isinstance(s, S.CtaSync)]
    rings = {x.smem for s in c.steps for f in ("src", "dst", "a", "b") for x in [getattr(s, f, None)] if isinstance(x, S.Slot)}
    return len(bars) == 1 and bool(rings) and all((bars[0], ring) not in facts.seen.separated for ring in rings)


def _unobserved(c: Change, facts: Facts) -> bool:
    steps = (x for s in c.steps for x in (_arrivals(s) or (s,)))
    return any(isinstance(s, (S.Advance, S.Arrive)) and s.id not in facts.seen.needed for s in steps)


def _one_slot(c: Change, facts: Facts) -> bool:
    """An Advance of a one-slot ring moves the phase only: beside steps that do not wait by the cursor it can be anywhere, and where
    nothing does it can be absent."""
    advances = [s for s in c.steps if isinstance(s, S.Advance) and facts.stages(s.cursor) == 1]
    others = tuple(s for s in c.steps if not isinstance(s, S.Advance))
    if c.rule == "swap":
        waits = {s.cursor for s in S.walk(others) if isinstance(s, S.Wait)}
        return bool(advances) and not waits & {s.cursor for s in advances}
    return bool(advances) and all(facts.phase_unused(s.cursor) for s in advances)


def _same_slot(c: Change, facts: Facts) -> bool:
    return (c.steps[0].id, *sorted((c.was, c.to))) not in facts.seen.apart


RULES: tuple[tuple[tuple[str, ...], str, Callable[[Change, Facts], bool]], ...] = (
    (("swap",), "an arrival that comes later only adds order, and no wait starves", _later_release),
    (("swap",), "a wait that begins earlier only adds order, and nothing starves", _earlier_wait),
    (("swap",), "the named barrier orders when products are issued and guards no memory", _turn),
    (("swap",), "two loads into different rings, announced to different barriers or waited for together", _two_loads),
    (("swap",), "two products on different registers, waited for together", _two_products),
    (("swap",), "the two touch neither the same memory nor the same registers", _independent),
    (("swap",), "the copy joins an older group, which is waited for no later", _older_group),
    (("swap",), "the copy joins a younger group, which the waits before its first read cover too", _younger_group),
    (("swap",), "the step beside the commit neither copies nor waits for copies", _commit_anywhere),
    (("drop", "swap"), "the ring has one slot and nothing there looks at the phase", _one_slot),
    (("start_phase",), "nothing waits by the cursor: its phase has no meaning", lambda c, facts: facts.phase_unused(c.was)),
    (("drop", "swap", "bar"), "the wait gives no order of its own: the phase has always completed before it", _idle_wait),
    (("drop", "swap", "bar"), "that all reads of the slot are over is known from another barrier", _reads_known_over),
    (
        ("drop", "swap", "bar"),
        "nothing reads the slot, and without the wait the arrival behind it still counts for its phase",
        _nothing_read,
    ),
    (("drop", "swap", "bar"), "the kernel is proven without this barrier: the others imply the order it gives", _idle_barrier),
    (
        ("swap",),
        "what is read before this arrival is released at another barrier too, which the next fill waits for",
        _released_twice,
    ),
    (("bar",), "whatever completes the other barrier's phase comes after the completion of this one's", _stronger_phase),
    (("drop", "swap", "pending+1"), "the wait completes no copy that an earlier one has not", _idle_copy_wait),
    (
        ("drop", "swap"),
        "nothing on one side of the barrier conflicts with the other side, up to the barriers around it",
        _idle_cta_sync,
    ),
    (("swap",), "the barrier keeps apart accesses to other rings, not to this one", _other_ring),
    (("drop", "swap"), "nothing looks: the cursor is not used again, or nothing waits for the phase", _unobserved),
    (("pending-1",), "waits for more groups than needed: later, never too early", lambda c, facts: True),
    (("slot",), "both cursors stand at the same slot whenever the step runs", _same_slot),
)
"""(mutation rules, the reason, when it holds)."""
