"""The steps of the kernels that quantise: rows stream through registers, statistics go through shared memory and workspaces.

A row of head_dim columns lies in head_dim / 16 lanes, 16 neighbouring columns each (`Frag` layout "lanes"); a warp holds 512 / head_dim
rows for every row of a lane. Rows are kept as they were loaded, in 16 bits; every step that uses them unpacks and, with `flips`, rotates
them anew (plan/rotation.py). Where rows are used twice, by a block's maximum and by its rounding, they wait in shared memory (`Staged`):
registers for a block would leave room for few warps, and so for few bytes in flight.

Workspaces are written by whole CTAs that share nothing, and read by later kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .expr import Expr
from .steps import Slot, Step

LARGEST = {"e4m3": 448.0, "int8": 127.0}
"""What the largest value that shares a scale becomes. int8 is symmetric: −128 is not used."""
LEAST_AMAX = 448.0 * 2.0**-100
"""No scale stands for less: 448 / amax, 127 / amax and descales are normal float32 numbers when every element is 0."""


@dataclass(frozen=True)
class Staged:
    """`rows` rows of a warp in the shared memory `smem`, from its row `row` on, row-major. No other warp touches them."""

    smem: str
    rows: int
    row: Expr


@dataclass(frozen=True, kw_only=True)
class StageRows(Step):
    """Asynchronous (cp.async): as LoadRows, to shared memory. Belongs to the group that the next CpCommit closes. Neighbouring lanes copy
    neighbouring 16 bytes, so that each request is of whole sectors: the warp may use the rows after the CpWait that covers them and a
    WarpSync."""

    dst: Staged
    src: str
    first_row: Expr
    limit: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class WarpSync(Step):
    """__syncwarp(): what each lane of the warp has written or waited for, all of them see."""


@dataclass(frozen=True, kw_only=True)
class LoadRows(Step):
    """Global → registers: rows first_row … of `src` (16-bit), two 16-byte loads a lane and row, all of them in flight at once; rows at or
    past `limit` are 0."""

    dst: str
    src: str
    first_row: Expr
    limit: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class LoadFlips(Step):
    """The rotation's signs for the lane's columns, as masks of the sign bits of its 16-bit values."""

    dst: str


@dataclass(frozen=True, kw_only=True)
class AbsMax(Step):
    """m = max(m, |value| of the lane's elements that are finite). `centre`: of the values minus their column's; then rows at or past
    `limit` do not count (uncentred they are 0). `or_inf`: one that is not finite makes m infinite."""

    m: str
    x: str | Staged
    flips: str | None
    first_row: Expr
    limit: Expr
    centre: str | None = None
    or_inf: bool = False


@dataclass(frozen=True, kw_only=True)
class ColumnStats(Step):
    """Of the lane's columns over its rows below `limit`: sum += value; with `high` and `fall`: high = max(high, value), fall = max(fall,
    −value). The largest |value − c| of a column is then max(high − c, fall + c), before c is known."""

    x: str
    sum: str
    high: str | None
    fall: str | None
    flips: str | None
    first_row: Expr
    limit: Expr


@dataclass(frozen=True, kw_only=True)
class ShareMax(Step):
    """The warp's maximum of m → its row of `dst`. An ordinary store."""

    m: str
    dst: Slot


@dataclass(frozen=True, kw_only=True)
class TakeMax(Step):
    """m = the maximum of all warps' in `src`, in every thread."""

    m: str
    src: Slot


@dataclass(frozen=True, kw_only=True)
class ShareColumns(Step):
    """The warp's sum or maximum of `src`, column by column → its row of `dst`. An ordinary store."""

    src: str
    dst: Slot
    op: Literal["sum", "max"]


@dataclass(frozen=True, kw_only=True)
class StoreColumns(Step):
    """The sum or maximum of all warps' rows in `src` → row `row` of the workspace `dst`: a thread a column."""

    src: Slot
    dst: str
    op: Literal["sum", "max"]
    row: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class StoreMax(Step):
    """m, the same in all threads → the workspace `dst`. One thread."""

    m: str
    dst: str
    row: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class ReduceParts(Step):
    """m = the maximum of the thread's share of the numbers first … first + count − 1 of the workspace `src`."""

    m: str
    src: str
    first: Expr
    count: Expr


@dataclass(frozen=True, kw_only=True)
class ColumnMean(Step):
    """The mean of `rows` rows from the `parts` sums of a (batch, head) → the workspace `dst`, a thread a column (no rows: 0). With `high`
    and `fall`: m = the largest |value − mean| of the thread's column, if it is finite; with `or_inf` else infinity."""

    dst: str
    sums: str
    high: str | None
    fall: str | None
    m: str
    cols: int
    parts: Expr
    rows: Expr
    head: Expr
    batch: Expr
    or_inf: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadColumns(Step):
    """The lane's columns of the workspace `src` (one row for each batch and head)."""

    dst: str
    src: str
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class Descale(Step):
    """With amax = m, at least LEAST_AMAX, and L the largest number of `dtype`: float `var` = L / amax, and amax / L · factor → `dst` (int8:
    NaN of an infinite amax); `inverse`: `var` → that workspace. One thread stores."""

    var: str
    m: str
    dst: str
    dtype: str
    factor: float
    row: Expr
    head: Expr
    batch: Expr
    inverse: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadScalar(Step):
    """float `var` = an element of the workspace `src`."""

    var: str
    src: str
    row: Expr
    head: Expr
    batch: Expr


@dataclass(frozen=True, kw_only=True)
class QuantiseRows(Step):
    """Registers or staged rows → global: rows first_row … of `x`, (value − centre) · `scale` rounded to `dst`'s dtype, as 16-byte stores;
    rows at or past `limit` are not written. e4m3 saturates at ±448; in int8 no value that is finite passes ±127, and NaN becomes −1.

    `shift`: factor · Σ value · dots of each row → that workspace, where `dots` are numbers for the lane's columns: what smoothing takes
    off every score of the row."""

    x: str | Staged
    dst: str
    scale: str
    flips: str | None
    first_row: Expr
    limit: Expr
    head: Expr
    batch: Expr
    centre: str | None = None
    dots: str | None = None
    shift: str | None = None
    factor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AddShift(Step):
    """dst += src, elements first … below `limit` of arrays of one shape, a thread an element; −∞, lse of a row that sees no key, stays."""

    dst: str
    src: str
    first: Expr
    limit: Expr


MEMORY: dict[type[Step], tuple[tuple[str, ...], tuple[str, ...]]] = {
    LoadRows: (("src",), ()),
    StageRows: (("src",), ()),
    ReduceParts: (("src",), ()),
    LoadColumns: (("src",), ()),
    LoadScalar: (("src",), ()),
    ColumnMean: (("sums", "high", "fall"), ("dst",)),
    StoreColumns: ((), ("dst",)),
    StoreMax: ((), ("dst",)),
    Descale: ((), ("dst", "inverse")),
    QuantiseRows: ((), ("dst", "shift")),
    AddShift: (("src", "dst"), ("dst",)),
}
"""Step → its fields that name global memory it reads, and that it writes (None: not used)."""
