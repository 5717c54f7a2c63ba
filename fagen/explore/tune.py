"""Tuning: which schedule is fastest for a problem, of many.

    enumerate → legality → compile → verify → screen → final → winners

Each step drops candidates and says why; nothing that did not compile, launch and agree with float64 is ever timed. What the steps do
to a candidate is the `Runner`'s matter (`tune_run.Workshop` on this machine); here is the order of things, and what is kept of it.

  verify   a few problems from the grid of `fagen check`, unkind scores among them, into outputs filled with NaN between guard bands
  screen   on each problem, all candidates in rotating order, few rounds: the fastest `FINALISTS` go on
  final    those beside the peers, all rounds; the highest median wins

A candidate that is wrong, hangs or fails on one problem wins on none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .. import __version__, tuned
from ..attention import Attention
from ..errors import InputError
from ..plan.kernel import Problem
from ..schedule import Schedule
from .bench_result import Record
from .timing import Interval
from .tune_space import Space

SCHEMA = 1
FINALISTS = 6
SCREEN_ROUNDS = 3

Heard = Callable[[str], None]
"""Told each thing as it is done, for a progress line."""


# what is kept -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate(Record):
    """`name` is that of its files and of its rows."""

    name: str
    schedule: Schedule


@dataclass(frozen=True)
class Failure(Record):
    """A candidate that was dropped. `stage`: "compile", "verify" or "measure"; `problem`: B,HQ,HKV,SQ,SK if it was measured on one."""

    name: str
    schedule: Schedule
    stage: str
    problem: str | None
    reason: str


@dataclass(frozen=True)
class Prepared(Record):
    """Compiled candidates: all that is known before a GPU is needed."""

    schema: int
    attention: Attention
    base: str
    """Built-in schedule that entries of the tuned table will be written against."""
    enumerated: int
    illegal: dict[str, int]
    candidates: tuple[Candidate, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Rate(Record):
    """TFLOP/s of a candidate or a peer on one problem, by the FlashAttention papers' count."""

    name: str
    tflops: Interval


@dataclass(frozen=True)
class Shape(Record):
    """What was measured on one problem, each list the fastest first. `screened` is empty where there were few candidates."""

    problem: Problem
    screened: tuple[Rate, ...]
    final: tuple[Rate, ...]
    peers: tuple[Rate, ...]
    winner: str | None
    """None: no candidate was left."""


@dataclass(frozen=True)
class TuneResult(Record):
    schema: int
    date: str
    fagen: str
    gpu: str
    sms: int
    driver: str
    compiler: str | None
    rounds: int
    prepared: Prepared
    failures: tuple[Failure, ...]
    """After compilation."""
    shapes: tuple[Shape, ...]

    @property
    def ok(self) -> bool:
        """Every problem has a winner."""
        return all(s.winner is not None for s in self.shapes)


# who does it --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """`driver`: its version, and the newest CUDA that it supports."""

    name: str
    sms: int
    driver: str


@dataclass(frozen=True)
class Work:
    """Candidates to be timed beside one another on a problem."""

    problem: Problem
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Measurement:
    """What became of a `Work`: each candidate has a rate, or stands in `failed` with the reason; or it failed on an earlier problem of the
    same run. `compiler`: of the kernels."""

    rates: Mapping[str, Interval]
    peers: Mapping[str, Interval]
    failed: Mapping[str, str]
    compiler: str | None


class Runner(Protocol):
    """Does the work. A candidate that fails, crashes or hangs is named with a reason; an exception means that no work is possible."""

    def device(self) -> Gpu: ...

    def compile(self, attention: Attention, candidates: Sequence[Candidate], heard: Heard) -> Mapping[str, str]:
        """Candidate → why it did not compile, "" if it did; every candidate is there."""

    def verify(self, attention: Attention, candidates: Sequence[Candidate], heard: Heard) -> Mapping[str, str]:
        """Candidate → why it is wrong, "" if it is right; every candidate is there."""

    def measure(
        self, attention: Attention, work: Sequence[Work], peers: Sequence[str], rounds: int, heard: Heard
    ) -> Sequence[Measurement]:
        """One for each problem. Candidates are verified once more on the problem itself before they are timed."""


def silent(_: str) -> None:
    """A `Heard` for those who do not listen."""


# the steps ----------------------------------------------------------------------------------------------------------------


def prepare(space: Space, base: str, name: Callable[[Schedule], str], runner: Runner, heard: Heard = silent) -> Prepared:
    """Compile the candidates of a space. `name` gives each its own name."""
    candidates = tuple(Candidate(name(s), s) for s in space.candidates)
    if len({c.name for c in candidates}) != len(candidates):
        raise InputError("tune", "two candidates have the same name")
    reasons = runner.compile(space.attention, candidates, heard)
    failures = tuple(Failure(c.name, c.schedule, "compile", None, reasons[c.name]) for c in candidates if reasons[c.name])
    built = tuple(c for c in candidates if not reasons[c.name])
    return Prepared(SCHEMA, space.attention, base, space.enumerated, space.illegal, built, failures)


def tune(
    prepared: Prepared,
    problems: Sequence[Problem],
    runner: Runner,
    *,
    date: str,
    peers: Sequence[str] = (),
    rounds: int = 10,
    finalists: int = FINALISTS,
    heard: Heard = silent,
) -> TuneResult:
    """Verify the candidates, then find the fastest on each problem. `date`: of the run, ISO 8601."""
    attention, candidates = prepared.attention, {c.name: c for c in prepared.candidates}
    failures: list[Failure] = []

    def left() -> tuple[Candidate, ...]:
        broken = {f.name for f in failures}
        return tuple(c for c in prepared.candidates if c.name not in broken)

    def drop(stage: str, reasons: Mapping[str, str], problem: Problem | None = None) -> None:
        at = None if problem is None else str(problem)
        failures.extend(Failure(n, candidates[n].schedule, stage, at, why) for n, why in reasons.items() if why)

    def measured(work: Sequence[Work], peers: Sequence[str], rounds: int) -> Sequence[Measurement]:
        found = runner.measure(attention, work, peers, rounds, heard)
        for w, m in zip(work, found):
            drop("measure", m.failed, w.problem)
        return found

    if candidates:
        drop("verify", runner.verify(attention, left(), heard))
    chosen = {p: left() for p in problems}
    screened: dict[Problem, tuple[Rate, ...]] = dict.fromkeys(problems, ())
    if len(left()) > finalists:
        found = measured([Work(p, left()) for p in problems], (), min(SCREEN_ROUNDS, rounds))
        for p, m in zip(problems, found):
            screened[p] = _ranked(m.rates, left())
            chosen[p] = tuple(candidates[rate.name] for rate in screened[p][:finalists])
    final = [Work(p, chosen[p]) for p in problems] if left() else []
    found = measured(final, peers, rounds) if final else [Measurement({}, {}, {}, None)] * len(problems)
    shapes = tuple(_judged(p, screened[p], m, left()) for p, m in zip(problems, found))
    compiler = next((m.compiler for m in found if m.compiler), None)
    gpu = runner.device()
    return TuneResult(
        schema=SCHEMA,
        date=date,
        fagen=__version__,
        gpu=gpu.name,
        sms=gpu.sms,
        driver=gpu.driver,
        compiler=compiler,
        rounds=rounds,
        prepared=prepared,
        failures=tuple(failures),
        shapes=shapes,
    )


def _ranked(rates: Mapping[str, Interval], of: Sequence[Candidate] | None = None) -> tuple[Rate, ...]:
    names = set(rates) if of is None else {c.name for c in of} & set(rates)
    return tuple(Rate(n, rates[n]) for n in sorted(names, key=lambda n: (-rates[n].median, n)))


def _judged(problem: Problem, screened: tuple[Rate, ...], m: Measurement, left: Sequence[Candidate]) -> Shape:
    """The winner is the fastest of those that failed nowhere."""
    final = _ranked(m.rates, left)
    return Shape(problem, screened, final, _ranked(m.peers), final[0].name if final else None)


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
        rate = next(r.tflops.median for r in shape.final if r.name == shape.winner)
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
