"""The model judged: predicted beside measured times, how well they are in the same order, and where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..attention import Attention
from ..errors import FagenError
from ..library import builtin_names, load, resource_dir
from ..plan import Problem, assemble
from ..schedule import Schedule
from ..tuned import builtin_tables
from .bench import flops
from .bench_result import BenchResult, Record
from .model import predict_time
from .timing import Interval

SCHEMA = 1
OUTLIER = 1.25
"""A time is off by so much, after the median of all ratios is taken out: an outlier."""
FEW = 4
"""A group needs so many for a rank correlation of its own."""


@dataclass(frozen=True)
class Compared(Record):
    """One schedule on one problem."""

    label: str
    attention: Attention
    problem: Problem
    schedule: Schedule
    predicted_us: float
    measured_us: Interval
    """By `fagen bench`'s burst."""
    code_sha256: str | None
    """Of the kernel that was timed; None where a file does not say."""

    @property
    def ratio(self) -> float:
        """Predicted / measured time."""
        return self.predicted_us / self.measured_us.median

    def tflops(self, us: float) -> float:
        return flops(self.attention, self.problem) / us / 1e6


@dataclass(frozen=True)
class Group(Record):
    """The schedules of one attention on one problem. `spearman`: None where there are fewer than `FEW`."""

    name: str
    count: int
    spearman: float | None


@dataclass(frozen=True)
class ModelReport(Record):
    """`spearman`: rank correlation of predicted and measured TFLOP/s over all rows (rates, since times would mostly rank the sizes of the
    problems). `median_ratio`: of predicted / measured time; `typical_error`: the median of how far a ratio is from it, 0.1 for 10 %."""

    schema: int
    date: str
    gpu: str
    driver: str
    compiler: str
    source: str
    rows: tuple[Compared, ...]
    schedules: int
    """Different ones."""
    spearman: float
    groups: tuple[Group, ...]
    median_ratio: float
    typical_error: float
    outliers: tuple[str, ...]
    failures: tuple[str, ...]
    """Schedules without a time, and why."""


def judged(
    rows: Sequence[Compared], *, date: str, gpu: str, driver: str, compiler: str, source: str, failures: Iterable[str] = ()
) -> ModelReport:
    """What the rows say of the model. At least two rows."""
    logs = [math.log(r.ratio) for r in rows]
    middle = float(np.median(logs))
    outliers = [
        f"{_group(r)}: {r.label}: {r.ratio:.2f} of the measured {r.measured_us.median:.0f} µs"
        for r, x in sorted(zip(rows, logs), key=lambda pair: -abs(pair[1] - middle))
        if abs(x - middle) > math.log(OUTLIER)
    ]
    names = list(dict.fromkeys(_group(r) for r in rows))
    groups = []
    for name in names:
        of = [r for r in rows if _group(r) == name]
        groups.append(Group(name, len(of), _ranks_agree(of) if len(of) >= FEW else None))
    return ModelReport(
        schema=SCHEMA,
        date=date,
        gpu=gpu,
        driver=driver,
        compiler=compiler,
        source=source,
        rows=tuple(rows),
        schedules=len({r.schedule for r in rows}),
        spearman=_ranks_agree(rows),
        groups=tuple(groups),
        median_ratio=math.exp(middle),
        typical_error=float(np.median([abs(x - middle) for x in logs])),
        outliers=tuple(outliers),
        failures=tuple(failures),
    )


def _group(row: Compared) -> str:
    return f"{row.attention.label} {row.problem}"


def _ranks_agree(rows: Sequence[Compared]) -> float:
    return spearman([r.tflops(r.predicted_us) for r in rows], [r.tflops(r.measured_us.median) for r in rows])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation: Pearson's of the ranks, equal values sharing their mean rank. 0 where either list is constant."""
    x, y = _ranks(a), _ranks(b)
    spread = float(np.std(x) * np.std(y))
    return float(np.mean((x - x.mean()) * (y - y.mean()))) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    array = np.asarray(values, np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    same = (array[None, :] == array[:, None]).sum(axis=1)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = below + (same - 1) / 2
    return ranks


def compare(
    found: BenchResult, schedules: Callable[[str], Schedule | None], codes: dict[str, str] | None = None
) -> tuple[list[Compared], list[str]]:
    """Every timed schedule of a bench's result beside its prediction; `schedules`: by id, None for one that is not known. And what could
    not be compared. `codes`: function → code_sha256."""
    rows, failures = [], []
    for case in found.cases:
        for row in case.rows:
            if row.kind != "schedule" or row.schedule_id is None:
                continue
            schedule = schedules(row.schedule_id)
            if row.burst is None:
                failures.append(f"{row.function} on {case.problem}: {row.outcome}: {row.reason}")
            elif schedule is None:
                failures.append(f"{row.function} on {case.problem}: schedule {row.schedule_id} is not known here")
            else:
                predicted = predict_time(assemble(case.attention, schedule), case.problem).time_us
                ms = row.burst.ms
                code = (codes or {}).get(row.function)
                rows.append(
                    Compared(
                        row.about or row.function,
                        case.attention,
                        case.problem,
                        schedule,
                        predicted,
                        ms.map(lambda t: 1e3 * t),
                        code,
                    )
                )
    return rows, failures


def known_schedules() -> dict[str, Schedule]:
    """Id → schedule: the built-ins at every head_dim, the chains, and the tuned table."""
    sources = [*builtin_names(), *(str(p) for p in sorted(Path(resource_dir("schedules") / "chain").glob("*.py")))]
    found = {}
    for source in sources:
        for head_dim in (64, 128, 256):
            try:
                schedule = load(source, head_dim=head_dim).schedule
            except FagenError:  # no tiles for this head_dim
                continue
            found[schedule.id] = schedule
    return found | {e.schedule_id: e.schedule for t in builtin_tables() for e in t.entries if e.schedule.id == e.schedule_id}
