"""Tuning: which schedule is fastest for a problem, of many.

    space → legality → model → compile → verify → race → winners

Each step drops candidates and says why; nothing that did not compile, launch and agree with float64 is ever timed. What the steps do
to a candidate is the `Runner`'s matter (`tune_run.Workshop` on this machine, `tune_cluster.Cluster` on several); here is the order of things,
and what is kept of it.

  model    every legal schedule's time predicted for every problem; the `keep` fastest of each go on
  verify   a few problems from the grid of `fagen check`, unkind scores among them, into outputs filled with NaN between guard bands
  race     on each problem, in rotating order, by successive halving (`tune_race`); the highest median wins, and what is within noise of it is
           said; peers are timed beside the last ones

A candidate that is wrong, hangs or fails on one problem wins on none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from .. import __version__, tuned
from ..errors import InputError
from ..plan.kernel import Problem
from ..schedule import Schedule
from .timing import Interval
from .tune_result import (
    SCHEMA,
    Broken,
    Candidate,
    Expired,
    Failure,
    Heard,
    Measurement,
    Prepared,
    Rate,
    Runner,
    Shape,
    TuneResult,
    Work,
)
from .tune_space import Axes, Space, with_neighbours

KEEP = 24
"""Of the predicted times of a problem so many go on: the model ranks by about a tenth of the time, not by a hundredth."""
ALIKE = 2
CLIMBS, CLIMBERS = 4, 8
ROUNDS = 14
"""Of those that get to the end: 2 + 4 + 8."""


def silent(_: str) -> None:
    """A `Heard` for those who do not listen."""


def never() -> bool:
    """An `Expired` without a limit."""
    return False


# before a GPU is needed -----------------------------------------------------------------------------------------------------


Times = Mapping[Schedule, "Sequence[float] | str"]
"""Schedule → the predicted µs of each problem, or why there are none."""


def predicted(
    space: Space, problems: Sequence[Problem], runner: Runner, axes: Axes | None = None, heard: Heard = silent
) -> tuple[Space, Times]:
    """Every candidate's times. Of a space that is only a sample, also those of the neighbours (by `axes`) of the best, of the best of these,
    and so on for `CLIMBS` times; the space that comes back has them too."""
    times: dict[Schedule, Sequence[float] | str] = {}

    def ask(some: Sequence[Schedule]) -> None:
        times.update(zip(some, runner.predict(space.attention, some, problems, heard)))

    ask(space.candidates)
    for _ in range(CLIMBS if axes is not None and space.sampled else 0):
        placed = [(s, found) for s in space.candidates if not isinstance(found := times[s], str)]
        best: dict[Schedule, None] = {}
        for i in range(len(problems)):
            order = sorted((float(found[i]), n) for n, (_, found) in enumerate(placed))
            best |= dict.fromkeys(placed[n][0] for _, n in order[:CLIMBERS])
        grown = with_neighbours(space, tuple(best), axes or {})
        fresh = [s for s in grown.candidates if s not in times]
        space = grown
        if not fresh:
            break
        ask(fresh)
    return space, times


def pruned(
    space: Space,
    times: Times,
    problems: Sequence[Problem],
    name: Callable[[Schedule], str],
    *,
    keep: int = KEEP,
    always: Sequence[Schedule] = (),
) -> tuple[tuple[Candidate, ...], tuple[Failure, ...]]:
    """What the model keeps, the best predicted first: of each problem the `keep` fastest, but no more than `ALIKE` that differ in stages and
    parallelism only, where the model sees next to no difference; and `always`. And those that it cannot place."""
    lost, placed = [], []
    for s in space.candidates:
        found = times[s]
        if isinstance(found, str):
            lost.append(Failure(name(s), s, "model", None, found))
        else:
            placed.append(Candidate(name(s), s, {str(p): t for p, t in zip(problems, found)}))
    if len({c.name for c in placed}) != len(placed):
        raise InputError("tune", "two candidates have the same name")
    chosen: dict[str, Candidate] = {}
    place: dict[str, int] = {}
    for p in problems:
        ranked = sorted(placed, key=lambda c: (c.predicted_us[str(p)], c.name))
        chosen |= {c.name: c for c in (*_varied(ranked, str(p), keep), *(c for c in ranked if c.schedule in always))}
        for n, c in enumerate(ranked):
            place[c.name] = min(n, place.get(c.name, n))
    return tuple(sorted(chosen.values(), key=lambda c: (place[c.name], c.name))), tuple(lost)


def _varied(ranked: Sequence[Candidate], at: str, keep: int) -> list[Candidate]:
    """The first `keep` at a problem, passing over those of which `ALIKE` like them are in. Times within a thousandth are the same to the model:
    more stages and tiles on demand, which bear more of what it leaves out, then come first."""
    kinds: Counter[Schedule] = Counter()
    chosen: list[Candidate] = []

    def order(c: Candidate) -> tuple[int, int, bool, str]:
        s = c.schedule
        return round(1000 * math.log(c.predicted_us[at])), -(s.stages_k + s.stages_v), s.parallelism != "persistent_dynamic", c.name

    for c in sorted(ranked, key=order):
        kind = c.schedule.replace(stages=1, parallelism="query_tiles")
        kinds[kind] += 1
        if kinds[kind] <= ALIKE and len(chosen) < keep:
            chosen.append(c)
    return chosen


def prepare(
    space: Space,
    candidates: Sequence[Candidate],
    lost: Sequence[Failure],
    base: str,
    start: Schedule,
    runner: Runner,
    heard: Heard = silent,
    expired: Expired = never,
) -> Prepared:
    """Compile the candidates that `pruned` left."""
    reasons = runner.compile(space.attention, candidates, heard, expired)
    failures = list(lost)
    for c in candidates:
        if c.name not in reasons:
            failures.append(Failure(c.name, c.schedule, "budget", None, "not compiled: the budget was used up"))
        elif (why := reasons[c.name]) is not None:
            failures.append(Failure(c.name, c.schedule, "compile", None, why.reason, why.bundle))
    broken = {f.name for f in failures}
    built = tuple(c for c in candidates if c.name not in broken)
    legal = len(space.candidates)
    dropped = legal - sum(not c.beside for c in candidates) - len(lost)
    return Prepared(
        schema=SCHEMA,
        attention=space.attention,
        base=base,
        start=start,
        combinations=space.combinations,
        enumerated=space.enumerated,
        illegal=space.illegal,
        excluded=space.excluded,
        legal=legal,
        pruned=dropped,
        candidates=built,
        failures=tuple(failures),
    )


# on the GPU -----------------------------------------------------------------------------------------------------------------


class Memory(Protocol):
    """What is known from earlier runs, and where what is found now goes (`tune_memory`)."""

    def failed(self, candidate: Candidate, problem: Problem) -> Failure | None: ...
    def verified(self, candidate: Candidate, problems: Sequence[Problem]) -> bool: ...
    def time_ms(self, candidate: Candidate, problem: Problem) -> Interval | None: ...
    def keep(
        self, candidate: Candidate, problem: Problem, stage: str, reason: str, rate: Rate | None, bundle: str | None
    ) -> None: ...


def tune(
    prepared: Prepared,
    problems: Sequence[Problem],
    runner: Runner,
    *,
    date: str,
    memory: Memory,
    peers: Sequence[str] = (),
    rounds: int = ROUNDS,
    heard: Heard = silent,
    deadline: float | None = None,
    seconds: Mapping[str, float] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> TuneResult:
    """Verify the candidates, then race them on each problem. `date`: of the run, ISO 8601. `seconds`: phases before; `clock` times the others."""
    attention, candidates = prepared.attention, {c.name: c for c in prepared.candidates}
    failures: list[Failure] = []
    took = dict(seconds or {})

    def left() -> tuple[Candidate, ...]:
        broken = {f.name for f in failures}
        return tuple(c for c in prepared.candidates if c.name not in broken)

    def drop(stage: str, reasons: Mapping[str, Broken | None], at: Problem | None = None) -> None:
        for name, why in reasons.items():
            if why is not None:
                c = candidates[name]
                failures.append(Failure(name, c.schedule, stage, None if at is None else str(at), why.reason, why.bundle))
                for p in problems if at is None else (at,):
                    memory.keep(c, p, stage, why.reason, None, why.bundle)

    reused = dict.fromkeys(problems, 0)
    for c in prepared.candidates:
        known = next((f for p in problems if (f := memory.failed(c, p)) is not None), None)
        if known is not None:
            failures.append(known)
        for p in problems:
            reused[p] += known is not None or memory.time_ms(c, p) is not None
    began = clock()
    fresh = tuple(c for c in left() if not memory.verified(c, problems))
    if fresh:
        drop("verify", runner.verify(attention, fresh, heard))
    took["verify"] = clock() - began
    began = clock()
    times = {p: {c.name: t for c in left() if (t := memory.time_ms(c, p)) is not None} for p in problems}
    work = [Work(p, left(), {n: t.median for n, t in times[p].items()}) for p in problems] if left() else []

    def progressed(problem: Problem, rates: Mapping[str, Rate]) -> None:
        for name, rate in rates.items():
            if rate.rounds:
                memory.keep(candidates[name], problem, "timed", "", rate, None)

    found = runner.race(attention, work, peers, rounds, heard, progressed, deadline) if work else []
    for w, m in zip(work, found):
        drop("measure", m.failed, w.problem)
        progressed(w.problem, {n: r for n, r in m.rates.items() if n not in m.failed})
    took["race"] = clock() - began
    nothing = Measurement({}, {}, (), (), (), False, {}, None)
    judged = found or [nothing] * len(problems)
    shapes = tuple(_judged(p, m, left(), reused[p]) for p, m in zip(problems, judged))
    gpu = runner.device()
    return TuneResult(
        schema=SCHEMA,
        date=date,
        fagen=__version__,
        gpu=gpu.name,
        sms=gpu.sms,
        driver=gpu.driver,
        compiler=next((m.compiler for m in judged if m.compiler), None),
        rounds=rounds,
        seconds={k: round(v, 1) for k, v in took.items()},
        prepared=prepared,
        failures=tuple(failures),
        shapes=shapes,
    )


def _ranked(rates: Sequence[Rate]) -> tuple[Rate, ...]:
    return tuple(sorted(rates, key=lambda r: (r.ms.median, r.name)))


def _judged(problem: Problem, m: Measurement, left: Sequence[Candidate], reused: int) -> Shape:
    """The winner is the fastest finalist of those that failed nowhere."""
    good = {c.name for c in left if not c.beside}
    beside = {c.name for c in left if c.beside}
    final = [m.rates[n] for n in m.final if n in good and n in m.rates]
    last = {r.name for r in final}
    others = _ranked([r for n, r in m.rates.items() if n in good and n not in last])
    winner = final[0].name if final else None
    return Shape(
        problem=problem,
        stages=m.stages,
        stopped=m.stopped,
        screened=others,
        final=tuple(final),
        peers=_ranked(list(m.peers.values())),
        beside=_ranked([r for n, r in m.rates.items() if n in beside]),
        winner=winner,
        within_noise=tuple(n for n in m.near if n in last and n != winner),
        reused=reused,
        absent=m.absent,
    )


# winners into the table ---------------------------------------------------------------------------------------------------


def check_buckets(problems: Sequence[Problem], sms: int) -> None:
    """InputError if two problems would fight for one entry of the table."""
    seen: dict[tuned.Bucket, Problem] = {}
    for problem in problems:
        bucket = tuned.Bucket.of(problem, sms)
        other = seen.setdefault(bucket, problem)
        if other != problem:
            raise InputError("--table", f"{other} and {problem} are in one bucket ({bucket}), which has one entry")


def entries(result: TuneResult) -> tuple[tuned.Entry, ...]:
    """The winners as entries of the tuned table."""
    prepared = result.prepared
    schedules = {c.name: c.schedule for c in prepared.candidates}
    found = []
    for shape in result.shapes:
        if shape.winner is None:
            continue
        rate = shape.final[0].tflops.median
        peer = shape.peers[0] if shape.peers else None
        measured = tuned.Measured(
            problem=str(shape.problem),
            tflops=round(rate, 1),
            peer=peer.name if peer else None,
            peer_tflops=round(peer.tflops.median, 1) if peer else None,
            gpu=result.gpu,
            driver=result.driver,
            compiler=result.compiler,
            fagen=result.fagen,
            date=result.date,
        )
        bucket = tuned.Bucket.of(shape.problem, result.sms)
        found.append(tuned.Entry.make(prepared.attention, schedules[shape.winner], bucket, prepared.base, measured))
    return tuple(found)
