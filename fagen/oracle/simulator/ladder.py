"""The steps that go through memory or between warps: copies through registers, workspaces, row passes, merging of partial results.

Workspaces hold NaN until written. A register image in a workspace or in shared memory is kept by its logical rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...plan import steps as st
from ..numeric import F32, Array, rounded
from .machine import SimulatedFault

if TYPE_CHECKING:
    from .instance import Instance

LN2 = np.float32(np.log(2.0))


def _place(x: Instance, step: Any) -> tuple[int, int]:
    return x.value(step.batch), x.value(step.head)


def _store_scores(x: Instance, step: st.StoreScores) -> None:
    s = x.registers[step.src].value
    first, limit, col = x.value(step.first_row), x.value(step.limit), x.value(step.col)
    rows = max(min(len(s), limit - first), 0)
    if rows:
        x.cta.memory.workspace(step.dst, *_place(x, step), first, rows, col, s.shape[1])[:] = s[:rows]


def _store_acc(x: Instance, step: st.StoreAcc) -> None:
    _acc(x, step, step.dst, step.src)[:] = x.registers[step.src].value


def _load_acc(x: Instance, step: st.LoadAcc) -> None:
    x.registers[step.dst].write(_acc(x, step, step.src, step.dst).copy())


def _acc(x: Instance, step: st.StoreAcc | st.LoadAcc, space: str, frag: str) -> Array:
    rows, cols = x.registers[frag].shape
    first, tile = x.value(step.first_row), x.value(step.tile)
    if first < tile:
        raise SimulatedFault(f"{step.id}: rows from {first} do not belong to the tile at {tile}")
    return x.cta.memory.workspace(space, *_place(x, step), first, rows, x.value(step.col), cols)


def _load_row(x: Instance, step: st.LoadRow) -> None:
    """With `share` too: the simulator keeps a row's sum in one place."""
    dst = x.registers[step.dst]
    dst.write(x.cta.memory.workspace(step.src, *_place(x, step), x.value(step.first_row), dst.shape[0], 0, 1).copy())


def _row_pass(x: Instance, step: st.RowPass) -> None:
    row, cols = x.value(step.row), x.value(step.cols)
    m, l = x.registers[step.m], x.registers[step.l]
    s: F32 = x.cta.memory.workspace(step.src, *_place(x, step), row, 1, 0, cols)
    scale = np.float32(step.scale_log2)
    if step.op in ("max", "max_sum"):
        m.write(s.max(axis=1, keepdims=True, initial=-np.inf) * scale)
    if step.op == "max":
        return
    p = np.exp2((s.astype(np.float64) * np.float64(scale) - _reference(m.value)).astype(np.float32))  # one FFMA, rounded once
    if step.op == "exponentials":
        memory = x.cta.memory
        memory.workspace(step.dst, *_place(x, step), row, 1, 0, cols)[:] = rounded(p, memory.dtypes[step.dst])
    else:
        l.write(p.sum(axis=1, keepdims=True))


def _reference(m: Array) -> Array:
    """What exponentials are taken against: 0 for a row without a key, so that 2^(−inf − 0) is 0."""
    return np.where(np.isneginf(m), np.float32(0), m)


# rows ---------------------------------------------------------------------------------------------------------------------


def _sum_row(x: Instance, step: st.SumRow) -> None:
    """A row's value is in one place: each thread's own part is not modelled."""
    x.registers[step.dst].write(x.registers[step.src].value.copy())


def _mul_row(x: Instance, step: st.MulRow) -> None:
    x.registers[step.dst].write(x.registers[step.dst].value * x.registers[step.src].value)


def _reciprocal(x: Instance, step: st.Reciprocal) -> None:
    v = x.registers[step.src].value
    scale = np.float32(1) if step.scale is None else x.scalars[step.scale]
    x.registers[step.dst].write(np.where(v == 0, np.float32(0), scale / v))


def _log_sum_exp(x: Instance, step: st.LogSumExp) -> None:
    m, l = x.registers[step.m].value, x.registers[step.l].value
    x.registers[step.lse].write(np.where(l == 0, np.float32(-np.inf), (m - np.float32(step.offset)) * LN2 + np.log(l)))


# between warps ------------------------------------------------------------------------------------------------------------


def _store_stats(x: Instance, step: st.StoreStats) -> None:
    slot = x.slot(step.dst)
    assert step.dst.row is not None
    both = np.concatenate([x.registers[step.m].value[:, 0], x.registers[step.l].value[:, 0]])
    write_part(slot, x, x.value(step.dst.row), 0, both[None, :])


def _merge_stats(x: Instance, step: st.MergeStats) -> None:
    m, l, alpha, part, beta = (x.registers[n] for n in (step.m, step.l, step.alpha, step.part, step.beta))
    data = x.slot(step.src).data
    rows = data.shape[1] // 2
    theirs, sums = data[:, :rows].T, data[:, rows:].T  # (rows, warps)
    new = np.maximum(m.value, theirs.max(axis=1, keepdims=True))
    reference = _reference(new)
    factor = np.exp2(m.value - reference)
    alpha.write(factor)
    beta.write(np.exp2(part.value - reference))
    l.write(l.value * factor + (sums * np.exp2(theirs - reference)).sum(axis=1, keepdims=True))
    m.write(new)


def _store_frag(x: Instance, step: st.StoreFrag) -> None:
    assert step.dst.row is not None
    write_part(x.slot(step.dst), x, x.value(step.dst.row), step.dst.col, x.registers[step.src].value)


def _add_parts(x: Instance, step: st.AddParts) -> None:
    o, data = x.registers[step.dst], x.slot(step.src).data
    rows, cols = o.shape
    total = o.value
    for w in range(x.role.count):
        total = total + data[w * rows : (w + 1) * rows, x.index * cols : (x.index + 1) * cols]
    o.write(total)


def write_part(slot: Any, x: Instance, row: int, col: int, values: Array) -> None:
    """An instance's own rows and columns of a slot that all instances fill."""
    where = np.zeros(slot.data.shape, bool)
    where[row : row + values.shape[0], col : col + values.shape[1]] = True
    whole = np.zeros(slot.data.shape, np.float32)
    whole[where] = values.ravel()
    slot.write(whole, where, generic=x.name)


def _copy(x: Instance, step: st.Copy) -> None:
    slot = x.slot(step.dst)
    rows, cols = slot.data.shape
    batch, head = _place(x, step)
    seq, limit, memory = x.value(step.seq), x.value(step.limit), x.cta.memory
    if step.src in memory.inputs:
        values = memory.tile(step.src, batch, head, seq, rows=rows, limit=limit)
    else:
        values = np.zeros((rows, cols), np.float32)
        there = max(min(rows, limit - seq), 0)
        col = 0 if step.col is None else x.value(step.col)
        if there:
            values[:there] = memory.workspace(step.src, batch, head, seq, there, col, cols)
    slot.write(values, x.share(slot), generic=x.name)


PRIVATE = (st.StoreScores, st.RowPass, st.SumRow, st.MulRow, st.Reciprocal, st.LogSumExp)
ACTIONS: dict[type[st.Step], Callable[[Instance, Any], None]] = {
    st.Copy: _copy,
    st.StoreScores: _store_scores,
    st.StoreAcc: _store_acc,
    st.LoadAcc: _load_acc,
    st.LoadRow: _load_row,
    st.RowPass: _row_pass,
    st.SumRow: _sum_row,
    st.MulRow: _mul_row,
    st.Reciprocal: _reciprocal,
    st.LogSumExp: _log_sum_exp,
    st.StoreStats: _store_stats,
    st.MergeStats: _merge_stats,
    st.StoreFrag: _store_frag,
    st.AddParts: _add_parts,
}
