"""A bench in a few numbers: the ratios to the best peer over many cases, as geometric mean and minimum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .bench_result import BenchResult, CaseResult, Timing

LOADS = ("burst", "sustained")


@dataclass(frozen=True)
class Summary:
    """A function over the cases of a group in which it and a peer were timed."""

    function: str
    load: str
    """"burst" or "sustained"."""
    group: str
    """The attention ("hd64 bf16 causal"), or "all bf16" for all of one type."""
    cases: int
    mean: float
    """Geometric, of the ratios (above 1: faster than the best peer of the case)."""
    least: float
    where: str
    """The case with the least ratio."""
    below: int
    """Cases with a ratio below 1."""
    gemm_share: float
    """Geometric mean of the shares of the matrix product's rate."""


def summaries(result: BenchResult) -> tuple[Summary, ...]:
    """By load, function and group, the whole last. Functions with fewer than two cases are left out: the table says it all."""
    functions = dict.fromkeys(row.function for case in result.cases for row in case.rows if row.kind == "schedule")
    found = []
    for load in LOADS:
        for function in functions:
            timed = [(case, t) for case in result.cases for t in _timings(case, function, load) if t.ratio is not None]
            if len(timed) < 2:
                continue
            groups: dict[str, list[tuple[CaseResult, Timing]]] = {}
            for case, t in timed:
                groups.setdefault(case.attention.label, []).append((case, t))
            if len(groups) > 1:
                for case, t in timed:
                    groups.setdefault(f"all {case.attention.products}", []).append((case, t))
            found += [_summary(function, load, group, of) for group, of in groups.items()]
    return tuple(found)


def _timings(case: CaseResult, function: str, load: str) -> list[Timing]:
    timings = (row.burst if load == "burst" else row.sustained for row in case.rows if row.function == function)
    return [t for t in timings if t is not None]


def _summary(function: str, load: str, group: str, of: Sequence[tuple[CaseResult, Timing]]) -> Summary:
    ratios = [t.ratio.median for _, t in of if t.ratio is not None]
    worst = of[ratios.index(min(ratios))][0]
    return Summary(
        function=function,
        load=load,
        group=group,
        cases=len(of),
        mean=geometric_mean(ratios),
        least=min(ratios),
        where=str(worst.problem) if group == worst.attention.label else f"{worst.attention.label} {worst.problem}",
        below=sum(r < 1 for r in ratios),
        gemm_share=geometric_mean([t.gemm_share for _, t in of]),
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(sum(map(math.log, values)) / len(values))
