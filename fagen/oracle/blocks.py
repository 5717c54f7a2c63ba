"""What the reference and the baseline share: the meaning of the arguments, and their cutting into blocks that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..attention import Attention
from ..descales import Descales, as_arrays, oracle_forms
from ..errors import InputError, ScheduleError, Violation
from ..plan.kernel import DESCALES, Problem
from .numeric import F32, Array

SCORES_PER_BLOCK = 1 << 22
"""Scores held at once (32 MiB in float64)."""


def problem_of(attention: Attention, q: Array, k: Array, v: Array, v_transposed: bool = False) -> Problem:
    """The sizes of the call, after checking that the tensors fit each other and the attention.

    q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads, head_dim_v);
    with `v_transposed`: v (batch, kv_heads, head_dim_v, seqlen_k). Raises InputError naming the tensor, ScheduleError (not-yet) for a variant of attention the oracle does not know.
    """
    if attention.mask not in ("full", "causal"):
        raise ScheduleError([Violation("not-yet", "mask", f"{attention.mask!r} is not known yet", ("full", "causal"))])
    for field, off in (("softcap", None), ("sink", False)):
        if getattr(attention, field) != off:
            raise ScheduleError([Violation("not-yet", field, "is not known yet", (off,))])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, np.ndarray):
            raise InputError(name, f"is a {type(x).__name__}; expected a NumPy array")
    if v_transposed and v.ndim == 4:
        if v.shape[2] != attention.dv:
            raise InputError("v", f"has shape {v.shape}; needs V transposed: (batch, kv_heads, {attention.dv}, seqlen_k)")
        v = v.transpose(0, 3, 1, 2)
    for name, x, dim in (("q", q, attention.head_dim), ("k", k, attention.head_dim), ("v", v, attention.dv)):
        if x.ndim != 4:
            raise InputError(name, f"has {x.ndim} dimensions; needs (batch, seqlen, heads, head_dim)")
        if x is v and not v_transposed and x.shape[1:3] == (k.shape[2], dim) and x.shape[3] == k.shape[1] != dim:
            raise InputError("v", f"has shape {x.shape}, transposed; needs (batch, seqlen_k, kv_heads, head_dim_v)")
        if x.shape[3] != dim:
            raise InputError(name, f"has head_dim {x.shape[3]}; the attention's is {dim}")
        if x.shape[0] != q.shape[0]:
            raise InputError(name, f"has batch {x.shape[0]}; that of q is {q.shape[0]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise InputError("v", f"has (seqlen, heads) {v.shape[1:3]}; those of k are {k.shape[1:3]}")
    batch, sq, hq, _ = q.shape
    sk, hkv = k.shape[1:3]
    if hq and (not hkv or hq % hkv):
        raise InputError("k", f"{hq} query heads are not a multiple of its {hkv} heads")
    return Problem(batch, sq, sk, hq, hkv)


@dataclass(frozen=True)
class Block:
    """Some query rows of all heads that share a KV head. `visible` (rows, keys): which keys a row sees, None: all of them."""

    batch: int
    heads: slice
    rows: slice
    """Into the list of rows asked for."""
    q: Array
    """(group, rows, head_dim)"""
    k: Array
    """(keys, head_dim): only the keys that some row of the block sees."""
    v: Array
    score_scale: float
    """Softmax scale times those of q's and k's descales that all rows share."""
    out_scale: float
    """v's descale, if all rows share it."""
    visible: npt.NDArray[np.bool_] | None
    row_scale: Array | None = None
    """q's descales by row, (group, rows, 1)."""
    key_scale: Array | None = None
    """k's by row, (keys,)."""
    value_scale: Array | None = None
    """v's by row, (keys,)."""

    def scale(self, scores: Array) -> None:
        """From products of q and k (group, rows, keys) to scores, in place."""
        scores *= scores.dtype.type(self.score_scale)
        if self.row_scale is not None:
            scores *= self.row_scale
        if self.key_scale is not None:
            scores *= self.key_scale


def scales_of(attention: Attention, problem: Problem, descales: Descales) -> Mapping[str, F32]:
    """The descales given, as arrays: 0-d, (batch, kv_heads), or by row (batch, heads, seqlen)."""
    return as_arrays(attention, descales, oracle_forms(problem))


def row_blocks(
    attention: Attention,
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    rows: npt.NDArray[np.int64],
    dtype: npt.DTypeLike,
    scales: Mapping[str, F32],
) -> Iterator[Block]:
    """Cut the query rows `rows` of every head into blocks of at most `SCORES_PER_BLOCK` scores, values converted to `dtype`.

    Blocks in which no row sees a key are left out. `rows` should rise, so that a causal block can leave out late keys.
    """
    if problem.empty or not rows.size:
        return
    group = problem.hq // problem.hkv
    step = max(1, SCORES_PER_BLOCK // max(1, group * problem.sk))
    for b in range(problem.batch):
        for kv in range(problem.hkv):
            heads = slice(kv * group, (kv + 1) * group)
            keys, values = k[b, :, kv].astype(dtype), v[b, :, kv].astype(dtype)
            of_q, of_k, of_v = (_shared(scales.get(n), b, kv) for n in DESCALES)
            score_scale = attention.softmax_scale * of_q * of_k
            rows_of_q, *rows_of_kv = (_by_row(scales.get(n), dtype) for n in DESCALES)
            for start in range(0, len(rows), step):
                part = slice(start, min(start + step, len(rows)))
                seen, visible = _visible(attention, problem, rows[part])
                if seen:
                    queries: Any = q[b, rows[part], heads].astype(dtype).transpose(1, 0, 2)
                    row_scale = None if rows_of_q is None else rows_of_q[b, heads][:, rows[part], None]
                    key_scale, value_scale = (None if x is None else x[b, kv, :seen] for x in rows_of_kv)
                    shared = (score_scale, of_v, visible)
                    yield Block(b, heads, part, queries, keys[:seen], values[:seen], *shared, row_scale, key_scale, value_scale)


def _shared(scale: F32 | None, batch: int, head: int) -> float:
    """A descale that all rows of a KV head share; 1 where each has its own."""
    if scale is None or scale.ndim == 3:
        return 1.0
    return float(scale[batch, head] if scale.ndim else scale)


def _by_row(scale: F32 | None, dtype: npt.DTypeLike) -> Array | None:
    return scale.astype(dtype) if scale is not None and scale.ndim == 3 else None


def _visible(attention: Attention, problem: Problem, rows: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.bool_] | None]:
    """How many leading keys any of `rows` sees, and which of these each row sees (None: all)."""
    if not attention.causal:
        return problem.sk, None
    last = rows + (problem.sk - problem.sq)  # bottom-right: the last row sees the last key
    seen = int(np.clip(last.max() + 1, 0, problem.sk))
    return seen, np.arange(seen) <= last[:, None]
