"""What a correct kernel's runs show about its steps: which of them could be missed. Counted in program order, apart from the
happens-before order, so that the reasons for equivalent mutants do not rest on the proof they are to test."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from .. import steps as S
from .checks import used_cursors
from .run import Run
from .state import Line, SlotKey


@dataclass
class Interval:
    """Accesses of all threads between two CTA barriers: slots read, slots written, slots whose copies a cp.async wait completed."""

    reads: set[SlotKey] = field(default_factory=set)
    writes: set[SlotKey] = field(default_factory=set)
    arrived: set[SlotKey] = field(default_factory=set)

    def conflicts(self, after: Interval) -> set[SlotKey]:
        """The slots for which a barrier between this interval and the next is needed."""
        written = self.writes | self.arrived
        return self.reads & after.writes | written & after.reads | self.writes & after.writes


@dataclass
class Thread:
    """Of one line: the CTA barriers it has passed, and its cp.async groups by count."""

    passed: list[str] = field(default_factory=list)
    steps: list[S.Step] = field(default_factory=list)
    commits: int = 0
    covered: int = 0
    """Groups that its waits have completed so far."""
    covered_at_sync: int = 0
    copies: dict[SlotKey, tuple[str, int]] = field(default_factory=dict)
    """Slot → the copy that filled it last, and the number of its group."""
    products: list[str] = field(default_factory=list)
    """Asynchronous products that no MmaWait has completed yet, oldest first."""


@dataclass
class Observed:
    """Facts gathered from one run after another: `step` is called before each step, `finish` after each run."""

    blocking: set[str] = field(default_factory=set)
    """Waits that are told something no other step told before."""
    guarding: set[str] = field(default_factory=set)
    """Waits before a fill without which the filling thread does not know that all reads of the slot are over."""
    weaker: set[tuple[str, str]] = field(default_factory=set)
    """(wait, another barrier): the other's phase can complete when the wait's own has not."""
    needed: set[str] = field(default_factory=set)
    """Advances after which the cursor is used, and arrivals in a phase that something waits for."""
    apart: set[tuple[str, ...]] = field(default_factory=set)
    """(step, cursor, cursor): the cursors were at different slots."""
    completing: set[str] = field(default_factory=set)
    """cp.async waits that complete a copy."""
    separated: set[tuple[str, str]] = field(default_factory=set)
    """(CTA barrier, ring): the barrier separates conflicting accesses to the ring that no other barrier separates."""
    slack: dict[str, int] = field(default_factory=dict)
    """Copy → how many groups younger it could be and still be waited for before it is read."""
    released: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """(reading step, ring) → barriers at each of which the reader arrives after reading, and which the next fill waits for."""
    completed: dict[str, set[str]] = field(default_factory=dict)
    """MmaWait → the products that it completes."""
    _threads: dict[int, Thread] = field(default_factory=dict)
    _intervals: list[Interval] = field(default_factory=list)

    def step(self, line: Line, step: S.Step) -> None:
        thread = self._threads.setdefault(line.index, Thread())
        used = used_cursors(step)
        if used:
            thread.steps.append(step)
        for a in used:
            for b, other in line.cursors.items():
                if other.slot != line.cursors[a].slot:
                    self.apart.add((step.id, *sorted((a, b))))
        if isinstance(step, S.Mma) and step.unit == "wgmma":
            thread.products.append(step.id)
        elif isinstance(step, S.MmaWait):
            done = max(len(thread.products) - step.pending, 0)
            self.completed.setdefault(step.id, set()).update(thread.products[:done])
            del thread.products[:done]
        if isinstance(step, S.CtaSync):
            thread.passed.append(step.id)
            thread.covered_at_sync = thread.covered
        elif isinstance(step, S.CpCommit):
            thread.commits += 1
        elif isinstance(step, S.CpWait):
            self._copy_wait(thread, step)
        else:
            self._accesses(line, thread, step)

    def _interval(self, thread: Thread) -> Interval:
        while len(self._intervals) <= len(thread.passed):
            self._intervals.append(Interval())
        return self._intervals[len(thread.passed)]

    def _copy_wait(self, thread: Thread, step: S.CpWait) -> None:
        covered = max(thread.covered, thread.commits - step.pending)
        arrived = {slot for slot, (_, group) in thread.copies.items() if thread.covered <= group < covered}
        if arrived:
            self.completing.add(step.id)
        self._interval(thread).arrived |= arrived
        thread.covered = covered

    def _accesses(self, line: Line, thread: Thread, step: S.Step) -> None:
        for name in ("src", "dst", "a", "b"):
            slot = getattr(step, name, None)
            if not isinstance(slot, S.Slot):
                continue
            key = slot.smem, line.cursors[slot.cursor].slot if slot.cursor is not None else 0
            if name == "dst":
                self._interval(thread).writes.add(key)
                if isinstance(step, S.CpAsync):
                    thread.copies[key] = step.id, thread.commits
            else:
                self._interval(thread).reads.add(key)
                if key in thread.copies:
                    copy, group = thread.copies[key]
                    spare = thread.covered_at_sync - group - 1
                    self.slack[copy] = min(spare, self.slack.get(copy, spare))

    def finish(self, run: Run) -> None:
        """Draw the conclusions of one run."""
        for thread in self._threads.values():
            self._used_later(thread.steps)
        if self._threads:
            passed = max((t.passed for t in self._threads.values()), key=len)
            for i, barrier in enumerate(passed):
                if i + 1 < len(self._intervals):
                    self.separated |= {(barrier, ring) for ring, _ in self._intervals[i].conflicts(self._intervals[i + 1])}
        self._waited_for(run)
        self._guarded(run)
        self._released(run)
        self._threads, self._intervals = {}, []

    def _used_later(self, steps: list[S.Step]) -> None:
        live: set[str] = set()
        for step in reversed(steps):
            if not isinstance(step, S.Advance):
                live |= used_cursors(step)
            elif step.cursor in live:
                self.needed.add(step.id)

    def _waited_for(self, run: Run) -> None:
        waited = set()
        for bar, phase, start, _, step in run.waits:
            if phase < 0:
                continue
            waited.add((str(bar), phase))
            if not run.order.completed(bar.done[phase], start):
                self.blocking.add(step.id)
            for (name, slot), other in run.mbars.items():
                if slot == bar.slot and not (phase < len(other.done) and run.order.completed(bar.done[phase], other.done[phase])):
                    self.weaker.add((step.id, name))
        for bar in run.mbars.values():
            for phase, events in enumerate(bar.phases):
                if (str(bar), phase) in waited:
                    self.needed |= {s.id for e in events for s in [run.order.labels[e].step] if s is not None}

    def _guarded(self, run: Run) -> None:
        masks = run.order.masks
        for key, fills in run.fills.items():
            for fill, following in pairwise(fills):
                past = masks[following.issues[0]]
                cursors = used_cursors(following.step)
                before = [w for w in run.waits if used_cursors(w.step) & cursors and w.bar.slot == key[1] and past >> w.end & 1]
                if before and any(not masks[before[-1].start] >> read.end & 1 for read in fill.reads):
                    self.guarding.add(before[-1].step.id)

    def _released(self, run: Run) -> None:
        masks, labels = run.order.masks, run.order.labels
        for key, fills in run.fills.items():
            for fill, following in pairwise(fills):
                past = masks[following.issues[0]]
                waited = {
                    (w.bar.spec.name, e) for w in run.waits if w.phase >= 0 and past >> w.end & 1 for e in w.bar.phases[w.phase]
                }
                for read in fill.reads:
                    reader = labels[read.start].who
                    bars = {bar for bar, e in waited if masks[e] >> read.end & 1 and labels[e].who == reader}
                    at = read.step.id, key[0]
                    self.released[at] = self.released.get(at, bars) & bars
