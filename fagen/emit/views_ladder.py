"""Views of the steps that go through memory or between warps: copies through registers, workspaces, row passes, merging."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..plan import steps as st
from ..plan.counts import ROW_LOADS, copy_loads
from ..plan.expr import IntLike, as_expr, sym
from .templates import View

if TYPE_CHECKING:
    from .views import Scope

Make = Callable[[Any, "Scope"], tuple[str, View]]


def _copy(s: st.Copy, x: Scope) -> tuple[str, View]:
    tile = x.kernel.smem_of(s.dst.smem)
    col = f" + {x.c(s.col)}" if s.col is not None else ""
    return "copy", {
        "rows": tile.rows,
        "units": tile.cols * st.DTYPE_BYTES[tile.dtype] // 16,
        "threads": x.role.threads,
        "batch": copy_loads(tile, x.role.threads, s.most),
        "dst": x.slot_address(s.dst),
        "src": x.address(s.src, s, s.seq) + col,
        "stride": f"p.{s.src}_ss",
        "seq": x.c(s.seq),
        "limit": x.c(s.limit),
    }


def _store_scores(s: st.StoreScores, x: Scope) -> tuple[str, View]:
    rows = [x.c(r) for r in x.rows(s.src, s.first_row)]
    return "store_scores", {
        "dst": f"{x.address(s.dst, s, None)} + {x.c(s.col)}",
        "stride": f"p.{s.dst}_ss",
        "limit": x.c(s.limit),
        "parts": [{"src": p, "row": r} for p, r in zip(x.parts(s.src), rows)],
    }


# accumulators and rows in a workspace -------------------------------------------------------------------------------------


def _acc(frag: str, space: str, s: Any, x: Scope) -> View:
    """A tile in the workspace is the register images of its warps one after another, each block of 16 rows by itself."""
    f = x.frag(frag)
    block = f.registers // f.blocks * 32
    at = [sym("w") * (block * f.blocks) + block * i for i in range(f.blocks)]
    base = x.address(space, s, s.tile)
    return {"parts": [{"frag": p, "tile": _plus(base, a, x)} for p, a in zip(x.parts(frag), at)]}


def _plus(base: str, offset: IntLike, x: Scope) -> str:
    """base + offset, in C."""
    return base if as_expr(offset) == as_expr(0) else f"{base} + {x.c(as_expr(offset))}"


def _row_address(tensor: str, s: Any, x: Scope) -> str:
    if x.kernel.gmem_of(tensor).use == "workspace":
        return x.address(tensor, s, None)
    return f"p.{tensor} + ((i64){x.c(s.batch)} * p.hq + {x.c(s.head)}) * p.sq"


def _load_row(s: st.LoadRow, x: Scope) -> tuple[str, View]:
    rows = [x.c(r) for r in x.rows(s.dst, s.first_row)]
    parts = [{"dst": p, "row": r} for p, r in zip(x.parts(s.dst), rows)]
    return ("load_row_share" if s.share else "load_row"), {"src": _row_address(s.src, s, x), "parts": parts}


def store_row(s: st.StoreRow, x: Scope) -> tuple[str, View]:
    rows = [x.c(r) for r in x.rows(s.src, s.first_row)]
    return ("store_row_uniform" if x.frag(s.src).layout == "uniform" else "store_row"), {
        "dst": _row_address(s.dst, s, x),
        "limit": x.c(s.limit),
        "parts": [{"src": p, "row": r} for p, r in zip(x.parts(s.src), rows)],
    }


def _row_pass(s: st.RowPass, x: Scope) -> tuple[str, View]:
    values = {
        "m": f"{s.m}[0]",
        "l": f"{s.l}[0]",
        "src": x.address(s.src, s, s.row),
        "cols": x.c(s.cols),
        "loads": ROW_LOADS,
        "scores": 4 * ROW_LOADS,
        "span": 128 * ROW_LOADS,
    }
    if s.op == "exponentials":
        values |= {"dst": x.address(s.dst, s, s.row), "pack": x.pack_function(x.kernel.gmem_of(s.dst).dtype)}
    return f"row_pass_{s.op}", values


# rows ---------------------------------------------------------------------------------------------------------------------


def _rows(template: str) -> Make:
    return lambda s, x: (template, {"parts": x.zipped(dst=s.dst, src=s.src)})


def _reciprocal(s: st.Reciprocal, x: Scope) -> tuple[str, View]:
    return "reciprocal", {"parts": x.zipped(dst=s.dst, src=s.src), "scale": s.scale or "1.f"}


def _log_sum_exp(s: st.LogSumExp, x: Scope) -> tuple[str, View]:
    reference = f"(m[r] - {s.offset}.f)" if s.offset else "m[r]"
    return "log_sum_exp", {"parts": x.zipped(lse=s.lse, m=s.m, l=s.l), "reference": reference}


# between warps ------------------------------------------------------------------------------------------------------------


def _store_stats(s: st.StoreStats, x: Scope) -> tuple[str, View]:
    tile = x.kernel.smem_of(s.dst.smem)
    assert s.dst.row is not None
    dst = _plus(x.slot_address(s.dst), s.dst.row * (tile.cols * 4), x)
    parts = [{**p, "dst": _plus(dst, 64 * i, x)} for i, p in enumerate(x.zipped(m=s.m, l=s.l))]
    return "store_stats", {"rows": tile.cols // 2, "parts": parts}


def _merge_stats(s: st.MergeStats, x: Scope) -> tuple[str, View]:
    tile = x.kernel.smem_of(s.src.smem)
    frags = x.zipped(m=s.m, l=s.l, alpha=s.alpha, part=s.part, beta=s.beta)
    parts = [{**p, "src": _plus(x.slot_address(s.src), 64 * i, x)} for i, p in enumerate(frags)]
    return "merge_stats", {"warps": tile.rows, "rows": tile.cols // 2, "parts": parts}


def _store_frag(s: st.StoreFrag, x: Scope) -> tuple[str, View]:
    tile = x.kernel.smem_of(s.dst.smem)
    assert s.dst.row is not None
    block = 16 * tile.cols * 4  # bytes of 16 rows; 8 columns of them are 512
    dst = _plus(x.slot_address(s.dst), s.dst.row * (tile.cols * 4) + s.dst.col * 64, x)
    return "store_frag", {"parts": [{"src": p, "dst": _plus(dst, block * i, x)} for i, p in enumerate(x.parts(s.src))]}


def _add_parts(s: st.AddParts, x: Scope) -> tuple[str, View]:
    tile, f = x.kernel.smem_of(s.src.smem), x.frag(s.dst)
    mine = f.registers // f.blocks * 128  # bytes of a block of the warp's columns; of all columns:
    block = 16 * tile.cols * 4
    src = x.slot_address(s.src)
    parts = [{"dst": p, "src": _plus(src, sym("w") * mine + block * i, x)} for i, p in enumerate(x.parts(s.dst))]
    return "add_parts", {
        "warps": x.role.count,
        "part_bytes": f.rows * tile.cols * 4,
        "parts": parts,
    }


VIEWS: dict[type[st.Step], Make] = {
    st.Copy: _copy,
    st.StoreScores: _store_scores,
    st.StoreAcc: lambda s, x: ("store_acc", _acc(s.src, s.dst, s, x)),
    st.LoadAcc: lambda s, x: ("load_acc", _acc(s.dst, s.src, s, x)),
    st.LoadRow: _load_row,
    st.StoreRow: store_row,
    st.RowPass: _row_pass,
    st.SumRow: _rows("sum_row"),
    st.MulRow: _rows("mul_row"),
    st.Reciprocal: _reciprocal,
    st.LogSumExp: _log_sum_exp,
    st.StoreStats: _store_stats,
    st.MergeStats: _merge_stats,
    st.StoreFrag: _store_frag,
    st.AddParts: _add_parts,
}
