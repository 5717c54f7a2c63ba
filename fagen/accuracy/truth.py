"""What a row of the table is compared with, for the queries of one head: float64, and attention as it was before FlashAttention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..oracle import reference_rows
from ..oracle.blocks import problem_of, row_blocks
from ..oracle.numeric import F64, Array, cast, rounded


@dataclass(frozen=True)
class Truth:
    """Of the query `rows` (n,) of one head: out (n, head_dim_v) and lse (n,) in float64, and what standard attention gives for out, in 16 bits
    and (None if not asked for) in e4m3."""

    rows: npt.NDArray[np.int64]
    out: F64
    lse: F64
    standard: F64
    standard_e4m3: F64 | None


def truth(
    attention: Attention,
    q: Array,
    k: Array,
    v: Array,
    rows: npt.NDArray[np.int64],
    dequantised: tuple[Array, Array, Array] | None = None,
) -> Truth:
    """q (1, seqlen_q, 1, head_dim), k and v (1, seqlen_k, 1, head_dim): exact, or in the 16-bit type of `attention` in which standard
    attention takes them; `dequantised`: the same, rounded to e4m3."""
    out, lse = reference_rows(attention, q, k, v, rows)
    hq, hk, hv = (cast(x, attention.dtype) for x in (q, k, v))
    half = standard(attention, hq, hk, hv, rows)[0, :, 0]
    eighth = None if dequantised is None else standard(attention, *dequantised, rows, p_dtype="e4m3")[0, :, 0]
    return Truth(rows, out[0, :, 0], lse[0, 0], half, eighth)


def standard(attention: Attention, q: Array, k: Array, v: Array, rows: npt.NDArray[np.int64], p_dtype: str | None = None) -> F64:
    """out (batch, rows, heads, head_dim_v) of attention as separate operations, as a framework runs it: scores, scaled scores, P and the
    output are each rounded to the 16-bit type of `attention`, P (at most 1) then to `p_dtype`; products are summed and the softmax is
    taken in float32. The baselines of the paper, whose details it leaves open."""
    problem = problem_of(attention, q, k, v)
    out = np.zeros((problem.batch, len(rows), problem.hq, attention.dv))
    with np.errstate(invalid="ignore", over="ignore"):
        for block in row_blocks(attention, problem, q, k, v, rows, np.float32, {}):
            s = rounded(block.q @ block.k.T, attention.dtype)
            s = rounded(s * np.float32(block.score_scale), attention.dtype)
            if block.visible is not None:
                np.copyto(s, np.float32(-np.inf), where=~block.visible)
            m = s.max(axis=2, keepdims=True)
            p = np.exp(s - np.where(np.isneginf(m), np.float32(0), m))
            p /= np.maximum(p.sum(axis=2, keepdims=True), np.float32(1e-30))  # a row that sees no key: 0
            p = rounded(rounded(p, attention.dtype), p_dtype or attention.dtype)
            o = rounded(p @ block.v, attention.dtype)
            out[block.batch, block.rows, block.heads] = o.transpose(1, 0, 2)
    return out
