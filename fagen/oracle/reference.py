"""The truth: attention in float64 on the inputs as they are (already rounded to their type)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..descales import Descales
from .blocks import problem_of, row_blocks, scales_of
from .numeric import F64, Array, matmul

if TYPE_CHECKING:
    from typing_extensions import Unpack


def reference(attention: Attention, q: Array, k: Array, v: Array, **descales: Unpack[Descales]) -> tuple[F64, F64]:
    """softmax(scale · Q Kᵀ + mask) V in float64.

    q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, head_dim or head_dim_v), of any real dtype.
    Returns out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q), the natural logarithm of the sum of
    exponentials of the scaled scores. A row that sees no key has out 0 and lse −inf. Query head h reads KV head h // group.
    `q_descale`, `k_descale`, `v_descale` (e4m3): what the tensors are multiplied by: numbers, float32 arrays (batch, kv_heads), or one
    for each row: q's (batch, heads, seqlen_q), k's and v's (batch, kv_heads, seqlen_k).

    Works on blocks: beside inputs and outputs it holds about 100 MB. A NaN or inf in a V row that is only masked (not past the
    end) may show in the output, as it may in a kernel: 0 · NaN is NaN.
    """
    return reference_rows(attention, q, k, v, np.arange(problem_of(attention, q, k, v).sq), **descales)


def reference_rows(
    attention: Attention, q: Array, k: Array, v: Array, rows: npt.ArrayLike, **descales: Unpack[Descales]
) -> tuple[F64, F64]:
    """`reference` for some query rows of every batch and head: out (batch, len(rows), heads, head_dim_v), lse (batch, heads, len(rows)).

    The way to check long sequences: the cost is len(rows) · seqlen_k.
    """
    problem = problem_of(attention, q, k, v)
    scales = scales_of(attention, problem, descales)
    index = np.asarray(rows, np.int64)
    out = np.zeros((problem.batch, len(index), problem.hq, attention.dv))
    lse = np.full((problem.batch, problem.hq, len(index)), -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        for block in row_blocks(attention, problem, q, k, v, index, np.float64, scales):
            s = matmul(block.q.reshape(-1, attention.head_dim), block.k.T).reshape(*block.q.shape[:2], -1)
            block.scale(s)
            if block.visible is not None:
                np.copyto(s, -np.inf, where=~block.visible)
            m = s.max(axis=2, keepdims=True)
            blind = np.isneginf(m)
            s -= np.where(blind, 0.0, m)
            p = np.exp(s, out=s)
            total = p.sum(axis=2, keepdims=True)
            values = block.v if block.value_scale is None else block.v * block.value_scale[:, None]
            o = matmul(p.reshape(-1, p.shape[2]), values).reshape(*p.shape[:2], -1) / np.where(blind, 1.0, total)
            out[block.batch, block.rows, block.heads] = o.transpose(1, 0, 2) * block.out_scale
            lse[block.batch, block.heads, block.rows] = np.where(blind, -np.inf, m + np.log(total))[..., 0]
    return out, lse
