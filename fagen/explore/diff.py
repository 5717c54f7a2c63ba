"""Two schedules side by side: knobs, programs, sources, instruction counts, what the model says of both, and what was measured."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..emit import Source
from ..errors import InputError
from ..plan import Plan, Problem
from ..plan.kernel import KernelPlan
from ..plan.steps import Body, bodies
from ..plan.text import SILENT, heading
from ..report import CompileReport
from .bench_result import BenchResult
from .explain import predict, sentence
from .machine import H200, Device
from .timing import interval

SASS_NAMES = (
    "HMMA",
    "HGMMA",
    "QGMMA",
    "IGMMA",
    "WARPGROUP.DEPBAR",
    "BAR.SYNC",
    "BAR.ARV",
    "UTMALDG",
    "LDGSTS",
    "LDG.E.128",
    "USETMAXREG",
)
"""Counts that tell kernels apart; others of the report follow them where they differ."""


def knobs(a: Plan, b: Plan) -> dict[str, tuple[Any, Any]]:
    """Fields of the attention and the schedule that differ → (of a, of b)."""
    return {**a.attention.diff(b.attention), **a.schedule.diff(b.schedule)}


def program_lines(plan: Plan) -> list[str]:
    """The programs as text, a step a line with its id; bookkeeping left out. Kernels and roles have lines of their own."""
    return [line for kernel in plan.kernels for line in _kernel_lines(kernel)]


def _kernel_lines(kernel: KernelPlan) -> Iterator[str]:
    yield f"kernel {kernel.name}, {kernel.threads} threads, grid {kernel.grid}"
    for role in kernel.roles:
        yield f"{role.name}: {role.count} × {role.warps * 32} threads"
        yield from _body_lines(role.body, 1)


def _body_lines(body: Body, depth: int) -> Iterator[str]:
    for step in body:
        if step.kind in SILENT:
            continue
        yield f"{'  ' * depth}{heading(step)}  [{step.id}]"
        for name, inner in bodies(step):
            if name == "orelse" and any(s.kind not in SILENT for s in inner):
                yield f"{'  ' * depth}else"
            yield from _body_lines(inner, depth + 1)


def code_lines(source: Source) -> list[str]:
    """The code without comments and blank lines, indentation kept."""
    lines = (line.split("//", 1)[0].rstrip() for line in source.text.splitlines())
    return [line for line in lines if line]


def unified(a: list[str], b: list[str], names: tuple[str, str], context: int = 3) -> list[str]:
    """A unified diff, without line ends; empty where nothing differs."""
    return list(difflib.unified_diff(a, b, *names, lineterm="", n=context))


def changed(lines: list[str]) -> tuple[int, int]:
    """(lines removed, lines added) of a unified diff."""
    body = lines[2:]
    return sum(x.startswith("-") for x in body), sum(x.startswith("+") for x in body)


def sass_counts(report: CompileReport) -> dict[str, int] | None:
    """Instruction counts of all kernels together; None where the SASS was not read."""
    if report.sass is None:
        return None
    total: dict[str, int] = {}
    for counts in report.sass.values():
        for name, n in counts.items():
            total[name] = total.get(name, 0) + n
    return total


def sass_difference(a: dict[str, int], b: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Name → (in a, in b): of `SASS_NAMES` those that either has, of the others those that differ."""
    names = [*SASS_NAMES, *sorted((a.keys() | b.keys()) - set(SASS_NAMES))]
    pairs = {n: (a.get(n, 0), b.get(n, 0)) for n in names}
    return {n: p for n, p in pairs.items() if (any(p) if n in SASS_NAMES else p[0] != p[1])}


def times(
    a: Plan, b: Plan, problem: Problem, reports: tuple[CompileReport | None, CompileReport | None], device: Device = H200
) -> dict[str, Any]:
    """The model's times of both on one problem: {"a", "b"} of times_us, binds, bound_us and the sentence."""
    out = {}
    for key, plan, report in zip("ab", (a, b), reports):
        found = predict(plan, problem, report, device)
        out[key] = {"times_us": found.times_us, "binds": found.binds, "bound_us": found.bound_us, "sentence": sentence(found)}
    return out


def measured_times(a: Plan, b: Plan, problem: Problem, result: BenchResult, source: str) -> dict[str, Any]:
    """What a bench's `result` has of both on one problem: {"a", "b"}: {ms, tflops (intervals), source}, None for one that it has not; and
    "speedup": how many times faster b is, the median over rounds with its interval, where both were timed in turn. InputError, naming
    `source`, where it has neither."""
    rows = [row for case in result.cases if case.problem == problem for row in case.rows if row.burst is not None]
    timed = [next((r.burst for r in rows if r.plan_id == plan.id), None) for plan in (a, b)]
    if timed == [None, None]:
        raise InputError(source, f"has no time of plan {a.id} or {b.id} on {problem}")
    out: dict[str, Any] = {}
    for key, t in zip("ab", timed):
        out[key] = None if t is None else {"ms": asdict(t.ms), "tflops": asdict(t.tflops), "source": source}
    ta, tb = timed
    together = ta is not None and tb is not None and len(ta.samples_ms) == len(tb.samples_ms) and a.attention == b.attention
    if together and ta is not None and tb is not None:
        out["speedup"] = asdict(interval([x / y for x, y in zip(ta.samples_ms, tb.samples_ms)]))
    return out


def diff(
    a: Plan,
    b: Plan,
    names: tuple[str, str],
    sources: tuple[Source, Source],
    reports: tuple[CompileReport | None, CompileReport | None] = (None, None),
    problem: Problem | None = None,
    measured: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Plain JSON values. Keys: a, b (names and plan ids), knobs (name → [a, b]), program and source (unified diffs, a line each), sass
    (name → [a, b], None where either SASS was not read), times (the model's, with a `problem`), and `measured` (see `measured_times`).

    InputError where both are the same kernel.
    """
    if (a.attention, a.schedule) == (b.attention, b.schedule):
        raise InputError(names[1], f"is the same attention and schedule as {names[0]}: nothing differs")
    counts = [None if r is None else sass_counts(r) for r in reports]
    both = None if counts[0] is None or counts[1] is None else sass_difference(counts[0], counts[1])
    return {
        "a": {"name": names[0], "plan": a.id},
        "b": {"name": names[1], "plan": b.id},
        "knobs": {n: [_plain(x) for x in pair] for n, pair in knobs(a, b).items()},
        "program": unified(program_lines(a), program_lines(b), names),
        "source": unified(code_lines(sources[0]), code_lines(sources[1]), names),
        "sass": None if both is None else {n: list(pair) for n, pair in both.items()},
        **({} if problem is None else {"times": times(a, b, problem, reports)}),
        **({} if measured is None else {"measured": measured}),
    }


def _plain(x: Any) -> Any:
    return list(x) if isinstance(x, tuple) else x
