"""What `fagen bench` measures and finds, as values with an exact JSON round trip (documented in benchmarks/README.md)."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar, Union

from ..attention import Attention
from ..errors import InputError
from ..plan.kernel import Problem
from ..value import Value
from .timing import Interval, Reading

SCHEMA = 3
T = TypeVar("T")


class Record:
    """Mixin for frozen dataclasses of JSON values, tuples, dicts, `Value`s and one another."""

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = _plain(self)
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls: type[T], data: dict[str, Any]) -> T:
        """Inverse of `to_dict`, exactly; a member that an older version did not write has its default. InputError naming the first member
        that does not fit."""
        made: T = _build(cls, data, cls.__name__)
        return made

    @classmethod
    def from_json(cls: type[T], text: str) -> T:
        try:
            data = json.loads(text)
        except ValueError as e:
            raise InputError(cls.__name__, f"is not JSON: {e}") from e
        made: T = _build(cls, data, cls.__name__)
        return made


def _plain(x: Any) -> Any:
    if isinstance(x, Value):
        return x.to_dict()
    if dataclasses.is_dataclass(x):
        return {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, (tuple, list)):
        return [_plain(i) for i in x]
    return {k: _plain(v) for k, v in x.items()} if isinstance(x, dict) else x


def _build(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):  # only X | None is used
        return None if data is None else _build(next(a for a in args if a is not type(None)), data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_build(args[0], x, f"{where}[{i}]") for i, x in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {k: _build(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(data, dict):
        if issubclass(kind, Value):
            return kind.from_dict(data)
        hints = typing.get_type_hints(kind)
        optional = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
        wrong = sorted((set(hints) - optional - set(data)) | (set(data) - set(hints)))
        if wrong:
            raise InputError(where, f"{'lacks' if wrong[0] in hints else 'has the unknown member'} {wrong[0]!r}")
        return kind(**{name: _build(hint, data[name], f"{where}.{name}") for name, hint in hints.items() if name in data})
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and type(data) is kind:
        return data
    raise InputError(where, f"is a {type(data).__name__} where a {getattr(kind, '__name__', kind)} belongs")


# what to measure ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelRef(Record):
    """A built kernel on disk (`write_built`): DIRECTORY/FILE.json and its cubin; `label` names it in tables, `about` says which schedule
    that is and why, "" if the label does. `without`: what a removal took from it ("" of a whole kernel); it is timed unverified."""

    label: str
    directory: str
    file: str
    about: str = ""
    without: str = ""
    part: str = ""
    """Of a plan that quantises: "quantise" or "attend", the kernels to time alone (`Plan.part`); "": all of them."""


@dataclass(frozen=True)
class CaseSpec(Record):
    """One comparison: what is computed, on which sizes, by which built kernels (all of this attention)."""

    attention: Attention
    problem: Problem
    kernels: tuple[KernelRef, ...]


@dataclass(frozen=True)
class BenchSpec(Record):
    """All that `run_bench` needs, and nothing that cannot go to another process."""

    cases: tuple[CaseSpec, ...]
    peers: tuple[str, ...]
    rounds: int
    sustained: bool
    seed: int
    inputs: str = "normal"
    """See `bench_inputs.KINDS`."""


# what was found -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing(Record):
    """One function under one kind of load."""

    ms: Interval
    """Milliseconds a launch."""
    tflops: Interval
    """By the paper's count of operations (`CaseResult.flops`)."""
    tflops_visible: float
    """Median, by the exact count (`CaseResult.flops_visible`)."""
    ratio: Interval | None
    """Speed relative to the best peer: the median over rounds of (peer's time / own time), so above 1 is faster. None for peers,
    and where no peer was timed."""
    best_peer: str | None
    """The peer with the smallest median time, to which `ratio` refers."""
    gemm_share: float
    """tflops / that of the bf16 matrix product measured in the same run, under the same kind of load."""
    copy_share: float
    """Compulsory bytes (of a row with `bytes`: those) a second / those of a device copy measured likewise."""
    sm_mhz: float | None
    """Median SM clock read right after (burst) or during (sustained) the measurements."""
    samples_ms: tuple[float, ...]
    """In the order of rounds."""
    launches: int
    """Launches in the CUDA graph."""


@dataclass(frozen=True)
class Prediction(Record):
    """What `explain` says of a schedule in this case, from its program and the data of an H200."""

    times_us: dict[str, float]
    """Lower bounds by resource: hbm, tensor, exp, parallelism, latency."""
    binds: str
    bound_us: float
    """No launch is faster under the model."""
    sm_bytes: int
    """Into the SMs."""
    dram_bytes: int
    sentence: str


@dataclass(frozen=True)
class Row(Record):
    """One function in one case. `kind`: "schedule", "peer", or "removal": a schedule without something (plan/removal.py). `outcome`: "timed"; "absent": not here or does not take this case;
    "wrong": its output differs from the reference, so it was not timed; "failed": it raised."""

    function: str
    """Its name in tables."""
    kind: str
    peer: str | None
    """The peer's name on the command line; None for schedules."""
    schedule_id: str | None
    plan_id: str | None
    compiler: str | None
    outcome: str
    reason: str
    error_ratio: float | None
    """Error / bound on the verified sample: at most 1 for a right output. None if not verified or not finite."""
    burst: Timing | None
    sustained: Timing | None
    prediction: Prediction | None
    """None for peers; of a removal, what is left."""
    about: str = ""
    """Which schedule this is and why (`KernelRef.about`)."""
    part: str = ""
    """Kernels of the plan that were timed alone (`KernelRef.part`)."""
    bytes: int | None = None
    """What those of part "quantise" read and write of tensors, each read counted; `copy_share` is of these. Else None."""

    @property
    def bad(self) -> bool:
        """A schedule of ours that could not be measured."""
        return self.kind != "peer" and self.outcome != "timed"


@dataclass(frozen=True)
class CaseResult(Record):
    attention: Attention
    problem: Problem
    flops: int
    """4 · seqlen_q · seqlen_k · head_dim · heads · batch, halved for a causal mask: the count of the FlashAttention papers, by
    which `tflops` is given."""
    flops_visible: int
    """The same over the (query, key) pairs that the mask lets through, exactly."""
    bytes: int
    """q, k and v read once, out and lse written once."""
    before: Reading
    after: Reading
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Ceilings(Record):
    """What this GPU did in this run: an 8192³ bf16 matrix product of torch (TFLOP/s) and the fastest device copy (TB/s, read +
    written)."""

    gemm_tflops: Interval
    copy_tbs: Interval
    gemm_tflops_sustained: Interval | None
    copy_tbs_sustained: Interval | None
    copies_tbs: dict[str, float]
    """Every copy that was tried, in a burst."""


@dataclass(frozen=True)
class Machine(Record):
    gpu: str
    compute_capability: str
    sms: int
    memory_bytes: int
    driver: str | None
    power_limit_watts: float | None
    max_sm_mhz: float | None
    sensors: str


@dataclass(frozen=True)
class BenchResult(Record):
    schema: int
    started: str
    """UTC, ISO 8601."""
    seconds: float
    machine: Machine
    versions: dict[str, str]
    """fagen, python, torch, torch_cuda, cudnn, and each peer that is there; compilers stand in the rows."""
    method: dict[str, str]
    """How the numbers came about, in words."""
    rounds: int
    seed: int
    ceilings: Ceilings
    cases: tuple[CaseResult, ...]
    inputs: str = "normal"

    @property
    def ok(self) -> bool:
        """Every schedule was right and timed."""
        return not any(row.bad for case in self.cases for row in case.rows)
