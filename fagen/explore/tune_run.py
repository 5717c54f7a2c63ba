"""The work of tuning on this machine: predicting and compiling in watched processes, checking and racing on the GPUs.

A candidate that takes its process with it (a compiler that crashes, a kernel that hangs or faults) costs that process: the candidate
is named with the reason, leaves a bundle for `fagen repro`, and a new process goes on with the rest.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .. import driver, guard, nvrtc
from ..attention import Attention
from ..check import CaseResult as CheckResult
from ..check import Item, check_gpu, first_device, jitter_problems
from ..check.device import driver_text
from ..compile import build, load_built, write_built
from ..emit import emit
from ..errors import FagenError, InputError, LaunchError
from ..oracle import CheckProblem, check_problems
from ..plan import Problem, assemble, plan
from ..schedule import Schedule
from .model import predict_time
from .tune_lane import race_on
from .tune_result import Broken, Candidate, Expired, Gpu, Heard, Measurement, Prepared, Progressed, Work

COMPILE_TASK = "fagen.explore.tune_run:compile_task"
PREDICT_TASK = "fagen.explore.tune_run:predict_task"
COMPILE_SECONDS = 180.0
"""For a plan with its proof, and a compilation, while other processes do the same."""
PREDICT_SECONDS = 60.0
MOST_AT_ONCE = 8
"""Candidates that one compiling process gets: starting one takes as long as a small compilation."""
PREDICTIONS_AT_ONCE = 64


# the workers' side ----------------------------------------------------------------------------------------------------------


def compile_task(request: Mapping[str, Any], channel: guard.Channel) -> None:
    """request: folder, attention, jobs (name, schedule). Sends "done_one" {name, answer} for each; answer: why not, "" if it compiled."""
    attention = Attention.from_dict(request["attention"])
    for job in request["jobs"]:
        channel.doing(f"{job['name']} is compiled", COMPILE_SECONDS)
        channel.send("done_one", name=job["name"], answer=_compile(attention, job, request["folder"]))


def _compile(attention: Attention, job: Mapping[str, Any], folder: str) -> str:
    try:
        planned = plan(attention, Schedule.from_dict(job["schedule"]))
        write_built(build(planned, emit(planned, job["name"])), folder, job["name"])
    except InputError:
        raise  # the folder cannot be written: no candidate's fault
    except FagenError as e:
        return str(e)
    except Exception as e:  # a fault of ours must not end the run of the others; it stands in the result
        return f"a fault of fagen: {type(e).__name__}: {e}"
    return ""


def predict_task(request: Mapping[str, Any], channel: guard.Channel) -> None:
    """request: attention, problems, jobs (name, schedule). Sends "done_one" {name, answer}: a list of µs, or why there is none."""
    attention = Attention.from_dict(request["attention"])
    problems = [Problem(**p) for p in request["problems"]]
    for job in request["jobs"]:
        channel.doing(f"{job['name']} is predicted", PREDICT_SECONDS)
        channel.send("done_one", name=job["name"], answer=_predict(attention, job, problems))


def _predict(attention: Attention, job: Mapping[str, Any], problems: Sequence[Problem]) -> list[float] | str:
    try:
        planned = assemble(attention, Schedule.from_dict(job["schedule"]))
        return [predict_time(planned, p).time_us for p in problems]
    except FagenError as e:
        return str(e)
    except Exception as e:
        return f"a fault of fagen: {type(e).__name__}: {e}"


# the parent's side ----------------------------------------------------------------------------------------------------------


def verify_problems(attention: Attention, schedule: Schedule) -> tuple[CheckProblem, ...]:
    """Of the grid of `fagen check` about a dozen: rings that wrap, ragged edges, a lone tile, several tiles a CTA, grouped heads, no keys,
    more queries than keys, and scores that grow along the keys or have an attention sink, which the exact path of a stale maximum is for."""
    grid = check_problems(attention, schedule)
    unkind = [p for kind in dict.fromkeys(p.inputs for p in grid) if kind != "normal" for p in grid if p.inputs == kind]
    few: Counter[str] = Counter()
    chosen = list(jitter_problems(attention, schedule))
    for p in unkind:
        few[p.inputs] += 1
        chosen += [p] * (few[p.inputs] <= 2)
    chosen += [p for p in grid if p.sk == 0 and p.sq > 1][:1]
    chosen += [p for p in grid if p.sq > 2 * p.sk > 0][-1:]
    return tuple(dict.fromkeys(chosen))


class Workshop:
    """Implements `tune_result.Runner`. Built kernels are in `folder`; `jobs` processes at a time on the CPU, one for each GPU."""

    def __init__(self, folder: str | Path, jobs: int, *, seed: int = 0, bundles: str | Path = "repro"):
        self._folder = Path(folder).resolve()
        self._jobs, self._seed, self._bundles = jobs, seed, bundles

    def device(self) -> Gpu:
        info = driver.device_info(first_device())
        return Gpu(info.name, info.num_sms, driver_text(info))

    # on the CPU -----------------------------------------------------------------------------------------------------------

    def predict(
        self, attention: Attention, schedules: Sequence[Schedule], problems: Sequence[Problem], heard: Heard
    ) -> list[list[float] | str]:
        jobs = [{"name": str(i), "schedule": s.to_dict()} for i, s in enumerate(schedules)]
        request = {"attention": attention.to_dict(), "problems": [vars(p) for p in problems]}
        answers, died = self._spread(PREDICT_TASK, request, jobs, PREDICTIONS_AT_ONCE, heard)
        return [answers[n] if n in answers else died[n].reason for n in (str(i) for i in range(len(jobs)))]

    def compile(
        self, attention: Attention, candidates: Sequence[Candidate], heard: Heard, expired: Expired
    ) -> dict[str, Broken | None]:
        jobs = [{"name": c.name, "schedule": c.schedule.to_dict()} for c in candidates]
        request = {"folder": str(self._folder), "attention": attention.to_dict()}
        answers, died = self._spread(COMPILE_TASK, request, jobs, MOST_AT_ONCE, heard, expired)
        return {**{n: Broken(why) if why else None for n, why in answers.items()}, **died}

    def _spread(
        self,
        task: str,
        request: Mapping[str, Any],
        jobs: Sequence[Mapping[str, Any]],
        most: int,
        heard: Heard,
        expired: Expired = lambda: False,
    ) -> tuple[dict[str, Any], dict[str, Broken]]:
        """The jobs over processes, in order: (name → answer, name → why its process ended over it). Those not begun when `expired` are in neither."""
        answers: dict[str, Any] = {}
        died: dict[str, Broken] = {}
        at_once = max(1, min(most, len(jobs) // (2 * self._jobs)))
        chunks = deque(list(jobs[i : i + at_once]) for i in range(0, len(jobs), at_once))
        turn = threading.Lock()

        def done(name: str, into: dict[str, Any], what: Any) -> None:
            with turn:
                into[name] = what
                heard(name)

        def work() -> None:
            while chunks and not expired():
                try:
                    chunk = chunks.popleft()
                except IndexError:  # another thread was faster
                    return
                while chunk:
                    chunk = chunk[some(chunk) :]

        def some(chunk: Sequence[Mapping[str, Any]]) -> int:
            """How many of the chunk one process dealt with, the one that it died of included."""
            count = 0
            with guard.Watched(task, {**request, "jobs": list(chunk)}) as worker:
                try:
                    for message in worker.messages():
                        done(message["name"], answers, message["answer"])
                        count += 1
                except guard.GuardError as e:
                    done(chunk[count]["name"], died, Broken(str(e)))
                    count += 1
            return count

        workers = min(self._jobs, len(chunks))
        with ThreadPoolExecutor(max(1, workers)) as pool:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()
        return answers, died

    # on the GPU -----------------------------------------------------------------------------------------------------------

    def verify(self, attention: Attention, candidates: Sequence[Candidate], heard: Heard) -> dict[str, Broken | None]:
        reasons: dict[str, Broken | None] = {c.name: None for c in candidates}
        left = list(candidates)
        while left:
            items = [Item(c.name, attention, c.schedule, verify_problems(attention, c.schedule)) for c in left]
            seen: Counter[str] = Counter()

            def take(result: CheckResult, seen: Counter[str] = seen) -> None:
                seen[result.item] += 1
                if not result.verdict.passed and reasons[result.item] is None:
                    reasons[result.item] = Broken(f"on {result.problem}, seed {result.seed}: {result.verdict.reason}")
                heard(result.item)

            builts = [load_built(self._folder, c.name) for c in left]
            try:
                run = check_gpu(items, builts, seed=self._seed, bundles=self._bundles, on_result=take)
                for name, folder in run.bundles.items():
                    broken = reasons[name]
                    reasons[name] = Broken(broken.reason if broken else "wrong", str(folder))
                break
            except LaunchError as e:
                at = next((i for i, item in enumerate(items) if seen[item.name] < len(item.problems)), None)
                failure = e.__cause__ or e
                if at is None or not isinstance(failure, guard.GuardError):
                    raise
                reasons[left[at].name] = Broken(str(e).splitlines()[0], failure.bundle)
                left = left[at + 1 :]
        return reasons

    def race(
        self,
        attention: Attention,
        work: Sequence[Work],
        peers: Sequence[str],
        rounds: int,
        heard: Heard,
        progressed: Progressed,
        deadline: float | None,
    ) -> list[Measurement]:
        """The problems are dealt out to the GPUs, one process on each."""
        gpus = visible_gpus(driver.device_count())[: len(work)]
        turn = threading.Lock()

        def locked(problem: Problem, rates: Any) -> None:
            with turn:
                progressed(problem, rates)

        def lane(number: int) -> list[Measurement]:
            mine = work[number :: len(gpus)]
            gpu = gpus[number] if len(gpus) > 1 else None
            return race_on(
                attention,
                mine,
                peers,
                rounds,
                heard,
                locked,
                deadline,
                folder=self._folder,
                seed=self._seed,
                bundles=self._bundles,
                gpu=gpu,
            )

        with ThreadPoolExecutor(len(gpus)) as pool:
            found = list(pool.map(lane, range(len(gpus))))
        return [found[i % len(gpus)][i // len(gpus)] for i in range(len(work))]


def visible_gpus(count: int) -> list[str]:
    """How CUDA_VISIBLE_DEVICES names each of the `count` devices that this process sees."""
    named = [n for n in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if n]
    return named[:count] if named else [str(i) for i in range(count)]


# prepared elsewhere -------------------------------------------------------------------------------------------------------


def manifest(folder: str | Path, name: str) -> Path:
    """The file that says which candidates were compiled into a folder."""
    return Path(folder) / f"{name}.tune.json"


def read_prepared(folder: str | Path, name: str) -> Prepared:
    """What `fagen tune --build-only` left. InputError naming the file if it is missing or of another kind."""
    path = manifest(folder, name)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(str(path), f"cannot be read ({e.strerror or e}); fagen tune --build-only writes it") from e
    return Prepared.from_json(text)


def compiler_of(folder: Path | None) -> str:
    """The compiler of the kernels built in a folder; without one, the NVRTC that is here."""
    if folder is None:
        return nvrtc.compiler()
    records = sorted(p for p in folder.glob("*.json") if not p.name.endswith(".tune.json"))
    return load_built(folder, records[0].name.removesuffix(".json")).report.compiler if records else "unknown"
