"""What one step costs: matrix operations, exponentials, bytes between global memory and the SM. One entry for each kind of step.

Amounts are `Expr`s over the same symbols as the program, so that `tally.py` can sum them over its loops. Rows past a tensor's end cost
nothing; products are counted whole, since the tensor core works on padding too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InternalError
from ..plan.counts import K_BYTES, MAX_N, MMA_SYNC_N, WGMMA_SASS
from ..plan.expr import Expr, IntLike, as_expr, maximum, minimum
from ..plan.kernel import KernelPlan
from ..plan.quantise_steps import MEMORY, Staged
from ..plan.steps import DTYPE_BYTES, Frag, Role, Slot, Smem, Step

Key = tuple[str, ...]
"""("flops", unit, dtype) · ("instructions", name) · ("exponentials",) · ("in", tensor) and ("out", tensor), in bytes."""

LANES_PER_ROW = 4
"""In accumulator layouts each row's statistics are held, and computed, by four lanes."""


@dataclass(frozen=True)
class Quantity:
    """One thing a step uses up, each time an instance of its role runs it."""

    key: Key
    amount: Expr
    place: tuple[Expr, ...] = ()
    """Of bytes: coordinates of what is touched. The same place is the same data."""
    shared: bool = False
    """All instances of the role do it together: counted for the first one."""


def quantities(kernel: KernelPlan, role: Role, step: Step) -> tuple[Quantity, ...]:
    """Everything that a step (not a loop or a branch) uses. InternalError for a kind that has no entry here."""
    if step.kind in FREE:
        return ()
    if step.kind not in COSTS:
        raise InternalError(
            f"{step.id}: nobody has said what a {step.kind} costs; it needs an entry in fagen/explore/quantities.py"
        )
    return COSTS[step.kind](_Scope(kernel, role), step)


FREE = frozenset(
    # control and scalars
    ("Let", "Var", "Set", "Break", "ClaimTile", "PutTile", "GetTile", "ResetCounter")
    # synchronisation
    + ("Wait", "Arrive", "Advance", "Sync", "NArrive", "CtaSync", "ProxyFence", "CpCommit", "CpWait", "MmaWait")
    # registers and shared memory only, on the ordinary pipes
    + (
        "LoadFrag",
        "TransposeV",
        "Prefill",
        "Opaque",
        "Fill",
        "Limits",
        "Mask",
        "IntToFloat",
        "AddSums",
        "Hold",
        "Calm",
        "Move",
        "Pack",
        "Rescale",
        "ScaleShift",
        "Promote",
        "SumRow",
        "CopyRow",
    )
    + ("MulRow", "Reciprocal", "LogSumExp", "StoreStats", "StoreFrag", "AddParts")
    + ("LoadFlips", "WarpSync", "AbsMax", "ColumnStats", "ShareMax", "TakeMax", "ShareColumns")
)
"""Steps that use none of the counted resources."""


@dataclass(frozen=True)
class _Scope:
    kernel: KernelPlan
    role: Role

    def frag(self, name: str) -> Frag:
        return next(f for f in self.role.frags if f.name == name)

    def tile(self, slot: Slot) -> Smem:
        return self.kernel.smem_of(slot.smem)

    def row_bytes(self, tensor: str, cols: int) -> int:
        return cols * DTYPE_BYTES[self.kernel.gmem_of(tensor).dtype]


def _rows(rows: int, first: Expr, limit: IntLike | None) -> Expr:
    """How many of `rows` rows from `first` on lie before `limit`."""
    return as_expr(rows) if limit is None else maximum(minimum(rows, as_expr(limit) - first), 0)


def _exponentials(amount: IntLike) -> Quantity:
    return Quantity(("exponentials",), as_expr(amount))


# matrix -------------------------------------------------------------------------------------------------------------------


def _mma(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    d, b = s.frag(step.d), s.tile(step.b)
    depth = s.frag(step.a).cols if isinstance(step.a, str) else s.tile(step.a).cols
    k_steps = depth * DTYPE_BYTES[b.dtype] // K_BYTES
    if step.unit == "wgmma":
        name, number = WGMMA_SASS[b.dtype], d.blocks * -(-d.cols // MAX_N) * k_steps
    else:
        name, number = "HMMA", d.blocks * -(-d.cols // MMA_SYNC_N) * k_steps
    return (
        Quantity(("flops", step.unit, b.dtype), as_expr(2 * d.rows * d.cols * depth)),
        Quantity(("instructions", name), as_expr(number)),
    )


# exponentials -------------------------------------------------------------------------------------------------------------


def _online_softmax(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """One for each score, and alpha of each row in each lane that holds it."""
    tile = s.frag(step.s)
    return (_exponentials(tile.rows * (tile.cols + (0 if step.first else LANES_PER_ROW))),)


def _stale_softmax(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    tile = s.frag(step.s)
    return (_exponentials(tile.rows * tile.cols),)


def _merge_stats(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """alpha, beta, and the factor of every instance, in every lane that holds the row."""
    return (_exponentials(s.frag(step.m).rows * LANES_PER_ROW * (2 + s.role.count)),)


def _row_pass(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """A row of the score workspace; the corrections of "max_sum", a lane's every sixteen scores, are left out."""
    place = (step.row, step.head, step.batch)
    out = [Quantity(("in", step.src), step.cols * s.row_bytes(step.src, 1), place)]
    if step.op != "max":
        out.append(_exponentials(step.cols))
    if step.dst:
        out.append(Quantity(("out", step.dst), step.cols * s.row_bytes(step.dst, 1), place))
    return tuple(out)


# bytes --------------------------------------------------------------------------------------------------------------------


def _tma_load(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """Rows past the tensor's end are filled by TMA without being read."""
    tile = s.tile(step.dst)
    dims = next(m.dims for m in s.kernel.maps if m.tensor == step.src)
    rows, cols, length = (tile.cols, tile.rows, dims[0]) if step.transposed else (tile.rows, tile.cols, dims[1])
    amount = _rows(rows, step.seq, length) * s.row_bytes(step.src, cols)
    return (Quantity(("in", step.src), amount, (step.seq, step.head, step.batch), shared=True),)


def _copy(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """CpAsync and Copy."""
    tile, col = s.tile(step.dst), getattr(step, "col", None)
    amount = _rows(tile.rows, step.seq, step.limit) * s.row_bytes(step.src, tile.cols)
    place = (step.seq, step.head, step.batch, *(() if col is None else (col,)))
    return (Quantity(("in", step.src), amount, place, shared=True),)


def _stored(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """StoreOut, StoreScores, StoreAcc, StoreRow: a Frag to memory."""
    tile, col = s.frag(step.src), getattr(step, "col", None)
    amount = _rows(tile.rows, step.first_row, getattr(step, "limit", None)) * s.row_bytes(step.dst, tile.cols)
    place = (step.first_row, step.head, step.batch, *(() if col is None else (col,)))
    return (Quantity(("out", step.dst), amount, place),)


def _loaded(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """LoadAcc, LoadRow: memory to a Frag."""
    tile, col = s.frag(step.dst), getattr(step, "col", None)
    place = (step.first_row, step.head, step.batch, *(() if col is None else (col,)))
    return (Quantity(("in", step.src), as_expr(tile.rows * s.row_bytes(step.src, tile.cols)), place),)


def _load_scale(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    size = DTYPE_BYTES["fp32"]
    place = tuple(e for e in (step.block, step.head, step.batch) if e is not None) or (as_expr(0),)
    return tuple(Quantity(("in", name), as_expr(size), place) for name in step.factors)


def _streamed(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """LoadRows, StageRows: a warp's own rows."""
    rows, cols = _shape(s, step.dst)
    amount = _rows(rows, step.first_row, step.limit) * s.row_bytes(step.src, cols)
    return (Quantity(("in", step.src), amount, (step.first_row, step.head, step.batch)),)


def _shape(s: _Scope, rows: str | Staged) -> tuple[int, int]:
    """Rows and columns of a warp's rows."""
    if isinstance(rows, Staged):
        return rows.rows, s.kernel.smem_of(rows.smem).cols
    frag = s.frag(rows)
    return frag.rows, frag.cols


def _quantised(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """QuantiseRows: rows of 8-bit values, and of each row a number where they have one."""
    (most, cols), place = _shape(s, step.x), (step.first_row, step.head, step.batch)
    rows = _rows(most, step.first_row, step.limit)
    out = [Quantity(("out", step.dst), rows * s.row_bytes(step.dst, cols), place)]
    if step.shift is not None:
        out.append(Quantity(("out", step.shift), rows * s.row_bytes(step.shift, 1), place))
    return tuple(out)


def _numbers(s: _Scope, step: Any) -> tuple[Quantity, ...]:
    """What a CTA reads and writes of float32 workspaces, all instances together."""
    amount: IntLike = 1
    place: tuple[Expr, ...] = tuple(getattr(step, f) for f in ("row", "head", "batch") if hasattr(step, f))
    if step.kind == "ReduceParts":
        amount, place = step.count, (step.first,)
    elif step.kind == "ColumnMean":
        amount = step.parts * step.cols
    elif step.kind == "StoreColumns":
        amount = s.tile(step.src).cols
    elif step.kind == "LoadColumns":
        amount = s.frag(step.dst).cols
    elif step.kind == "AddShift":
        amount, place = _rows(s.role.threads, step.first, step.limit), (step.first,)
    size = DTYPE_BYTES["fp32"]
    return tuple(
        Quantity(
            (direction, getattr(step, f)),
            as_expr(step.cols if (direction, step.kind) == ("out", "ColumnMean") else amount) * size,
            place,
            shared=True,
        )
        for direction, names in zip(("in", "out"), MEMORY[type(step)])
        for f in names
        if getattr(step, f) is not None
    )


COSTS: Mapping[str, Callable[[_Scope, Any], tuple[Quantity, ...]]] = {
    "Mma": _mma,
    "OnlineSoftmax": _online_softmax,
    "StaleSoftmax": _stale_softmax,
    "MergeStats": _merge_stats,
    "RowPass": _row_pass,
    "TmaLoad": _tma_load,
    "CpAsync": _copy,
    "Copy": _copy,
    "StoreOut": _stored,
    "StoreScores": _stored,
    "StoreAcc": _stored,
    "StoreRow": _stored,
    "LoadAcc": _loaded,
    "LoadRow": _loaded,
    "LoadScale": _load_scale,
    **dict.fromkeys(("LoadRows", "StageRows"), _streamed),
    "QuantiseRows": _quantised,
    **dict.fromkeys(
        ("ReduceParts", "ColumnMean", "StoreColumns", "StoreMax", "Descale", "LoadScalar", "LoadColumns", "AddShift"), _numbers
    ),
}
"""Kind of step → what it uses."""
