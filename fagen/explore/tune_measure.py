"""The measuring process of a tune: on each problem it verifies the candidates, then races them (`tune_race`), torch started once for all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import guard
from .bench import check_spec
from .bench_result import BenchSpec
from .timing import Clock, Task, burst
from .tune_race import Race

TASK = "fagen.explore.tune_measure:work"


def work(request: Mapping[str, Any], channel: guard.Channel) -> None:
    """The worker's side. request: spec (of a `BenchSpec`; its cases are the problems), stored (for each case name → ms), beside (names that are no
    candidates), deadline (time.time(), or null), gpu (the ordinal to use, or null).

    Sends "at" {case, function} before what could hang; "failed" {case, function, reason} for what cannot be timed; "rung" {case, samples} after
    every rung and "raced" {case, rungs, samples, left, stopped} at the end of a case; "about" {compilers}.
    """
    if request["gpu"] is not None:  # before the driver starts in this process
        os.environ["CUDA_VISIBLE_DEVICES"] = str(request["gpu"])
    from .bench_lab import Lab

    def doing(what: str, seconds: float, case: int | None, function: str | None) -> None:
        channel.send("at", case=case, function=function)
        channel.doing(what, seconds)

    spec = BenchSpec.from_dict(request["spec"])
    check_spec(spec)
    lab = Lab(spec, doing)
    beside = set(request["beside"])
    for number, case in enumerate(spec.cases):
        with lab.case(number):
            found = lab.candidates(case)
            tasks = {c.row.function: c.task for c in found if c.task is not None}
            peers = {c.row.function for c in found if c.row.kind == "peer"}
            for c in found:
                if c.task is None:
                    channel.send("failed", case=number, function=c.row.function, reason=f"{c.row.outcome}: {c.row.reason}")
            channel.send("about", compilers=sorted({c.row.compiler for c in found if c.row.compiler}))
            guests = tuple(n for n in tasks if n in peers or n in beside)
            names = tuple(n for n in tasks if n not in guests)
            run_case(
                number, names, guests, tasks, lab.clock, spec.rounds, request["stored"][number], request["deadline"], channel, peers
            )


def run_case(
    number: int,
    names: Sequence[str],
    guests: Sequence[str],
    tasks: Mapping[str, Task],
    clock: Clock,
    rounds: int,
    stored: Mapping[str, float],
    deadline: float | None,
    channel: guard.Channel,
    peers: set[str],
) -> None:
    """Race the tasks of one case and tell the parent."""
    race = Race(tuple(names), rounds, tuple(guests), {n: t for n, t in stored.items() if n in tasks})

    def measure(some: Sequence[str], rounds: int) -> dict[str, list[float]]:
        samples = burst([tasks[n] for n in some], clock, rounds)
        return {n: [s.ms for s in of] for n, of in zip(some, samples)}

    def told(race: Race) -> None:
        channel.send("rung", case=number, samples=race.samples, left=list(race.left))

    race.run(measure, told, lambda: deadline is not None and time.time() > deadline)
    rungs = [{**vars(r)} for r in race.rungs]
    channel.send(
        "raced",
        case=number,
        rungs=rungs,
        samples=race.samples,
        left=list(race.left),
        stopped=race.stopped,
        peers=sorted(peers & set(race.samples)),
    )
