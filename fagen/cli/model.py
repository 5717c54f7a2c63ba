"""fagen model: how well does the model predict?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError, LaunchError
from ..host import cores
from . import common
from .bar import Bar

if TYPE_CHECKING:
    from ..explore.bench_result import BenchResult
    from ..explore.model_report import Compared, ModelReport
    from ..explore.model_set import Entry


@click.command()
@click.option("--from-results", "results", multiple=True, metavar="FILE", help="Measure nothing: compare with what `fagen bench --output` wrote; repeatable.")  # fmt: skip
@click.option("--build-only", metavar="DIR", help="Compile the set into DIR, and stop. Needs no GPU.")
@click.option("--from", "folder", metavar="DIR", help="Time the kernels that --build-only left there. Needs no compiler.")
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Measurements of each kernel.")
@click.option("--jobs", type=click.IntRange(1), help="Compilations at a time. Default: one a core.")
@click.option("--output", metavar="FILE", help="Write the report there as JSON.")
@common.json_option
def command(
    results: tuple[str, ...],
    build_only: str | None,
    folder: str | None,
    rounds: int,
    jobs: int | None,
    output: str | None,
    as_json: bool,
) -> int:
    """Predicted beside measured times, and whether they are in the same order.

    Times a fixed set of some sixty schedules, of every generation, good ones and bad ones, on this GPU (or takes the times of --from-results), and
    prints the rank correlation of predicted and measured rates, by size and over all, with the outliers. Exit code 1 if a schedule
    could not be timed.
    """
    from ..explore.model_report import compare, judged, known_schedules

    if sum(map(bool, (results, build_only, folder))) > 1:
        raise InputError("--from-results", "--from-results, --build-only and --from exclude one another")
    if results:
        common.refuse_given("given beside --from-results, which measures nothing", but=("results", "output", "as_json"))
    if output and (Path(output).is_dir() or not Path(output).absolute().parent.is_dir()):
        raise InputError("--output", f"{output} cannot be written: it is a folder, or lies in none")
    date = datetime.now(timezone.utc).date().isoformat()
    if results:
        from .bench import read_results

        known = known_schedules()
        rows: list[Compared] = []
        failures: list[str] = []
        found = [read_results(path) for path in results]
        for of in found:
            some, missing = compare(of, known.get)
            rows, failures = rows + some, failures + missing
        if len(rows) < 2:
            raise InputError("--from-results", f"have {len(rows)} schedules that are known here; at least 2 are needed")
        report = judged(rows, **_about(found[0], date, ", ".join(Path(path).name for path in results)), failures=failures)
    else:
        from ..explore.model_set import entries

        asked = entries()
        place = build_only or folder
        if not build_only:
            from ..explore.bench_lab import check_device

            check_device()
        with tempfile.TemporaryDirectory(prefix="fagen-model-") as scratch:
            broken = {} if folder else _build(asked, place or scratch, jobs or cores())
            if build_only:
                common.write(*(f"{n}: {why}" for n, why in broken.items()))
                common.write(f"{len(asked) - len(broken)} kernels compiled into {build_only}")
                return int(bool(broken))
            result, codes = _measure(asked, place or scratch, rounds, broken)
        schedules = {e.schedule.id: e.schedule for e in asked}
        rows, failures = compare(result, schedules.get, codes)
        if len(rows) < 2:
            raise LaunchError(f"only {len(rows)} of {len(asked)} schedules were timed: {'; '.join(failures[:2])}")
        report = judged(rows, **_about(result, date, "fagen model"), failures=[*broken.values(), *failures])
    if output:
        from .tune_options import write_file

        write_file(Path(output), report.to_json() + "\n")
    if as_json:
        common.write_json(report.to_dict())
    else:
        common.write(*_report(report))
    return int(bool(report.failures))


def _name(entry: Entry) -> str:
    """Of a kernel's files."""
    return f"{entry.attention.id}-{entry.schedule.id}"


def _build(asked: Sequence[Entry], folder: str, jobs: int) -> dict[str, str]:
    """Name → why it did not compile."""
    from ..explore.tune_result import Candidate
    from ..explore.tune_run import Workshop

    workshop = Workshop(folder, jobs)
    Path(folder).mkdir(parents=True, exist_ok=True)
    broken: dict[str, str] = {}
    distinct = {_name(e): e for e in asked}
    with Bar("compiling", len(distinct)) as bar:
        for attention in dict.fromkeys(e.attention for e in distinct.values()):
            some = [Candidate(n, e.schedule) for n, e in distinct.items() if e.attention == attention]
            found = workshop.compile(attention, some, bar.step, lambda: False)
            broken |= {n: f"{distinct[n].label}: {why.reason}" for n, why in found.items() if why is not None}
    return broken


def _measure(asked: Sequence[Entry], folder: str, rounds: int, broken: dict[str, str]) -> tuple[BenchResult, dict[str, str]]:
    """The times, and the hash of each kernel's code."""
    from ..compile import load_built
    from ..explore.bench_result import BenchSpec, CaseSpec, KernelRef
    from ..explore.bench_watch import run_watched

    cases = []
    for attention, problem in dict.fromkeys((e.attention, e.problem) for e in asked):
        some = [e for e in asked if (e.attention, e.problem) == (attention, problem) and _name(e) not in broken]
        refs = tuple(KernelRef(_name(e), str(Path(folder).resolve()), _name(e), e.label) for e in some)
        if refs:
            cases.append(CaseSpec(attention, problem, refs))
    codes = {r.file: load_built(r.directory, r.file).source.code_sha256 for c in cases for r in c.kernels}
    spec = BenchSpec(tuple(cases), (), rounds, False, 0)
    with Bar("measuring") as bar:
        result = run_watched(spec, on_function=lambda case, name: bar.step(f"{cases[case].problem} {name}"))
    return result, codes


def _about(result: BenchResult, date: str, source: str) -> dict[str, Any]:
    compilers = sorted({row.compiler for case in result.cases for row in case.rows if row.compiler})
    return {
        "date": date,
        "gpu": result.machine.gpu,
        "driver": result.machine.driver or "unknown",
        "compiler": ", ".join(compilers),
        "source": source,
    }


def _report(report: ModelReport) -> list[Any]:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("attention, B,HQ,HKV,SQ,SK", no_wrap=True)
    for title in ("measured µs", "predicted", "ratio", "TFLOP/s", "predicted"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("schedule")
    shown = ""
    for r in sorted(report.rows, key=lambda r: (r.attention.label, str(r.problem), r.measured_us.median)):
        group = f"{r.attention.label} {r.problem}"
        cells = (f"{r.measured_us.median:.1f}", f"{r.predicted_us:.1f}", f"{r.ratio:.2f}")
        rates = (f"{r.tflops(r.measured_us.median):.0f}", f"{r.tflops(r.predicted_us):.0f}")
        table.add_row(group if group != shown else "", *cells, *rates, r.label[:70])
        shown = group
    groups = ", ".join(f"{g.name} {g.spearman:.2f} ({g.count})" for g in report.groups if g.spearman is not None)
    return [
        table,
        f"{report.gpu}, {report.compiler}: rank correlation (Spearman, of rates) {report.spearman:.3f} over {len(report.rows)} times of "
        f"{report.schedules} schedules",
        f"by size: {groups}",
        f"median of predicted / measured {report.median_ratio:.2f}; half of the times are within {100 * report.typical_error:.0f} % of that",
        "outliers: " + ("; ".join(report.outliers) or "none"),
        *(f"without a time: {f}" for f in report.failures),
    ]
