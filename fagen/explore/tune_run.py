"""The work of tuning on this machine: compiling in watched processes, checking and timing on the GPU.

A candidate that takes its process with it (a compiler that crashes, a kernel that hangs or faults) costs that process: the candidate
is named with the reason, and a new process goes on with the rest.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .. import driver, guard
from ..attention import Attention
from ..check import CaseResult as CheckResult
from ..check import Item, check_gpu, first_device, jitter_problems
from ..check.device import driver_text
from ..compile import build, load_built, write_built
from ..emit import emit
from ..errors import FagenError, InputError, LaunchError
from ..oracle import CheckProblem, check_problems
from ..plan import plan
from ..schedule import Schedule
from .bench_result import BenchSpec, CaseResult, CaseSpec, KernelRef
from .bench_watch import run_watched
from .tune import Candidate, Gpu, Heard, Measurement, Prepared, Work

COMPILE_TASK = "fagen.explore.tune_run:compile_task"
COMPILE_SECONDS = 180.0
"""For a plan with its proof, and a compilation, while other processes do the same."""
MOST_AT_ONCE = 8
"""Candidates that one compiling process gets: starting one takes as long as a small compilation."""


def compile_task(request: Mapping[str, Any], channel: guard.Channel) -> None:
    """The worker's side. request: folder, attention, jobs (name, schedule). Sends "done_one" {name, reason} for each."""
    attention = Attention.from_dict(request["attention"])
    for job in request["jobs"]:
        channel.doing(f"{job['name']} is compiled", COMPILE_SECONDS)
        channel.send("done_one", name=job["name"], reason=_compile(attention, job, request["folder"]))


def _compile(attention: Attention, job: Mapping[str, Any], folder: str) -> str:
    """Why it did not compile, "" if it did."""
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
    """Implements `tune.Runner`. Built kernels are in `folder`; `jobs` compilations at a time."""

    def __init__(self, folder: str | Path, jobs: int, *, seed: int = 0, bundles: str | Path = "repro"):
        self._folder = Path(folder).resolve()
        self._jobs, self._seed, self._bundles = jobs, seed, bundles

    def device(self) -> Gpu:
        info = driver.device_info(first_device())
        return Gpu(info.name, info.num_sms, driver_text(info))

    # compiling ------------------------------------------------------------------------------------------------------------

    def compile(self, attention: Attention, candidates: Sequence[Candidate], heard: Heard) -> dict[str, str]:
        reasons: dict[str, str] = {}
        at_once = max(1, min(MOST_AT_ONCE, len(candidates) // (2 * self._jobs)))
        chunks = deque(list(candidates[i : i + at_once]) for i in range(0, len(candidates), at_once))
        turn = threading.Lock()

        def done(name: str, reason: str) -> None:
            with turn:
                reasons[name] = reason
                heard(name)

        def work() -> None:
            while chunks:
                try:
                    chunk = chunks.popleft()
                except IndexError:  # another thread was faster
                    return
                while chunk:
                    chunk = chunk[self._compile_some(attention, chunk, done) :]

        workers = min(self._jobs, len(chunks))
        with ThreadPoolExecutor(max(1, workers)) as pool:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()
        return reasons

    def _compile_some(self, attention: Attention, chunk: Sequence[Candidate], done: Any) -> int:
        """How many of the chunk one process dealt with, the one that it died of included."""
        jobs = [{"name": c.name, "schedule": c.schedule.to_dict()} for c in chunk]
        request = {"folder": str(self._folder), "attention": attention.to_dict(), "jobs": jobs}
        count = 0
        with guard.Watched(COMPILE_TASK, request) as worker:
            try:
                for message in worker.messages():
                    done(message["name"], message["reason"])
                    count += 1
            except guard.GuardError as e:
                done(chunk[count].name, str(e))
                count += 1
        return count

    # on the GPU -----------------------------------------------------------------------------------------------------------

    def verify(self, attention: Attention, candidates: Sequence[Candidate], heard: Heard) -> dict[str, str]:
        reasons: dict[str, str] = {}
        left = list(candidates)
        while left:
            items = [Item(c.name, attention, c.schedule, verify_problems(attention, c.schedule)) for c in left]
            seen: Counter[str] = Counter()

            def take(result: CheckResult, seen: Counter[str] = seen) -> None:
                seen[result.item] += 1
                if not result.verdict.passed:
                    reasons.setdefault(result.item, f"on {result.problem}, seed {result.seed}: {result.verdict.reason}")
                heard(result.item)

            builts = [load_built(self._folder, c.name) for c in left]
            try:
                check_gpu(items, builts, seed=self._seed, bundles=None, on_result=take)
                break
            except LaunchError as e:
                at = next((i for i, item in enumerate(items) if seen[item.name] < len(item.problems)), None)
                if at is None or not isinstance(e.__cause__ or e, guard.GuardError):
                    raise
                reasons[left[at].name] = str(e)
                left = left[at + 1 :]
        return {c.name: reasons.get(c.name, "") for c in candidates}

    def measure(
        self, attention: Attention, work: Sequence[Work], peers: Sequence[str], rounds: int, heard: Heard
    ) -> list[Measurement]:
        found: list[Measurement] = []
        dead: dict[str, tuple[int, str]] = {}  # candidate that ended a run → number of the problem, reason
        while len(found) < len(work):
            begin = len(found)
            at: tuple[int, str] = (begin, "")

            def on_function(case: int, name: str, begin: int = begin) -> None:
                nonlocal at
                at = (begin + case, name)
                heard(name)

            def on_case(case: CaseResult) -> None:
                found.append(_measurement(case, {n: why for n, (i, why) in dead.items() if i == len(found)}))

            spec = BenchSpec(
                cases=tuple(self._case(attention, w, dead) for w in work[begin:]),
                peers=tuple(peers),
                rounds=rounds,
                sustained=False,
                seed=self._seed,
            )
            try:
                run_watched(spec, on_case, on_function, self._bundles)
            except LaunchError as e:
                number, name = at
                if name in dead or name not in {c.name for w in work for c in w.candidates}:
                    raise
                dead[name] = (number, str(e))
        return found

    def _case(self, attention: Attention, work: Work, dead: Mapping[str, Any]) -> CaseSpec:
        refs = (KernelRef(c.name, str(self._folder), c.name) for c in work.candidates if c.name not in dead)
        return CaseSpec(attention, work.problem, tuple(refs))


def _measurement(case: CaseResult, dead: Mapping[str, str]) -> Measurement:
    ours = [row for row in case.rows if row.kind == "schedule"]
    compilers = sorted({row.compiler for row in ours if row.compiler})
    return Measurement(
        rates={row.function: row.burst.tflops for row in ours if row.burst},
        peers={row.function: row.burst.tflops for row in case.rows if row.kind == "peer" and row.burst},
        failed={row.function: f"{row.outcome}: {row.reason}" for row in ours if not row.burst} | dict(dead),
        compiler=", ".join(compilers) or None,
    )


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
