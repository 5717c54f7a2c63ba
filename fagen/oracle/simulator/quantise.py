"""The steps that quantise: rows in registers, statistics in shared memory and workspaces. A warp's rows are one float32 array; sums are
taken in NumPy's order, everything else rounds as the GPU does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...plan import quantise_steps as qs
from ...plan import steps as st
from ..numeric import F32, Array
from ..quantise import codes_of, rotate
from .ladder import write_part

if TYPE_CHECKING:
    from .instance import Instance


def _place(x: Instance, step: Any) -> tuple[int, int]:
    return x.value(step.batch), x.value(step.head)


def _load_rows(x: Instance, step: qs.LoadRows) -> None:
    dst = x.registers[step.dst]
    first, limit = x.value(step.first_row), x.value(step.limit)
    dst.write(x.cta.memory.tile(step.src, *_place(x, step), first, rows=dst.shape[0], limit=limit))


def _load_flips(x: Instance, step: qs.LoadFlips) -> None:
    """The signs are in `rotate`; here they are only known to be loaded."""
    x.registers[step.dst].write(np.zeros(x.registers[step.dst].shape, np.float32))


def _stage_rows(x: Instance, step: qs.StageRows) -> None:
    first, limit = x.value(step.first_row), x.value(step.limit)
    values = x.cta.memory.tile(step.src, *_place(x, step), first, rows=step.dst.rows, limit=limit)
    x.stage(x.cta.slots[step.dst.smem][0], values, x.value(step.dst.row))


def _values(x: Instance, rows: str | qs.Staged, rotated: bool) -> F32:
    if isinstance(rows, qs.Staged):
        first = x.value(rows.row)
        values: F32 = x.cta.slots[rows.smem][0].data[first : first + rows.rows]
    else:
        values = x.registers[rows].value
    return rotate(values) if rotated else values


def _below(x: Instance, step: Any, rows: Array) -> Array:
    """Those of the rows that lie below the limit."""
    return rows[: max(min(len(rows), x.value(step.limit) - x.value(step.first_row)), 0)]


def _largest(values: Array, or_inf: bool) -> np.float32:
    """The largest |value| that is finite, 0 where none is; `or_inf`: infinity where one is not finite."""
    size = np.abs(values)
    finite = np.isfinite(size)
    if or_inf:
        size, finite = np.where(finite, size, np.float32(np.inf)), np.ones_like(finite)
    largest: np.float32 = size.max(initial=np.float32(0), where=finite)
    return largest


def _abs_max(x: Instance, step: qs.AbsMax) -> None:
    m, values = x.registers[step.m], _values(x, step.x, step.flips is not None)
    if step.centre is not None:
        values = _below(x, step, values - x.registers[step.centre].value)
    m.write(np.maximum(m.value, _largest(values, step.or_inf)))


def _column_stats(x: Instance, step: qs.ColumnStats) -> None:
    values = _below(x, step, _values(x, step.x, step.flips is not None))
    total = x.registers[step.sum]
    total.write(total.value + values.sum(axis=0, keepdims=True, dtype=np.float32))
    for name, v in ((step.high, values), (step.fall, -values)):
        if name is not None:
            top = x.registers[name]
            top.write(np.fmax(top.value, np.fmax.reduce(v, axis=0, keepdims=True, initial=-np.inf)))


def _share(x: Instance, step: qs.ShareMax | qs.ShareColumns) -> None:
    assert step.dst.row is not None
    value = x.registers[step.m if isinstance(step, qs.ShareMax) else step.src].value
    write_part(x.slot(step.dst), x, x.value(step.dst.row), 0, value)


def _take_max(x: Instance, step: qs.TakeMax) -> None:
    x.registers[step.m].write(x.slot(step.src).data.max(keepdims=True))


def _store_columns(x: Instance, step: qs.StoreColumns) -> None:
    """Which thread stores a column does not matter: instance 0 stands for all."""
    if x.index == 0:
        data = x.slot(step.src).data
        both = data.sum(axis=0, dtype=np.float32) if step.op == "sum" else np.fmax.reduce(data, axis=0)
        x.cta.memory.workspace(step.dst, *_place(x, step), x.value(step.row), 1, 0, data.shape[1])[:] = both


def _scalar(x: Instance, name: str, step: Any) -> Array:
    """The workspace's element."""
    return x.cta.memory.workspace(name, *_place(x, step), x.value(step.row), 1, 0, 1)


def _store_max(x: Instance, step: qs.StoreMax) -> None:
    if x.index == 0:
        _scalar(x, step.dst, step)[:] = x.registers[step.m].value


def _reduce_parts(x: Instance, step: qs.ReduceParts) -> None:
    first, count = x.value(step.first), x.value(step.count)
    numbers = x.cta.memory.spaces[step.src].reshape(-1)[first : first + count]
    x.registers[step.m].write(np.full((1, 1), numbers.max(initial=np.float32(0)), np.float32))


def _column_mean(x: Instance, step: qs.ColumnMean) -> None:
    memory, parts = x.cta.memory, x.value(step.parts)

    def parts_of(name: str) -> Array:
        return memory.workspace(name, *_place(x, step), 0, parts, 0, step.cols)

    mean = parts_of(step.sums).sum(axis=0, dtype=np.float32) / np.float32(max(x.value(step.rows), 1))
    if x.index == 0:
        memory.workspace(step.dst, *_place(x, step), 0, 1, 0, step.cols)[:] = mean
    if step.high is not None and step.fall is not None:
        high, fall = (np.fmax.reduce(parts_of(n), axis=0) for n in (step.high, step.fall))
        largest = np.fmax(high - mean, fall + mean)
        infinite = step.or_inf and x.value(step.rows) > 0
        x.registers[step.m].write(np.full((1, 1), _largest(largest, infinite), np.float32))


def _load_columns(x: Instance, step: qs.LoadColumns) -> None:
    dst = x.registers[step.dst]
    dst.write(x.cta.memory.workspace(step.src, *_place(x, step), 0, 1, 0, dst.shape[1]).copy())


def _descale(x: Instance, step: qs.Descale) -> None:
    amax = np.maximum(x.registers[step.m].value[0, 0], np.float32(qs.LEAST_AMAX))
    top = np.float32(qs.LARGEST[step.dtype])
    scale = top / amax
    x.scalars[step.var] = scale
    if x.index == 0:
        spoiled = step.dtype == "int8" and np.isinf(amax)
        _scalar(x, step.dst, step)[:] = np.float32(np.nan) if spoiled else amax / top * np.float32(step.factor)
        if step.inverse is not None:
            _scalar(x, step.inverse, step)[:] = scale


def _load_scalar(x: Instance, step: qs.LoadScalar) -> None:
    x.scalars[step.var] = np.float32(_scalar(x, step.src, step)[0, 0])


def _quantise_rows(x: Instance, step: qs.QuantiseRows) -> None:
    values = _below(x, step, _values(x, step.x, step.flips is not None))
    if not len(values):
        return
    memory, first, place = x.cta.memory, x.value(step.first_row), _place(x, step)
    if step.shift is not None and step.dots is not None:
        dots = (values * x.registers[step.dots].value).sum(axis=1, keepdims=True, dtype=np.float32)
        memory.workspace(step.shift, *place, first, len(values), 0, 1)[:] = dots * np.float32(step.factor)
    if step.centre is not None:
        values = values - x.registers[step.centre].value
    codes = codes_of(values, x.scalars[step.scale], x.cta.memory.dtypes[step.dst]).astype(np.float32)
    memory.workspace(step.dst, *place, first, len(values), 0, values.shape[1])[:] = codes


def _add_shift(x: Instance, step: qs.AddShift) -> None:
    memory, first = x.cta.memory, x.value(step.first) + 32 * x.index
    end = min(first + 32, x.value(step.limit))
    lse, shift = (a.reshape(-1)[first:end] for a in (memory.outputs[step.dst], memory.spaces[step.src]))
    np.add(lse, shift, out=lse, where=lse != -np.inf)


PRIVATE = (
    *(
        qs.WarpSync,
        qs.LoadRows,
        qs.LoadFlips,
        qs.AbsMax,
        qs.ColumnStats,
        qs.StoreMax,
        qs.ReduceParts,
        qs.ColumnMean,
        qs.LoadColumns,
        qs.Descale,
    ),
    *(qs.LoadScalar, qs.QuantiseRows, qs.AddShift),
)
ACTIONS: dict[type[st.Step], Callable[[Instance, Any], None]] = {
    qs.LoadRows: _load_rows,
    qs.StageRows: _stage_rows,
    qs.LoadFlips: _load_flips,
    qs.WarpSync: lambda x, step: None,  # an instance moves as one
    qs.AbsMax: _abs_max,
    qs.ColumnStats: _column_stats,
    qs.ShareMax: _share,
    qs.TakeMax: _take_max,
    qs.ShareColumns: _share,
    qs.StoreColumns: _store_columns,
    qs.StoreMax: _store_max,
    qs.ReduceParts: _reduce_parts,
    qs.ColumnMean: _column_mean,
    qs.LoadColumns: _load_columns,
    qs.Descale: _descale,
    qs.LoadScalar: _load_scalar,
    qs.QuantiseRows: _quantise_rows,
    qs.AddShift: _add_shift,
}
