"""Does the removal that saves most time take most from the resource that `fagen explain` says binds? A row for each case.

    python benchmarks/what_binds.py --build DIR                             compile what is timed; needs no GPU
    python benchmarks/what_binds.py [--from DIR] [--rounds N] [--output FILE]    time it on this GPU

Each kernel is timed in turn with what is left of it without softmax, loads, P·V and idle SMs (fagen/plan/removal.py). Exit code 1 if a
case says another thing than the model, or could not be timed. FILE holds {"result": as `fagen bench --output`, "cases": a `Measured`
(fagen/explore/shares.py) for each}.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fagen.cli.bench import check_output
from fagen.cli.common import Progress, Selected, planned, select
from fagen.cli.explain import parse_problem
from fagen.compile import build, load_built, write_built
from fagen.emit import emit
from fagen.errors import FagenError
from fagen.explore.bench_lab import check_device
from fagen.explore.bench_result import BenchSpec
from fagen.explore.bench_watch import run_watched
from fagen.explore.shares import ROUNDS, Measured, measured, removals_for, sentences, spec_of, write_removals
from fagen.plan import Plan, Problem

CASES = (
    ("fa1", (), "1,16,16,16384,16384", {"parallelism"}),
    ("standard", (), "4,16,16,4096,4096", {"hbm"}),
    ("fa3", ("head_dim=64",), "1,32,32,16384,16384", {"exp", "tensor"}),
    ("fa3", (), "1,16,16,16384,16384", {"tensor"}),
)
"""Schedule, settings, sizes, and what binds. standard's are shorter: at 16384 five of it would need 130 GB for S and P."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--build", metavar="DIR")
    options.add_argument("--from", dest="built", metavar="DIR")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--output", metavar="FILE")
    o = options.parse_args()
    try:
        if o.build:
            build_all(o.build)
        else:
            sys.exit(0 if compare(o.built, o.rounds, check_output("--output", o.output)) else 1)
    except FagenError as e:
        print(f"what_binds.py: {e}", file=sys.stderr)
        sys.exit(e.exit_code)


def cases() -> list[tuple[Selected, Plan, Problem, set[str]]]:
    """CASES with their plans."""
    found = []
    for name, settings, shape, binds in CASES:
        (item,) = select([name], settings)
        found.append((item, planned(item), parse_problem(shape), binds))
    return found


def build_all(folder: str) -> None:
    todo = cases()
    with Progress("building", len(todo)) as progress:
        for item, plan, problem, _ in todo:
            write_built(build(plan, emit(plan, item.name)), folder, item.name)
            for name in write_removals(plan, removals_for(plan, problem), folder, item.name):
                progress.step(name, counts=False)
            progress.step(item.name)


def compare(built: str | None, rounds: int, output: Path | None) -> bool:
    check_device()
    with tempfile.TemporaryDirectory(prefix="fagen-binds-") as scratch:
        if built is None:
            build_all(scratch)
        folder, todo = str(Path(built or scratch).resolve()), cases()
        specs = [
            spec_of(plan, problem, removals_for(plan, problem), folder, item.name, item.name, rounds)
            for item, plan, problem, _ in todo
        ]
        spec: BenchSpec = replace(specs[0], cases=tuple(case for s in specs for case in s.cases))
        with Progress("measuring", len(spec.cases)) as progress:
            result = run_watched(
                spec,
                on_case=lambda case: progress.step(str(case.problem)),
                on_function=lambda case, name: progress.step(name, counts=False),
            )
        found = [
            (item.name, binds, measured(plan, problem, result, "now", load_built(folder, item.name).report))
            for item, plan, problem, binds in todo
        ]
    for name, binds, m in found:
        print(f"{name}: {'as expected' if right(binds, m) else 'NOT as expected'} ({' or '.join(sorted(binds))})")
        print("\n".join(f"  {line}" for line in sentences(m)), end="\n\n")
    if output is not None:
        rows: list[dict[str, Any]] = [{"name": name, "right": right(binds, m), **m.to_dict()} for name, binds, m in found]
        output.write_text(json.dumps({"result": result.to_dict(), "cases": rows}, indent=1, allow_nan=False) + "\n")
    return all(right(binds, m) for _, binds, m in found)


def right(binds: set[str], m: Measured) -> bool:
    """The model says one of `binds`, and the removal that saves most is one that takes most of it."""
    return m.binding[0] in binds and m.agrees is True


if __name__ == "__main__":
    main()
