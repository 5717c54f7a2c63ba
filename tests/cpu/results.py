"""Bench results made up for tests: what `fagen bench --output` would hold of given times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fagen.attention import Attention
from fagen.explore.bench import METHOD, compulsory_bytes, flops
from fagen.explore.bench_result import SCHEMA, BenchResult, CaseResult, Ceilings, Machine, Row, Timing
from fagen.explore.timing import Interval, Reading, interval
from fagen.plan import Plan, Problem

ROUNDS = 10
CEILINGS = Ceilings(Interval(800.0, 790.0, 805.0, 0.97), Interval(4.0, 3.9, 4.1, 0.97), None, None, {"memcpy": 2.7, "add": 4.0})
MACHINE = Machine("NVIDIA H200", "9.0", 132, 1 << 37, "580.1", 700.0, None, "NVML")


def timing(attention: Attention, problem: Problem, samples: Sequence[float]) -> Timing:
    """Of milliseconds a launch, a sample a round."""
    ms, n = interval(samples), flops(attention, problem)
    return Timing(ms, ms.map(lambda t: n / t / 1e9), n / ms.median / 1e9, None, None, 0.5, 0.1, 1900.0, tuple(samples), 4)


def spread(ms: float, noise: float = 0.004) -> tuple[float, ...]:
    """ROUNDS samples around `ms`."""
    return tuple(ms * (1 + noise * (2 * i / (ROUNDS - 1) - 1)) for i in range(ROUNDS))


def row(name: str, plan_id: str | None, attention: Attention, problem: Problem, samples: Sequence[float], kind: str) -> Row:
    found = timing(attention, problem, samples)
    schedule_id = None if plan_id is None else plan_id.split("-")[1]
    return Row(name, kind, None, schedule_id, plan_id, "NVRTC 13", "timed", "", 0.5, found, None, None)


def result_of(plans: Mapping[str, tuple[Plan, Problem, Sequence[float]]]) -> BenchResult:
    """Name → (plan, problem, samples in ms); kernels of the same attention and problem stand in one case."""
    cases: dict[tuple[Attention, Problem], list[Row]] = {}
    for name, (plan, problem, samples) in plans.items():
        kind = "removal" if plan.without else "schedule"
        cases.setdefault((plan.attention, problem), []).append(row(name, plan.id, plan.attention, problem, samples, kind))
    found = tuple(
        CaseResult(a, p, flops(a, p), flops(a, p), compulsory_bytes(a, p), Reading(), Reading(), tuple(rows))
        for (a, p), rows in cases.items()
    )
    return BenchResult(SCHEMA, "2026-01-02T03:04:05+00:00", 1.5, MACHINE, {"torch": "2.11"}, METHOD, ROUNDS, 7, CEILINGS, found)
