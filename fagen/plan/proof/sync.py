"""The steps that synchronise threads: mbarriers with their phases, named barriers with their generations, fences."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from .. import quantise_steps as Q
from .. import steps as S
from .order import Label
from .state import Line, MBarState, NamedState, WaitRecord

if TYPE_CHECKING:
    from .run import Run

WARP = 32
Blocking = Generator[None, None, bool]
"""A handler that yields while it has to wait, and returns whether a Break fired."""


def _bar(run: Run, line: Line, step: S.Wait | S.Arrive) -> MBarState:
    state = run.mbars.get((step.bar, line.cursors[step.cursor].slot))
    if state is None:
        run.refuse("slot", line, step, f"uses {step.bar}[{line.cursors[step.cursor].slot}], which does not exist")
    assert state is not None
    return state


def _wait(run: Run, line: Line, step: S.Wait) -> Blocking:
    """Wait for the phase that the cursor means; phase −1, of a fresh barrier, counts as completed. That the parity bit tells this
    phase from its neighbours is what `checks` verifies afterwards."""
    bar, cursor = _bar(run, line, step), line.cursors[step.cursor]
    phase = cursor.passes - cursor.spec.start_phase - step.refill
    start = end = run.event(line, step)
    if phase >= 0:
        line.at = step
        while len(bar.done) <= phase:
            yield
        line.at = None
        line.known |= run.order.masks[bar.done[phase]]
        end = run.event(line, step, "ends")
    run.waits.append(WaitRecord(bar, phase, start, end, step))
    return False


def _arrive_step(run: Run, line: Line, step: S.Arrive) -> None:
    bar, count = _bar(run, line, step), line.warps
    if line.single:
        count = 1
    elif step.who == "thread":
        run.refuse("who", line, step, "is for one thread but all threads would run it")
    if step.behind is not None:
        if step.behind not in line.loading:
            run.refuse("behind", line, step, f"waits for {step.behind}, which no load is to bring")
        line.known |= run.order.masks[line.loading.pop(step.behind)]
    known = line.known
    line.known |= line.first  # the first warp arrives by its lane 0, which is thread 0
    e = run.event(line, step)
    line.known = known | 1 << e
    arrive(run, line, step, bar, e, count)


def arrive(run: Run, line: Line, step: S.Step, bar: MBarState, e: int, count: int) -> None:
    """`count` arrivals at `bar` by event `e`; the last of a phase completes it."""
    bar.events.append(e)
    bar.arrived += count
    if bar.arrived > bar.spec.arrivals:
        run.refuse("arrivals", line, step, f"makes {bar.arrived} arrivals in a phase of {bar} that takes {bar.spec.arrivals}")
    if bar.arrived < bar.spec.arrivals:
        return
    phase = len(bar.done)
    if bar.bytes != bar.spec.tx_bytes:
        expected = f"phase {phase} of {bar}, which expects {bar.spec.tx_bytes}"
        run.refuse("bytes", line, step, f"completes the arrivals with {bar.bytes} bytes in {expected}")
    after = 0
    for x in bar.events:
        after |= run.order.masks[x]
    bar.done.append(run.order.add(Label(None, str(bar), f"phase {phase} completes"), after))
    bar.phases.append(tuple(bar.events))
    bar.events, bar.arrived, bar.bytes = [], 0, 0


def _advance(run: Run, line: Line, step: S.Advance) -> None:
    line.cursors[step.cursor].advance()


def _named(run: Run, line: Line, step: S.Sync | S.NArrive) -> NamedState:
    bar, index = run.nbars[step.bar], run.evaluate(step.index, line.env)
    if not 0 <= index < bar.count:
        run.refuse("slot", line, step, f"uses {step.bar}[{index}], which does not exist")
    return run.named[bar.first_id + index]


def _arrive_named(run: Run, line: Line, step: S.Step, bar: NamedState) -> None:
    """Whole warps arrive; each thread brings what it alone knows."""
    me = line.index
    if me in bar.events:
        run.refuse("generation", line, step, f"arrives twice in one generation of {bar.name}")
    known = line.known
    line.known |= line.own | line.first
    e = run.event(line, step)
    line.known = known | 1 << e
    bar.events[me] = e
    bar.threads += (1 if line.single else line.warps) * WARP
    if bar.threads > bar.expected:
        run.refuse("generation", line, step, f"brings {bar.threads} threads to {bar.name}, which takes {bar.expected}")
    if bar.threads == bar.expected:
        after = 0
        for x in bar.events.values():
            after |= run.order.masks[x]
        bar.done.append(run.order.add(Label(None, bar.name, f"generation {len(bar.done)} completes"), after))
        bar.phases.append(tuple(bar.events.values()))
        bar.threads, bar.events = 0, {}


def _sync(run: Run, line: Line, step: S.Sync) -> Blocking:
    return _meet(run, line, step, _named(run, line, step))


def _narrive(run: Run, line: Line, step: S.NArrive) -> None:
    _arrive_named(run, line, step, _named(run, line, step))


def _cta_sync(run: Run, line: Line, step: S.CtaSync) -> Blocking:
    return _meet(run, line, step, run.cta_barrier)


def _meet(run: Run, line: Line, step: S.Step, bar: NamedState) -> Blocking:
    """bar.sync: arrive, and wait for the generation to complete."""
    generation = len(bar.done)
    _arrive_named(run, line, step, bar)
    line.at = step
    while len(bar.done) <= generation:
        yield
    line.at = None
    line.known |= run.order.masks[bar.done[generation]]
    run.event(line, step, "ends")
    return False


def _proxy_fence(run: Run, line: Line, step: S.ProxyFence) -> None:
    e = run.order.add(line.label(step), line.known | line.own | line.first)
    line.fences.append(e)
    if line.single or line.role.warps == 1:  # the step ends with __syncwarp: lane 0 then speaks for its warp
        line.known |= run.order.masks[e]
    else:  # each warp fences its own writes: the others learn of it at a barrier
        line.own |= run.order.masks[e]


def _warp_sync(run: Run, line: Line, step: Q.WarpSync) -> None:
    """Of an instance that is one warp: what its threads know each for itself, all of them know."""
    if line.role.warps != 1:
        run.refuse("who", line, step, "is for instances of one warp")
    line.known |= line.own
    run.event(line, step)


PLAIN: dict[type[S.Step], Callable[[Run, Line, Any], None]] = {
    S.Arrive: _arrive_step,
    S.Advance: _advance,
    S.NArrive: _narrive,
    S.ProxyFence: _proxy_fence,
    Q.WarpSync: _warp_sync,
}
BLOCKING: dict[type[S.Step], Callable[[Run, Line, Any], Blocking]] = {
    S.Wait: _wait,
    S.Sync: _sync,
    S.CtaSync: _cta_sync,
}
