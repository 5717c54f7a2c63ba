"""The tuned table: which schedule is fastest for which problem, as measured. `choose` picks from it.

The table is data, `schedules/tuned/*.json`, one file for a family of devices. An entry's key is the architecture and family (of its
file), dtype ("int8_qk": int8 beside a 16-bit v), head_dim, mask, and the *bucket* of the problem it was measured on:

  length   seqlen_k, rounded in ratio to a power of two, at least 128
  tiles    "few" if there are fewer tiles of 128 query rows (batch · heads · ⌈seqlen_q / 128⌉) than SMs, else "many"

A problem takes the entry of its own bucket. Where there is none, the *nearest* one: of its head_dim always, and then, in this order,
of the same device family, dtype (bf16 and fp16 stand in for each other, and so do e4m3 and int8), mask and tiles, and of the closest length in
ratio, the longer of two equally close ones. An entry is checked again whenever it is chosen: one that is not legal for the
attention, or whose schedule is no longer the one that was measured, is passed over. What has no entry gets the built-in schedule.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

from .attention import EIGHT_BIT_TYPES, Attention
from .errors import FagenError, InputError, LaunchError, ScheduleError
from .library import load, resource_dir
from .plan.kernel import Problem
from .plan.memory import BARRIER_BYTES, tile_bytes
from .plan.precision import quantised
from .plan.rules import check
from .schedule import Schedule

SCHEMA = 1
SHORTEST = 128
"""Lengths below it count as this one: a block of keys is about as long."""
TILE_ROWS = 128
HALF_TYPES = ("bf16", "fp16")
BUILTIN = {"bf16": "fa3", "fp16": "fa3", "e4m3": "fa3_fp8", "int8": "fa3_fp8", "int8_qk": "fa3_fp8"}
"""What an attention of those `products` falls back to on Hopper."""


def types_of(products: str) -> dict[str, Any]:
    """Types of an attention with those `products`; beside int8, a 16-bit v is bf16 here."""
    return {"dtype": "int8", "v_dtype": "bf16"} if products == "int8_qk" else {"dtype": products}


class Device(Protocol):
    """What a choice needs to know of a GPU; `driver.DeviceInfo` is one."""

    @property
    def name(self) -> str: ...
    @property
    def compute_capability(self) -> tuple[int, int]: ...
    @property
    def num_sms(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...


@dataclass(frozen=True)
class KnownDevice:
    """A `Device` as data, for choices on a machine without it. `smem_bytes`: what one CTA may opt in to."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    smem_bytes: int


H200 = KnownDevice("NVIDIA H200", (9, 0), 132, 227 << 10)


# the table ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """A class of problems; ordered by length."""

    length: int
    tiles: str

    @classmethod
    def of(cls, problem: Problem, num_sms: int) -> Bucket:
        tiles = problem.batch * problem.hq * -(-problem.sq // TILE_ROWS)
        length = 1 << round(math.log2(max(problem.sk, SHORTEST)))
        return cls(length, "few" if tiles < num_sms else "many")

    def __str__(self) -> str:
        return f"seqlen_k {self.length}, {self.tiles} tiles"


@dataclass(frozen=True)
class Measured:
    """What was seen when an entry was made. TFLOP/s by the FlashAttention papers' count of operations; None: not recorded."""

    problem: str
    """B,HQ,HKV,SQ,SK."""
    tflops: float
    peer: str | None
    """The fastest other implementation of that run."""
    peer_tflops: float | None
    gpu: str
    driver: str | None
    compiler: str | None
    fagen: str
    date: str
    """Of the run, ISO 8601."""


@dataclass(frozen=True)
class Entry:
    """A winner: a built-in schedule (with its tiles for this head_dim) and what the winner changes of it."""

    dtype: str
    """`Attention.products`."""
    head_dim: int
    mask: str
    bucket: Bucket
    base: str
    changes: tuple[tuple[str, Any], ...]
    schedule_id: str
    """Of the schedule that was measured: `schedule` must have it."""
    measured: Measured

    @classmethod
    def make(cls, attention: Attention, schedule: Schedule, bucket: Bucket, base: str, measured: Measured) -> Entry:
        own = load(base, head_dim=attention.head_dim).schedule
        changes = tuple((name, new) for name, (_, new) in own.diff(schedule).items())
        return cls(attention.products, attention.head_dim, attention.mask, bucket, base, changes, schedule.id, measured)

    @property
    def key(self) -> tuple[str, int, str, int, str]:
        """Unique in a table; sorts it."""
        return self.dtype, self.head_dim, self.mask, self.bucket.length, self.bucket.tiles

    @property
    def label(self) -> str:
        return f"hd{self.head_dim} {self.dtype} {self.mask}, {self.bucket}"

    @property
    def attention(self) -> Attention:
        """What was measured, with nothing but its key's fields set."""
        return Attention(head_dim=self.head_dim, mask=self.mask, **types_of(self.dtype))

    @cached_property
    def schedule(self) -> Schedule:
        """Raises InputError or ScheduleError where this fagen has no such built-in or knob."""
        return load(self.base, head_dim=self.head_dim).schedule.replace(**dict(self.changes))

    def unusable(self, attention: Attention) -> str:
        """Why the entry cannot serve the attention, "" if it can."""
        try:
            if self.schedule.id != self.schedule_id:
                return f"its schedule is {self.schedule.id} now, {self.schedule_id} was measured"
            check(attention, self.schedule)
        except FagenError as e:
            return str(e).splitlines()[0]
        return ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "mask": self.mask,
            "seqlen_k": self.bucket.length,
            "tiles": self.bucket.tiles,
            "base": self.base,
            "changes": dict(self.changes),
            "schedule_id": self.schedule_id,
            "measured": asdict(self.measured),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        plain = {n: data[n] for n in ("dtype", "head_dim", "mask", "base", "schedule_id")}
        changes = tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in data["changes"].items())
        bucket = Bucket(int(data["seqlen_k"]), data["tiles"])
        return cls(**plain, bucket=bucket, changes=changes, measured=Measured(**data["measured"]))


@dataclass(frozen=True)
class Table:
    """The entries of one family of devices. `device`: what the names of its devices contain, such as "H200"."""

    arch: str
    device: str
    entries: tuple[Entry, ...]

    def with_entries(self, new: Sequence[Entry]) -> Table:
        """New entries in the place of those with their key; sorted."""
        kept = {e.key: e for e in (*self.entries, *new)}
        return Table(self.arch, self.device, tuple(kept[k] for k in sorted(kept)))

    def to_json(self) -> str:
        """One line an entry, so that a difference between two tables reads well."""
        lines = ",\n".join(f"  {json.dumps(e.to_dict(), allow_nan=False)}" for e in self.entries)
        head = {"schema": SCHEMA, "arch": self.arch, "device": self.device}
        return f'{json.dumps(head)[:-1]}, "entries": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, name: str = "tuned table") -> Table:
        """Inverse of `to_json`. InputError, beginning with `name`, for anything else."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise InputError(name, f"has schema {data['schema']!r}; this version of fagen reads {SCHEMA}")
            return cls(data["arch"], data["device"], tuple(Entry.from_dict(e) for e in data["entries"]))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise InputError(name, f"is not a tuned table: {type(e).__name__}: {e}") from e


def builtin_path(device: str = "H200") -> Path:
    """The file of the table that comes with fagen for a device family."""
    return resource_dir("schedules") / "tuned" / f"{device.lower()}.json"


@cache
def builtin_tables() -> tuple[Table, ...]:
    """Those that come with fagen, read once."""
    return tuple(read(path) for path in sorted(builtin_path().parent.glob("*.json")))


def read(path: str | Path) -> Table:
    """InputError naming the file if it cannot be read or is no table."""
    try:
        return Table.from_json(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(str(path), f"cannot be read: {getattr(e, 'strerror', None) or e}") from e


def record(path: str | Path, entries: Sequence[Entry], begin: Table) -> Table:
    """Put entries into the table at `path`, which is `begin` if there is none yet; returns the new table.

    The file is replaced whole, and two processes take turns: neither loses the other's entries. InputError naming the file if it is no
    table, is another family's, or cannot be written.
    """
    place = Path(path)
    try:
        with _exclusive(place.parent):
            old = read(place) if place.exists() else begin
            if (old.arch, old.device) != (begin.arch, begin.device):
                raise InputError(str(path), f"is the table of {old.device} ({old.arch}), not of {begin.device} ({begin.arch})")
            new = old.with_entries(entries)
            fd, temporary = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as f:
                    f.write(new.to_json())
                    f.flush()
                    os.fsync(f.fileno())
                os.chmod(temporary, 0o644)
                os.replace(temporary, place)
            finally:
                Path(temporary).unlink(missing_ok=True)
    except OSError as e:
        raise InputError(str(path), f"cannot be written: {e.strerror or e}") from e
    return new


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One process at a time in here. The lock is on the folder itself: it leaves no file, and ends with its process."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# choosing -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A schedule for a problem. `entry`: where it comes from, None for a built-in. `why`: one sentence."""

    schedule: Schedule
    entry: Entry | None
    why: str


def choose(attention: Attention, problem: Problem, device: Device = H200, tables: Sequence[Table] | None = None) -> Choice:
    """The schedule for a problem on a device: from `tables` (None: fagen's own) by the rule above, or else a built-in one.

    Devices of compute capability 9.0 take WGMMA schedules; those of 8.x, the mma.sync schedule `fa2` if its tiles fit. ScheduleError
    for an attention that no kernel computes yet, LaunchError for a device (or a dtype on it) that no schedule is for.
    """
    if device.compute_capability != (9, 0):
        return _mma_sync(attention, device)
    bucket = Bucket.of(problem, device.num_sms)
    passed_over = []
    for table, entry in _nearest_first(attention, bucket, device, builtin_tables() if tables is None else tables):
        reason = entry.unusable(attention)
        if reason:
            passed_over.append(f"passed over {entry.label} ({reason})")
            continue
        return Choice(entry.schedule, entry, "; ".join([_why(attention, bucket, device, table, entry), *passed_over]))
    name = BUILTIN.get(attention.products, BUILTIN["bf16"])
    schedule = load(name, head_dim=attention.head_dim, dtype=attention.dtype, v_dtype=attention.v_dtype).schedule
    check(attention, schedule)
    return Choice(
        schedule, None, "; ".join([f"the tuned table has nothing for {attention.label}: the built-in {name}", *passed_over])
    )


PRECISIONS = {"fp8": "e4m3", "int8": "int8", "int8_qk": "int8_qk"}
"""What callers ask for → `Schedule.precision`."""
QUANTISED: dict[str, Any] = {"scale_granularity": "head", "hadamard": True}
"""How 16-bit tensors are quantised where nothing else is asked for: the most exact way that costs little."""


def choose_quantised(
    attention: Attention,
    problem: Problem,
    device: Device = H200,
    tables: Sequence[Table] | None = None,
    *,
    precision: str = "e4m3",
) -> Choice:
    """As `choose`, for 16-bit tensors that are quantised first, to `precision`: the schedule for 8-bit tensors of that type and size, and
    `QUANTISED`."""
    choice = choose(quantised(attention, precision), problem, device, tables)
    schedule = choice.schedule.replace(precision=precision, **QUANTISED)
    check(attention, schedule)
    what = "q and k" if precision == "int8_qk" else "q, k and v"
    return Choice(schedule, choice.entry, f"{choice.why}; {what} are quantised first")


def _nearest_first(attention: Attention, bucket: Bucket, device: Device, tables: Sequence[Table]) -> list[tuple[Table, Entry]]:
    """All entries that may stand in for one another, by distance."""

    def may(entry: Entry) -> bool:
        types = {entry.dtype, attention.products}
        # bf16 and fp16, and e4m3 and int8, have kernels that do work of the same shape
        same = len(types) == 1 or types <= set(HALF_TYPES) or types <= set(EIGHT_BIT_TYPES)
        return entry.head_dim == attention.head_dim and same

    def distance(found: tuple[Table, Entry]) -> tuple[bool, bool, bool, bool, float, int]:
        table, entry = found
        ratio = abs(math.log2(entry.bucket.length / bucket.length))
        return (
            table.device not in device.name,
            entry.dtype != attention.products,
            entry.mask != attention.mask,
            entry.bucket.tiles != bucket.tiles,
            ratio,
            -entry.bucket.length,
        )

    return sorted(((t, e) for t in tables if t.arch == "sm_90a" for e in t.entries if may(e)), key=distance)


def _why(attention: Attention, bucket: Bucket, device: Device, table: Table, entry: Entry) -> str:
    theirs = f"{entry.label}, measured on {table.device}"
    own = entry.bucket == bucket and (entry.dtype, entry.mask) == (attention.products, attention.mask)
    if own and table.device in device.name:
        return f"the tuned table's entry for {theirs}"
    wanted = f"hd{attention.head_dim} {attention.dtype} {attention.mask}, {bucket} on {device.name}"
    return f"the tuned table has no entry for {wanted}; the nearest is {theirs}"


def _mma_sync(attention: Attention, device: Device) -> Choice:
    """The built-in for devices without WGMMA, with smaller blocks or one stage where it does not fit."""
    major, minor = device.compute_capability
    where = f"{device.name} (compute capability {major}.{minor})"
    if major != 8:
        raise LaunchError(f"no schedule runs on {where}; there are some for compute capability 8.x and for 9.0")
    if attention.has_descales:
        raise LaunchError(f"{attention.dtype} attention needs compute capability 9.0; this is {where}")
    own = load("fa2", head_dim=attention.head_dim).schedule.replace(arch="sm_80")
    smaller = [own, *own.sweep(stages=(own.stages, 1), tile_kv=(own.tile_kv, own.tile_kv // 2))]
    needs = []
    for schedule in smaller:
        try:
            check(attention, schedule)
        except ScheduleError as e:
            if not set(e.codes) <= {"smem", "registers"}:
                raise
            continue
        needs.append(tile_bytes(attention, schedule) + BARRIER_BYTES)
        if needs[-1] <= device.smem_bytes:
            tiles = f"tile_kv={schedule.tile_kv}, stages={schedule.stages}"
            return Choice(schedule, None, f"{where} has no WGMMA: the built-in fa2 for sm_80 with {tiles}")
    least = f"; fa2 needs at least {min(needs)}" if needs else ""
    raise LaunchError(
        f"no schedule for {attention.label} fits {where}: a CTA has {device.smem_bytes} bytes of shared memory{least}"
    )
