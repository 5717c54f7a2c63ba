"""What tuning found, kept on disk: one JSON record for each (attention, schedule, problem bucket, GPU, compiler).

A record is written as soon as it is known and replaced as more is known, whole or not at all; a lock keeps two tuners apart. A tune that
was killed, or one with more candidates, goes on from there (`fagen tune --resume`): failures are not tried again, and what was timed
is timed again only if it comes near the best.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from ..attention import Attention
from ..errors import InputError
from ..plan.kernel import Problem
from ..schedule import Schedule
from .bench_result import Record
from .timing import Interval

SCHEMA = 1
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Key:
    """What a record is of. `compiler`: NVRTC's version."""

    attention_id: str
    schedule_id: str
    bucket: str
    gpu: str
    compiler: str

    @property
    def file(self) -> str:
        """Its file's name; plain letters, so that it can lie on any file system."""
        parts = (self.attention_id, self.schedule_id, self.bucket, self.gpu, self.compiler)
        return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", p).strip("-") for p in parts) + ".json"


@dataclass(frozen=True)
class Stored(Record):
    """One record. `stage`: "compile", "verify" or "measure" where the candidate failed, with the reason; "timed" where it did not. `bundle`: of a
    candidate that hung or crashed (`fagen repro`)."""

    schema: int
    fagen: str
    date: str
    attention: Attention
    schedule: Schedule
    problem: Problem
    bucket: str
    gpu: str
    driver: str
    compiler: str
    stage: str
    reason: str
    code_sha256: str
    """Of the kernel's source: a record of other code is not reused."""
    predicted_us: float | None
    ms: Interval | None
    rounds: int
    bundle: str | None = None

    @property
    def key(self) -> Key:
        return Key(self.attention.id, self.schedule.id, self.bucket, self.gpu, self.compiler)


class Store:
    """A directory of records. InputError naming it where it cannot be used."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.directory / ".lock", timeout=LOCK_SECONDS)
            with self._lock:
                pass
        except OSError as e:
            raise InputError("--store", f"{self.directory} cannot be used: {e.strerror or e}") from e

    def write(self, record: Stored) -> Path:
        """Replaces what is known under the record's key."""
        path = self.directory / record.key.file
        with self._lock:
            with tempfile.NamedTemporaryFile("w", dir=self.directory, prefix=".new-", delete=False, encoding="utf-8") as f:
                f.write(record.to_json() + "\n")
                f.flush()
                os.fsync(f.fileno())
            os.replace(f.name, path)
        return path

    def read(self, key: Key) -> Stored | None:
        """The record of that key; None where there is none, or one of another schema."""
        try:
            text = (self.directory / key.file).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return Stored.from_json(text) if json.loads(text).get("schema") == SCHEMA else None

    def __iter__(self) -> Iterator[Stored]:
        """All records of this schema."""
        for path in sorted(self.directory.glob("*.json")):
            text = path.read_text(encoding="utf-8")
            if json.loads(text).get("schema") == SCHEMA:
                yield Stored.from_json(text)
