"""A bench's results arranged for reading: a panel for each head_dim and mask, in it a line for each function over the shapes."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.kernel import Problem
from .bench_result import BenchResult, Row


@dataclass(frozen=True)
class Series:
    """One function. `rows` has a place for every shape of its panel; None where it was not part of that case."""

    name: str
    kind: str
    """"schedule" or "peer"."""
    rows: tuple[Row | None, ...]

    @property
    def tflops(self) -> tuple[float | None, ...]:
        """Medians of the burst; None where it was not timed."""
        return tuple(None if r is None or r.burst is None else r.burst.tflops.median for r in self.rows)


@dataclass(frozen=True)
class Panel:
    head_dim: int
    mask: str
    problems: tuple[Problem, ...]
    series: tuple[Series, ...]
    """Schedules first, in the order of the run."""


def panels(result: BenchResult) -> tuple[Panel, ...]:
    """By head_dim, then mask (full first). A function measured in several types has them in its name: fa3 fp16. So has every schedule
    whose type is not the commonest."""
    types = [case.attention.products for case in result.cases for row in case.rows if row.kind == "schedule"]
    usual = max(dict.fromkeys(types), key=types.count) if types else ""
    table: dict[tuple[int, str], dict[tuple[str, str], dict[Problem, Row]]] = {}
    for case in result.cases:
        panel = table.setdefault((case.attention.head_dim, case.attention.mask), {})
        for row in (r for r in case.rows if r.bytes is None):  # the others have no operations to count
            name = row.function if case.attention.products == usual else f"{row.function} {case.attention.products}"
            panel.setdefault((row.kind, name), {})[case.problem] = row
    out = []
    for (head_dim, mask), found in sorted(table.items(), key=lambda item: (item[0][0], item[0][1] != "full", item[0][1])):
        problems = tuple(
            dict.fromkeys(p for case in result.cases for p in (case.problem,) if any(p in rows for rows in found.values()))
        )
        kept = [item for item in found.items() if item[0][0] == "schedule" or any(r.burst for r in item[1].values())]
        kept.sort(key=lambda item: item[0][0] != "schedule")
        series = tuple(Series(name, kind, tuple(rows.get(p) for p in problems)) for (kind, name), rows in kept)
        out.append(Panel(head_dim, mask, problems, series))
    return tuple(out)


def length(n: int) -> str:
    """1024 → 1k, 1000 → 1000."""
    return f"{n // 1024}k" if n % 1024 == 0 and n else str(n)


def shape_name(problem: Problem) -> str:
    """16 × 4k where that says all but the number of heads; else B,HQ,HKV,SQ,SK."""
    p = problem
    return f"{p.batch} × {length(p.sq)}" if p.sq == p.sk and p.hq == p.hkv else str(p)
