"""`run_bench` in a watched subprocess: a kernel that hangs costs seconds, and leaves a repro bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from .. import guard
from ..check.gpu import case_facts
from ..compile import load_built
from ..errors import InternalError, LaunchError
from ..oracle import CheckProblem
from ..oracle.inputs import Inputs
from .bench import check_spec, run_bench
from .bench_result import BenchResult, BenchSpec, CaseResult

TASK = "fagen.explore.bench_watch:work"


def work(request: Mapping[str, Any], channel: guard.Channel) -> None:
    """The worker's side. Sends "at" {case, function} before what could hang, "case" {result} for each case, "result" {result}."""

    def doing(what: str, seconds: float, case: int | None, function: str | None) -> None:
        channel.send("at", case=case, function=function)
        channel.doing(what, seconds)

    spec = BenchSpec.from_dict(request["spec"])
    result = run_bench(spec, lambda case: channel.send("case", result=case.to_dict()), doing)
    channel.send("result", result=result.to_dict())


def run_watched(
    spec: BenchSpec,
    on_case: Callable[[CaseResult], None] | None = None,
    on_function: Callable[[int, str], None] | None = None,
    bundles: str | Path = "repro",
) -> BenchResult:
    """As `run_bench`, in its own process. `on_function` hears the number of the case and the name of the function being worked on.

    LaunchError if a kernel hangs, faults or takes the process with it; if it was one of the spec's, its sentence ends with the
    place of a repro bundle under `bundles`.
    """
    check_spec(spec)
    case: int | None = None
    function: str | None = None
    with guard.Watched(TASK, {"spec": spec.to_dict()}) as worker:
        try:
            for message in worker.messages():
                if message["kind"] == "at":
                    case, function = message["case"], message["function"]
                    if on_function is not None and case is not None and function is not None:
                        on_function(case, function)
                elif message["kind"] == "case" and on_case is not None:
                    on_case(CaseResult.from_dict(message["result"]))
                elif message["kind"] == "result":
                    return BenchResult.from_dict(message["result"])
        except guard.GuardError as failure:
            raise _explained(failure, spec, case, function, bundles) from failure
    raise InternalError("the bench worker ended without a result")


def _explained(
    failure: guard.GuardError, spec: BenchSpec, case: int | None, function: str | None, bundles: str | Path
) -> LaunchError:
    """The failure, and a bundle if one of our kernels was at work; else the end of the worker's output."""
    folder = leave_bundle(failure, spec, case, function, bundles)
    if folder is None:
        said = failure.log.strip().splitlines()
        return LaunchError(f"{failure}" + (f": {said[-1]}" if said else ""))
    return LaunchError(f"{failure}\nrepro bundle: {folder} (rerun: fagen repro {folder})")


def leave_bundle(
    failure: guard.GuardError, spec: BenchSpec, case: int | None, function: str | None, bundles: str | Path
) -> Path | None:
    """A repro bundle of the kernel of the spec that was at work; None if it was none of them."""
    at = None if case is None else spec.cases[case]
    ref = None if at is None else next((k for k in at.kernels if k.label == function), None)
    if at is None or ref is None or ref.without:  # a bundle's kernel is checked when it runs again; one without something cannot be
        return None
    problem = CheckProblem(**dataclasses.asdict(at.problem), inputs=cast(Inputs, spec.inputs))
    facts = case_facts(problem, spec.seed, 1, False, {}, failure.detail)
    return guard.write_bundle(load_built(ref.directory, ref.file), facts, failure, bundles)
