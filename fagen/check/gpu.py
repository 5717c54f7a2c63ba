"""Checking on the GPU: a watched subprocess runs the kernels, other processes compute the reference meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import driver, guard
from ..compile import Built, write_built
from ..errors import LaunchError
from ..oracle import Verdict
from .items import CaseResult, Item, with_reason
from .judge import judge_outputs, pool, room_for

TASK = "fagen.check.device:run"
LAUNCH_SECONDS = 20.0
"""A checked launch takes milliseconds; the first one also loads the kernel."""


@dataclass(frozen=True)
class GpuRun:
    """Results in the items' order, and where they come from. `bundles`: item → repro bundle of its first failing case."""

    results: tuple[CaseResult, ...]
    gpu: str
    driver: str
    bundles: dict[str, Path]


def first_device() -> int:
    """Ordinal of the device to use; a LaunchError ("no GPU: …") where there is none."""
    driver.device_count()
    return 0


def reason_no_gpu() -> str:
    """Why there is no GPU to run on, "" if there is one."""
    try:
        first_device()
    except LaunchError as e:
        return str(e)
    return ""


def check_gpu(
    items: Sequence[Item],
    builts: Sequence[Built],
    *,
    seed: int = 0,
    repeat: int = 1,
    jitter: bool = False,
    timeout: float = LAUNCH_SECONDS,
    bundles: str | Path | None = "repro",
    on_result: Callable[[CaseResult], None] = lambda _: None,
) -> GpuRun:
    """Run every problem of every item on its built kernel and judge it, problem i with the inputs of `seed` + i.

    `repeat`: launches of a case that must give the same bits; with `jitter` (debug builds) each under another seed of its delays.
    A wrong result is a failed case; a kernel that hangs for `timeout` seconds or faults ends the run with a LaunchError. Either leaves
    a repro bundle under `bundles` (None: none). Needs no NVRTC.
    """
    device = first_device()
    with tempfile.TemporaryDirectory(prefix="fagen-check-") as scratch:
        folder = Path(scratch)
        request = {
            "device": device,
            "timeout": timeout,
            "output": scratch,
            "items": [_order(folder, item, built, seed, repeat, jitter) for item, built in zip(items, builts)],
        }
        with (
            pool(sum(len(i.problems) for i in items), room_for(items, at_once=2)) as judges,
            guard.Watched(TASK, request) as worker,
        ):
            run = _Run(items, seed, repeat, on_result)
            try:
                for message in worker.messages():
                    run.take(message, judges.submit)
            except guard.GuardError as failure:
                with contextlib.suppress(BrokenExecutor):  # the hang is what counts
                    run.finish()
                raise _explained(failure, run, items, builts, seed, repeat, jitter, bundles) from failure
            run.finish()
    written = {}
    for item, built in zip(items, builts) if bundles is not None else ():
        failed = next((r for r in run.ordered() if r.item == item.name and not r.verdict.passed), None)
        if failed is not None:
            facts = case_facts(failed.problem, failed.seed, repeat, jitter, run.about, failed.verdict.reason)
            written[item.name] = guard.write_bundle(built, facts, root=bundles or "")
    return GpuRun(run.ordered(), run.about.get("name", ""), run.about.get("driver", ""), written)


def case_facts(problem: Any, seed: int, repeat: int, jitter: bool, about: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """What a bundle says of the case."""
    case = {"problem": dataclasses.asdict(problem), "seed": seed, "repeat": repeat, "jitter": jitter}
    return {"case": case, "gpu": about.get("name", ""), "driver": about.get("driver", ""), "reason": reason}


def _order(folder: Path, item: Item, built: Built, seed: int, repeat: int, jitter: bool) -> dict[str, Any]:
    """An item as the worker takes it, its kernel written to `folder`."""
    name = built.source.name
    write_built(built, folder, name)
    cases = [{"problem": dataclasses.asdict(p), "seed": seed + i} for i, p in enumerate(item.problems)]
    return {"folder": str(folder), "name": name, "runs": repeat, "jitter": jitter, "cases": cases}


class _Run:
    """Collects what the worker and the judges say."""

    def __init__(self, items: Sequence[Item], seed: int, repeat: int, on_result: Callable[[CaseResult], None]):
        self.about: dict[str, Any] = {}
        self.last: tuple[int, int] | None = None
        """(item, case) that the worker finished last."""
        self._items, self._seed, self._repeat, self._on_result = items, seed, repeat, on_result
        self._waiting: dict[Future[Verdict], tuple[int, int, str]] = {}
        self._found: dict[tuple[int, int], CaseResult] = {}

    def take(self, message: Mapping[str, Any], submit: Callable[..., Future[Verdict]]) -> None:
        if message["kind"] == "gpu":
            self.about = dict(message)
        elif message["kind"] == "case":
            n, i = message["item"], message["case"]
            item = self._items[n]
            future = submit(judge_outputs, item.attention, item.schedule, item.problems[i], self._seed + i, Path(message["file"]))
            self._waiting[future] = (n, i, message["reason"])
            self.last = (n, i)
        self._collect({f for f in self._waiting if f.done()})

    def finish(self) -> None:
        """Wait for the judges."""
        while self._waiting:
            self._collect(wait(self._waiting, return_when=FIRST_COMPLETED).done)

    def ordered(self) -> tuple[CaseResult, ...]:
        return tuple(self._found[key] for key in sorted(self._found))

    def next_case(self) -> tuple[int, int]:
        """(item, case) that the worker was at."""
        if self.last is None:
            return 0, 0
        n, i = self.last
        return (n, i + 1) if i + 1 < len(self._items[n].problems) else (min(n + 1, len(self._items) - 1), 0)

    def _collect(self, done: set[Future[Verdict]]) -> None:
        for future in done:
            n, i, reason = self._waiting.pop(future)
            item = self._items[n]
            verdict = with_reason(future.result(), reason)
            result = CaseResult(item.name, item.problems[i], item.attention.mask, self._seed + i, verdict, self._repeat)
            self._found[n, i] = result
            self._on_result(result)


def _explained(
    failure: guard.GuardError,
    run: _Run,
    items: Sequence[Item],
    builts: Sequence[Built],
    seed: int,
    repeat: int,
    jitter: bool,
    bundles: str | Path | None,
) -> LaunchError:
    """The failure as the user reads it."""
    n, i = run.next_case()
    if not items[n].problems:
        return failure
    facts = case_facts(items[n].problems[i], seed + i, repeat, jitter, run.about, failure.detail)
    return guard.explained(failure, builts[n], facts, bundles)
