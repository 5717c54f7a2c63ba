"""The yardstick: what a careful kernel of the same precision can reach, against which a kernel's error is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..descales import Descales
from ..plan.scales import LEAST_V_SCALE
from ..schedule import Schedule
from .blocks import problem_of, row_blocks, scales_of
from .numeric import E4M3_DEPTH, E4M3_P_SCALE, F32, Array, cast, half_step, last_bit, rounded, tensor_core

if TYPE_CHECKING:
    from typing_extensions import Unpack


def largest_weights(attention: Attention, schedule: Schedule | None) -> tuple[float, ...]:
    """What a row's largest weight may be where it is rounded to P's type. In e4m3 about 2^8, the most that leaves the row's small weights as
    far as they go, whatever range a kernel leaves them: a bound must see what is lost of it. Against a running maximum it is a power of two,
    which nothing is lost of; against a stale one it is any number, here two that rounding changes by half of the most, down and up: one alone
    may happen to cancel what was lost of the values."""
    scale = E4M3_P_SCALE if attention.value_dtype == "e4m3" else 1.0
    if schedule is None or schedule.reference == "running":
        return (scale,)
    half = half_step(attention.value_dtype)
    return scale * (1 + half / 2), scale * (1 + 3 * half / 2)


def weight_step(attention: Attention, schedule: Schedule | None, largest: F32) -> F32 | float:
    """What rounding a row's largest weight may change of each element, at most; `largest`: as `Baselines` has it. 0 against a running maximum.
    The baselines lose half of it, but by chance other roundings may cancel that in them and add to it in a kernel."""
    if schedule is None or schedule.reference == "running":
        return 0.0
    step: F32 = largest * np.float32(half_step(attention.value_dtype))
    return step


class Baselines(NamedTuple):
    """outs (len(weights), batch, rows, heads, head_dim_v) in the output's type, one for each of some `largest_weights`; lse (batch, heads, rows);
    `largest` (batch, rows, heads, head_dim_v): how much of out a row's largest weight makes, without its sign, 0 where no key is seen."""

    outs: Array
    lse: F32
    largest: F32


def farthest(outs: Array, reference: Array) -> Array:
    """Of several outs (n, …) of baselines, in each place the one that is farthest from the reference; finite where any is."""
    chosen: Array = outs[0]
    for out in outs[1:]:
        chosen = np.where(_finite_error(out, reference) > _finite_error(chosen, reference), out, chosen)
    return chosen


def _finite_error(x: Array, reference: Array) -> Array:
    """How far off each element is; −1 where that is no number."""
    with np.errstate(invalid="ignore"):
        error: Array = np.abs(x.astype(np.float64) - reference)
    error[~np.isfinite(error)] = -1.0
    return error


def baseline(attention: Attention, q: Array, k: Array, v: Array, **descales: Unpack[Descales]) -> tuple[Array, F32]:
    """Attention in one pass in the precision of the kernel: float32 scores and softmax of the rounded inputs, P rounded to its
    type (e4m3: times 2^8 first), float32 accumulation (e4m3: as the tensor core sums, see `numeric.tensor_core`), O rounded to the
    output's type. Descales of v by row multiply P before it is rounded.

    Arguments as `reference`. Returns out (batch, seqlen_q, heads, head_dim_v) in the attention's output dtype and lse
    (batch, heads, seqlen_q) in float32. Its error is a yardstick, never a truth.
    """
    return baseline_rows(attention, q, k, v, np.arange(problem_of(attention, q, k, v).sq), **descales)


def score_step(attention: Attention, q: Array, k: Array, **descales: Unpack[Descales]) -> float:
    """What the tensor core may cut off one score at most, if its largest term is no larger than largest q times largest k of a column:
    one last bit kept for each product of depth 32. 0 for types whose sums keep float32. Arguments as `baseline`."""
    if attention.dtype != "e4m3" or not q.size or not k.size:
        return 0.0
    scales = scales_of(attention, problem_of(attention, q, k, k), descales)
    columns, shared = [], 1.0
    for name, x in (("q_descale", q), ("k_descale", k)):
        magnitude, scale = np.abs(x.astype(np.float32)), scales.get(name)
        if scale is not None and scale.ndim == 3:
            magnitude *= scale.transpose(0, 2, 1)[..., None]
        elif scale is not None:
            shared *= float(scale.max())
        columns.append(magnitude.reshape(-1, attention.head_dim).max(axis=0))
    return score_step_of(attention, float((columns[0] * columns[1]).max())) * shared


def score_step_of(attention: Attention, largest_term: float) -> float:
    """`score_step` of scores whose largest term is known."""
    if attention.dtype != "e4m3":
        return 0.0
    cuts = -(-attention.head_dim // E4M3_DEPTH)
    return cuts * float(last_bit(np.float32(largest_term))) * attention.softmax_scale


def baseline_rows(
    attention: Attention, q: Array, k: Array, v: Array, rows: npt.ArrayLike, **descales: Unpack[Descales]
) -> tuple[Array, F32]:
    """`baseline` for some query rows: out (batch, len(rows), heads, head_dim_v), lse (batch, heads, len(rows))."""
    outs, lse, _ = baselines_of(attention, q, k, v, rows, largest_weights(attention, None), **descales)
    return outs[0], lse


def baselines_of(
    attention: Attention,
    q: Array,
    k: Array,
    v: Array,
    rows: npt.ArrayLike,
    weights: Sequence[float],
    **descales: Unpack[Descales],
) -> Baselines:
    """`baseline_rows` for each of some `largest_weights`."""
    problem = problem_of(attention, q, k, v)
    scales = scales_of(attention, problem, descales)
    index = np.asarray(rows, np.int64)
    outs = np.zeros((len(weights), problem.batch, len(index), problem.hq, attention.dv), np.float32)
    lse = np.full((problem.batch, problem.hq, len(index)), -np.inf, np.float32)
    largest = np.zeros(outs.shape[1:], np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        for block in row_blocks(attention, problem, q, k, v, index, np.float32, scales):
            s = tensor_core(block.q.reshape(-1, attention.head_dim), block.k.T, attention.dtype, terms=True).reshape(
                *block.q.shape[:2], -1
            )
            block.scale(s)
            if block.visible is not None:
                np.copyto(s, np.float32(-np.inf), where=~block.visible)
            share = None if block.value_scale is None else np.maximum(block.value_scale, np.float32(LEAST_V_SCALE))
            if share is not None:  # v's scales become part of P, and the reference is that of P (see `plan.scales`)
                s += np.log(share)
            m = s.max(axis=2, keepdims=True)
            blind = np.isneginf(m)
            first = s.argmax(axis=2)
            s -= np.where(blind, np.float32(0), m)
            p = np.exp(s, out=s)
            total = (p if share is None else p / share).sum(axis=2, keepdims=True)
            for out, weight in zip(outs, np.asarray(weights, np.float32)):
                w = rounded(p * weight, attention.value_dtype)
                o = tensor_core(w.reshape(-1, w.shape[2]), block.v, attention.value_dtype).reshape(*w.shape[:2], -1)
                o /= np.where(blind, np.float32(1), total * weight)
                out[block.batch, block.rows, block.heads] = o.transpose(1, 0, 2) * np.float32(block.out_scale)
            made = np.where(blind, np.float32(0), np.abs(block.v[first] * np.float32(block.out_scale)) / total)
            largest[block.batch, block.rows, block.heads] = made.transpose(1, 0, 2)
            lse[block.batch, block.heads, block.rows] = np.where(blind, np.float32(-np.inf), m + np.log(total))[..., 0]
    return Baselines(cast(outs, attention.output_dtype), lse, largest)
