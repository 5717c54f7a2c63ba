"""A machine made up for tuning tests: candidates with faults, and times that a model with noise gives."""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fagen import Attention, Schedule, load
from fagen.explore import tune_measure
from fagen.explore.bench import flops
from fagen.explore.bench_result import BenchSpec
from fagen.explore.timing import Sample
from fagen.explore.tune_lane import Case, measurement
from fagen.explore.tune_result import Broken, Candidate, Gpu, Measurement, Work
from fagen.guard import Channel
from fagen.plan.kernel import Problem

FULL = Attention(head_dim=128)
FA3 = load("fa3").schedule
SHORT, LONG = Problem(32, 512, 512, 16, 16), Problem(4, 4096, 4096, 16, 16)
DRIFT = 0.05
"""How far the clock wanders during a race, for all functions alike."""


class FakeTask:
    """A function that takes `ms`."""

    def __init__(self, name: str, ms: float):
        self.name, self.ms, self.launches = name, ms, 1

    def once(self) -> None: ...

    def replay(self) -> None: ...


class NoisyClock:
    """Measures a FakeTask with noise of its own, and a drift that all share. `before` hears each name first."""

    def __init__(self, noise: float, seed: int, before: Callable[[str], None] = lambda _: None):
        self._noise, self._rng, self._before = noise, random.Random(seed), before
        self._at = 0

    def rest(self, seconds: float) -> None: ...

    def measure(self, task: Any, *, warm_replays: int, replays: int) -> Sample:
        self._before(task.name)
        self._at += 1
        drift = 1 + DRIFT * (self._at % 400) / 400
        return Sample(task.ms * drift * (1 + self._rng.gauss(0, self._noise)))


class Messages:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})


@dataclass
class FakeRunner:
    """A machine on which each candidate does what its fault says (by its tile_kv), at a speed that its schedule tells: TFLOP/s."""

    faults: Mapping[int, str] = field(default_factory=dict)
    speed: Callable[[Schedule, Problem], float] = lambda s, p: 400.0 + s.tile_kv
    guess: Callable[[Schedule, Problem], float] | None = None
    """The model's; None: right."""
    name: str = "NVIDIA H200"
    noise: float = 0.001
    raced: list[tuple[Problem, tuple[int, ...], tuple[str, ...]]] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    rungs: list[list[str]] = field(default_factory=list)
    """Who was measured, rung by rung."""

    def fault(self, candidate: Candidate) -> str:
        return self.faults.get(candidate.schedule.tile_kv, "")

    def device(self) -> Gpu:
        return Gpu(self.name, 132, "580.1, CUDA 13.0")

    def predict(self, attention: Attention, schedules: Sequence[Schedule], problems: Sequence[Problem], heard: Any) -> list[Any]:
        guess = self.guess or self.speed
        return [[flops(attention, p) / guess(s, p) / 1e6 for p in problems] for s in schedules]

    def compile(self, attention: Attention, candidates: Sequence[Candidate], heard: Any, expired: Any) -> dict[str, Broken | None]:
        reasons = {
            "does not compile": "error: expected a ';'",
            "spills": "spills 24 bytes",
            "crashes the compiler": "signal SIGSEGV",
        }
        self.compiled += [c.name for c in candidates]
        return {c.name: _broken(reasons.get(self.fault(c))) for c in candidates}

    def verify(self, attention: Attention, candidates: Sequence[Candidate], heard: Any) -> dict[str, Broken | None]:
        self.verified += [c.schedule.tile_kv for c in candidates]
        reasons = {
            "writes half the rows": "64 of 128 elements of out are NaN",
            "does nothing": "128 of 128 elements of out are NaN",
            "asks for too much shared memory": "cuFuncSetAttribute failed: CUDA_ERROR_INVALID_VALUE",
            "traps": "the worker's process ended",
        }
        return {c.name: _broken(reasons.get(self.fault(c)), "repro/x" if self.fault(c) == "traps" else None) for c in candidates}

    def race(
        self,
        attention: Attention,
        work: Sequence[Work],
        peers: Sequence[str],
        rounds: int,
        heard: Any,
        progressed: Any,
        deadline: float | None,
    ) -> list[Measurement]:
        found = []
        for number, w in enumerate(work):
            self.raced.append((w.problem, tuple(c.schedule.tile_kv for c in w.candidates), tuple(peers)))
            case = Case(w, stored=dict(w.stored), compilers=("NVRTC 13",))
            case.failed = {
                c.name: Broken("wrong: error 3 > 1")
                for c in w.candidates
                if self.fault(c) == "wrong when long" and w.problem.sk > 1000
            }
            good = [c for c in w.candidates if c.name not in case.failed]
            counted = flops(attention, w.problem)
            tasks = {c.name: FakeTask(c.name, counted / self.speed(c.schedule, w.problem) / 1e9) for c in good}
            tasks |= {n: FakeTask(n, counted / 390.0 / 1e9) for n in peers}
            channel = Messages()
            clock = NoisyClock(self.noise, number)
            names, guests = [c.name for c in good if not c.beside], [c.name for c in good if c.beside] + list(peers)
            tune_measure.run_case(number, names, guests, tasks, clock, rounds, w.stored, deadline, channel, set(peers))  # type: ignore[arg-type]
            case.raced = channel.sent[-1]
            self.rungs += [r["names"] for r in case.raced["rungs"]]
            found.append(measurement(attention, case))
            progressed(w.problem, found[-1].rates)
        return found


def _broken(reason: str | None, bundle: str | None = None) -> Broken | None:
    return None if reason is None else Broken(reason, bundle)


# a measuring process (the worker's side), for `tune_lane` ------------------------------------------------------------------


def measuring(request: Mapping[str, Any], channel: Channel) -> None:
    """As `tune_measure.work`, on made-up kernels: the file's name says what each does. NAME.MS[.FAULT], faults: wrong, crash, hang, fault; a
    fault happens once the kernel is timed. Every process appends the problems it was given to processes.log beside the kernels."""
    spec = BenchSpec.from_dict(request["spec"])
    folder = next(k.directory for case in spec.cases for k in case.kernels)
    with open(os.path.join(folder, "processes.log"), "a") as log:
        print(f"{request['gpu']} {' '.join(str(c.problem) for c in spec.cases)}", file=log)
    for number, case in enumerate(spec.cases):
        tasks, faults = {}, {}
        for ref in case.kernels:
            _, ms, fault = (ref.label + "-").split("-")[:3]
            faults[ref.label] = fault
            if fault == "wrong":
                channel.send("failed", case=number, function=ref.label, reason="wrong: error 3 > 1")
            else:
                tasks[ref.label] = FakeTask(ref.label, float(ms))

        def before(name: str, number: int = number, faults: dict[str, str] = faults) -> None:
            channel.send("at", case=number, function=name)
            channel.doing(f"{name} is timed", 1.0)
            if faults[name] == "crash":
                os.abort()
            if faults[name] == "hang":
                time.sleep(60)
            if faults[name] == "fault":
                from fagen import LaunchError

                raise LaunchError(f"{name} ended the GPU context: misaligned address")

        channel.send("about", compilers=["NVRTC 13"])
        for peer in spec.peers:
            channel.send("failed", case=number, function=peer, reason="absent: not installed")
        clock = NoisyClock(0.002, zlib.crc32(str(case.problem).encode()), before)
        beside = set(request["beside"])
        names = [n for n in tasks if n not in beside]
        tune_measure.run_case(
            number, names, [n for n in tasks if n in beside], tasks, clock, spec.rounds, request["stored"][number], request["deadline"], channel, set()
        )  # fmt: skip
