"""Views of the steps that quantise: streamed rows, their statistics, rounding to 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..plan import quantise_steps as qs
from ..plan import steps as st
from ..plan.expr import Expr, as_expr, sym
from ..plan.rotation import signs
from .templates import View

if TYPE_CHECKING:
    from .views import Scope

Make = Callable[[Any, "Scope"], tuple[str, View]]
LANE = sym("lane")
UNPACK = {"bf16": "unpack_bf16", "fp16": "unpack_f16"}


def _lanes(frag: st.Frag) -> int:
    """Lanes that hold a row."""
    return frag.cols // st.LANE_COLUMNS


def _row(s: Any, frag: st.Frag, x: Scope) -> str:
    """The first row of this lane."""
    return x.c(s.first_row + LANE // _lanes(frag))


def _column(frag: st.Frag) -> Expr:
    """The first column of this lane."""
    return LANE % _lanes(frag) * st.LANE_COLUMNS


def _rows_address(tensor: str, s: Any, frag: st.Frag, x: Scope) -> str:
    return f"{x.address(tensor, s, None)} + {x.c(_column(frag))}"


def _frag(rows: str | qs.Staged, x: Scope) -> st.Frag:
    """The shape of a warp's rows, in registers or staged."""
    if isinstance(rows, str):
        return x.frag(rows)
    tile = x.kernel.smem_of(rows.smem)
    return st.Frag(rows.smem, rows.rows, tile.cols, tile.dtype, "lanes")


def _values(rows: str | qs.Staged, flips: str | None, x: Scope) -> View:
    """How a helper gets a lane's 16 values of a row as float32, and what its name says of it; and how the rows are handed to it."""
    frag = _frag(rows, x)
    unpack = UNPACK[frag.dtype]
    x.helpers.need(f"ptx/{unpack}")
    values: View = {"suffix": "", "warp_rows": frag.unit_rows, "flips_parameter": "", "flips": ""}
    convert = f"{unpack}(v, {{}});"
    if flips is not None:
        x.helpers.need("steps/rotate", {"unpack": unpack, "lanes": _lanes(frag), "head_dim": frag.cols})
        values |= {"suffix": "_rotated", "flips_parameter": ", const u32 (&flips)[8]", "flips": f", {flips}[0]"}
        convert = "rotated(v, {}, flips);"
    if isinstance(rows, str):
        held = {"of_row": [convert.format("x[r]")], "x_type": "const u32 (&x)[N][8]", "x": rows, "unroll": "", "count": ""}
        return values | held
    x.helpers.need("steps/ld_staged")
    of_row = ["u32 y[8];", "ld_staged(y, x, r);", convert.format("y")]
    count = f"<{frag.blocks}>"
    return (
        values
        | {"of_row": of_row, "x_type": "u32 x", "x": _part_of(rows, x, 32), "unroll": " 1", "count": count}
        | {"suffix": f"{values['suffix']}_staged"}
    )


def _part_of(rows: qs.Staged, x: Scope, unit: int) -> str:
    """Address of a lane's place in the warp's first rows, lanes of a row `unit` bytes apart."""
    frag, tile = _frag(rows, x), x.kernel.smem_of(rows.smem)
    row_bytes = tile.cols * st.DTYPE_BYTES[tile.dtype]
    lanes = _lanes(frag)
    place = rows.row * row_bytes + LANE // lanes * row_bytes + LANE % lanes * unit
    return f"smem_{rows.smem} + {x.c(place)}"


def _stage_rows(s: qs.StageRows, x: Scope) -> tuple[str, View]:
    frag = _frag(s.dst, x)
    column = LANE % _lanes(frag) * 8
    return "stage_rows", {
        "rows": frag.blocks,
        "warp_rows": frag.unit_rows,
        "half": 8 * _lanes(frag),
        "dst": _part_of(s.dst, x, 16),
        "src": f"{x.address(s.src, s, None)} + {x.c(column)}",
        "stride": f"p.{s.src}_ss",
        "row": _row(s, frag, x),
        "limit": x.c(s.limit),
    }


def _load_flips(s: qs.LoadFlips, x: Scope) -> tuple[str, View]:
    frag = x.frag(s.dst)
    return "load_flips", {"dst": f"{s.dst}[0]", "lanes": _lanes(frag), "signs": _flips(frag.cols)}


def _flips(head_dim: int) -> list[str]:
    """For every lane of a row 16 bits, the lowest for its first column: 1 where the rotation flips the sign."""
    pattern = signs(head_dim)
    words = []
    for lane in range(head_dim // st.LANE_COLUMNS):
        of_lane = pattern[lane * st.LANE_COLUMNS : (lane + 1) * st.LANE_COLUMNS]
        words.append(f"0x{sum((sign < 0) << i for i, sign in enumerate(of_lane)):04x}")
    return words


def _load_rows(s: qs.LoadRows, x: Scope) -> tuple[str, View]:
    frag = x.frag(s.dst)
    return "load_rows", {
        "dst": s.dst,
        "src": _rows_address(s.src, s, frag, x),
        "stride": f"p.{s.src}_ss",
        "row": _row(s, frag, x),
        "limit": x.c(s.limit),
        "warp_rows": frag.unit_rows,
    }


def _abs_max(s: qs.AbsMax, x: Scope) -> tuple[str, View]:
    frag = _frag(s.x, x)
    values = _values(s.x, s.flips, x) | {"m": f"{s.m}[0]"} | _order(s, x)
    values["suffix"] += "_or_inf" if s.or_inf else ""
    if s.centre is None:
        return "abs_max", values
    return "abs_max_centred", values | {"centre": f"{s.centre}[0]", "row": _row(s, frag, x), "limit": x.c(s.limit)}


def _order(s: qs.AbsMax | qs.ColumnMean, x: Scope) -> View:
    """The functions by which sizes are compared as integers."""
    suffix = "_or_inf" if s.or_inf else ""
    x.helpers.need(f"steps/abs_order{suffix}")
    rule = "; infinite where one of them is not finite" if s.or_inf else ", of those that are finite"
    return {"order": f"abs_order{suffix}", "of_order": f"abs_of_order{suffix}", "rule": rule}


def _column_stats(s: qs.ColumnStats, x: Scope) -> tuple[str, View]:
    frag = x.frag(s.x)
    values = _values(s.x, s.flips, x) | {"sum": f"{s.sum}[0]", "row": _row(s, frag, x), "limit": x.c(s.limit)}
    if s.high is None:
        return "column_sums", values
    return "column_stats", values | {"high": f"{s.high}[0]", "fall": f"{s.fall}[0]"}


def _part(slot: st.Slot, x: Scope) -> str:
    """The warp's row of a ring of float32 rows."""
    assert slot.row is not None
    return f"{x.slot_address(slot)} + {x.c(slot.row * (x.kernel.smem_of(slot.smem).cols * 4))}"


def _share_max(s: qs.ShareMax, x: Scope) -> tuple[str, View]:
    return "share_max", {"m": f"{s.m}[0]", "dst": _part(s.dst, x)}


def _take_max(s: qs.TakeMax, x: Scope) -> tuple[str, View]:
    return "take_max", {"m": f"{s.m}[0]", "src": x.slot_address(s.src), "warps": x.kernel.smem_of(s.src.smem).rows}


COMBINE = {"sum": "a + b", "max": "fmaxf(a, b)"}


def _share_columns(s: qs.ShareColumns, x: Scope) -> tuple[str, View]:
    lanes = _lanes(x.frag(s.src))
    x.helpers.need("steps/combine", {"op": s.op, "both": COMBINE[s.op]})
    return "share_columns", {"op": s.op, "src": f"{s.src}[0]", "dst": _part(s.dst, x), "lanes": lanes}


def _store_columns(s: qs.StoreColumns, x: Scope) -> tuple[str, View]:
    tile = x.kernel.smem_of(s.src.smem)
    x.helpers.need("steps/combine", {"op": s.op, "both": COMBINE[s.op]})
    return "store_columns", {
        "op": s.op,
        "src": x.slot_address(s.src),
        "dst": x.address(s.dst, s, s.row),
        "warps": tile.rows,
        "cols": tile.cols,
    }


def _store_max(s: qs.StoreMax, x: Scope) -> tuple[str, View]:
    return "store_max", {"m": f"{s.m}[0][0]", "dst": x.address(s.dst, s, s.row)}


def _reduce_parts(s: qs.ReduceParts, x: Scope) -> tuple[str, View]:
    first = "" if s.first == as_expr(0) else f" + {x.c(s.first)}"
    return "reduce_parts", {
        "m": f"{s.m}[0]",
        "src": f"p.{s.src}{first}",
        "count": x.c(s.count),
        "threads": x.role.threads,
    }


def _column_mean(s: qs.ColumnMean, x: Scope) -> tuple[str, View]:
    values: View = {
        "m": f"{s.m}[0]",
        "dst": x.address(s.dst, s, None),
        "sums": x.address(s.sums, s, None),
        "parts": x.c(s.parts),
        "rows": x.c(s.rows),
        "cols": s.cols,
    }
    if s.high is None:
        return "column_mean", values
    assert s.fall is not None
    known = {"high": x.address(s.high, s, None), "fall": x.address(s.fall, s, None)}
    rule = {"otherwise": "infinity", "if_rows": "if (rows > 0) "} if s.or_inf else {"otherwise": "0", "if_rows": ""}
    return "column_mean_and_max", values | known | rule | _order(s, x)


def _load_columns(s: qs.LoadColumns, x: Scope) -> tuple[str, View]:
    frag = x.frag(s.dst)
    return "load_columns", {"dst": f"{s.dst}[0]", "src": f"{x.address(s.src, s, None)} + {x.c(_column(frag))}"}


def _descale(s: qs.Descale, x: Scope) -> tuple[str, View]:
    inverse = [] if s.inverse is None else [x.address(s.inverse, s, s.row)]
    largest = f"{qs.LARGEST[s.dtype]:.0f}.f"
    factor = "" if s.factor == 1.0 else f" * {s.factor:.9g}f" if "." in f"{s.factor:.9g}" else f" * {s.factor:.9g}.f"
    descale = f"__fdiv_rn(amax, {largest}){factor}"
    return "descale", {
        "var": s.var,
        "m": f"{s.m}[0][0]",
        "dst": x.address(s.dst, s, s.row),
        "inverse": inverse,
        "largest": largest,
        "descale": f"amax < -NEG_INF ? {descale} : __int_as_float(0x7fffffff)" if s.dtype == "int8" else descale,
        "least": f"{qs.LEAST_AMAX:.9g}f",
    }


def _load_scalar(s: qs.LoadScalar, x: Scope) -> tuple[str, View]:
    return "load_scalar", {"var": s.var, "src": x.address(s.src, s, s.row)}


def _quantise_rows(s: qs.QuantiseRows, x: Scope) -> tuple[str, View]:
    frag = _frag(s.x, x)
    values = _values(s.x, s.flips, x)
    dtype = x.kernel.gmem_of(s.dst).dtype
    suffix, parameters, arguments, before = values["suffix"], "", "", []
    four = [f"v[4 * i{f' + {n}' if n else ''}]" for n in range(4)]
    if dtype == "int8":
        suffix += "_int8"
        helper, pack = "steps/pack_int8", f"pack_int8({', '.join(four)}, scale)"
    else:
        helper, pack = "ptx/cvt_pack_e4m3", f"pack_e4m3({', '.join(f'{v} * scale' for v in four)})"
    if s.centre is not None:
        suffix += "_centred"
        parameters, arguments = ", const float (&centre)[16]", f", {s.centre}[0]"
        before = ["for (int i = 0; i < 16; ++i) v[i] -= centre[i];"]
    if s.shift is not None:
        suffix += "_shifting"
        lanes, number = _lanes(frag), f"{s.factor:.9g}"
        number += "f" if any(c in number for c in ".e") else ".f"
        x.helpers.need("steps/row_dot", {"lanes": lanes})
        parameters, arguments = ", const float (&dots)[16], float* shifts", f", {s.dots}[0], {x.address(s.shift, s, None)}"
        before = [
            "const float dot = row_dot(v, dots);",
            f"if (threadIdx.x % {lanes} == 0 && row + r * {frag.unit_rows} < limit) shifts[row + r * {frag.unit_rows}] = dot * {number};",
        ]
    x.helpers.need(helper)
    return "quantise_rows", values | {
        "suffix": suffix,
        "parameters": parameters,
        "arguments": arguments,
        "before": before,
        "dtype": dtype,
        "pack": pack,
        "dst": _rows_address(s.dst, s, frag, x),
        "stride": f"p.{s.dst}_ss",
        "scale": s.scale,
        "row": _row(s, frag, x),
        "limit": x.c(s.limit),
    }


def _add_shift(s: qs.AddShift, x: Scope) -> tuple[str, View]:
    return "add_shift", {"dst": f"p.{s.dst}", "src": f"p.{s.src}", "first": x.c(s.first), "limit": x.c(s.limit)}


VIEWS: dict[type[st.Step], Make] = {
    qs.LoadRows: _load_rows,
    qs.StageRows: _stage_rows,
    qs.WarpSync: lambda s, x: ("warp_sync", {}),
    qs.LoadFlips: _load_flips,
    qs.AbsMax: _abs_max,
    qs.ColumnStats: _column_stats,
    qs.ShareMax: _share_max,
    qs.TakeMax: _take_max,
    qs.ShareColumns: _share_columns,
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
