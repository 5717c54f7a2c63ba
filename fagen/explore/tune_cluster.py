"""Tuning on several machines through dask.distributed: each worker process is one GPU (start it with CUDA_VISIBLE_DEVICES), the scheduler's
client is here. Kernels travel as bytes, so the machines share no file system.

What a worker does to a candidate it does in a `Workshop` of its own, in watched processes: a kernel that hangs costs that process, not the
dask worker; its repro bundle comes back.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..attention import Attention
from ..errors import FagenError, InputError, LaunchError
from ..plan import Problem
from ..schedule import Schedule
from .tune_result import Broken, Candidate, Expired, Gpu, Heard, Measurement, Progressed, Rate, Work

WORKSHOP = "fagen.explore.tune_run:Workshop"
CHUNK = 4
"""Candidates of one compilation task; predictions: sixteen times as many."""
CONNECT_SECONDS = 15

Files = dict[str, bytes]
"""Path below a folder → content."""


def connect(address: str) -> Any:
    """A client of the scheduler at `address` (host:port). InputError without dask.distributed, LaunchError where nobody answers."""
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as e:
        raise InputError("--cluster", f"needs dask.distributed ({e}); pip install 'fagen[cluster]'") from e
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as e:
        raise LaunchError(f"no cluster: {address} does not answer ({type(e).__name__}: {e})") from e
    if not client.scheduler_info()["workers"]:
        client.close()
        raise LaunchError(f"no cluster: the scheduler at {address} has no workers")
    return client


class Cluster:
    """Implements `tune_result.Runner` over a dask client. Built kernels also lie in `folder`, here; bundles come under `bundles`."""

    def __init__(self, client: Any, folder: str | Path, *, seed: int = 0, bundles: str | Path = "repro", workshop: str = WORKSHOP):
        self._client, self._folder, self._seed = client, Path(folder).resolve(), seed
        self._bundles, self._workshop = Path(bundles), workshop

    @property
    def workers(self) -> int:
        return len(self._client.scheduler_info()["workers"])

    def device(self) -> Gpu:
        found: Gpu = self._client.submit(_device, self._workshop, pure=False).result()
        return found

    def predict(
        self, attention: Attention, schedules: Sequence[Schedule], problems: Sequence[Problem], heard: Heard
    ) -> list[Sequence[float] | str]:
        chunks = _chunks(schedules, 16 * CHUNK)
        answers: list[list[Sequence[float] | str]] = [[] for _ in chunks]

        def take(i: int, found: list[Sequence[float] | str]) -> None:
            answers[i] = found
            for s in chunks[i]:
                heard(s.id)

        self._spread(_predict, [(attention, c, tuple(problems), self._workshop) for c in chunks], take)
        return [x for found in answers for x in found]

    def compile(
        self, attention: Attention, candidates: Sequence[Candidate], heard: Heard, expired: Expired
    ) -> dict[str, Broken | None]:
        chunks = _chunks(candidates, CHUNK)
        reasons: dict[str, Broken | None] = {}

        def take(i: int, found: tuple[dict[str, Broken | None], Files]) -> None:
            reasons.update(found[0])
            _unpack(found[1], self._folder)
            for c in chunks[i]:
                heard(c.name)

        self._spread(_compile, [(attention, c, self._workshop) for c in chunks], take, expired)
        return reasons

    def verify(self, attention: Attention, candidates: Sequence[Candidate], heard: Heard) -> dict[str, Broken | None]:
        each = -(-len(candidates) // max(self.workers, 1))
        chunks = _chunks(candidates, max(each, 1))
        reasons: dict[str, Broken | None] = {}

        def take(i: int, found: tuple[dict[str, Broken | None], Files]) -> None:
            reasons.update(self._returned(*found))
            for c in chunks[i]:
                heard(c.name)

        jobs = [(attention, c, _pack(self._folder, c), self._seed, self._workshop) for c in chunks]
        self._spread(_verify, jobs, take)
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
        """A problem is one task: all that are compared are timed on one GPU."""
        found: list[Measurement | None] = [None] * len(work)

        def take(i: int, answer: tuple[Measurement, list[Mapping[str, Rate]], Files]) -> None:
            measurement, rungs, files = answer
            for rates in rungs:
                progressed(work[i].problem, rates)
            failed = {n: b for n, b in self._returned(dict(measurement.failed), files).items() if b is not None}
            found[i] = Measurement(**{**vars(measurement), "failed": failed})
            heard(str(work[i].problem))

        jobs = [
            (attention, w, tuple(peers), rounds, deadline, _pack(self._folder, w.candidates), self._seed, self._workshop)
            for w in work
        ]
        self._spread(_race, jobs, take)
        return [m for m in found if m is not None]

    def _spread(
        self,
        task: Callable[..., Any],
        jobs: Sequence[tuple[Any, ...]],
        take: Callable[[int, Any], None],
        expired: Expired = lambda: False,
    ) -> None:
        """The jobs over the workers; `take` hears each answer as it comes. Those not begun when `expired` are cancelled."""
        distributed = importlib.import_module("distributed")
        futures = {self._client.submit(task, *job, pure=False, retries=0): i for i, job in enumerate(jobs)}
        for future in distributed.as_completed(list(futures)):
            if future.cancelled():
                continue
            try:
                answer = future.result()
            except FagenError:
                self._client.cancel(list(futures))
                raise
            except Exception as e:  # the dask worker itself is gone, or a fault of ours there
                self._client.cancel(list(futures))
                raise LaunchError(f"a worker of the cluster failed: {type(e).__name__}: {e}") from e
            take(futures[future], answer)
            if expired():
                self._client.cancel([f for f in futures if not f.done()])

    def _returned(self, reasons: Mapping[str, Broken | None], files: Files) -> dict[str, Broken | None]:
        """The bundles that came back, as paths here."""
        _unpack(files, self._bundles)
        return {
            n: b if b is None or b.bundle is None else Broken(b.reason, str(self._bundles / b.bundle)) for n, b in reasons.items()
        }


# on the workers -------------------------------------------------------------------------------------------------------------


def _made(workshop: str, folder: str, seed: int = 0) -> Any:
    module, _, name = workshop.partition(":")
    return getattr(importlib.import_module(module), name)(folder, 1, seed=seed, bundles=Path(folder) / "bundles")


def _device(workshop: str) -> Gpu:
    with tempfile.TemporaryDirectory(prefix="fagen-tune-") as folder:
        found: Gpu = _made(workshop, folder).device()
    return found


def _predict(
    attention: Attention, schedules: Sequence[Schedule], problems: Sequence[Problem], workshop: str
) -> list[Sequence[float] | str]:
    with tempfile.TemporaryDirectory(prefix="fagen-tune-") as folder:
        return list(_made(workshop, folder).predict(attention, schedules, problems, lambda _: None))


def _compile(attention: Attention, candidates: Sequence[Candidate], workshop: str) -> tuple[dict[str, Broken | None], Files]:
    with tempfile.TemporaryDirectory(prefix="fagen-tune-") as folder:
        reasons = _made(workshop, folder).compile(attention, candidates, lambda _: None, lambda: False)
        return dict(reasons), _pack(Path(folder), [c for c in candidates if reasons[c.name] is None])


def _verify(
    attention: Attention, candidates: Sequence[Candidate], files: Files, seed: int, workshop: str
) -> tuple[dict[str, Broken | None], Files]:
    with tempfile.TemporaryDirectory(prefix="fagen-tune-") as folder:
        _unpack(files, Path(folder))
        reasons = _made(workshop, folder, seed).verify(attention, candidates, lambda _: None)
        return _with_bundles(dict(reasons), Path(folder))


def _race(
    attention: Attention,
    work: Work,
    peers: Sequence[str],
    rounds: int,
    deadline: float | None,
    files: Files,
    seed: int,
    workshop: str,
) -> tuple[Measurement, list[Mapping[str, Rate]], Files]:
    rungs: list[Mapping[str, Rate]] = []
    with tempfile.TemporaryDirectory(prefix="fagen-tune-") as folder:
        _unpack(files, Path(folder))
        made = _made(workshop, folder, seed)
        (found,) = made.race(attention, [work], peers, rounds, lambda _: None, lambda _, rates: rungs.append(rates), deadline)
        failed, bundles = _with_bundles(dict(found.failed), Path(folder))
        return Measurement(**{**vars(found), "failed": failed}), rungs, bundles


def _with_bundles(reasons: Mapping[str, Broken | None], folder: Path) -> tuple[dict[str, Any], Files]:
    """Bundles as names below the folder of bundles, and their files."""
    told: dict[str, Any] = {}
    files: Files = {}
    for name, broken in reasons.items():
        told[name] = broken
        if broken is not None and broken.bundle is not None:
            bundle = Path(broken.bundle)
            told[name] = Broken(broken.reason, bundle.name)
            files |= {f"{bundle.name}/{f.name}": f.read_bytes() for f in bundle.iterdir()}
    return told, files


def _pack(folder: Path, candidates: Sequence[Candidate]) -> Files:
    paths = [folder / f"{c.name}{end}" for c in candidates for end in (".cu", ".cubin", ".json")]
    return {p.name: p.read_bytes() for p in paths if p.exists()}


def _unpack(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
