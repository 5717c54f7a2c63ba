"""The parent's side of a race: one measuring process on one GPU, begun anew behind a candidate that it died of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import guard
from ..attention import Attention
from ..errors import LaunchError
from .bench import flops
from .bench_result import BenchSpec, CaseSpec, KernelRef
from .bench_watch import leave_bundle
from .timing import Interval, interval
from .tune_measure import TASK
from .tune_race import Race
from .tune_result import Broken, Heard, Measurement, Progressed, Rate, Stage, Work


@dataclass
class Case:
    """What is known of one problem so far."""

    work: Work
    failed: dict[str, Broken] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)
    """From an earlier run, or from a process that died."""
    absent: dict[str, str] = field(default_factory=dict)
    """Peer → why it was not timed."""
    compilers: tuple[str, ...] = ()
    raced: Mapping[str, Any] | None = None


def race_on(
    attention: Attention,
    work: Sequence[Work],
    peers: Sequence[str],
    rounds: int,
    heard: Heard,
    progressed: Progressed,
    deadline: float | None,
    *,
    folder: Path,
    seed: int,
    bundles: str | Path,
    gpu: str | None,
) -> list[Measurement]:
    """As `Runner.race`, on one GPU (`gpu`: as CUDA_VISIBLE_DEVICES names it; None: the one that there is)."""
    cases = [Case(w, stored=dict(w.stored)) for w in work]
    dead: dict[str, Broken] = {}
    while True:
        todo = [c for c in cases if c.raced is None]
        if not todo:
            break
        spec = BenchSpec(
            cases=tuple(_case(attention, c, dead, folder) for c in todo),
            peers=tuple(peers),
            rounds=rounds,
            sustained=False,
            seed=seed,
        )
        _run(attention, spec, todo, heard, progressed, deadline, gpu, bundles, dead)
    return [measurement(attention, c) for c in cases]


def _case(attention: Attention, case: Case, dead: Mapping[str, Any], folder: Path) -> CaseSpec:
    refs = (KernelRef(c.name, str(folder), c.name) for c in case.work.candidates if c.name not in dead)
    return CaseSpec(attention, case.work.problem, tuple(refs))


def _run(
    attention: Attention,
    spec: BenchSpec,
    todo: Sequence[Case],
    heard: Heard,
    progressed: Progressed,
    deadline: float | None,
    gpu: str | None,
    bundles: str | Path,
    dead: dict[str, Broken],
) -> None:
    """One process. If it dies of a candidate, that one stands in `dead` and fails the case it was at; the failure is raised if it was none of
    ours."""
    beside = sorted({c.name for case in todo for c in case.work.candidates if c.beside})
    request = {
        "spec": spec.to_dict(),
        "stored": [dict(case.stored) for case in todo],
        "beside": beside,
        "deadline": deadline,
        "gpu": gpu,
    }
    at: tuple[int | None, str | None] = (None, None)
    with guard.Watched(TASK, request) as worker:
        try:
            for message in worker.messages():
                kind = message["kind"]
                if kind == "at":
                    at = message["case"], message["function"]
                    heard(message["function"] or "")
                    continue
                case = todo[message["case"]] if "case" in message else todo[0]
                if kind == "about":
                    for each in todo:
                        each.compilers = tuple(message["compilers"])
                elif kind == "failed" and message["function"] in {c.name for c in case.work.candidates}:
                    case.failed[message["function"]] = Broken(message["reason"])
                elif kind == "failed":
                    case.absent[message["function"]] = message["reason"]
                elif kind == "rung":
                    race = _race(message)
                    case.stored |= {n: race.median(n) for n in race.samples if race.own(n)}
                    progressed(case.work.problem, _rates(attention, case.work, race, None))
                elif kind == "raced":
                    case.raced = message
        except LaunchError as e:
            number, name = at
            if number is None or name is None or name in dead or name not in {c.name for c in todo[number].work.candidates}:
                raise
            failure = e if isinstance(e, guard.GuardError) else guard.GuardError("fault", f"{name} is timed", str(e))
            bundle = leave_bundle(failure, spec, number, name, bundles)
            dead[name] = todo[number].failed[name] = Broken(str(e), None if bundle is None else str(bundle))


def _race(message: Mapping[str, Any]) -> Race:
    race = Race(tuple(message["samples"]), 0)
    race.samples = {n: list(of) for n, of in message["samples"].items()}
    race.left = tuple(message["left"])
    return race


def _rates(attention: Attention, work: Work, race: Race, winner: str | None) -> dict[str, Rate]:
    """Of everyone who was measured."""
    counted = flops(attention, work.problem)
    rates = {}
    for name in race.samples:
        own = race.own(name)
        if own:
            ms = interval(own)
            rates[name] = Rate(name, ms.map(lambda t: counted / t / 1e9), ms, len(own), _against(race, winner, name))
    return rates


def _against(race: Race, winner: str | None, name: str) -> Interval | None:
    ratio = None if winner is None or name == winner else race.ratio(name, winner)
    return None if ratio is None else ratio.map(lambda r: 1 / r)


def measurement(attention: Attention, case: Case) -> Measurement:
    message, work = case.raced, case.work
    assert message is not None
    race = _race(message)
    guests = {c.name for c in work.candidates if c.beside} | set(message["peers"])
    final = tuple(n for n in race.left if n not in case.failed and n not in guests)
    rates = _rates(attention, work, race, final[0] if final else None)
    counted = flops(attention, work.problem)
    for name, ms in case.stored.items():
        if name not in rates and name not in case.failed and name in {c.name for c in work.candidates}:
            known = Interval(ms, ms, ms, 0.0)  # of an earlier run, or of a process that died: a median and no more
            rates[name] = Rate(name, known.map(lambda t: counted / t / 1e9), known, 0)
    return Measurement(
        rates={n: r for n, r in rates.items() if n not in message["peers"]},
        peers={n: rates[n] for n in message["peers"] if n in rates},
        final=final,
        near=tuple(n for n in final[1:] if race.near(n, final[0])),
        stages=tuple(Stage(len(r["names"]), r["rounds"], len(r["dropped"]), tuple(r["within_noise"])) for r in message["rungs"]),
        stopped=message["stopped"],
        failed=case.failed,
        compiler=", ".join(case.compilers) or None,
        absent=tuple(f"{name}: {why}" for name, why in case.absent.items()),
    )
