"""One run of a CTA's program with concrete sizes: it decides deadlock, and gives the events that `checks` looks at.

Every role instance is a thread of control (a `Line`). They run in turn, each until it has to wait. Waits only ever wait for
counts to rise, so if one order reaches the end, all do; what a count is made of is the same in every order because `checks`
demands that each arrival comes after the phase before it has completed. Asynchronous work completes in events of its own that
nothing follows until a step waits for it: the order sees it as late as may be, whenever this run happened to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from .. import steps as S
from ..expr import Expr
from ..kernel import KernelPlan
from .evaluate import Evaluator
from .order import Label, Order
from .registers import REGISTER_STEPS, Group, Registers
from .state import CursorState, Failure, Fill, Line, MBarState, NamedState, Read, SlotKey, Stop, WaitRecord, unknown

WARP = 32
LONGEST = 64  # iterations of a Forever before the run is said not to end: cases have at most a few tiles
Blocking = Generator[None, None, bool]
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
            registers = Registers(frozenset(f.name for f in role.frags))
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
            return False

    def _deadlock(self, stuck: list[Line]) -> None:
        at = [f"{line.label(line.at)}" for line in stuck if line.at is not None]
        recent = self.order.labels[-6:]
        self.failures.append(
            Failure("deadlock", f"{', '.join(at)} never ends", self.case, (*(str(x) for x in recent), *(f"{a} waits" for a in at)))
        )

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

    def _elected(self, line: Line, step: S.Elected) -> Blocking:
        """Thread 0 runs the body. The others of its warp do not learn what it learns, but cannot run ahead of it for good."""
        if not line.leads:
            return False
        known, single = line.known, line.single
        line.known, line.single = known | line.first, True
        left = yield from self._body(line, step.body)
        line.first, line.known, line.single = line.known, known, single
        return left

    # copies ---------------------------------------------------------------------------------------------------------------

    def slot(self, line: Line, step: S.Step, slot: S.Slot) -> SlotKey:
        at = line.cursors[slot.cursor].slot if slot.cursor is not None else 0
        if at >= self.smem[slot.smem].stages:
            self.refuse("slot", line, step, f"uses slot {at} of {slot.smem}, which has {self.smem[slot.smem].stages}")
        return slot.smem, at

    def _alone(self, line: Line, step: S.Step, alone: bool) -> None:
        if line.single != alone:
            should, does = ("one thread", "all threads") if alone else ("all threads", "one thread")
            self.refuse("who", line, step, f"is for {should} but {does} would run it")

    def _new_fill(self, line: Line, step: S.TmaLoad | S.CpAsync, key: SlotKey, expected: int, asynchronous: bool) -> Fill:
        env = line.env
        identity = (self.evaluate(step.head, env), self.evaluate(step.batch, env))
        return Fill(step, asynchronous, self.evaluate(step.seq, env), step.head, step.batch, identity, expected)

    def _part(self, line: Line, fill: Fill, issue: int, end: int) -> None:
        fill.issues.append(issue)
        fill.ends.append(end)
        fill.lines.append(line.index)

    def _tma_load(self, line: Line, step: S.TmaLoad) -> None:
        self._alone(line, step, True)
        key = self.slot(line, step, step.dst)
        issue = self.event(line, step)
        lands = self.order.add(line.label(step, "lands"), self.order.masks[issue])
        fill = self._new_fill(line, step, key, 1, asynchronous=True)
        self._part(line, fill, issue, lands)
        self.fills.setdefault(key, []).append(fill)
        bar = self.mbars[step.full, key[1]]  # exists: `checks.static` compared the rings' lengths
        bar.events.append(lands)
        bar.bytes += self.smem[step.dst.smem].tile_bytes
        self._arrive(line, step, bar, issue, 1)

    def _cp_async(self, line: Line, step: S.CpAsync) -> None:
        self._alone(line, step, False)
        key = self.slot(line, step, step.dst)
        issue = self.event(line, step)
        end = self.order.add(line.label(step, "lands"), self.order.masks[issue])
        line.copies.append(end)
        turn = line.parts.get(key, 0)
        line.parts[key] = turn + 1
        fills = self.fills.setdefault(key, [])
        mine = self._new_fill(line, step, key, self.writers[line.role.name], asynchronous=False)
        if turn == len(fills):
            fills.append(mine)
        fill = fills[turn]
        if (fill.step, fill.seq, fill.identity) != (step, mine.seq, mine.identity):
            self.refuse("parts", line, step, f"copies other rows than the instance whose part {fill.step.id} is")
        self._part(line, fill, issue, end)

    def _cp_commit(self, line: Line, step: S.CpCommit) -> None:
        line.groups.append(line.copies)
        line.copies = []

    def _cp_wait(self, line: Line, step: S.CpWait) -> None:
        done = line.groups[: max(len(line.groups) - step.pending, 0)]
        line.groups = line.groups[len(done) :]
        for group in done:
            for end in group:
                line.own |= self.order.masks[end]
        line.own |= self.order.masks[self.order.add(line.label(step), line.known | line.own)]

    def _load_frag(self, line: Line, step: S.LoadFrag) -> None:
        self._alone(line, step, False)
        e = self.event(line, step)
        self._read(line, step, step.src, e, e, asynchronous=False)
        self._registers(line, step)

    def _read(self, line: Line, step: S.Step, slot: S.Slot, start: int, end: int, asynchronous: bool) -> Fill:
        """Find the fill this read sees (the youngest that happens before it) and hold it to the contract."""
        key = self.slot(line, step, slot)
        if slot.row is not None and not 0 <= self.evaluate(slot.row, line.env) < self.smem[slot.smem].rows:
            self.refuse("slot", line, step, f"reads past the {self.smem[slot.smem].rows} rows of {slot.smem}")
        fills, before = self.fills.get(key, []), self.order.masks[start]
        for fill in reversed(fills):
            if len(fill.ends) == fill.expected and not fill.ends_mask & ~before:
                break
        else:
            late = tuple(e for f in fills[-1:] for e in f.ends if not before >> e & 1)[:1]
            self.fail("race", f"{line.label(step)} reads {_name(key)} before it is filled", self.order.witness(start, *late))
        self._contract(line, step, slot, fill, start, key)
        if asynchronous and not fill.asynchronous:
            self._fenced(line, step, fill, start, key)
        fill.reads.append(Read(start, end, step))
        return fill

    def _contract(self, line: Line, step: S.Step, slot: S.Slot, fill: Fill, start: int, key: SlotKey) -> None:
        if slot.holds is None or fill.head is None or fill.batch is None:
            return
        want = (self.evaluate(slot.holds, line.env), self.evaluate(fill.head, line.env), self.evaluate(fill.batch, line.env))
        if want != (fill.seq, *fill.identity):
            text = "(row {}, head {}, batch {})"
            found = text.format(fill.seq, *fill.identity)
            self.fail(
                "stale",
                f"{line.label(step)} expects {text.format(*want)} in {_name(key)} but finds {found} by {fill.step.id}",
                self.order.witness(start),
            )

    def _fenced(self, line: Line, step: S.Step, fill: Fill, start: int, key: SlotKey) -> None:
        """Ordinary writes reach the async proxy only past a fence of the writing thread."""
        masks = self.order.masks
        for writer, end in zip(fill.lines, fill.ends):
            if not any(masks[f] >> end & 1 and masks[start] >> f & 1 for f in self.lines[writer].fences):
                message = f"{line.label(step)} reads {_name(key)} through the async proxy without a fence after {fill.step.id}"
                self.fail("proxy", message, self.order.witness(start))

    # persistent tiles -------------------------------------------------------------------------------------------------------

    def _claim_tile(self, line: Line, step: S.ClaimTile) -> None:
        self._alone(line, step, True)
        line.env[step.var] = line.env["n_ctas"] + len(self.claims)
        self.claims.append(self.event(line, step))

    def _put_tile(self, line: Line, step: S.PutTile) -> None:
        self._alone(line, step, True)
        key, e = self.slot(line, step, step.dst), self.event(line, step)
        fill = Fill(step, False, self.evaluate(step.value, line.env), None, None, (0, 0))
        self._part(line, fill, e, e)
        self.fills.setdefault(key, []).append(fill)

    def _get_tile(self, line: Line, step: S.GetTile) -> None:
        e = self.event(line, step)
        line.env[step.var] = self._read(line, step, step.src, e, e, asynchronous=False).seq

    def _reset_counter(self, line: Line, step: S.ResetCounter) -> None:
        self._alone(line, step, True)
        self.resets.append(self.event(line, step))

    # synchronisation --------------------------------------------------------------------------------------------------------

    def event(self, line: Line, step: S.Step, what: str = "") -> int:
        e = self.order.add(line.label(step, what), line.known)
        line.known = self.order.masks[e]
        return e

    def _bar(self, line: Line, step: S.Wait | S.Arrive) -> MBarState:
        state = self.mbars.get((step.bar, line.cursors[step.cursor].slot))
        if state is None:
            self.refuse("slot", line, step, f"uses {step.bar}[{line.cursors[step.cursor].slot}], which does not exist")
        assert state is not None
        return state

    def _wait(self, line: Line, step: S.Wait) -> Blocking:
        bar, cursor = self._bar(line, step), line.cursors[step.cursor]
        phase = cursor.passes - cursor.spec.start_phase
        start = end = self.event(line, step)
        if phase >= 0:
            line.at = step
            while len(bar.done) <= phase:
                yield
            line.at = None
            line.known |= self.order.masks[bar.done[phase]]
            end = self.event(line, step, "ends")
        self.waits.append(WaitRecord(bar, phase, start, end, step))
        return False

    def _arrive_step(self, line: Line, step: S.Arrive) -> None:
        bar, count = self._bar(line, step), line.warps
        if step.who == "thread" or line.single:
            if not (line.leads or line.single):
                return
            count = 1
        known = line.known
        line.known |= line.first
        e = self.event(line, step)
        line.known = known | 1 << e
        self._arrive(line, step, bar, e, count)

    def _arrive(self, line: Line, step: S.Step, bar: MBarState, e: int, count: int) -> None:
        bar.events.append(e)
        bar.arrived += count
        if bar.arrived > bar.spec.arrivals:
            self.refuse("arrivals", line, step, f"makes {bar.arrived} arrivals in a phase of {bar} that takes {bar.spec.arrivals}")
        if bar.arrived < bar.spec.arrivals:
            return
        phase = len(bar.done)
        if bar.bytes != bar.spec.tx_bytes:
            expected = f"phase {phase} of {bar}, which expects {bar.spec.tx_bytes}"
            self.refuse("bytes", line, step, f"completes the arrivals with {bar.bytes} bytes in {expected}")
        after = 0
        for x in bar.events:
            after |= self.order.masks[x]
        bar.done.append(self.order.add(Label(None, str(bar), f"phase {phase} completes"), after))
        bar.phases.append(tuple(bar.events))
        bar.events, bar.arrived, bar.bytes = [], 0, 0

    def _advance(self, line: Line, step: S.Advance) -> None:
        line.cursors[step.cursor].advance()

    def _named(self, line: Line, step: S.Sync | S.NArrive) -> NamedState:
        bar, index = self.nbars[step.bar], self.evaluate(step.index, line.env)
        if not 0 <= index < bar.count:
            self.refuse("slot", line, step, f"uses {step.bar}[{index}], which does not exist")
        return self.named[bar.first_id + index]

    def _arrive_named(self, line: Line, step: S.Step, bar: NamedState) -> None:
        """Whole warps arrive; each thread brings what it alone knows."""
        me = line.index
        if me in bar.events:
            self.refuse("generation", line, step, f"arrives twice in one generation of {bar.name}")
        known = line.known
        line.known |= line.own | line.first
        e = self.event(line, step)
        line.known = known | 1 << e
        bar.events[me] = e
        bar.threads += (1 if line.single else line.warps) * WARP
        if bar.threads > bar.expected:
            self.refuse("generation", line, step, f"brings {bar.threads} threads to {bar.name}, which takes {bar.expected}")
        if bar.threads == bar.expected:
            after = 0
            for x in bar.events.values():
                after |= self.order.masks[x]
            bar.done.append(self.order.add(Label(None, bar.name, f"generation {len(bar.done)} completes"), after))
            bar.phases.append(tuple(bar.events.values()))
            bar.threads, bar.events = 0, {}

    def _sync(self, line: Line, step: S.Sync) -> Blocking:
        return self._meet(line, step, self._named(line, step))

    def _narrive(self, line: Line, step: S.NArrive) -> None:
        self._arrive_named(line, step, self._named(line, step))

    def _cta_sync(self, line: Line, step: S.CtaSync) -> Blocking:
        return self._meet(line, step, self.cta_barrier)

    def _meet(self, line: Line, step: S.Step, bar: NamedState) -> Blocking:
        generation = len(bar.done)
        self._arrive_named(line, step, bar)
        line.at = step
        while len(bar.done) <= generation:
            yield
        line.at = None
        line.known |= self.order.masks[bar.done[generation]]
        self.event(line, step, "ends")
        return False

    def _proxy_fence(self, line: Line, step: S.ProxyFence) -> None:
        e = self.order.add(line.label(step), line.known | line.own | line.first)
        line.fences.append(e)
        if line.single:
            line.known |= self.order.masks[e]
        else:
            line.own |= self.order.masks[e]

    # matrix and registers -----------------------------------------------------------------------------------------------------

    def _mma(self, line: Line, step: S.Mma) -> None:
        self._alone(line, step, False)
        self._registers(line, step)
        asynchronous = step.unit == "wgmma"
        start = end = self.event(line, step)
        if asynchronous:
            end = self.order.add(line.label(step, "completes"), self.order.masks[start])
            line.registers.flight.append(Group(step.d, step.a if isinstance(step.a, str) else None, end, step.id))
        for slot in (step.a, step.b):
            if isinstance(slot, S.Slot):
                self._read(line, step, slot, start, end, asynchronous)

    def _mma_wait(self, line: Line, step: S.MmaWait) -> None:
        done, wrong = line.registers.wait(step)
        if wrong:
            self.refuse("ready", line, step, wrong)
        for e in done:
            line.known |= self.order.masks[e]
        self.event(line, step)

    def _registers(self, line: Line, step: S.Step) -> None:
        wrong = line.registers.touch(step)
        if wrong:
            self.refuse("registers", line, step, wrong)


def _name(key: SlotKey) -> str:
    return f"{key[0]}[{key[1]}]"


_PLAIN: dict[type[S.Step], Callable[[Run, Line, Any], None]] = {
    S.Let: Run._let,
    S.Var: Run._let,
    S.Set: Run._let,
    S.TmaLoad: Run._tma_load,
    S.CpAsync: Run._cp_async,
    S.CpCommit: Run._cp_commit,
    S.CpWait: Run._cp_wait,
    S.LoadFrag: Run._load_frag,
    S.ClaimTile: Run._claim_tile,
    S.PutTile: Run._put_tile,
    S.GetTile: Run._get_tile,
    S.ResetCounter: Run._reset_counter,
    S.Arrive: Run._arrive_step,
    S.Advance: Run._advance,
    S.NArrive: Run._narrive,
    S.ProxyFence: Run._proxy_fence,
    S.Mma: Run._mma,
    S.MmaWait: Run._mma_wait,
    **dict.fromkeys(REGISTER_STEPS, Run._registers),
}
_BLOCKING: dict[type[S.Step], Callable[[Run, Line, Any], Blocking]] = {
    S.Loop: Run._loop,
    S.Forever: Run._forever,
    S.If: Run._if,
    S.Elected: Run._elected,
    S.Wait: Run._wait,
    S.Sync: Run._sync,
    S.CtaSync: Run._cta_sync,
}
