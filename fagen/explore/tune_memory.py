"""What earlier runs of a tune knew, as far as it still holds, and where what is found now goes: the store behind `tune.Memory`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..attention import Attention
from ..emit import emit
from ..errors import FagenError
from ..plan import Problem, plan
from ..tuned import Bucket
from .timing import Interval
from .tune_result import Candidate, Failure, Gpu, Rate
from .tune_store import SCHEMA, Key, Store, Stored


class Forgetful:
    """For a tune without a store: knows nothing, keeps nothing."""

    def failed(self, candidate: Candidate, problem: Problem) -> Failure | None:
        return None

    def verified(self, candidate: Candidate, problems: Sequence[Problem]) -> bool:
        return False

    def time_ms(self, candidate: Candidate, problem: Problem) -> Interval | None:
        return None

    def keep(self, candidate: Candidate, problem: Problem, stage: str, reason: str, rate: Rate | None, bundle: str | None) -> None:
        return


class StoreMemory:
    """Records of one attention on one GPU and compiler. A record counts if it is of the same problem, not only of the same bucket, and of the
    same generated code; without `resume` nothing counts, and records are written anew. `folder`: of the built kernels."""

    def __init__(self, store: Store, attention: Attention, gpu: Gpu, compiler: str, date: str, folder: str | Path, resume: bool):
        self._store, self._attention, self._gpu = store, attention, gpu
        self._compiler, self._date, self._folder, self._resume = compiler, date, Path(folder), resume
        self._codes: dict[str, str] = {}
        self._known: dict[tuple[str, Problem], Stored | None] = {}

    def failed(self, candidate: Candidate, problem: Problem) -> Failure | None:
        known = self._find(candidate, problem)
        if known is None or known.stage == "timed":
            return None
        at = str(problem) if known.stage == "measure" else None
        return Failure(candidate.name, candidate.schedule, known.stage, at, f"{known.reason} (stored, {known.date})", known.bundle)

    def verified(self, candidate: Candidate, problems: Sequence[Problem]) -> bool:
        """What was timed had been verified."""
        return any(r is not None and r.stage == "timed" for r in (self._find(candidate, p) for p in problems))

    def time_ms(self, candidate: Candidate, problem: Problem) -> Interval | None:
        known = self._find(candidate, problem)
        return None if known is None else known.ms

    def keep(self, candidate: Candidate, problem: Problem, stage: str, reason: str, rate: Rate | None, bundle: str | None) -> None:
        self._store.write(
            Stored(
                schema=SCHEMA,
                fagen=__version__,
                date=self._date,
                attention=self._attention,
                schedule=candidate.schedule,
                problem=problem,
                bucket=self._key(candidate, problem).bucket,
                gpu=self._gpu.name,
                driver=self._gpu.driver,
                compiler=self._compiler,
                stage=stage,
                reason=reason,
                code_sha256=self._code(candidate),
                predicted_us=candidate.predicted_us.get(str(problem)),
                ms=None if rate is None else rate.ms,
                rounds=0 if rate is None else rate.rounds,
                bundle=bundle,
            )
        )

    def _key(self, candidate: Candidate, problem: Problem) -> Key:
        bucket = str(Bucket.of(problem, self._gpu.sms))
        return Key(self._attention.id, candidate.schedule.id, bucket, self._gpu.name, self._compiler)

    def _find(self, candidate: Candidate, problem: Problem) -> Stored | None:
        """As it was when the run began."""
        if not self._resume:
            return None
        at = candidate.name, problem
        if at not in self._known:
            found = self._store.read(self._key(candidate, problem))
            holds = found is not None and found.problem == problem and found.code_sha256 == self._code(candidate)
            self._known[at] = found if holds else None
        return self._known[at]

    def _code(self, candidate: Candidate) -> str:
        """Hash of its source: as built, or as it would be; "" where it cannot even be planned."""
        if candidate.name not in self._codes:
            record = self._folder / f"{candidate.name}.json"
            if record.exists():
                self._codes[candidate.name] = json.loads(record.read_text())["code_sha256"]
            else:
                try:
                    self._codes[candidate.name] = emit(plan(self._attention, candidate.schedule), candidate.name).code_sha256
                except FagenError:
                    self._codes[candidate.name] = ""
        return self._codes[candidate.name]
