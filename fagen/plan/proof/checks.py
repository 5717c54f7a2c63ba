"""What must hold: of the plan as it stands (`static`), and of the events of a run that reached its end (`check`)."""

from __future__ import annotations

from collections.abc import Iterator

from .. import steps as S
from ..kernel import KernelPlan
from . import ladder
from .order import Order
from .run import Run
from .state import Failure, Fill, SlotKey, name

CTA_BARRIER_ID = 0


def static(kernel: KernelPlan, named_barriers: int) -> list[Failure]:
    """Counts and lengths that have to agree before anything runs. `named_barriers`: how many a CTA of the target has."""
    out = [Failure("threads", f"the roles have {n} threads, the kernel {kernel.threads}") for n in _role_threads(kernel)]
    for bar in kernel.mbars:
        if bar.arrivals < 1 or bar.tx_bytes < 0:
            out.append(Failure("arrivals", f"{bar.name} takes {bar.arrivals} arrivals and {bar.tx_bytes} bytes a phase"))
    owner: dict[int, str] = {CTA_BARRIER_ID: "the CTA barrier"}
    for named in kernel.nbars:
        if named.threads % 32 or named.threads < 32:
            out.append(Failure("threads", f"{named.name} takes {named.threads} threads, which are not whole warps"))
        for i in range(named.first_id, named.first_id + named.count):
            if not 0 <= i < named_barriers or i in owner:
                whose = f"is {owner[i]}'s" if i in owner else f"is outside 1 … {named_barriers - 1}"
                out.append(Failure("barrier-id", f"{named.name} uses the hardware barrier {i}, which {whose}"))
            owner.setdefault(i, named.name)
    for role in kernel.roles:
        out += [Failure("cursor", m) for m in _cursors(kernel, role)]
        out += [Failure("elected", m) for m in _elected_cursors(role)]
    return out


def _role_threads(kernel: KernelPlan) -> Iterator[int]:
    n = sum(role.threads for role in kernel.roles)
    if n != kernel.threads:
        yield n


def _rings(step: S.Step) -> Iterator[tuple[str, str | None]]:
    """(ring or mbarrier, cursor) pairs that a step uses."""
    if isinstance(step, (S.Wait, S.Arrive)):
        yield step.bar, step.cursor
    for slot in (getattr(step, f, None) for f in ("src", "dst", "a", "b")):
        if isinstance(slot, S.Slot):
            yield slot.smem, slot.cursor
    if isinstance(step, S.TmaLoad):
        yield step.full, step.dst.cursor


def used_cursors(step: S.Step) -> frozenset[str]:
    """The cursors a step looks at or advances."""
    own = {step.cursor} if isinstance(step, S.Advance) else set()
    return frozenset(own | {c for _, c in _rings(step) if c is not None})


def _cursors(kernel: KernelPlan, role: S.Role) -> Iterator[str]:
    """A cursor must exist, start at phase 0 or 1, and be as long as each ring it stands in."""
    stages = {t.name: t.stages for t in kernel.smem} | {b.name: b.stages for b in kernel.mbars}
    named = {b.name for b in kernel.nbars}
    cursors = {c.name: c for c in role.cursors}
    for c in role.cursors:
        if c.start_phase not in (0, 1) or c.stages < 1:
            yield f"{role.name}: cursor {c.name} starts in phase {c.start_phase} of {c.stages} slots"
    for step in S.walk(role.body):
        for missing in used_cursors(step) - set(cursors):
            yield f"{step.id} uses cursor {missing}, which {role.name} does not have"
        if isinstance(step, (S.Sync, S.NArrive)) and step.bar not in named:
            yield f"{step.id} uses the named barrier {step.bar}, which does not exist"
        for ring, cursor in _rings(step):
            length = 1 if cursor is None else cursors[cursor].stages if cursor in cursors else None
            if ring not in stages:
                yield f"{step.id} uses {ring}, which does not exist"
            elif length is not None and length != stages[ring]:
                yield f"{step.id}: cursor {cursor} has {length} slots, {ring} has {stages[ring]}"


def _elected_cursors(role: S.Role) -> Iterator[str]:
    """A cursor that one thread advances is of no use to the others."""
    elected = {id(s): s for e in S.walk(role.body) if isinstance(e, S.Elected) for s in S.walk(e.body)}
    moved = {s.cursor for s in elected.values() if isinstance(s, S.Advance)}
    for step in S.walk(role.body):
        for c in used_cursors(step) & moved if id(step) not in elected else ():
            yield f"{step.id} uses cursor {c}, which only the elected thread advances"


def check(run: Run) -> list[Failure]:
    """The failures of a run that reached its end."""
    return [*_slots(run), *_waits(run), *_phases(run), *_left_over(run), *_counter(run), *ladder.regions(run)]


def _slots(run: Run) -> Iterator[Failure]:
    """Fill → read → next fill, and every fill landed before the CTA ends."""
    order, finals = run.order, 0
    for line in run.lines:
        finals |= line.known | line.own | line.first
    for key, fills in run.fills.items():
        for i, fill in enumerate(fills):
            if len(fill.ends) != fill.expected:
                yield Failure(
                    "parts", f"only {len(fill.ends)} of {fill.expected} warps fill {name(key)} by {fill.step.id}", run.case
                )
            for end in fill.ends:
                if not finals >> end & 1:
                    message = f"nothing waits for {fill.step.id}: it may write {name(key)} after the CTA has ended"
                    yield Failure("in-flight", message, run.case, order.witness(end))
            if i + 1 < len(fills):
                yield from _next_fill(run, key, fill, fills[i + 1])


def _next_fill(run: Run, key: SlotKey, fill: Fill, following: Fill) -> Iterator[Failure]:
    order = run.order
    for issue, writer in zip(following.issues, following.lines):
        for end, part in zip(fill.ends, fill.lines):
            if (part == writer or fill.expected == 1) and not order.before(end, issue):
                message = f"{following.step.id} fills {name(key)} while {fill.step.id} may still be landing there"
                yield Failure("race", message, run.case, order.witness(issue, end))
        for read in fill.reads:
            if not order.before(read.end, issue):
                message = f"{following.step.id} overwrites {name(key)} while {read.step.id} may still read it"
                late = (issue, read.end) if read.end == read.start else (issue, read.start, read.end)
                yield Failure("race", message, run.case, _race(order, issue, read.start, late))


def _race(order: Order, issue: int, start: int, late: tuple[int, ...]) -> tuple[str, ...]:
    """The write in front of the read, or between the read's start and its end where the start is in the write's past."""
    last = tuple(e for e in late if e == issue or not order.before(e, issue))
    return order.witness(*last, after=order.masks[start] & ~(1 << start) if start in last else order.masks[start])


def _waits(run: Run) -> Iterator[Failure]:
    """A parity wait means one phase: the one before it is over when it begins, the one after cannot end until it has."""
    order = run.order
    for bar, phase, start, end, step in run.waits:
        if phase > 0 and not order.completed(bar.done[phase - 1], start):
            message = f"{step.id} waits for phase {phase} of {bar} when phase {phase - 1} may be open: the parity would let it pass"
            yield Failure("alias", message, run.case, order.witness(start, bar.done[phase - 1]))
        if phase + 1 < len(bar.done) and not order.before(end, bar.done[phase + 1]):
            message = f"phase {phase + 1} of {bar} may end while {step.id} waits for phase {phase}: the parity would hold it"
            yield Failure("alias", message, run.case, order.witness(bar.done[phase + 1], end))


def _phases(run: Run) -> Iterator[Failure]:
    """Each arrival belongs to one phase in every order: it comes after the phase before has ended."""
    order = run.order
    bars = [(f"{b}", b.done, b.phases) for b in run.mbars.values()]
    bars += [(b.name, b.done, b.phases) for b in (*run.named.values(), run.cta_barrier)]
    for bar, done, phases in bars:
        for i in range(1, len(phases)):
            for e in phases[i]:
                if not order.completed(done[i - 1], e):
                    message = f"{order.labels[e]} may count for phase {i - 1} of {bar} instead of {i}"
                    yield Failure("phase", message, run.case, order.witness(e, done[i - 1]))


def _left_over(run: Run) -> Iterator[Failure]:
    """Nothing stays half arrived."""
    for bar in run.mbars.values():
        if bar.arrived:
            message = f"{bar} ends with {bar.arrived} of {bar.spec.arrivals} arrivals"
            yield Failure("left-over", message, run.case, run.order.witness(bar.events[-1]))
    for named in (*run.named.values(), run.cta_barrier):
        if named.threads:
            message = f"{named.name} ends with {named.threads} of {named.expected} threads arrived"
            yield Failure("left-over", message, run.case, run.order.witness(*list(named.events.values())[-1:]))


def _counter(run: Run) -> Iterator[Failure]:
    """The tile counter goes back to 0 once, after every claim."""
    claims, resets, order = run.claims, run.resets, run.order
    if claims and len(resets) != 1 or len(resets) > 1:
        yield Failure("counter", f"the tile counter is reset {len(resets)} times by a CTA, not once", run.case)
    for claim in claims:
        for reset in resets:
            if not order.before(claim, reset):
                yield Failure(
                    "counter", f"{order.labels[reset]} may come before {order.labels[claim]}", run.case, order.witness(reset, claim)
                )
