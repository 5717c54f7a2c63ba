"""`fagen bench`: schedules beside their peers, on this GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .attention import Attention
from .check import parse_shape
from .cli.common import Progress, Selected, built, built_name, from_option, json_option, select, set_option, write, write_json
from .errors import InputError
from .plan.kernel import Problem

if TYPE_CHECKING:
    from rich.table import Table

    from .explore.bench_result import BenchResult, CaseSpec, Ceilings, Row, Timing
    from .explore.timing import Interval

PEERS = "cudnn,fa2,fa3"


@click.command("bench", short_help="Time schedules beside cuDNN, FlashAttention 2 and 3.")
@click.argument("schedules", nargs=-1, required=True, metavar="SCHEDULE…")
@click.option(
    "--grid",
    metavar="NAME",
    help="paper: lengths 512 to 16384 of 16384 tokens, hidden size 2048, head_dim 64, 128 and 256, full and causal, as far as --set, "
    "--causal and --full leave it open. ladder: one sequence of 16384. Default: ladder, unless --shape is given.",
)
@click.option("--shape", "shapes", multiple=True, metavar="B,HQ,HKV,SQ,SK", help="Sizes to time, besides the grid's; repeatable.")
@click.option("--causal/--full", "causal", default=None, help="The mask, instead of the schedule's own.")
@click.option("--vs", default=PEERS, show_default=True, metavar="PEERS", help="Peers to time beside, or none.")
@click.option("--rounds", default=10, show_default=True, metavar="N", help="Measurements of each function.")
@click.option("--sustained", is_flag=True, help="Also time each function under lasting load, where the power limit sets the clock.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of the random inputs.")
@click.option("--output", metavar="FILE", help="Write the results there as JSON.")
@set_option
@from_option
@json_option
def bench_command(
    schedules: Sequence[str],
    grid: str | None,
    shapes: Sequence[str],
    causal: bool | None,
    vs: str,
    rounds: int,
    sustained: bool,
    seed: int,
    output: str | None,
    settings: Sequence[str],
    folder: str | None,
    as_json: bool,
) -> int:
    """Time schedules beside their peers on this GPU.

    Every function is verified first; all run on the same inputs in one process, in rotating order. benchmarks/README.md says how
    the numbers come about. Exit code 1 if a schedule is wrong or could not be timed.
    """
    from .explore.bench import check_peers, check_spec
    from .explore.bench_lab import check_device
    from .explore.bench_result import BenchSpec
    from .explore.bench_watch import run_watched

    peers = parse_peers(vs)
    check_peers(peers)
    target = check_output(output)
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
            result = run_watched(
                spec,
                on_case=lambda case: progress.step(f"{case.attention.label} {case.problem}"),
                on_function=lambda case, name: progress.step(f"{spec.cases[case].problem} {name}", counts=False),
            )
    if target is not None:
        _write_file(target, result.to_json() + "\n")
    if as_json:
        write_json(result.to_dict())
    else:
        write(*report(result))
    return 0 if result.ok else 1


# what to measure ----------------------------------------------------------------------------------------------------------


def parse_peers(text: str) -> tuple[str, ...]:
    """ "cudnn,fa3" → their names, without repeats; "none" or "" → ()."""
    names = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    return () if names == ("none",) else names


def check_output(path: str | None) -> Path | None:
    """InputError before anything is measured, if FILE could not be written afterwards."""
    if path is None:
        return None
    target = Path(path)
    if target.is_dir():
        raise InputError("--output", f"{path} is a folder")
    if not target.parent.is_dir():
        raise InputError("--output", f"there is no folder {target.parent}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise InputError("--output", f"{path} cannot be written")
    return target


def selected(schedules: Sequence[str], settings: Sequence[str], causal: bool | None, grid: str | None) -> list[Selected]:
    """The kernels: every schedule with every head_dim and mask of the paper's grid that the options leave open."""
    from .explore.bench import HEAD_DIMS

    given = {text.partition("=")[0].strip().replace("-", "_") for text in settings}
    masks = [] if causal is None else [f"mask={'causal' if causal else 'full'}"]
    if masks and "mask" in given:
        raise InputError("--causal" if causal else "--full", "given beside --set mask=…; one of them is enough")
    head_dims: list[str] = []
    if grid == "paper":
        masks = masks or ([] if "mask" in given else ["mask=full", "mask=causal"])
        head_dims = [] if "head_dim" in given else [f"head_dim={d}" for d in HEAD_DIMS]
    extras = [[x for x in (d, m) if x] for d in head_dims or [""] for m in masks or [""]]
    return [item for extra in extras for item in select(schedules, (*settings, *extra))]


def problems_of(attention: Attention, grid: str | None, shapes: Sequence[str]) -> tuple[Problem, ...]:
    """The sizes to time: the grid's, then those of --shape."""
    from .explore.bench import grid_problems

    named = None if grid is None and shapes else grid or "ladder"
    wanted = list(grid_problems(named, attention.head_dim)) if named else []
    parsed = [parse_shape(text) for text in shapes]
    return tuple(dict.fromkeys(wanted + [Problem(p.batch, p.sq, p.sk, p.hq, p.hkv) for p in parsed]))


def cases(
    chosen: Sequence[Selected], problems: Sequence[tuple[Problem, ...]], places: Sequence[tuple[str, str]]
) -> tuple[CaseSpec, ...]:
    """Kernels of one attention are timed together. `places`: (folder, file) of each built kernel."""
    from .explore.bench_result import CaseSpec, KernelRef

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
    from .compile import write_built

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
    return f"ceilings of this run (bf16 matrix product of 8192³, device copy): {'; '.join(texts)}"


def _table(result: BenchResult) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("attention")
    table.add_column("B,HQ,HKV,SQ,SK", no_wrap=True)
    table.add_column("function", no_wrap=True)
    table.add_column("load", no_wrap=True)
    for name in ("TFLOP/s", "interval", "ms", "vs best peer", "% gemm", "% copy", "MHz"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in result.cases:
        first = (case.attention.label, str(case.problem))
        for row in case.rows:
            for cells in _lines(row):
                table.add_row(*first, *cells)
                first = ("", "")
        table.add_section()
    return table


def _lines(row: Row) -> list[tuple[str, ...]]:
    timings = [(load, t) for load, t in (("burst", row.burst), ("sustained", row.sustained)) if t is not None]
    if not timings:
        return [(row.function, row.outcome)]
    return [(row.function, load, *_numbers(t)) for load, t in timings]


def _numbers(t: Timing) -> tuple[str, ...]:
    ratio = "" if t.ratio is None else f"{t.ratio.median:.3f} of {t.best_peer}" + (" (slower)" if t.ratio.median < 1 else "")
    spread = f"{t.tflops.low:.1f}–{t.tflops.high:.1f}"
    shares = (f"{100 * t.gemm_share:.0f}", f"{100 * t.copy_share:.0f}")
    return f"{t.tflops.median:.1f}", spread, f"{t.ms.median:.4g}", ratio, *shares, _or(t.sm_mhz, ".0f")


def _or(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
