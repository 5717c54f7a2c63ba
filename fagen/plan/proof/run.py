"""One run of a CTA's program with concrete sizes: it decides deadlock, and gives the events that `checks` looks at.

Every role instance is a thread of control (a `Line`). They run in turn, each until it has to wait. Waits only ever wait for
counts to rise, so if one order reaches the end, all do; what a count is made of is the same in every order because `checks`
demands that each arrival comes after the phase before it has completed. Asynchronous work completes in events of its own that
nothing follows until a step waits for it: the order sees it as late as may be, whenever this run happened to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import steps as S
from ..expr import Expr
from ..kernel import KernelPlan
from . import ladder, memory, sync
from .evaluate import Evaluator
from .order import Order
from .registers import REGISTER_STEPS, Registers
from .state import CursorState, Failure, Fill, Line, MBarState, NamedState, SlotKey, Stop, WaitRecord, unknown
from .sync import Blocking

LONGEST = 64  # iterations of a Forever before the run is said not to end: cases have at most a few tiles
Trace = Callable[[Line, S.Step], None]


class Run:
    """Executes one case of `kernel`; the outcome stands in the attributes, online failures in `failures`."""

    def __init__(
        self, kernel: KernelPlan, scope: Mapping[str, int], case: str, evaluate: Evaluator, trace: Trace | None = None
    ) -> None:
        self.kernel, self.case, self.evaluate, self.trace = kernel, case, evaluate, trace
        self.order = Order()
        self.smem = {s.name: s for s in kernel.smem}
        self.mbars = {(b.name, i): MBarState(b, i) for b in kernel.mbars for i in range(b.stages)}
        self.nbars = {b.name: b for b in kernel.nbars}
        self.named = {b.first_id + i: NamedState(f"{b.name}[{i}]", b.threads) for b in kernel.nbars for i in range(b.count)}
        self.cta_barrier = NamedState("the CTA barrier", kernel.threads)
        self.fills: dict[SlotKey, list[Fill]] = {}
        self.waits: list[WaitRecord] = []
        self.spaces = {g.name for g in kernel.gmem if g.use == "workspace" and g.dtype != "i32"}
        self.accesses: dict[ladder.Region, list[ladder.Access]] = {}
        """To workspaces, in the order of the run."""
        self.part_columns: dict[str, int] = {}
        """Ring of the warps' parts → columns of one StoreFrag into it."""
        self.claims: list[int] = []
        self.resets: list[int] = []
        self.failures: list[Failure] = []
        self.lines: list[Line] = []
        for role in kernel.roles:
            for w in range(role.count):
                self._start(role, w, scope)
        self.writers = {role.name: sum(line.role is role for line in self.lines) for role in kernel.roles}

    def _start(self, role: S.Role, w: int, scope: Mapping[str, int]) -> None:
        """An instance is one line, since its warps do the same at the same places; but where thread 0 does more (Elected bodies),
        its warp is a line beside that of the instance's other warps."""
        elects = any(isinstance(s, S.Elected) for s in S.walk(role.body))
        split = [1, role.warps - 1] if elects and not role.elect and w == 0 and role.warps > 1 else [role.warps]
        for i, warps in enumerate(split):
            cursors = {c.name: CursorState(c) for c in role.cursors}
            registers = Registers(frozenset(f.name for f in role.frags), frozenset(f.name for f in role.frags if f.dtype == "i32"))
            leads = w == 0 and i == 0
            env = {**scope, "w": w}
            self.lines.append(Line(len(self.lines), role, w, warps, leads, role.elect, env, cursors, registers))

    # the run --------------------------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """Run to the end, to a deadlock or to the first online failure."""
        try:
            running = [(line, self._body(line, line.role.body)) for line in self.lines]
            events = -1
            while running and events != len(self.order.masks):
                events = len(self.order.masks)
                running = [(line, g) for line, g in running if self._resume(line, g)]
            if running:
                self._deadlock([line for line, _ in running])
        except Stop as stop:
            self.failures.append(stop.failure)

    def _resume(self, line: Line, body: Blocking) -> bool:
        """Whether the line still runs: it waits for something."""
        try:
            next(body)
            return True
        except StopIteration:
            if line.registers.flight:
                names = ", ".join(g.name for g in line.registers.flight)
                self.fail("in-flight", f"{line.role.name}{line.suffix} ends while {names} is in flight")
            if line.registers.unconverted:
                names = ", ".join(sorted(line.registers.unconverted))
                self.fail("registers", f"{line.role.name}{line.suffix} ends with integers in {names} that nothing has converted")
            return False

    def _deadlock(self, stuck: list[Line]) -> None:
        at = [f"{line.label(line.at)}" for line in stuck if line.at is not None]
        recent = self.order.labels[-6:]
        self.failures.append(
            Failure("deadlock", f"{', '.join(at)} never ends", self.case, (*(str(x) for x in recent), *(f"{a} waits" for a in at)))
        )

    def event(self, line: Line, step: S.Step, what: str = "") -> int:
        """The line's next event."""
        e = self.order.add(line.label(step, what), line.known)
        line.known = self.order.masks[e]
        return e

    def fail(self, kind: str, message: str, interleaving: tuple[str, ...] = ()) -> None:
        raise Stop(Failure(kind, message, self.case, interleaving))

    def refuse(self, kind: str, line: Line, step: S.Step, message: str) -> None:
        """Fail at a step, with what led there."""
        here = line.label(step)
        order = tuple(str(self.order.labels[e]) for e in range(line.known.bit_length()) if line.known >> e & 1)[-6:]
        self.fail(kind, f"{here} {message}", (*order, str(here)))

    # control --------------------------------------------------------------------------------------------------------------

    def _body(self, line: Line, body: S.Body) -> Blocking:
        """Run steps; yields where it has to wait; returns True if a Break fired."""
        for step in body:
            if self.trace is not None:
                self.trace(line, step)
            plain = _PLAIN.get(type(step))
            if plain is not None:
                plain(self, line, step)
                continue
            if isinstance(step, S.Break):
                if self.evaluate(step.cond, line.env):
                    return True
                continue
            blocking = _BLOCKING.get(type(step))
            if blocking is None:
                raise unknown(step)
            if (yield from blocking(self, line, step)):
                return True
        return False

    def _let(self, line: Line, step: S.Let | S.Var | S.Set) -> None:
        line.env[step.var] = self.evaluate(step.value, line.env)

    def _loop(self, line: Line, step: S.Loop) -> Blocking:
        first, last = self.evaluate(step.first, line.env), self.evaluate(step.last, line.env)
        by = self.evaluate(step.step, line.env) if isinstance(step.step, Expr) else step.step
        if by == 0:
            self.refuse("endless", line, step, "steps by 0")
        for value in range(first, last + (1 if by > 0 else -1), by):
            line.env[step.var] = value
            if (yield from self._body(line, step.body)):
                return True
        return False

    def _forever(self, line: Line, step: S.Forever) -> Blocking:
        for _ in range(LONGEST):
            if (yield from self._body(line, step.body)):
                return False
        self.refuse("endless", line, step, f"still runs after {LONGEST} turns")
        return False

    def _if(self, line: Line, step: S.If) -> Blocking:
        return self._body(line, step.then if self.evaluate(step.cond, line.env) else step.orelse)

    def _vote(self, line: Line, step: S.Vote) -> Blocking:
        """Which side a warp takes is a matter of data. Both are register steps with the same waits, so one stands for both."""
        waits = [[s for s in side if isinstance(s, S.MmaWait)] for side in (step.then, step.orelse)]
        if [(w.pending, w.ready) for w in waits[0]] != [(w.pending, w.ready) for w in waits[1]]:
            self.refuse("vote", line, step, "waits for different products on its two sides")
        other = [s for side in (step.then, step.orelse) for s in side if not isinstance(s, (*REGISTER_STEPS, S.MmaWait))]
        if other:
            self.refuse("vote", line, step, f"holds {other[0].id}, which is neither a register step nor an MmaWait")
        left = yield from self._body(line, step.then)
        yield from self._body(line, tuple(s for s in step.orelse if not isinstance(s, S.MmaWait)))
        return left

    def _elected(self, line: Line, step: S.Elected) -> Blocking:
        """Thread 0 runs the body. The others of its warp do not learn what it learns, but cannot run ahead of it for good."""
        if not line.leads:
            return False
        known, single = line.known, line.single
        line.known, line.single = known | line.first, True
        left = yield from self._body(line, step.body)
        line.first, line.known, line.single = line.known, known, single
        return left


_PLAIN: dict[type[S.Step], Callable[[Run, Line, Any], None]] = {
    S.Let: Run._let,
    S.Var: Run._let,
    S.Set: Run._let,
    **memory.HANDLERS,
    **ladder.HANDLERS,
    **sync.PLAIN,
}
_BLOCKING: dict[type[S.Step], Callable[[Run, Line, Any], Blocking]] = {
    S.Loop: Run._loop,
    S.Forever: Run._forever,
    S.If: Run._if,
    S.Vote: Run._vote,
    S.Elected: Run._elected,
    **sync.BLOCKING,
}
