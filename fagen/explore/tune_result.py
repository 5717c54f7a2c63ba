"""What `fagen tune` works on and finds, as values with an exact JSON round trip, and who does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..attention import Attention
from ..plan.kernel import Problem
from ..schedule import Schedule
from .bench_result import Record
from .timing import Interval

SCHEMA = 2

Heard = Callable[[str], None]
"""Told each thing as it is done, for a progress line."""
Expired = Callable[[], bool]
"""Whether the time for a phase is used up."""


# what is kept -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate(Record):
    """`name` is that of its files and of its rows. `predicted_us`: problem (B,HQ,HKV,SQ,SK) → the model's time. `beside`: timed beside the last ones
    for comparison, and no candidate to win."""

    name: str
    schedule: Schedule
    predicted_us: dict[str, float] = field(default_factory=dict)
    beside: bool = False


@dataclass(frozen=True)
class Failure(Record):
    """A candidate that was dropped. `stage`: "model" (the model cannot place it), "compile", "verify", "measure", or "budget" (its turn never
    came); `problem`: B,HQ,HKV,SQ,SK if it was measured on one. `bundle`: for `fagen repro`, of one that hung or crashed."""

    name: str
    schedule: Schedule
    stage: str
    problem: str | None
    reason: str
    bundle: str | None = None


@dataclass(frozen=True)
class Prepared(Record):
    """Compiled candidates: all that is known before a GPU is needed."""

    schema: int
    attention: Attention
    base: str
    """Built-in schedule that entries of the tuned table will be written against."""
    start: Schedule
    """Around which the space lies."""
    combinations: int
    enumerated: int
    illegal: dict[str, int]
    excluded: int
    """Legal, and left out because they are known."""
    legal: int
    pruned: int
    """Of the legal ones, those that the model saw no chance for."""
    candidates: tuple[Candidate, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Rate(Record):
    """TFLOP/s of a candidate or a peer on one problem, by the FlashAttention papers' count, and milliseconds a launch. `rounds`: measured in
    this run; 0: an earlier run's. `vs_winner`: interval of (winner's time / own time) over common rounds; None where there were none."""

    name: str
    tflops: Interval
    ms: Interval
    rounds: int
    vs_winner: Interval | None = None


@dataclass(frozen=True)
class Stage(Record):
    """One rung of the race: how many were measured how many rounds each, how many dropped out, and who stayed within noise."""

    measured: int
    rounds: int
    dropped: int
    within_noise: tuple[str, ...]


@dataclass(frozen=True)
class Shape(Record):
    """What was measured on one problem, each list the fastest first."""

    problem: Problem
    stages: tuple[Stage, ...]
    stopped: bool
    """The budget ended the race before its last rung."""
    screened: tuple[Rate, ...]
    """Those that dropped out on the way."""
    final: tuple[Rate, ...]
    peers: tuple[Rate, ...]
    beside: tuple[Rate, ...]
    """Timed for comparison only: with --exclude-known what the tuned table has for this problem."""
    winner: str | None
    """None: no candidate was left."""
    within_noise: tuple[str, ...]
    """Finalists that the measurement cannot tell from the winner."""
    reused: int
    """Candidates of which something was known from an earlier run."""
    absent: tuple[str, ...] = ()
    """Peers that were asked for and not timed, and why."""


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
    seconds: dict[str, float]
    """Phase → how long it took."""
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
    """Candidates to race on a problem. `stored`: name → milliseconds known from an earlier run."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    stored: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Broken:
    """Why a candidate failed, and its repro bundle if it left one."""

    reason: str
    bundle: str | None = None


@dataclass(frozen=True)
class Measurement:
    """What became of a `Work`: each candidate has a rate, or stands in `failed`; or it failed on an earlier problem of the same run.
    `final`: those in the last rung, the fastest first. `near`: of those, the ones within noise of the first. `compiler`: of the kernels.
    `absent`: peers without a rate, and why."""

    rates: Mapping[str, Rate]
    peers: Mapping[str, Rate]
    final: tuple[str, ...]
    near: tuple[str, ...]
    stages: tuple[Stage, ...]
    stopped: bool
    failed: Mapping[str, Broken]
    compiler: str | None
    absent: tuple[str, ...] = ()


Progressed = Callable[[Problem, Mapping[str, Rate]], None]
"""Hears the rates known so far, after every rung of a problem's race."""


class Runner(Protocol):
    """Does the work. A candidate that fails, crashes or hangs is named with a reason; an exception means that no work is possible."""

    def device(self) -> Gpu: ...

    def predict(
        self, attention: Attention, schedules: Sequence[Schedule], problems: Sequence[Problem], heard: Heard
    ) -> Sequence[Sequence[float] | str]:
        """For each schedule the µs of each problem, or why there are none."""

    def compile(
        self, attention: Attention, candidates: Sequence[Candidate], heard: Heard, expired: Expired
    ) -> Mapping[str, Broken | None]:
        """Candidate → why it did not compile, None if it did; those whose turn did not come before `expired` are missing."""

    def verify(self, attention: Attention, candidates: Sequence[Candidate], heard: Heard) -> Mapping[str, Broken | None]:
        """Candidate → why it is wrong, None if it is right; every candidate is there."""

    def race(
        self,
        attention: Attention,
        work: Sequence[Work],
        peers: Sequence[str],
        rounds: int,
        heard: Heard,
        progressed: Progressed,
        deadline: float | None,
    ) -> Sequence[Measurement]:
        """One for each problem. Candidates are verified once more on the problem itself before they are timed. No rung begins after
        `deadline` (time.time())."""
