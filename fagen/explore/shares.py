"""Measured time beside the predicted, and the part of it that softmax, loads, P·V and idle SMs take: each kernel that a removal
leaves (plan/removal.py) is timed in turn with the whole one, so that rounds can be compared pair by pair.

What a removal saves is no sum of parts: work that runs side by side hides behind what is left. So the largest saving tells what binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..compile import build, write_built
from ..emit import emit
from ..errors import InputError
from ..plan import Plan, Problem
from ..plan.removal import file_of, removable, without
from ..report import CompileReport
from .bench import flops
from .bench_result import BenchResult, BenchSpec, CaseSpec, KernelRef, Row
from .explain import predict, us
from .machine import H200, Device
from .roofline import Cost
from .timing import Interval, interval

NEAR = 0.95
"""Resources whose time is at least this part of the binding one's bind as well."""
CALLED = {"softmax": "softmax", "loads": "loads", "pv": "P·V", "idle": "idle SMs"}
"""Removals in sentences."""
ROUNDS = 10


def removals_for(plan: Plan, problem: Problem, device: Device = H200) -> tuple[str, ...]:
    """The removals worth measuring there: of idle SMs only where CTAs are fewer than SMs."""
    idle = any(k.ctas < device.sms for k in predict(plan, problem, device=device).kernels)
    return tuple(name for name in removable(plan) if name != "idle" or idle)


def write_removals(plan: Plan, names: tuple[str, ...], directory: str | Path, name: str) -> Iterator[str]:
    """Compile the plan without each of `names`, and write them beside one another; yields the names of the files. CompileError where
    one breaks the promises of `compile.build`, which hold for them too."""
    for removed in names:
        left = without(plan, removed)
        write_built(build(left, emit(left, file_of(name, removed))), directory, file_of(name, removed))
        yield file_of(name, removed)


def spec_of(plan: Plan, problem: Problem, names: tuple[str, ...], directory: str, name: str, label: str, rounds: int) -> BenchSpec:
    """The whole kernel and what removals leave of it, in one case."""
    whole = KernelRef(label, directory, name)
    parts = (KernelRef(f"{label} without {n}", directory, file_of(name, n), without=n) for n in names)
    return BenchSpec((CaseSpec(plan.attention, problem, (whole, *parts)),), (), rounds, False, 0)


def recorded(plan: Plan, problem: Problem, report: CompileReport | None = None, device: Device = H200) -> Measured | None:
    """The time that the tuned table keeps of the plan on exactly that problem (a median, without interval or removals), if it has one."""
    from .. import tuned

    for entry in (e for table in tuned.builtin_tables() for e in table.entries):
        a, m = plan.attention, entry.measured
        key = (entry.dtype, entry.head_dim, entry.mask, m.problem)
        if key == (a.products, a.head_dim, a.mask, str(problem)) and entry.schedule == plan.schedule:
            ms = flops(a, problem) / m.tflops / 1e9
            cost = predict(plan, problem, report, device)
            source = f"the tuned table, {m.date}"
            return Measured(source, m.gpu, Interval(ms, ms, ms, 0.0), cost.bound_us, binding_of(cost), (), ())
    return None


# what was found ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """One removal. `saved`: the part of the whole kernel's time, median over rounds of 1 − (time without / time with), with its interval;
    `removes_us`: what the model says it takes away, by resource; `bound_us`: the model's bound for what is left."""

    removed: str
    ms: Interval
    saved: Interval
    removes_us: dict[str, float]
    bound_us: float


@dataclass(frozen=True)
class Measured:
    """A kernel's time on one problem (`ms` has confidence 0 where only a median is known). `source`: where it was measured; `bound_us`: the model's bound; `binding`: the resources that bind
    under the model, or nearly; `expected`: the removals that take most from one of them. `shares` may be empty."""

    source: str
    gpu: str
    ms: Interval
    bound_us: float
    binding: tuple[str, ...]
    expected: tuple[str, ...]
    shares: tuple[Share, ...]

    @property
    def most(self) -> Share | None:
        """The removal that saves most."""
        return max(self.shares, key=lambda s: s.saved.median, default=None)

    @property
    def agrees(self) -> bool | None:
        """Whether the removal that saves most takes most from what binds; None without removals."""
        return None if self.most is None else self.most.removed in self.expected

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with `bound_share`, `most` and `agrees`."""
        most = self.most
        return {
            **asdict(self),
            "binding": list(self.binding),
            "expected": list(self.expected),
            "shares": [asdict(s) for s in self.shares],
            "bound_share": self.bound_us / 1e3 / self.ms.median,
            "most": None if most is None else most.removed,
            "agrees": self.agrees,
        }


def measured(
    plan: Plan,
    problem: Problem,
    result: BenchResult,
    source: str,
    report: CompileReport | None = None,
    device: Device = H200,
) -> Measured:
    """What `result` has of the plan on that problem. `report`: the plan's, whose registers the model takes for what removals leave, too.
    InputError, naming `source`, where there is no time of it."""
    rows = [row for case in result.cases if (case.attention, case.problem) == (plan.attention, problem) for row in case.rows]
    whole = next((r for r in rows if r.plan_id == plan.id and r.burst is not None), None)
    if whole is None or whole.burst is None:
        raise InputError(source, f"has no time of plan {plan.id} on {problem}; it has {_times_in(result)}")
    cost = predict(plan, problem, report, device)
    names = tuple(n for n in removable(plan) if _row(rows, plan, n) is not None)
    left = {n: predict(without(plan, n), problem, report, device) for n in names}
    shares = []
    for n in names:
        row = _row(rows, plan, n)
        assert row is not None and row.burst is not None
        pairs = zip(row.burst.samples_ms, whole.burst.samples_ms)
        saved = interval([1 - part / all_ for part, all_ in pairs])
        shares.append(Share(n, row.burst.ms, saved, _taken(cost, left[n]), left[n].bound_us))
    binding = binding_of(cost)
    return Measured(source, result.machine.gpu, whole.burst.ms, cost.bound_us, binding, expected_of(cost, left), tuple(shares))


def binding_of(cost: Cost) -> tuple[str, ...]:
    """What binds, and what would within 5 % (parallelism only where it is what binds)."""
    times, least = cost.times_us, NEAR * cost.times_us[cost.binds]
    near = [r for r, t in times.items() if t >= least and r not in (cost.binds, "parallelism")]
    return (cost.binds, *near)


def expected_of(cost: Cost, left: dict[str, Cost]) -> tuple[str, ...]:
    """Of the removals, those that take most of the time of one of `binding_of`."""
    found = (max(left, key=lambda n: _taken(cost, left[n])[r], default=None) for r in binding_of(cost))
    return tuple(dict.fromkeys(n for n in found if n is not None))


def _taken(cost: Cost, left: Cost) -> dict[str, float]:
    return {r: t - left.times_us[r] for r, t in cost.times_us.items()}


def _row(rows: list[Row], plan: Plan, removed: str) -> Row | None:
    """The row of a removal that was timed."""
    return next((r for r in rows if r.plan_id == f"{plan.id}-without-{removed}" and r.burst is not None), None)


def _times_in(result: BenchResult) -> str:
    found = dict.fromkeys(
        f"{row.function} ({row.plan_id}) on {case.problem}"
        for case in result.cases
        for row in case.rows
        if row.plan_id and row.burst
    )
    return (
        ", ".join(list(found)[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "") if found else "no times of schedules"
    )


def sentences(m: Measured) -> list[str]:
    """The numbers in words: the time beside the bound, a line for each removal, and what that says."""
    spread = f" ({us(1e3 * m.ms.low)} to {us(1e3 * m.ms.high)})" if m.ms.confidence else ""
    share = 100 * m.bound_us / 1e3 / m.ms.median
    lines = [
        f"Measured on {m.gpu} ({m.source}): {us(1e3 * m.ms.median)}{spread}; the bound of {us(m.bound_us)} is {share:.0f} % of it."
    ]
    for s in sorted(m.shares, key=lambda s: -s.saved.median):
        change = f"{-100 * s.saved.median:+.1f} % ({-100 * s.saved.high:+.1f} to {-100 * s.saved.low:+.1f})".replace("-", "−")
        lines.append(f"  without {CALLED[s.removed]}: {change}, {us(1e3 * s.ms.median)}")
    if m.most is not None:
        verdict = "as" if m.agrees else "unlike what"
        wanted = " or ".join(CALLED[n] for n in m.expected)
        lines.append(
            f"Most is saved without {CALLED[m.most.removed]}, {verdict} the model says: {' and '.join(m.binding)} "
            f"bind{'s' * (len(m.binding) == 1)}, of which {wanted} {'take' if ' or ' in wanted else 'takes'} most."
        )
    return lines
