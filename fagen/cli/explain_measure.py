"""The measured side of `fagen explain`: times from this GPU, from a result file, or from the tuned table."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from . import common
from . import needed as need
from .bench import check_output, read_results, write_results

if TYPE_CHECKING:
    from ..explore.bench_result import BenchResult
    from ..explore.shares import Measured
    from ..plan import Plan, Problem
    from ..report import CompileReport


def check_options(
    measure: bool, rounds: int | None, output: str | None, from_results: str | None, shape: str | None, folder: str | None
) -> None:
    """InputError for options that do not go together, before anything is done."""
    if measure and from_results is not None:
        raise InputError("--measure", "given beside --from-results, which has the times already; one of them is enough")
    if from_results is not None and shape is None:
        raise InputError("--from-results", "needs --shape: times are of one size")
    for option, given in (("--rounds", rounds), ("--output", output), ("--from", folder)):
        if given is not None and not measure:
            raise InputError(option, "is about what --measure does; give that, too")
    if rounds is not None and rounds < 1:
        raise InputError("--rounds", f"{rounds}; at least 1, and at least 6 for a 95 % interval")
    check_output("--output", output)


def time_of(
    item: common.Selected,
    plan: Plan,
    problem: Problem,
    report: CompileReport | None,
    measure: bool,
    rounds: int | None,
    output: str | None,
    from_results: str | None,
    folder: str | None,
) -> Measured | None:
    """What is known of the plan's time there: measured now, read from a file, or recorded in the tuned table (None: nothing)."""
    from ..explore.shares import ROUNDS, measured, recorded

    if from_results is not None:
        return measured(plan, problem, read_results(from_results), from_results, report)
    if not measure:
        return recorded(plan, problem, report)
    result = _measure(item, plan, problem, rounds or ROUNDS, folder)
    if output is not None:
        write_results(Path(output), result)
    for row in (r for case in result.cases for r in case.rows if r.bad):
        common.note(f"{row.function}: {row.outcome}: {row.reason}")
    return measured(plan, problem, result, "now", report)


def check_device() -> None:
    """LaunchError in one line where nothing can be measured."""
    from ..explore import bench_lab

    bench_lab.check_device()


def _measure(item: common.Selected, plan: Plan, problem: Problem, rounds: int, folder: str | None) -> BenchResult:
    """Time the kernel and what removals leave of it, in turn, in a watched process."""
    from ..compile import load_built, write_built
    from ..explore.bench_watch import run_watched
    from ..explore.shares import removals_for, spec_of, write_removals
    from ..plan.removal import file_of

    names, name = removals_for(plan, problem), common.built_name(item)
    whole = common.built(item, folder=folder)
    with tempfile.TemporaryDirectory(prefix="fagen-explain-") as scratch:
        place = str(Path(folder or scratch).resolve())
        if folder is None:
            write_built(whole, place, name)
            with common.Progress("building", len(names)) as progress:
                for built in write_removals(plan, names, place, name):
                    progress.step(built)
        else:
            for removed in names:  # a file that is missing is named before anything is timed
                load_built(place, file_of(name, removed), removed)
        spec = spec_of(plan, problem, names, place, name, need.label(item), rounds)
        with common.Progress("measuring", 1) as progress:
            return run_watched(spec, on_function=lambda case, function: progress.step(function, counts=False))
