"""fagen tune: which of many schedules is fastest?"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import common

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from ..explore.tune import Failure, Prepared, TuneResult
    from ..explore.tune_run import Workshop
    from ..explore.tune_space import Space
    from ..plan.kernel import Problem
    from ..tuned import Table

SHOWN = 5
"""Candidates a problem shows."""
PEERS = "cudnn,fa2,fa3"


@click.command()
@click.argument("schedule", metavar="SCHEDULE")
@click.option("--shape", "shapes", multiple=True, metavar="B,HQ,HKV,SQ,SK", help="Tune for this size; repeatable.")
@click.option(
    "--grid", metavar="NAME", help="Tune for the sizes of a grid of `fagen bench`. Default: paper, unless --shape is given."
)
@click.option(
    "--over",
    multiple=True,
    metavar="KNOB=A:B:…",
    help="Try these values of a knob, such as stages=2:3:4,3; repeatable. Default: the axes that matter at this head_dim.",
)
@common.set_option
@common.causal_option
@click.option("--vs", default=PEERS, show_default=True, metavar="PEERS", help="Peers to time beside the finalists, or none.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="Measurements of each finalist.")
@click.option("--jobs", type=click.IntRange(1), help="Compilations at a time. Default: one a CPU core.")
@click.option("--build-only", metavar="DIR", help="Compile the candidates into DIR, and stop. Needs no GPU.")
@click.option("--from", "folder", metavar="DIR", help="Measure the candidates that --build-only left there. Needs no compiler.")
@click.option("--table", metavar="FILE", help="Put the winners into this tuned table; a new one begins as a copy of fagen's own.")
@click.option("--output", metavar="FILE", help="Write the results there as JSON.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random inputs.")
@common.json_option
def command(
    schedule: str,
    shapes: tuple[str, ...],
    grid: str | None,
    over: tuple[str, ...],
    settings: tuple[str, ...],
    causal: bool,
    vs: str,
    rounds: int,
    jobs: int | None,
    build_only: str | None,
    folder: str | None,
    table: str | None,
    output: str | None,
    seed: int,
    as_json: bool,
) -> int:
    """Find the fastest schedule for some sizes, around SCHEDULE.

    All combinations of some knobs are checked for legality and compiled in parallel; each candidate is compared with float64, then all
    are timed in rotating order on each size, and the fastest once more beside the peers. Those that fail are listed with the reason.
    --set fixes a knob. Exit code 1 if nothing could be compiled, or a size has no winner.
    """
    from ..evidence import variant_id
    from ..explore import tune, tune_run
    from ..explore.bench import check_peers
    from ..explore.bench_lab import check_device

    item = common.select([schedule], settings, causal)[0]
    name = f"{item.stem}.{variant_id(item.attention)}"
    problems = _problems(item, shapes, grid)
    peers = tuple(dict.fromkeys(n.strip() for n in vs.split(",") if n.strip() not in ("", "none")))
    check_peers(peers)
    _refuse_clashes(build_only, folder, table, output, over, item)
    axes = parse_axes(over, settings)
    space = None if folder else _space(item, axes, settings, table)
    if not build_only:
        check_device()
    with tempfile.TemporaryDirectory(prefix="fagen-tune-") as scratch:
        place = Path(build_only or folder or scratch)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError("--build-only", f"{place} cannot be made: {e.strerror or e}") from e
        workshop = tune_run.Workshop(place, jobs or os.cpu_count() or 1, seed=seed)
        if table:
            tune.check_buckets(problems, workshop.device().sms)
        prepared = _prepared(space, item, name, workshop) if space else _read(folder or "", name, item)
        if build_only:
            write_file(tune_run.manifest(place, name), prepared.to_json() + "\n")
            _tell_prepared(prepared, str(place), as_json)
            return int(not prepared.candidates)
        date = datetime.now(timezone.utc).date().isoformat()
        with common.Progress("tuning", 0) as progress:
            result = tune.tune(prepared, problems, workshop, date=date, peers=peers, rounds=rounds, heard=progress.step)
    if output:
        write_file(Path(output), result.to_json() + "\n")
    if table:
        _record(table, result)
    if as_json:
        common.write_json(result.to_dict())
    else:
        common.write(*_report(result))
    return int(not result.ok)


# what to try --------------------------------------------------------------------------------------------------------------


def parse_axes(over: Sequence[str], settings: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """`--over knob=a:b` … as axes. InputError for what is no knob of a schedule, given twice, or fixed by --set."""
    from ..schedule import Schedule

    fixed = common.parse_settings(settings)
    axes: dict[str, tuple[Any, ...]] = {}
    for text in over:
        knob, equals, values = text.partition("=")
        knob = knob.strip().replace("-", "_")
        if not equals or not values.strip():
            raise InputError("--over", f"{text!r} is not knob=value:value, such as tile_kv=96:128")
        if knob not in Schedule.field_names():
            import difflib

            near = difflib.get_close_matches(knob, Schedule.field_names())
            hint = f"did you mean {' or '.join(near)}?" if near else f"knobs: {', '.join(Schedule.field_names())}"
            raise InputError("--over", f"a schedule has no knob {knob!r}; {hint}")
        if knob in axes:
            raise InputError("--over", f"{knob} is given twice")
        if knob in fixed:
            raise InputError("--over", f"{knob} is fixed by --set {knob}={fixed[knob]}")
        axes[knob] = tuple(dict.fromkeys(common.parse_value(v) for v in values.split(":")))
    return axes


def _problems(item: common.Selected, shapes: Sequence[str], grid: str | None) -> tuple[Problem, ...]:
    from ..check import parse_shape
    from ..explore.bench import grid_problems
    from ..plan.kernel import Problem

    named = grid or (None if shapes else "paper")
    wanted = list(grid_problems(named, item.attention.head_dim)) if named else []
    parsed = [parse_shape(text) for text in shapes]
    wanted += [Problem(p.batch, p.sq, p.sk, p.hq, p.hkv) for p in parsed]
    for p in wanted:
        if min(p.batch, p.sq, p.sk, p.hq) < 1:
            raise InputError("--shape", f"{p}: every size must be at least 1 to be timed")
    return tuple(dict.fromkeys(wanted))


def _refuse_clashes(
    build_only: str | None, folder: str | None, table: str | None, output: str | None, over: Sequence[str], item: common.Selected
) -> None:
    if build_only and folder:
        raise InputError("--build-only", "compiles candidates, and --from takes compiled ones; one of them is enough")
    if build_only and (table or output):
        raise InputError("--build-only", "measures nothing, so there is nothing for --table or --output")
    if folder and over:
        raise InputError("--over", "has no effect on candidates that are compiled already (--from)")
    if folder and not Path(folder).is_dir():
        raise InputError("--from", f"there is no folder {folder}")
    if table and item.schedule.arch != "sm_90a":
        raise InputError("--table", f"holds schedules for sm_90a; {item.stem} is for {item.schedule.arch}")
    for option, path in (("--table", table), ("--output", output)):
        if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise InputError(option, f"{path} cannot be written: it is a folder, or lies in none")


def _space(item: common.Selected, axes: dict[str, tuple[Any, ...]], settings: Sequence[str], table: str | None) -> Space:
    """The combinations, and what the table has for this head_dim, so that a winner is never slower than what it replaces."""
    from ..explore.tune_space import default_axes, enumerate_space
    from ..tuned import builtin_tables, read

    tables = [*builtin_tables(), *([read(table)] if table and Path(table).exists() else [])]
    known = [e for t in tables if t.arch == item.schedule.arch for e in t.entries if e.head_dim == item.attention.head_dim]
    also = [e.schedule for e in known if not e.unusable(item.attention)]
    pinned = common.parse_settings(settings)
    with common.refusing(item):
        return enumerate_space(item.attention, item.schedule, axes or default_axes(item.attention, item.schedule), pinned, also)


def _prepared(space: Space, item: common.Selected, name: str, workshop: Workshop) -> Prepared:
    from ..explore import tune
    from ..library import builtin_names
    from ..tuned import BUILTIN

    base = item.stem if item.stem in builtin_names() else BUILTIN[item.attention.dtype]
    common.note(f"{name}: {len(space.candidates)} of {space.enumerated} schedules are legal{_counted(space.illegal)}")
    with common.Progress("compiling", len(space.candidates)) as progress:
        return tune.prepare(space, base, lambda s: f"{name}.{s.id}", workshop, progress.step)


def _read(folder: str, name: str, item: common.Selected) -> Prepared:
    from ..explore.tune_run import read_prepared

    prepared = read_prepared(folder, name)
    if prepared.attention != item.attention:
        raise InputError("--from", f"{folder} has candidates for {prepared.attention.label}, not for {item.attention.label}")
    return prepared


# what was found -----------------------------------------------------------------------------------------------------------


def _record(path: str, result: TuneResult) -> None:
    from .. import tuned
    from ..explore.tune import entries

    found = entries(result)
    tuned.record(path, found, beginning(result.gpu))
    common.note(f"{len(found)} entr{'y' if len(found) == 1 else 'ies'} written to {path}")


def beginning(gpu: str) -> Table:
    """What a new table for a GPU begins as: fagen's own of its family, or an empty one."""
    from .. import tuned

    known = [t for t in tuned.builtin_tables() if t.arch == "sm_90a" and t.device in gpu]
    return known[0] if known else tuned.Table("sm_90a", gpu.removeprefix("NVIDIA "), ())


def write_file(path: Path, text: str) -> None:
    """Whole or not at all; InputError naming it."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
            f.write(text)
        os.chmod(f.name, 0o644)
        os.replace(f.name, path)
    except OSError as e:
        raise InputError(str(path), f"cannot be written: {e.strerror or e}") from e


def _tell_prepared(prepared: Prepared, place: str, as_json: bool) -> None:
    if as_json:
        common.write_json(prepared.to_dict())
        return
    common.write(*_failures(prepared.failures))
    common.write(f"{len(prepared.candidates)} candidates for {prepared.attention.label} compiled into {place}")


def _report(result: TuneResult) -> list[Any]:
    prepared = result.prepared
    head = (
        f"{prepared.attention.label} on {result.gpu}: {prepared.enumerated} schedules, "
        f"{len(prepared.candidates) + len(prepared.failures)} legal{_counted(prepared.illegal)}, {len(prepared.candidates)} compiled, "
        f"{result.compiler or 'compiler unknown'}, driver {result.driver}"
    )
    foot = [f"{s.problem}: no candidate was left" for s in result.shapes if s.winner is None]
    return [head, _table(result), *_failures((*prepared.failures, *result.failures)), *foot]


def _table(result: TuneResult) -> RichTable:
    from rich import box
    from rich.table import Table

    schedules = {c.name: c.schedule for c in result.prepared.candidates}
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("B,HQ,HKV,SQ,SK", no_wrap=True)
    for title in ("TFLOP/s", "interval", "vs best peer"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("schedule")
    for shape in result.shapes:
        best = shape.peers[0].tflops.median if shape.peers else None
        first = str(shape.problem)
        for rate in shape.final[:SHOWN]:
            ratio = "" if best is None else f"{rate.tflops.median / best:.3f}"
            cells = (f"{rate.tflops.median:.1f}", f"{rate.tflops.low:.1f}–{rate.tflops.high:.1f}", ratio)
            mark = "  (winner)" if rate.name == shape.winner else ""
            table.add_row(first, *cells, _knobs(result, schedules[rate.name].to_dict()) + mark)
            first = ""
        for peer in shape.peers:
            table.add_row(first, f"{peer.tflops.median:.1f}", f"{peer.tflops.low:.1f}–{peer.tflops.high:.1f}", "", peer.name)
            first = ""
        table.add_section()
    return table


def _knobs(result: TuneResult, values: dict[str, Any]) -> str:
    """The knobs in which the candidates differ."""
    all_ = [c.schedule.to_dict() for c in result.prepared.candidates]
    differ = [n for n in values if any(other[n] != values[n] for other in all_)]
    return ", ".join(f"{n}={values[n]}" for n in differ) or "as given"


def _failures(failures: Sequence[Failure]) -> list[str]:
    """One line a reason, with how many candidates it befell."""
    if not failures:
        return []
    groups: dict[tuple[str, str], list[Failure]] = {}
    for f in failures:
        whole = f.reason.replace(f.name, "it").splitlines()
        groups.setdefault((f.stage, "; ".join(whole[:2])), []).append(f)
    lines = []
    for (stage, reason), of in groups.items():
        ids = ", ".join(f.schedule.id for f in of[:4]) + (" …" if len(of) > 4 else "")
        lines.append(f"  {stage}: {len(of)} × {reason} ({ids})")
    return ["\n".join([f"failed ({len(failures)}):", *lines])]


def _counted(illegal: dict[str, int]) -> str:
    return f" ({', '.join(f'{n} break {code}' for code, n in illegal.items())})" if illegal else ""
