"""`fagen bench`: schedules beside their peers, on this GPU."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import needed as need
from .common import (
    Progress,
    Selected,
    built,
    built_name,
    from_option,
    json_option,
    refuse_given,
    refusing,
    set_option,
    write,
    write_json,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..explore.bench_result import BenchResult, BenchSpec, Ceilings, Row, Timing
    from ..explore.timing import Interval

PEERS = "cudnn,fa2,fa3"


@click.command()
@click.argument("schedules", nargs=-1, metavar="SCHEDULE…")
@need.grid_option
@need.shape_option
@need.ablate_option
@click.option(
    "--parts",
    is_flag=True,
    help="Time the kernels that quantise, and the attention kernel after them, alone as well (schedules with precision).",
)
@click.option("--causal/--full", "causal", default=None, help="The mask, instead of the schedule's own.")
@click.option("--vs", default=PEERS, show_default=True, metavar="PEERS", help="Peers to time beside, or none.")
@click.option(
    "--inputs",
    default="normal",
    show_default=True,
    metavar="KIND",
    help="normal; sink: the first keys score high; growing: scores that grow in the order in which the keys are walked.",
)
@click.option("--rounds", default=10, show_default=True, metavar="N", help="Measurements of each function.")
@click.option("--sustained", is_flag=True, help="Also time each function under lasting load, where the power limit sets the clock.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of the random inputs.")
@click.option("--output", metavar="FILE", help="Write the results there as JSON.")
@click.option("--plot", metavar="FILE", help="Draw the results there: an .svg, .png or .pdf. Needs matplotlib.")
@click.option("--markdown", is_flag=True, help="Print the results as a Markdown table.")
@click.option("--from-results", metavar="FILE", help="Measure nothing: show what an earlier run wrote with --output.")
@click.option(
    "--compare", "files", nargs=2, metavar="OLD NEW", help="Measure nothing: two files that --output wrote, case by case."
)
@click.option(
    "--fail-below",
    type=float,
    metavar="X",
    help="With --compare: exit code 1 if a schedule runs at less than X of its old speed, and not within noise.",
)
@set_option
@from_option
@json_option
def command(
    schedules: Sequence[str],
    grid: str | None,
    shapes: Sequence[str],
    ablate: bool,
    parts: bool,
    causal: bool | None,
    vs: str,
    inputs: str,
    rounds: int,
    sustained: bool,
    seed: int,
    output: str | None,
    plot: str | None,
    markdown: bool,
    from_results: str | None,
    files: tuple[str, str] | None,
    fail_below: float | None,
    settings: Sequence[str],
    folder: str | None,
    as_json: bool,
) -> int:
    """Time schedules beside their peers on this GPU.

    SCHEDULE `tuned` is, for each size, the one that the tuned table has for it. Without --grid or --shape the size is one sequence of
    16384. Every function is verified first; all run on the same inputs in one process, in rotating order. benchmarks/README.md says how
    the numbers come about. Exit code 1 if a schedule is wrong or could not be timed.
    """
    if files is not None:
        refuse_given("given beside --compare, which measures nothing", but=("files", "fail_below", "as_json"))
        return _compare(files, fail_below, as_json)
    if fail_below is not None:
        raise InputError("--fail-below", "is about --compare; give that, too")
    if bool(schedules) == (from_results is not None):
        raise InputError(
            "SCHEDULE", "name schedules to time" if not schedules else "--from-results measures nothing; leave the schedules out"
        )
    if from_results is not None:
        shown = ("from_results", "output", "plot", "markdown", "as_json")
        refuse_given("given beside --from-results, which measures nothing", but=shown)
    if as_json and markdown:
        raise InputError("--markdown", "given beside --json; one of them is enough")
    from ..explore.bench_result import BenchSpec

    target, picture = check_output("--output", output), check_output("--plot", plot)
    if picture is not None:
        from ..explore.plot import require_matplotlib

        require_matplotlib(picture)
    if from_results is None:
        kernels, peers = need.needed(schedules, settings, causal, grid, shapes, ablate), parse_peers(vs)
        if parts and all(k.item.schedule.precision is None for k in kernels):
            raise InputError(
                "--parts", "none of the schedules quantises; those with precision do, such as --set precision=e4m3 or int8"
            )
        result = _measure(kernels, BenchSpec((), peers, rounds, sustained, seed, inputs), folder, parts)
    else:
        result = read_results(from_results)
    if target is not None:
        write_results(target, result)
    if picture is not None:
        from ..explore.plot import write_plot

        write_plot(result, picture)
    if as_json:
        write_json(result.to_dict())
    elif markdown:
        from ..explore.table import markdown_table

        write(markdown_table(result))
    else:
        write(*report(result))
    return 0 if result.ok else 1


def _measure(kernels: Sequence[need.Needed], spec: BenchSpec, folder: str | None, parts: bool) -> BenchResult:
    """`spec`: all but the cases."""
    from ..explore.bench import check_spec
    from ..explore.bench_lab import check_device
    from ..explore.bench_watch import run_watched
    from ..plan import rules

    items = need.distinct(kernels)
    for item in items:
        with refusing(item):
            rules.check(item.attention, item.schedule)
    check_spec(replace(spec, cases=need.cases(kernels, [("", "")] * len(kernels))))
    check_device()
    with tempfile.TemporaryDirectory(prefix="fagen-bench-") as scratch:
        with Progress("building", len(items)) as progress:
            places = {}
            for item in items:
                places[item] = _ready(item, folder, scratch)
                progress.step(item.name)
        spec = replace(spec, cases=need.cases(kernels, [places[k.item] for k in kernels], parts))
        with Progress("measuring", len(spec.cases)) as progress:
            return run_watched(
                spec,
                on_case=lambda case: progress.step(f"{case.attention.label} {case.problem}"),
                on_function=lambda case, name: progress.step(f"{spec.cases[case].problem} {name}", counts=False),
            )


def _compare(files: tuple[str, str], fail_below: float | None, as_json: bool) -> int:
    from .bench_compare import compare

    if fail_below is not None and not 0 < fail_below < math.inf:
        raise InputError("--fail-below", f"{fail_below:g}; a positive part of the old speed, such as 0.98")
    return compare(*files, fail_below, as_json)


def read_results(path: str, option: str = "--from-results") -> BenchResult:
    """What --output wrote; InputError naming `option` and the file if it is not that."""
    from ..explore.bench_result import BenchResult

    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(option, f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from e
    try:
        return BenchResult.from_json(text)
    except InputError as e:
        raise InputError(option, f"{path} is not a result of this version: {e}") from e


# what to measure ----------------------------------------------------------------------------------------------------------


def parse_peers(text: str) -> tuple[str, ...]:
    """ "cudnn,fa3" → their names, without repeats; "none" or "" → ()."""
    names = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    return () if names == ("none",) else names


def check_output(option: str, path: str | None) -> Path | None:
    """InputError before anything is measured, if FILE could not be written afterwards."""
    if path is None:
        return None
    target = Path(path)
    if target.is_dir():
        raise InputError(option, f"{path} is a folder")
    if not target.parent.is_dir():
        raise InputError(option, f"there is no folder {target.parent}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise InputError(option, f"{path} cannot be written")
    return target


def _ready(item: Selected, folder: str | None, scratch: str) -> tuple[str, str]:
    """(folder, file) of the built kernel, which is checked to be what was asked for."""
    from ..compile import write_built

    kernel = built(item, folder=folder)
    if folder is None:
        write_built(kernel, scratch, built_name(item))
    return str(Path(folder or scratch).resolve()), built_name(item)


def write_results(path: Path, result: BenchResult) -> None:
    """Whole or not at all, for `read_results`."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
            f.write(result.to_json() + "\n")
        os.chmod(f.name, 0o644)
        os.replace(f.name, path)
    except OSError as e:
        raise InputError("--output", f"{path} cannot be written: {e.strerror or e}") from e


# what was found -----------------------------------------------------------------------------------------------------------


def report(result: BenchResult) -> list[Any]:
    """The tables, and what is needed to read them."""
    m, versions = result.machine, dict(result.versions)
    head = [f"{m.gpu}, {m.sms} SMs, driver {m.driver or 'unknown'}; clocks and power: {m.sensors}"]
    if m.power_limit_watts or m.max_sm_mhz:
        head[0] += f"; power limit {_or(m.power_limit_watts, '.0f')} W, SM clock at most {_or(m.max_sm_mhz, '.0f')} MHz"
    compilers = sorted({row.compiler for case in result.cases for row in case.rows if row.compiler})
    head.append(", ".join([*(f"{name} {version}" for name, version in versions.items()), *(f"kernels by {c}" for c in compilers)]))
    head.append(_ceilings(result.ceilings))
    foot = [
        f"{name}: {text}" for name, text in result.method.items() if name != "sustained" or result.ceilings.gemm_tflops_sustained
    ]
    notes = dict.fromkeys(
        f"{row.function} on {case.attention.label}: {row.outcome}: {row.reason}"
        for case in result.cases
        for row in case.rows
        if row.reason
    )
    told = dict.fromkeys(f"{row.function}: {row.about}" for case in result.cases for row in case.rows if row.about)
    lines = [*_titled("not timed:", notes), *_titled("schedules:", told), *foot]
    return ["\n".join(head), _table(result), "\n".join(lines), *_summary(result)]


def _titled(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return [title, *found] if found else []


def _summary(result: BenchResult) -> list[Table]:
    """Many cases in a few numbers; nothing where there are few."""
    from rich import box
    from rich.table import Table

    from ..explore.summary import summaries

    found = summaries(result)
    if not found:
        return []
    table = Table(box=box.SIMPLE, pad_edge=False, title="speed relative to the best peer", title_justify="left")
    for name in ("function", "load", "attention"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "geometric mean", "least", "below 1", "% gemm"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("least at", no_wrap=True)
    for s in found:
        numbers = (str(s.cases), f"{s.mean:.3f}", f"{s.least:.3f}", str(s.below), f"{100 * s.gemm_share:.0f}")
        table.add_row(s.function, s.load, s.group, *numbers, s.where)
    return [table]


def _ceilings(c: Ceilings) -> str:
    loads: list[tuple[str, Interval, Interval]] = [("burst", c.gemm_tflops, c.copy_tbs)]
    if c.gemm_tflops_sustained and c.copy_tbs_sustained:
        loads.append(("sustained", c.gemm_tflops_sustained, c.copy_tbs_sustained))
    texts = [f"{load}: {g.median:.0f} TFLOP/s, {t.median:.2f} TB/s" for load, g, t in loads]
    copies = ", ".join(f"{name} {rate:.2f}" for name, rate in c.copies_tbs.items())
    return f"ceilings of this run (bf16 matrix product of 8192³, fastest device copy): {'; '.join(texts)} (copies: {copies})"


def _table(result: BenchResult) -> Table:
    from rich import box
    from rich.table import Table

    loads = any(row.sustained is not None for case in result.cases for row in case.rows)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("attention", min_width=9)
    table.add_column("B,HQ,HKV,SQ,SK", no_wrap=True)
    table.add_column("function", no_wrap=True)
    if loads:
        table.add_column("load", no_wrap=True)
    for name in ("TFLOP/s", "interval", "ms", "vs best peer", "% gemm", "% copy", "% of bound", "MHz"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in result.cases:
        first = (case.attention.label, str(case.problem))
        for row in case.rows:
            for load, cells in _lines(row):
                table.add_row(*first, row.function, *([load] if loads else []), *cells)
                first = ("", "")
        table.add_section()
    return table


def _lines(row: Row) -> list[tuple[str, tuple[str, ...]]]:
    """(load, cells) of each timing, or why there is none."""
    timings = [(load, t) for load, t in (("burst", row.burst), ("sustained", row.sustained)) if t is not None]
    return [(load, _numbers(t, row)) for load, t in timings] or [("", (row.outcome,))]


def _numbers(t: Timing, row: Row) -> tuple[str, ...]:
    prediction = row.prediction
    if row.bytes is not None:  # kernels that only move bytes
        return "", "", f"{t.ms.median:.4g}", "", "", f"{100 * t.copy_share:.0f}", "", _or(t.sm_mhz, ".0f")
    ratio = "" if t.ratio is None else f"{t.ratio.median:.3f} of {t.best_peer}" + (" (slower)" if t.ratio.median < 1 else "")
    spread = f"{t.tflops.low:.1f}–{t.tflops.high:.1f}"
    shares = (f"{100 * t.gemm_share:.0f}", f"{100 * t.copy_share:.0f}")
    bound = "" if prediction is None else f"{prediction.binds} {prediction.bound_us / t.ms.median / 10:.0f}"
    return f"{t.tflops.median:.1f}", spread, f"{t.ms.median:.4g}", ratio, *shares, bound, _or(t.sm_mhz, ".0f")


def _or(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
