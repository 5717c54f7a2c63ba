"""fagen build: schedules to NAME.cu, NAME.cubin and NAME.json."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import cache, nvrtc
from ..compile import Built, build, write_built
from ..emit import Source, emit
from ..errors import InputError
from ..plan import Plan
from ..plan.removal import file_of, removable, without
from ..report import KernelReport
from . import common
from . import needed as need

if TYPE_CHECKING:
    from rich.table import Table

COMPILERS = 4
"""Compilations at a time; NVRTC works outside Python's lock."""


@click.command()
@click.argument("schedules", nargs=-1, required=True, metavar="SCHEDULE...")
@click.option("-o", "--output", default="generated", show_default=True, metavar="DIR", help="Folder for the files.")
@common.set_option
@common.causal_option
@common.variants_option
@need.grid_option
@need.shape_option
@need.ablate_option
@click.option(
    "--removals",
    is_flag=True,
    help="Beside each kernel what is left of it without softmax, loads, P·V and idle SMs, for `fagen explain --measure --from`.",
)
@click.option("--accuracy", is_flag=True, help="The kernels of the tables of `fagen check --accuracy`, for its --from.")
@click.option("--input", "input_", metavar="FILE.npz", help="Of --accuracy: as for `fagen check`.")
@click.option("--debug", is_flag=True, help="Bounded waits that name what hung: NAME.debug.cu and so on.")
@click.option("--trace", is_flag=True, help="Marks that `fagen trace` reads: NAME.trace.cu and so on, beside the normal build.")
@common.json_option
def command(
    schedules: tuple[str, ...],
    output: str,
    settings: tuple[str, ...],
    causal: bool,
    variants: bool,
    grid: str | None,
    shapes: tuple[str, ...],
    ablate: bool,
    removals: bool,
    accuracy: bool,
    input_: str | None,
    debug: bool,
    trace: bool,
    as_json: bool,
) -> None:
    """Compile each SCHEDULE and write NAME.cu, NAME.cubin and NAME.json; NAME is the file's stem and what --set changed.

    --accuracy as for `fagen check`; --grid, --shape and --ablate as for `fagen bench`: all kernels that it needs, for its --from; SCHEDULE `tuned` is, for each size, the one
    that the tuned table has for it (on this GPU, or on an H200 where there is none). The compiled code must keep the plan's promises: no spills, no serialised matrix products, exactly the planned instructions.
    """
    if input_ is not None and not accuracy:
        raise InputError("--input", "has a meaning with --accuracy only")
    if accuracy:
        from . import accuracy as acc

        for option, given in {"--variants": variants, "--grid": grid, "--ablate": ablate, "--debug": debug}.items():
            if given:
                raise InputError(option, "has no meaning beside --accuracy")
        items = acc.kernels(acc.trials(acc.select(schedules, settings, causal), acc.Options(shapes, input_)))
    elif need.TUNED in schedules or grid or shapes or ablate:
        if variants:
            raise InputError(
                "--variants", "given beside what a bench needs (tuned, --grid, --shape, --ablate); one of them is enough"
            )
        items = need.distinct(need.needed(schedules, settings, causal or None, grid, shapes, ablate))
    else:
        items = common.select(schedules, settings, causal, variants)
    if debug and trace:
        raise InputError("--trace", "given beside --debug, whose delays would be what one sees; one of them is enough")
    if removals and (debug or trace):
        kind = "debug" if debug else "trace"
        raise InputError("--removals", f"given beside --{kind}; what is timed is no {kind} build")
    kinds = [(False, False), (False, True)] if trace else [(debug, False)]
    wanted = [(i, d, t) for i in items for d, t in kinds]
    jobs = [
        (common.planned(i, debug=d, trace=t), common.built_name(i, d, t)) for i, d, t in wanted
    ]  # an illegal one is refused first
    if removals:
        jobs = [job for plan, name in jobs for job in ((plan, name), *_removals(plan, name))]
    plans, sources = [plan for plan, _ in jobs], [emit(plan, name) for plan, name in jobs]
    with common.Progress("compiling", len(jobs)) as progress, ThreadPoolExecutor(min(COMPILERS, len(jobs))) as compilers:
        done = []
        for outcome in compilers.map(lambda job: _build(*job), zip(plans, sources)):
            done.append(outcome)
            progress.step(outcome.built.source.name)
    written = [write_built(d.built, output, d.built.source.name) for d in done]
    if as_json:
        common.write_json([_facts(d, paths) for d, paths in zip(done, written)])
        return
    common.write(_table(done))
    for d in done:
        for text in _notes(d.built):
            common.note(f"{d.built.source.name}: {text}")
    common.write(f"{len(written)} kernel{'s' if len(written) != 1 else ''} in {output}: .cu to read, .cubin to run, .json to check")


def _removals(plan: Plan, name: str) -> list[tuple[Plan, str]]:
    return [(without(plan, removed), file_of(name, removed)) for removed in removable(plan)]


@dataclass(frozen=True)
class _Outcome:
    built: Built
    seconds: float
    cached: bool


def _build(plan: Plan, source: Source) -> _Outcome:
    start = time.perf_counter()
    cached = _in_cache(source)
    built = build(plan, source)
    return _Outcome(built, round(time.perf_counter() - start, 3), cached)


def _notes(built: Built) -> tuple[str, ...]:
    """What was not checked, and what costs speed (of what a removal leaves, no speed is claimed)."""
    faults = () if built.plan.without else tuple(f for k in built.report.kernels for f in k.faults)
    return (*built.report.notes, *faults)


def _in_cache(source: Source) -> bool:
    try:
        store = cache.default()
    except OSError:  # no place for a cache: `build` compiles
        return False
    return store.load(cache.key(source.text, nvrtc.options(source.arch), nvrtc.compiler())) is not None


def _facts(outcome: _Outcome, paths: tuple[Path, Path, Path]) -> dict[str, Any]:
    built = outcome.built
    return {
        "name": built.source.name,
        "plan": built.plan.id,
        "attention": built.plan.attention.to_dict(),
        "schedule": built.plan.schedule.to_dict(),
        "code_sha256": built.source.code_sha256,
        "files": [str(p) for p in paths],
        "seconds": outcome.seconds,
        "cached": outcome.cached,
        "report": built.report.to_dict(),
    }


def _table(outcomes: list[_Outcome]) -> Table:
    from rich.table import Table

    table = Table("kernel", "attention", "registers", "spill", "shared memory", "SASS: found = expected", "seconds")
    for o in outcomes:
        built = o.built
        for k in built.report.kernels:
            name = built.source.name if len(built.report.kernels) == 1 else f"{built.source.name}: {k.name}"
            table.add_row(
                name,
                built.plan.attention.label,
                _registers(k),
                f"{max(k.spill_stores, k.spill_loads, k.stack_bytes)} B",
                f"{k.smem_bytes} B",
                _counts(k),
                f"{o.seconds:.2f}" + (" (cached)" if o.cached else ""),
            )
    return table


def _registers(kernel: KernelReport) -> str:
    roles = kernel.registers_by_role
    return ", ".join(f"{role} {n}" for role, n in roles.items()) if roles else str(kernel.registers)


def _counts(kernel: KernelReport) -> str:
    """The counts that are not 0. Those that differ have been refused, unless somebody asked for them."""
    if kernel.sass is None:
        return "not read"
    parts = []
    for name, want in kernel.expected.items():
        has = kernel.sass[name]
        if has or want:
            parts.append(f"{name} {has}" if has == want else f"{name} {has} ≠ {want}")
    return ", ".join(parts)
