"""`fagen bench`: schedules beside their peers, on this GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..attention import Attention
from ..check import parse_shape
from ..errors import InputError
from ..plan.kernel import Problem
from .common import Progress, Selected, built, built_name, from_option, json_option, select, set_option, write, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from ..explore.bench_result import BenchResult, CaseSpec, Ceilings, Prediction, Row, Timing
    from ..explore.timing import Interval

PEERS = "cudnn,fa2,fa3"


@click.command()
@click.argument("schedules", nargs=-1, metavar="SCHEDULE…")
@click.option(
    "--grid",
    metavar="NAME",
    help="paper: lengths 512 to 16384 of 16384 tokens, hidden size 2048, head_dim 64, 128 and 256. ladder: 16 heads; 16 sequences of 1024, "
    "2048 and 4096, 4 of 4096, one of 16384. Both full and causal, as far as --set, --causal and --full leave it open. Default: one "
    "sequence of 16384, unless --shape is given.",
)
@click.option("--shape", "shapes", multiple=True, metavar="B,HQ,HKV,SQ,SK", help="Sizes to time, besides the grid's; repeatable.")
@click.option("--causal/--full", "causal", default=None, help="The mask, instead of the schedule's own.")
@click.option("--vs", default=PEERS, show_default=True, metavar="PEERS", help="Peers to time beside, or none.")
@click.option("--rounds", default=10, show_default=True, metavar="N", help="Measurements of each function.")
@click.option("--sustained", is_flag=True, help="Also time each function under lasting load, where the power limit sets the clock.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of the random inputs.")
@click.option("--output", metavar="FILE", help="Write the results there as JSON.")
@click.option("--plot", metavar="FILE", help="Draw the results there: an .svg, .png or .pdf. Needs matplotlib.")
@click.option("--markdown", is_flag=True, help="Print the results as a Markdown table.")
@click.option("--from-results", metavar="FILE", help="Measure nothing: show what an earlier run wrote with --output.")
@set_option
@from_option
@json_option
def command(
    schedules: Sequence[str],
    grid: str | None,
    shapes: Sequence[str],
    causal: bool | None,
    vs: str,
    rounds: int,
    sustained: bool,
    seed: int,
    output: str | None,
    plot: str | None,
    markdown: bool,
    from_results: str | None,
    settings: Sequence[str],
    folder: str | None,
    as_json: bool,
) -> int:
    """Time schedules beside their peers on this GPU.

    Every function is verified first; all run on the same inputs in one process, in rotating order. benchmarks/README.md says how
    the numbers come about. Exit code 1 if a schedule is wrong or could not be timed.
    """
    if bool(schedules) == (from_results is not None):
        raise InputError(
            "SCHEDULE", "name schedules to time" if not schedules else "--from-results measures nothing; leave the schedules out"
        )
    if as_json and markdown:
        raise InputError("--markdown", "given beside --json; one of them is enough")
    target, picture = check_output("--output", output), check_output("--plot", plot)
    if picture is not None:
        from ..explore.plot import require_matplotlib

        require_matplotlib(picture)
    if from_results is None:
        result = _measure(schedules, grid, shapes, causal, parse_peers(vs), rounds, sustained, seed, settings, folder)
    else:
        result = read_results(from_results)
    if target is not None:
        _write_file(target, result.to_json() + "\n")
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


def _measure(
    schedules: Sequence[str],
    grid: str | None,
    shapes: Sequence[str],
    causal: bool | None,
    peers: tuple[str, ...],
    rounds: int,
    sustained: bool,
    seed: int,
    settings: Sequence[str],
    folder: str | None,
) -> BenchResult:
    from ..explore.bench import check_peers, check_spec
    from ..explore.bench_lab import check_device
    from ..explore.bench_result import BenchSpec
    from ..explore.bench_watch import run_watched

    check_peers(peers)
    chosen = selected(schedules, settings, causal, grid)
    problems = [problems_of(item.attention, grid, shapes) for item in chosen]
    check_device()
    with tempfile.TemporaryDirectory(prefix="fagen-bench-") as scratch:
        with Progress("building", len(chosen)) as progress:
            places = []
            for item in chosen:
                places.append(_ready(item, folder, scratch))
                progress.step(item.name)
        spec = BenchSpec(cases(chosen, problems, places), peers, rounds, sustained, seed)
        check_spec(spec)
        with Progress("measuring", len(spec.cases)) as progress:
            return run_watched(
                spec,
                on_case=lambda case: progress.step(f"{case.attention.label} {case.problem}"),
                on_function=lambda case, name: progress.step(f"{spec.cases[case].problem} {name}", counts=False),
            )


def read_results(path: str) -> BenchResult:
    """What --output wrote; InputError naming the file if it is not that."""
    from ..explore.bench_result import BenchResult

    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError("--from-results", f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from e
    try:
        return BenchResult.from_json(text)
    except InputError as e:
        raise InputError("--from-results", f"{path} is not a result of this version: {e}") from e


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


def selected(schedules: Sequence[str], settings: Sequence[str], causal: bool | None, grid: str | None) -> list[Selected]:
    """The kernels: every schedule with every head_dim (paper) and mask (paper, ladder) of the grid that the options leave open."""
    from ..explore.bench import HEAD_DIMS

    given = {text.partition("=")[0].strip().replace("-", "_") for text in settings}
    masks = [] if causal is None else [f"mask={'causal' if causal else 'full'}"]
    if masks and "mask" in given:
        raise InputError("--causal" if causal else "--full", "given beside --set mask=…; one of them is enough")
    head_dims: list[str] = []
    if grid is not None:
        masks = masks or ([] if "mask" in given else ["mask=full", "mask=causal"])
    if grid == "paper":
        head_dims = [] if "head_dim" in given else [f"head_dim={d}" for d in HEAD_DIMS]
    extras = [[x for x in (d, m) if x] for d in head_dims or [""] for m in masks or [""]]
    return [item for extra in extras for item in select(schedules, (*settings, *extra))]


def problems_of(attention: Attention, grid: str | None, shapes: Sequence[str]) -> tuple[Problem, ...]:
    """The sizes to time: the grid's, then those of --shape; the longest of the paper's where neither is given."""
    from ..explore.bench import grid_problems, one_problem

    wanted = [] if grid is None else list(grid_problems(grid, attention.head_dim))
    if grid is None and not shapes:
        wanted = [one_problem(attention.head_dim)]
    parsed = [parse_shape(text) for text in shapes]
    return tuple(dict.fromkeys(wanted + [Problem(p.batch, p.sq, p.sk, p.hq, p.hkv) for p in parsed]))


def cases(
    chosen: Sequence[Selected], problems: Sequence[tuple[Problem, ...]], places: Sequence[tuple[str, str]]
) -> tuple[CaseSpec, ...]:
    """Kernels of one attention are timed together. `places`: (folder, file) of each built kernel."""
    from ..explore.bench_result import CaseSpec, KernelRef

    groups: dict[Attention, list[int]] = {}
    for i, item in enumerate(chosen):
        groups.setdefault(item.attention, []).append(i)
    return tuple(
        CaseSpec(attention, problem, tuple(KernelRef(label(chosen[i]), *places[i]) for i in members))
        for attention, members in groups.items()
        for problem in problems[members[0]]
    )


def label(item: Selected) -> str:
    """The schedule's name in tables; a changed schedule shows its id."""
    return item.stem if item.own_schedule else f"{item.stem}.{item.schedule.id}"


def _ready(item: Selected, folder: str | None, scratch: str) -> tuple[str, str]:
    """(folder, file) of the built kernel, which is checked to be what was asked for."""
    from ..compile import write_built

    kernel = built(item, folder=folder)
    if folder is None:
        write_built(kernel, scratch, built_name(item))
    return str(Path(folder or scratch).resolve()), built_name(item)


def _write_file(path: Path, text: str) -> None:
    """Whole or not at all."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
            f.write(text)
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
    return ["\n".join(head), _table(result), "\n".join([*(["not timed:"] if notes else []), *(f"  {n}" for n in notes), *foot])]


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
    return [(load, _numbers(t, row.prediction)) for load, t in timings] or [("", (row.outcome,))]


def _numbers(t: Timing, prediction: Prediction | None) -> tuple[str, ...]:
    ratio = "" if t.ratio is None else f"{t.ratio.median:.3f} of {t.best_peer}" + (" (slower)" if t.ratio.median < 1 else "")
    spread = f"{t.tflops.low:.1f}–{t.tflops.high:.1f}"
    shares = (f"{100 * t.gemm_share:.0f}", f"{100 * t.copy_share:.0f}")
    bound = "" if prediction is None else f"{prediction.binds} {prediction.bound_us / t.ms.median / 10:.0f}"
    return f"{t.tflops.median:.1f}", spread, f"{t.ms.median:.4g}", ratio, *shares, bound, _or(t.sm_mhz, ".0f")


def _or(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
