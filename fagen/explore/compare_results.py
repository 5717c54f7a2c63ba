"""Two results of `fagen bench` side by side: has a schedule become faster or slower from one run to the other?

Runs are not paired round by round, so a ratio's interval is that of two independent medians: from the fastest of the old over the slowest
of the new to the opposite. It is wide on purpose. Peers that both runs timed tell what the machine itself did in between.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..attention import Attention
from ..errors import InputError
from ..plan.kernel import Problem
from .bench_result import BenchResult, Row, Timing
from .summary import LOADS, geometric_mean
from .timing import Interval

Key = tuple[Attention, Problem, str, str]
"""(attention, problem, function, load)."""


@dataclass(frozen=True)
class Compared:
    """One function on one case, in both runs. `ratio`: speed in the new run over that in the old one, above 1 is faster; `changed`: the
    two ran different plans under this name."""

    attention: Attention
    problem: Problem
    function: str
    kind: str
    load: str
    """"burst" or "sustained"."""
    old: Interval
    """TFLOP/s."""
    new: Interval
    ratio: Interval
    changed: bool

    @property
    def within_noise(self) -> bool:
        """The interval of the ratio holds 1."""
        return self.ratio.low <= 1 <= self.ratio.high

    def slower_than(self, least: float) -> bool:
        """Below `least` of the old speed, and not within noise."""
        return self.ratio.median < least and not self.within_noise


@dataclass(frozen=True)
class Comparison:
    rows: tuple[Compared, ...]
    only_old: tuple[str, ...]
    """What the new run did not time: "function on attention problem"."""
    only_new: tuple[str, ...]

    def slower(self, least: float) -> tuple[Compared, ...]:
        """The schedules that lost more than they may; peers are nobody's fault."""
        return tuple(r for r in self.rows if r.kind == "schedule" and r.slower_than(least))

    def mean(self, kind: str) -> float | None:
        """Geometric mean of the ratios of that kind's bursts, None where there is none."""
        found = [r.ratio.median for r in self.rows if r.kind == kind and r.load == "burst"]
        return geometric_mean(found) if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rows": [
                {
                    "attention": r.attention.to_dict(),
                    "problem": str(r.problem),
                    **{n: getattr(r, n) for n in ("function", "kind", "load", "changed", "within_noise")},
                    **{n: asdict(getattr(r, n)) for n in ("old", "new", "ratio")},
                }
                for r in self.rows
            ],
            "only_old": list(self.only_old),
            "only_new": list(self.only_new),
            "mean": {kind: self.mean(kind) for kind in ("schedule", "peer")},
        }


def compare_results(old: BenchResult, new: BenchResult) -> Comparison:
    """Everything that both have timed, in the order of the old run. InputError where they have nothing in common."""
    before, after = dict(_timed(old)), dict(_timed(new))
    rows = []
    for key, (row, t) in before.items():
        if key in after:
            other, u = after[key]
            attention, problem, function, load = key
            ratio = Interval(
                u.tflops.median / t.tflops.median,
                u.tflops.low / t.tflops.high,
                u.tflops.high / t.tflops.low,
                t.tflops.confidence * u.tflops.confidence,
            )
            changed = row.plan_id != other.plan_id
            rows.append(Compared(attention, problem, function, row.kind, load, t.tflops, u.tflops, ratio, changed))
    if not rows:
        raise InputError("--compare", f"the files have no case in common: {_few(before)} in the first, {_few(after)} in the second")
    return Comparison(
        tuple(rows), tuple(_text(k) for k in before if k not in after), tuple(_text(k) for k in after if k not in before)
    )


def _timed(result: BenchResult) -> list[tuple[Key, tuple[Row, Timing]]]:
    return [
        ((case.attention, case.problem, row.function, load), (row, t))
        for case in result.cases
        for row in case.rows
        for load in LOADS
        if (t := row.burst if load == "burst" else row.sustained) is not None
    ]


def _text(key: Key) -> str:
    attention, problem, function, load = key
    return f"{function} on {attention.label} {problem}" + ("" if load == "burst" else f", {load}")


def _few(keys: dict[Key, Any]) -> str:
    return "; ".join([*(_text(k) for k in list(keys)[:2]), *(["…"] if len(keys) > 2 else [])]) or "nothing timed"
