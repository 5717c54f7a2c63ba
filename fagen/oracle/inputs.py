"""Inputs for checks: random and adversarial tensors of a seed, in the layouts callers use, and the shapes a kernel is checked on.

`make_case` gives all that a kernel and its judge need; `make_inputs` the tensors alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args
from typing import cast as typed

import ml_dtypes
import numpy as np

from ..attention import Attention
from ..descales import Descales, Form, by_row, forms
from ..errors import InputError
from ..plan.kernel import Problem
from ..schedule import Schedule
from .numeric import DTYPES, F32, INT8_MAX, Array, cast

Inputs = Literal["normal", "sink", "growing", "descaled", "uneven"]
Layout = Literal["contiguous", "fused", "transposed", "strided_k"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class CheckProblem(Problem):
    """A problem to check a kernel on, with the kind of numbers and the memory layout of its inputs (see `make_inputs`)."""

    inputs: Inputs = "normal"
    layout: Layout = "contiguous"

    def __str__(self) -> str:
        extra = [x for x, usual in ((self.inputs, "normal"), (self.layout, "contiguous")) if x != usual]
        return " ".join([super().__str__(), *extra])


@dataclass(frozen=True)
class Case:
    """Inputs of a check problem: q, k and v as the oracle takes them, `given_v` as the kernel does (v itself, or V transposed); the
    descales (none, or float32 arrays of all that the attention has; int8 always has them) as the kernel takes them, and `row_descales` as the oracle does."""

    q: Array
    k: Array
    v: Array
    given_v: Array
    descales: Descales
    row_descales: Descales


def make_case(attention: Attention, schedule: Schedule, problem: CheckProblem, *, seed: int = 0) -> Case:
    """The inputs of a problem for a kernel of the schedule, the same for the same seed on every machine."""
    q, k, v = make_inputs(attention, problem, seed=seed, inputs=problem.inputs, layout=problem.layout)
    given = transpose_v(v, problem.layout) if schedule.v_transposed else v
    descales: Descales = {}
    units = int8_units(attention, problem.inputs)
    if units != (1.0, 1.0) or problem.inputs in ("descaled", "uneven"):
        uneven = UNEVEN / 2 if attention.output_dtype == "fp16" else UNEVEN  # fp16 ends at 65504
        spread = uneven if problem.inputs == "uneven" else 1.0 if problem.inputs == "descaled" else 0.0
        made = make_descales(problem, schedule, seed=seed, layout=problem.layout, v_spread=spread, units=units)
        descales = typed(Descales, {n: x for n, x in made.items() if n in attention.descales})
    return Case(q, k, v, given, descales, by_row(schedule, problem, descales))


UNEVEN = 24.0
"""Powers of two, up and down, that the block scales of v in "uneven" inputs are apart; half of it where out is fp16."""


def make_descales(
    problem: Problem,
    schedule: Schedule | None = None,
    *,
    seed: int = 0,
    layout: Layout = "contiguous",
    v_spread: float = 1.0,
    units: tuple[float, float] = (1.0, 1.0),
) -> Descales:
    """q_descale, k_descale and v_descale in float32, of the form that the schedule's scale_granularity asks for; without a schedule
    (batch, kv_heads). Random numbers from 1/2 to 2, no two alike, q's and k's times `units`; v's from 2^−v_spread to 2^v_spread, and with
    a spread above 1 every fourth block's is 0, as that of a block of zeros may be. With a spread of 0 q's and k's are the units.

    `layout` of (batch, kv_heads): "contiguous"; "fused": columns of one (batch, kv_heads, 3) array; "transposed": views of (kv_heads,
    batch) arrays; "strided_k": k's is every second head of a longer array whose others are NaN, and q's is one for all heads (stride 0).
    """
    rng = np.random.default_rng((seed, 1))
    if schedule is not None and schedule.scale_granularity != "head":
        return _form_descales(rng, forms(schedule, problem), v_spread, units)
    shape = (problem.batch, problem.hkv)
    apart = min(v_spread, 1.0)
    q, k, v = np.exp2(rng.uniform(-apart, apart, (3, *shape))).astype(np.float32)
    q, k = q * np.float32(units[0]), k * np.float32(units[1])
    if layout == "fused":
        fused = np.ascontiguousarray(np.stack([q, k, v], axis=2))
        q, k, v = (fused[:, :, i] for i in range(3))
    elif layout == "transposed":
        q, k, v = (np.ascontiguousarray(x.T).T for x in (q, k, v))
    elif layout == "strided_k":
        longer = np.full((shape[0], 2 * shape[1]), np.nan, np.float32)
        longer[:, ::2] = k
        q, k = np.broadcast_to(q[:, :1], shape), longer[:, ::2]
    return {"q_descale": q, "k_descale": k, "v_descale": v}


def _form_descales(rng: np.random.Generator, forms: Mapping[str, Form], v_spread: float, units: tuple[float, float]) -> Descales:
    apart = min(v_spread, 1.0)
    q, k, v = (
        np.exp2(rng.uniform(-x, x, f.shapes[0][0] if f.shapes else (1,))).astype(np.float32) * np.float32(unit)
        for f, x, unit in zip(forms.values(), (apart, apart, v_spread), (*units, 1.0))
    )
    if v_spread > 1.0:
        v[..., 3::4] = 0.0
    return {"q_descale": q, "k_descale": k, "v_descale": v}


def transpose_v(v: Array, layout: Layout = "contiguous") -> Array:
    """V (batch, seqlen_k, kv_heads, head_dim_v) as a schedule with v_transposed takes it: (batch, kv_heads, head_dim_v, seqlen_k), its
    rows padded with NaN to 16 bytes. `layout` "transposed": head_dim_v stands before kv_heads in memory."""
    batch, keys, heads, dim = v.shape
    step = 16 // v.dtype.itemsize
    padded = -(-max(keys, 1) // step) * step
    if layout == "transposed":
        rows = np.full((batch, dim, heads, padded), np.nan, v.dtype).transpose(0, 2, 1, 3)
    else:
        rows = np.full((batch, heads, dim, padded), np.nan, v.dtype)
    given: Array = rows[..., :keys]
    given[...] = v.transpose(0, 2, 3, 1)
    return given


def make_inputs(
    attention: Attention,
    problem: Problem,
    *,
    seed: int = 0,
    amplitude: float = 1.0,
    inputs: Inputs = "normal",
    layout: Layout = "contiguous",
) -> tuple[Array, Array, Array]:
    """q, k, v of the attention's dtype for the problem, the same for the same seed on every machine. int8: q and k as multiples of
    `int8_units`, which a call gives as descales, and v of its own type.

    With a softmax scale so large that N(0, 1) would make scores no kernel could tell apart, q and k are smaller (`narrowing`).

    `inputs`: "normal": N(0, amplitude²). "sink": the first four keys score about 8 above the rest (natural units), as the first
    tokens of a language model do. "growing": scores rise along the keys by 100 in all, so that a running maximum moves at every
    block. (Both by less with so small a scale that k has no numbers for it.) "descaled": as "normal"; the problem has random descales.
    "uneven": likewise, those of v's blocks far apart.

    `layout`: "contiguous" (batch, seq, heads, dim); "fused": slices of one (batch, seq, heads + 2 · kv_heads, dim) tensor, as a
    fused projection leaves them (needs seqlen_q = seqlen_k, head_dim = head_dim_v); "transposed": views of (batch, heads, seq,
    dim); "strided_k": K is every second token of a longer buffer whose other tokens are NaN, q and v are contiguous.
    """
    rng = np.random.default_rng(seed)
    b, d = problem.batch, attention.head_dim
    narrow = amplitude * narrowing(attention)
    q = _normal(rng, (b, problem.sq, problem.hq, d), narrow)
    k = _normal(rng, (b, problem.sk, problem.hkv, d), narrow)
    v = _normal(rng, (b, problem.sk, problem.hkv, attention.dv), amplitude)
    if inputs in ("sink", "growing"):
        q[..., 0] = PATTERN_Q * narrowing(attention)
        most = _most_of_k(attention, PATTERNS[inputs])
        if inputs == "sink":
            k[..., 0] = 0.0
            k[:, :4, :, 0] = most
        else:
            k[..., 0] = np.linspace(0.0, most, problem.sk)[:, None]
    q_unit, k_unit = int8_units(attention, inputs, amplitude)
    q, k = q / np.float32(q_unit), k / np.float32(k_unit)
    return _laid_out(cast(q, attention.dtype), cast(k, attention.dtype), cast(v, attention.value_dtype), layout)


MOST_SPREAD = 2.0
"""Standard deviation of scores in natural units. With more of it rows have one or two keys that count: what is lost of those by chance, in P of
type e4m3, is then all the error there is, of a kernel and of its yardstick."""


def narrowing(attention: Attention) -> float:
    """What random q and k are both multiplied by, a power of two: 1 unless their scores would spread by more than `MOST_SPREAD`."""
    excess = attention.softmax_scale * math.sqrt(attention.head_dim) / MOST_SPREAD
    return 1.0 if excess <= 1.0 else 2.0 ** -math.ceil(math.log2(excess) / 2)


def int8_units(attention: Attention, inputs: Inputs, amplitude: float = 1.0) -> tuple[float, float]:
    """What 1 of int8 in q, and in k, stands for: 127 then for four standard deviations, or the largest value of unkind inputs. Of other
    types 1."""
    if attention.dtype != "int8":
        return 1.0, 1.0
    score = PATTERNS.get(inputs, 0.0)
    largest = (PATTERN_Q * narrowing(attention), _most_of_k(attention, score)) if score else (0.0, 0.0)
    q, k = (max(4.0 * amplitude * narrowing(attention), x) / INT8_MAX for x in largest)
    return q, k


PATTERNS: dict[Inputs, float] = {"sink": 8.0, "growing": 100.0}
"""By how much the inputs' largest scores stand out, in natural units: q has one number in its first column, and k what makes the score."""
PATTERN_Q = 8.0
"""That number, but for `narrowing`."""


def per_unit(attention: Attention) -> float:
    """Of k in a pattern's column, for one natural unit of score."""
    return 1.0 / (PATTERN_Q * narrowing(attention) * attention.softmax_scale)


def largest_of_k(attention: Attention) -> float:
    """The largest number that k has: of its type; int8 is a multiple of any float32."""
    return float(ml_dtypes.finfo(np.float32 if attention.dtype == "int8" else DTYPES[attention.dtype]).max)


def _most_of_k(attention: Attention, score: float) -> float:
    """The largest value of a pattern in k; with a very small softmax scale the most that k has a number for."""
    return min(score * per_unit(attention), largest_of_k(attention))


def _normal(rng: np.random.Generator, shape: tuple[int, ...], amplitude: float) -> F32:
    x: F32 = rng.standard_normal(shape, np.float32)
    return x if amplitude == 1.0 else x * np.float32(amplitude)


def _laid_out(q: Array, k: Array, v: Array, layout: Layout) -> tuple[Array, Array, Array]:
    if layout == "fused":
        if q.shape[1] != k.shape[1] or q.shape[3] != v.shape[3]:
            raise InputError("layout", "fused needs seqlen_q = seqlen_k and head_dim = head_dim_v")
        hq, hkv = q.shape[2], k.shape[2]
        # int8 beside another type is one tensor of bytes, a 16-bit v as two of its heads for each of v's
        bits = [x.view(f"u{q.dtype.itemsize}").reshape(*x.shape[:2], x.shape[2] * x.itemsize // q.itemsize, -1) for x in (q, k, v)]
        fused = np.concatenate(bits, axis=2)
        parts = fused[:, :, :hq], fused[:, :, hq : hq + hkv], fused[:, :, hq + hkv :]
        mine, its, values = (part.reshape(*x.shape[:3], -1).view(x.dtype) for part, x in zip(parts, (q, k, v)))
        return mine, its, values
    if layout == "transposed":
        return _transposed(q), _transposed(k), _transposed(v)
    if layout == "strided_k":
        poison = np.iinfo(k.dtype).min if k.dtype.kind == "i" else np.nan
        longer = np.full((k.shape[0], 2 * k.shape[1], *k.shape[2:]), poison, k.dtype)
        longer[:, ::2] = k
        return q, longer[:, ::2], v
    return q, k, v


def _transposed(x: Array) -> Array:
    y: Array = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    return y


def check_problems(attention: Attention, schedule: Schedule) -> tuple[CheckProblem, ...]:
    """The shapes on which a kernel of this schedule must agree with the reference: where it can go wrong, at least 60, and small
    enough that the float64 reference of all of them takes seconds (above 2048 rows `check` samples).

    Tile edges ±1 of both tiles; key-block counts around the ring's stages; lengths 0, 1, 63, 64, 65; more queries than keys (under
    a causal mask: rows that see nothing); GQA 8:1, 28:4, 6:2, MQA; batch 3; every layout; unkind scores; more than three tiles for
    every CTA of a persistent grid; for 8-bit types descales, in every layout.
    """
    tq, tk = schedule.tile_q, schedule.tile_kv
    stages = max(schedule.stages_k, schedule.stages_v)
    at = _Collector()
    for s in (1, 63, 64, 65):
        at(s, s)
    for sq, sk in ((1, 203), (203, 1), (113, 203), (203, 113), (1, tk), (1, tk + 1), (1, 1025), (2, 65)):
        at(sq, sk)
    for sq in (tq - 1, tq, tq + 1):
        for sk in (tk - 1, tk, tk + 1):
            at(sq, sk)
    for sq, sk in ((2 * tq - 1, 2 * tk + 1), (2 * tq, 2 * tk), (2 * tq + 1, 2 * tk - 1), (3 * tq + 1, 3 * tk + 1), (3 * tq, 5)):
        at(sq, sk)
    for blocks in sorted({1, stages - 1, stages, stages + 1, 2 * stages, 2 * stages + 1} - {0}):
        at(tq + 1, blocks * tk)
        at(tq, blocks * tk + 1, hq=4, hkv=2)
    for sq, sk in ((5, 2), (300, 170), (128, 1), (257, 128), (2 * tq + 1, tk - 1), (3 * tq, tq), (tq + 1, 1)):
        at(sq, sk, hq=4, hkv=2)
    for sq in (1, 64, tq + 1):
        at(sq, 0)
    at(0, 64)
    at(0, 0)
    at(64, 64, batch=0)
    for hq, hkv in ((8, 1), (28, 4), (6, 2), (5, 5), (7, 1)):
        at(113, 203, hq=hq, hkv=hkv)
        at(tq + 1, tk + 1, batch=3, hq=hq, hkv=hkv)
    at(1, 333, batch=3, hq=28, hkv=4)
    for layout in LAYOUTS[1:]:
        at(tq + 1, tq + 1, batch=3, hq=4, hkv=4, layout=layout)
        at(203, 203, batch=2, hq=4, hkv=2, layout=layout)
    at(113, 203, batch=2, hq=4, hkv=2, layout="transposed")
    at(203, 113, batch=2, hq=4, hkv=2, layout="strided_k")
    for inputs in ("sink", "growing"):
        at(tq + 1, 4 * tk + 1, inputs=inputs)
        at(2 * tq, 7 * tk, hq=4, hkv=1, inputs=inputs)
    if attention.has_descales:
        for hq, hkv in ((2, 1), (4, 4), (28, 4)):
            at(tq + 1, 2 * tk + 1, batch=3, hq=hq, hkv=hkv, inputs="descaled")
        for layout in LAYOUTS[1:]:
            at(203, 203, batch=2, hq=4, hkv=2, inputs="descaled", layout=layout)
        at(300, 170, batch=2, hq=4, hkv=2, inputs="descaled")
        at(64, 0, batch=2, hq=4, hkv=2, inputs="descaled")
        at(3 * tq + 1, tk + 1, batch=3, hq=44, hkv=4, inputs="descaled")
        if schedule.scale_granularity == "block" and "v_descale" in attention.descales:
            for sq, sk, hq in ((tq + 1, 5 * tk + 1, 2), (2 * tq, 9 * tk, 4), (300, 2 * tk - 1, 2), (1, 4 * tk, 2)):
                at(sq, sk, batch=2, hq=hq, hkv=2, inputs="uneven")
    # Four query tiles in each of 3 · 44 heads: 528 tiles, more than three for each of 132 CTAs (SMs of an H100 SXM or H200); and a longer sequence.
    at(3 * tq + 1, tk + 1, batch=3, hq=44, hkv=4)
    at(3 * tq + 1, 3 * tq + 1, batch=3, hq=44, hkv=11)
    at(1, tk + 1, batch=3, hq=140, hkv=35)
    at(4099, 4099, hq=2, hkv=1)
    at(2100, 8192, hq=2, hkv=2)
    return at.problems()


class _Collector:
    """Gathers problems in order, without repeats."""

    def __init__(self) -> None:
        self._seen: dict[CheckProblem, None] = {}

    def __call__(
        self,
        sq: int,
        sk: int,
        *,
        batch: int = 1,
        hq: int = 2,
        hkv: int = 1,
        inputs: Inputs = "normal",
        layout: Layout = "contiguous",
    ) -> None:
        self._seen[CheckProblem(batch, sq, sk, hq, hkv, inputs, layout)] = None

    def problems(self) -> tuple[CheckProblem, ...]:
        return tuple(self._seen)
