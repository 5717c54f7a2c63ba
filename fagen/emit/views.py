"""One function per step kind: a step's fields as the C that its template prints. All numbers come from the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InternalError
from ..plan import matrix
from ..plan import steps as st
from ..plan.counts import copy_loads, scarce
from ..plan.expr import Expr, as_expr, sym
from ..plan.kernel import KernelPlan
from ..plan.layout import ACC64, LAYOUTS, WARP
from ..plan.text import calm_if
from . import debug, trace, views_ladder, views_quantise, views_removal
from .templates import Helpers, View, path

PACK = {"bf16": ("pack_bf16", "bf16x2"), "fp16": ("pack_f16", "f16x2")}
PTX_TYPE = {"bf16": "bf16", "fp16": "f16", "e4m3": "e4m3", "int8": "s8"}
ACCUMULATOR = {"fp32": ("float", "f", "f32"), "i32": ("int", "r", "s32")}
"""Its type in C, as an operand of asm, and in PTX."""


class Scope:
    """What a step's view may look up: its kernel and role, how symbols are spelled, and the device functions collected so far."""

    def __init__(self, kernel: KernelPlan, role: st.Role, helpers: Helpers):
        self.kernel, self.role, self.helpers = kernel, role, helpers
        self._params = {p.name for p in kernel.params}
        self._divisors = {p.value: f"p.{p.name}" for p in kernel.params if p.ctype == "divisor"}
        self._frags = {f.name: f for f in role.frags}
        self._cursors = {c.name: c for c in role.cursors}

    def thread(self, index: str) -> str:
        """A thread's index as a helper with many addresses should spell it: taken anew in each call where registers are scarce."""
        if not scarce(self.role):
            return index
        self.helpers.need("ptx/fresh")
        return f"fresh({index})"

    def c(self, e: Expr) -> str:
        return e.c(lambda name: f"p.{name}" if name in self._params else name, self._divisors)

    def frag(self, name: str) -> st.Frag:
        return self._frags[name]

    def parts(self, name: str) -> list[str]:
        """C names of a Frag's blocks of 16 (or 64) rows."""
        f = self.frag(name)
        return [name] if f.unit_rows == 64 else [f"{name}[{i}]" for i in range(f.blocks)]

    def zipped(self, **frags: str) -> list[dict[str, str]]:
        """Blocks of several Frags side by side: parts(s="S", m="m_ref") is [{"s": "S[0]", "m": "m_ref[0]"}, …]."""
        columns = [self.parts(f) for f in frags.values()]
        return [dict(zip(frags, row)) for row in zip(*columns)]

    def slot_address(self, slot: st.Slot) -> str:
        """Address of the tile in shared memory."""
        tile = self.kernel.smem_of(slot.smem)
        if slot.cursor is None or self._cursors[slot.cursor].stages == 1:
            return f"smem_{slot.smem}"
        return f"smem_{slot.smem} + {slot.cursor}.slot * {tile.tile_bytes}"

    def descriptor(self, slot: st.Slot, units: int) -> str:
        """Matrix descriptor of the tile; `units` of 16 bytes lie between slots."""
        if self.kernel.smem_of(slot.smem).stages == 1:
            return f"desc_{slot.smem}"
        return f"desc_{slot.smem} + {slot.cursor}.slot * {units}"

    def bar_address(self, bar: str, cursor: str) -> str:
        return bar if self.kernel.mbar_of(bar).stages == 1 else f"{bar} + 8 * {cursor}.slot"

    def rows(self, frag: str, first_row: Expr) -> list[Expr]:
        """Of each block, the row that this thread's first elements belong to; the second row is 8 further."""
        f = self.frag(frag)
        return [first_row + as_expr(f.unit_rows * i) + LAYOUTS[f.layout].row_thread for i in range(f.blocks)]

    def address(self, tensor: str, step: Any, first: Expr | None) -> str:
        """C address of a tensor or workspace at a step's batch and head, and at a first row; 64-bit, since the strides are."""
        return _global(tensor, step, self, first)

    def pack_function(self, dtype: str) -> str:
        return _pack_function(dtype, self)


def view(step: st.Step, scope: Scope) -> tuple[str, View]:
    """The template of a step, and what it substitutes; device functions it calls are put into scope.helpers."""
    make = _VIEWS.get(type(step))
    if make is None:
        raise InternalError(f"no template for step kind {step.kind}")
    template, values = make(step, scope)
    scope.helpers.need(path(template), values)
    return template, values


# control ----------------------------------------------------------------------------------------------------------------


def _assign(template: str) -> Callable[[Any, Scope], tuple[str, View]]:
    return lambda s, x: (template, {"var": s.var, "value": x.c(s.value)})


def _loop(s: st.Loop, x: Scope) -> tuple[str, View]:
    if isinstance(s.step, Expr):
        condition, advance = f"{s.var} < {x.c(s.last + 1)}", f"{s.var} += {x.c(s.step)}"
    elif s.step > 0:
        condition, advance = f"{s.var} < {x.c(s.last + 1)}", f"++{s.var}" if s.step == 1 else f"{s.var} += {s.step}"
    else:
        condition, advance = f"{s.var} >= {x.c(s.last)}", f"--{s.var}" if s.step == -1 else f"{s.var} -= {-s.step}"
    return "loop", {"var": s.var, "first": x.c(s.first), "condition": condition, "advance": advance}


def _break(s: st.Break, x: Scope) -> tuple[str, View]:
    return "break", {"cond": x.c(s.cond)}


def _if(s: st.If, x: Scope) -> tuple[str, View]:
    one_line = not s.orelse and len(s.then) == 1 and isinstance(s.then[0], st.Arrive)
    return ("if_else" if s.orelse else "if_short" if one_line else "if"), {"cond": x.c(s.cond)}


# copies -----------------------------------------------------------------------------------------------------------------


def _tma_load(s: st.TmaLoad, x: Scope) -> tuple[str, View]:
    assert s.dst.cursor is not None
    x.helpers.need(f"ptx/createpolicy_{s.hint}")
    values = {
        "bar": x.bar_address(s.full, s.dst.cursor),
        "bytes": x.kernel.mbar_of(s.full).tx_bytes,
        "dst": x.slot_address(s.dst),
        "src": s.src,
        "seq": x.c(s.seq),
        "head": x.c(s.head),
        "batch": x.c(s.batch),
        "policy": s.hint if s.keeps_hint else f"l2_{s.hint}()",
    }
    if not s.transposed:
        return "tma_load", values
    tile = x.kernel.smem_of(s.dst.smem)
    keys, bytes_ = tile.chunk_bytes, tile.rows * tile.chunk_bytes  # 8-bit values
    chunks = [{"dst": f"{values['dst']} + {i * bytes_}", "seq": x.c(s.seq + i * keys)} for i in range(tile.chunks)]
    return "tma_load_transposed", values | {"chunks": chunks}


def _global(tensor: str, s: Any, x: Scope, first: Expr | None) -> str:
    """C address of a (batch, seq, heads, dim) tensor at a batch and head, and at a first row; 64-bit, since the strides are."""
    terms = [sym(f"{tensor}_sb"), sym(f"{tensor}_sh"), sym(f"{tensor}_ss")]
    index = [s.batch, s.head, first]
    return f"p.{tensor}" + "".join(f" + {x.c(i * t)}" for i, t in zip(index, terms) if i not in (None, as_expr(0)))


def _cp_async(s: st.CpAsync, x: Scope) -> tuple[str, View]:
    tile = x.kernel.smem_of(s.dst.smem)
    return ("cp_async_batch" if scarce(x.role) else "cp_async"), {
        "rows": tile.rows,
        "units": tile.cols * st.DTYPE_BYTES[tile.dtype] // 16,
        "threads": x.role.threads,
        "batch": copy_loads(tile, x.role.threads, st.MANY_COPIES),
        "dst": x.slot_address(s.dst),
        "src": _global(s.src, s, x, s.seq),
        "stride": f"p.{s.src}_ss",
        "seq": x.c(s.seq),
        "limit": x.c(s.limit),
    }


def _load_frag(s: st.LoadFrag, x: Scope) -> tuple[str, View]:
    tile = x.kernel.smem_of(s.src.smem)
    assert s.src.row is not None
    whole = x.frag(s.dst).unit_rows == 64
    row = s.src.row + WARP * 16 if whole else s.src.row
    at = matrix.ldmatrix_a(tile, as_expr(0) if whole else sym("i"))
    return ("load_frag_rows" if whole else "load_frag"), {"dst": s.dst, "src": x.slot_address(s.src), "row": x.c(row), "at": at.c()}


def _transpose_v(s: st.TransposeV, x: Scope) -> tuple[str, View]:
    """Strips of 16 columns; a unit is an ldmatrix of 32 keys."""
    raw, turned = x.kernel.smem_of(s.src.smem), x.kernel.smem_of(s.dst.smem)
    lane = sym("lane")
    unit = sym("strip") % (raw.chunk_bytes // 16)
    place = unit ^ (lane % 8 if raw.chunk_bytes == 128 else lane // 2 % 4)
    source = sym("strip") // (raw.chunk_bytes // 16) * (raw.rows * raw.chunk_bytes) + lane * raw.chunk_bytes + place * 16
    return "transpose_v", {
        "src": x.slot_address(s.src),
        "dst": x.slot_address(s.dst),
        "first": "w",
        "strips": turned.rows // 16,
        "warps": x.role.count,
        "units": turned.cols // 32,
        "batch": s.at_once,
        "source": source.c(),
        "keys_bytes": 32 * raw.chunk_bytes,
        "chunk": turned.rows * turned.chunk_bytes,
    }


def _load_scale(s: st.LoadScale, x: Scope) -> tuple[str, View]:
    def descale(name: str) -> str:
        steps = ((s.batch, sym(f"{name}_sb")), (s.head, sym(f"{name}_sh")), (s.block, as_expr(1)))
        terms = [index * stride for index, stride in steps if index is not None]
        return f"descale(p.{name}, {x.c(sum(terms[1:], terms[0])) if terms else '0'}, p.{name}_value)"

    known = [*(["SCALE_LOG2"] if s.constant != 1 else []), *([s.times] if s.times else [])]
    declare = f"{s.declare} " if s.declare else ""
    product = " * ".join([*known, *map(descale, s.factors)])
    if s.least is not None:
        x.helpers.need("steps/at_least")
        product = f"at_least({product}, {s.least:.9g}f)"
    return "load_scale", {"declare": declare, "var": s.var, "product": product}


def _scale_shift(s: st.ScaleShift, x: Scope) -> tuple[str, View]:
    return "scale_shift", {"shift": s.shift, "weight": s.weight, "scale": s.scale, "least": f"{s.least!r}f"}


def _softmax_scales(s: st.OnlineSoftmax | st.StaleSoftmax) -> View:
    """Where a softmax helper differs with a shift (see ScaleShift): its parameters, the exponent of a row's largest score, what the
    reference is lowered by, and what becomes of the row sums."""
    lowered = [*(["shift"] if s.shift else []), *([f"{s.offset}.f"] if s.offset else [])]
    values: View = {
        "scale": s.scale or "SCALE_LOG2",
        "arguments": f", {s.shift}, {s.weight}" if s.shift else "",
        "parameters": ", float shift, float weight" if s.shift else "",
        "lower": f"    reference[r] -= {' + '.join(lowered)};\n" if lowered else "",
    }
    if s.shift:
        raised = {"first": "m[r] = fmaf(m[r], scale, shift)", "top": "fmaf(top[r], scale, shift)"}
        return (
            values
            | raised
            | {
                "sum": "sum[r] * weight",
                "sums": [f"(even[{r}] + odd[{r}]) * weight" for r in range(2)],
                "weigh": ["l[0] *= weight, l[1] *= weight;"],
            }
        )
    return values | {
        "first": "m[r] *= scale",
        "top": "top[r] * scale",
        "sum": "sum[r]",
        "sums": [f"even[{r}] + odd[{r}]" for r in range(2)],
        "weigh": [],
    }


def _store_out(s: st.StoreOut, x: Scope) -> tuple[str, View]:
    pack = _pack_function(x.kernel.gmem_of(s.dst).dtype, x)
    rows = [x.c(r) for r in x.rows(s.src, s.first_row)]
    exchanged = x.frag(s.src).cols % 32 == 0
    return ("store_out" if exchanged else "store_out_narrow"), {
        "dst": _global(s.dst, s, x, None) + (f" + {x.c(s.col)}" if s.col is not None else ""),
        "stride": f"p.{s.dst}_ss",
        "limit": x.c(s.limit),
        "pack": pack,
        "parts": [{"src": p, "row": r} for p, r in zip(x.parts(s.src), rows)],
    }


def _pack_function(dtype: str, x: Scope) -> str:
    name, kind = PACK[dtype]
    x.helpers.need("ptx/cvt_pack", {"name": name, "type": kind})
    return name


# tiles, synchronisation -------------------------------------------------------------------------------------------------


def _claim(s: st.ClaimTile, x: Scope) -> tuple[str, View]:
    return "claim_tile", {"var": s.var, "counter": s.counter}


def _put_tile(s: st.PutTile, x: Scope) -> tuple[str, View]:
    return "put_tile", {"dst": x.slot_address(s.dst), "value": x.c(s.value)}


def _get_tile(s: st.GetTile, x: Scope) -> tuple[str, View]:
    return "get_tile", {"var": s.var, "src": x.slot_address(s.src)}


def _wait(s: st.Wait, x: Scope) -> tuple[str, View]:
    return "wait", {"bar": x.bar_address(s.bar, s.cursor), "phase": debug.parity(s)}


def _arrive(s: st.Arrive, x: Scope) -> tuple[str, View]:
    if s.behind is not None and s.who != "warp":
        raise InternalError("an arrival of one thread behind a load has no template")
    behind = None if s.behind is None else x.c(sym(s.behind))
    return ("arrive" if s.who == "warp" else "arrive_thread"), {"bar": x.bar_address(s.bar, s.cursor), "behind": behind}


def _named(template: str) -> Callable[[Any, Scope], tuple[str, View]]:
    def make(s: Any, x: Scope) -> tuple[str, View]:
        bar = x.kernel.nbar_of(s.bar)
        return template, {"id": x.c(bar.first_id + s.index), "threads": bar.threads}

    return make


# matrix -----------------------------------------------------------------------------------------------------------------


def _mma(s: st.Mma, x: Scope) -> tuple[str, View]:
    return _mma_wgmma(s, x) if s.unit == "wgmma" else _mma_sync(s, x)


def _mma_title(s: st.Mma) -> str:
    a = s.a if isinstance(s.a, str) else s.a.smem
    return f"{s.d} {'+=' if s.accumulate else '='} {a} · {s.b.smem}{'' if s.trans_b else 'ᵀ'}, the whole tile"


def _mma_wgmma(s: st.Mma, x: Scope) -> tuple[str, View]:
    d, tile = x.frag(s.d), x.kernel.smem_of(s.b.smem)
    depth = matrix.k_depth(tile.dtype)
    b = matrix.wgmma_operand(tile, s.trans_b)
    k_steps = (x.frag(s.a) if isinstance(s.a, str) else x.kernel.smem_of(s.a.smem)).cols // depth
    if isinstance(s.a, str):
        a, a_param, a_at_k = s.a, f"const u32 (&a)[{x.frag(s.a).registers}]", "a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]"
    else:
        source = matrix.wgmma_operand(x.kernel.smem_of(s.a.smem), False)
        a, a_param, a_at_k = x.descriptor(s.a, source.slot), "u64 a", f"a + {source.at_k.c()}"
    suffix = ("_rs" if isinstance(s.a, str) else "_ss") + ("_t" if s.trans_b else "")
    instruction = f"wgmma_m64n{d.cols}k{depth}{suffix}"
    if tile.dtype == "int8":
        instruction += "_s8"
        x.helpers.need("steps/pin")
        x.helpers.need("steps/pin_int")
    x.helpers.need("ptx/wgmma_mma_async", _wgmma_instruction(instruction, d, depth, tile.dtype, s))
    return "mma_wgmma", {
        "function": s.name,
        "title": _mma_title(s),
        "d": s.d,
        "a": a,
        "b": x.descriptor(s.b, b.slot),
        "regs": d.registers,
        "c_type": ACCUMULATOR[d.dtype][0],
        "a_param": a_param,
        "a_at_k": a_at_k,
        "b_at_k": b.at_k.c(),
        "k_steps": k_steps,
        "instruction": instruction,
        "accumulate": "1" if s.accumulate else "k != 0",
    }


def _wgmma_instruction(name: str, d: st.Frag, k: int, dtype: str, s: st.Mma) -> View:
    """Operand numbers of one wgmma: accumulators first, then A (a descriptor, or four registers), B's descriptor, the predicate; `tail`:
    signs of A and B, which integers do not have, and transpositions, which 8-bit operands do not have (PTX ISA 9.7.15.5.2)."""
    n, regs = d.cols, d.registers
    c_type, register, ptx_d = ACCUMULATOR[d.dtype]
    trans = f", {int(s.trans_b)}" if st.DTYPE_BYTES[dtype] == 2 else ""
    if isinstance(s.a, str):
        width, params, tail = 4, "u32 a0, u32 a1, u32 a2, u32 a3", trans
        operand = "{" + ", ".join(f"%{regs + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(a{i})' for i in range(4))
    else:
        width, params, tail, operand, inputs = 1, "u64 a", trans and f", 0{trans}", f"%{regs}", '"l"(a)'
    return {
        "name": name,
        "n": n,
        "k": k,
        "c_type": c_type,
        "register": register,
        "d": ptx_d,
        "ab": PTX_TYPE[dtype],
        "regs": regs,
        "a_params": params,
        "a_operand": operand,
        "a_inputs": inputs,
        "b_at": regs + width,
        "p_at": regs + width + 1,
        "tail": tail if dtype == "int8" else f", 1, 1{tail}",
    }


def _mma_sync(s: st.Mma, x: Scope) -> tuple[str, View]:
    d, tile = x.frag(s.d), x.kernel.smem_of(s.b.smem)
    x.helpers.need("ptx/mma_m16n8k16", {"ab": PTX_TYPE[tile.dtype]})
    load = "ldmatrix_trans" if s.trans_b else "ldmatrix"
    values = {
        "function": s.name,
        "lane": x.thread("threadIdx.x % 32"),
        "title": _mma_title(s),
        "d": s.d,
        "b": _part_address(s.b, x),
        "regs": d.registers // d.blocks,
        "k_steps": (x.frag(s.a) if isinstance(s.a, str) else x.kernel.smem_of(s.a.smem)).cols // 16,
        "n_steps": d.cols // 16,
        "load_b": f"{load}(b, tile + {matrix.ldmatrix_b(tile, s.trans_b).c()})",
        "before": [] if s.accumulate else ["for (int i = 0; i < BLOCKS; ++i) fill(d[i], 0.f);"],
    }
    if isinstance(s.a, str):
        return "mma_sync_frag", values | {"a": s.a, "a_regs": x.frag(s.a).registers // d.blocks}
    source = x.kernel.smem_of(s.a.smem)
    assert s.a.row is not None
    load_a = f"ldmatrix(a[i], a_tile + {matrix.ldmatrix_a(source, sym('i')).c()})"
    return "mma_sync_smem", values | {"a": x.slot_address(s.a), "row": x.c(s.a.row), "load_a": load_a}


def _part_address(slot: st.Slot, x: Scope) -> str:
    """Of the B operand that starts at a row (a multiple of 8) and a chunk of the tile."""
    tile = x.kernel.smem_of(slot.smem)
    column = slot.col * st.DTYPE_BYTES[tile.dtype] // tile.chunk_bytes * tile.rows * tile.chunk_bytes
    offset = column + (slot.row * tile.chunk_bytes if slot.row is not None else as_expr(0))
    return x.slot_address(slot) + (f" + {x.c(offset)}" if offset != as_expr(0) else "")


def _mma_wait(s: st.MmaWait, x: Scope) -> tuple[str, View]:
    return "mma_wait", {"pending": s.pending, "pins": [f for f in s.ready if x.frag(f).dtype in ACCUMULATOR]}


# registers --------------------------------------------------------------------------------------------------------------


def _fill(s: st.Fill, x: Scope) -> tuple[str, View]:
    return "fill", {"parts": x.parts(s.dst), "value": FILL[s.value]}


FILL = {0.0: "0.f", 1.0: "1.f", float("-inf"): "NEG_INF"}


def _limits(s: st.Limits, x: Scope) -> tuple[str, View]:
    column = ACC64.col_thread  # the same in acc16
    parts = []
    for name, row in zip(x.parts(s.dst), x.rows(s.dst, s.first_row)):
        first, second = (x.c(s.limit.substitute({"row": r})) for r in (row, row + 8))
        parts.append({"dst": name, "first": first, "second": second})
    return "limits", {"parts": parts, "column": column.c()}


def _mask(s: st.Mask, x: Scope) -> tuple[str, View]:
    column = LAYOUTS[x.frag(s.s).layout].col_element.c()
    return "mask", {"parts": x.zipped(s=s.s, limits=s.limits), "first_key": x.c(s.first_key), "column": column}


def _online_softmax(s: st.OnlineSoftmax, x: Scope) -> tuple[str, View]:
    one = 127 + s.offset  # the exponent, as float32 has it, of a sum of one largest value
    values = _softmax_scales(s) | {"lift": s.lift, "one": one, "most": one + s.lift, "mirror": one + 127}
    if s.lift:
        x.helpers.need("steps/sum_row")
    if s.first:
        return "first_softmax", values | {"parts": x.zipped(s=s.s, m=s.m, l=s.l)}
    return "online_softmax", values | {"parts": x.zipped(s=s.s, m=s.m, l=s.l, alpha=s.alpha)}


STALE_LIMIT = {"bf16": "65536.f", "fp16": "65504.f"}
"""Row sums above which a value might not fit P's type (fp16), or its precision might suffer (bf16 has the range of float32)."""


def _stale_softmax(s: st.StaleSoftmax, x: Scope) -> tuple[str, View]:
    dtype = x.frag(s.e).dtype
    values: View = {
        "parts": x.zipped(e=s.e, s=s.s, m=s.m, part=s.part),
        "fits": s.fits,
        "calm": s.calm,
        **_softmax_scales(s),
    }
    if dtype == "e4m3":
        x.helpers.need("ptx/cvt_pack_e4m3")
        if x.frag(s.e).layout != "a64_e4m3perm":
            raise InternalError("a stale reference with a V given transposed has no template")
        return "stale_softmax_e4m3", values
    return "stale_softmax", values | {"pack": _pack_function(dtype, x), "limit": STALE_LIMIT[dtype]}


def _calm(s: st.Calm, x: Scope) -> tuple[str, View]:
    if s.alpha is None:
        values: View = {"var": s.var, "declare": "bool " if s.declare else "", "limits": None, "why": calm_if(s)}
        if s.limits is not None:
            assert s.first_key is not None
            # Limits are relative to the thread's first column.
            values |= {"limits": x.parts(s.limits)[0], "last": x.c(s.first_key + (s.seen - 1) - ACC64.col_thread)}
        return "calm_start", values
    return "calm", {"var": s.var, "alpha": x.parts(s.alpha)[0], "least": f"{s.least!r}f", "why": calm_if(s)}


def _pack(s: st.Pack, x: Scope) -> tuple[str, View]:
    p = x.frag(s.p)
    if p.dtype == "e4m3":
        x.helpers.need("ptx/cvt_pack_e4m3")
        return ("pack_e4m3" if p.layout == "a64_e4m3perm" else "pack_e4m3_exchanged"), {"parts": x.zipped(p=s.p, s=s.s)}
    return "pack", {"parts": x.zipped(p=s.p, s=s.s), "pack": _pack_function(x.frag(s.p).dtype, x)}


def _rescale(s: st.Rescale, x: Scope) -> tuple[str, View]:
    return "rescale", {"parts": x.zipped(o=s.o, alpha=s.alpha)}


_VIEWS: dict[type[st.Step], Callable[[Any, Scope], tuple[str, View]]] = {
    st.Let: _assign("let"),
    st.Var: _assign("var"),
    st.Set: _assign("set"),
    st.Loop: _loop,
    st.Forever: lambda s, x: ("forever", {}),
    st.Break: _break,
    st.If: _if,
    st.Elected: lambda s, x: ("elected", {}),
    st.TmaLoad: _tma_load,
    st.CpAsync: _cp_async,
    st.CpCommit: lambda s, x: ("cp_commit", {}),
    st.CpWait: lambda s, x: ("cp_wait", {"pending": s.pending}),
    st.LoadFrag: _load_frag,
    st.TransposeV: _transpose_v,
    st.LoadScale: _load_scale,
    st.ScaleShift: _scale_shift,
    st.StoreOut: _store_out,
    st.ClaimTile: _claim,
    st.PutTile: _put_tile,
    st.GetTile: _get_tile,
    st.ResetCounter: lambda s, x: ("reset_counter", {"counter": s.counter}),
    st.Wait: _wait,
    st.Arrive: _arrive,
    st.Advance: lambda s, x: ("advance", {"cursor": s.cursor}),
    st.Sync: _named("sync"),
    st.NArrive: _named("n_arrive"),
    st.CtaSync: lambda s, x: ("cta_sync", {}),
    st.ProxyFence: lambda s, x: ("proxy_fence", {}),
    st.Mma: _mma,
    st.MmaWait: _mma_wait,
    st.Fill: _fill,
    st.Limits: _limits,
    st.Mask: _mask,
    st.IntToFloat: lambda s, x: ("int_to_float", {"parts": x.zipped(dst=s.dst, src=s.src)}),
    st.OnlineSoftmax: _online_softmax,
    st.StaleSoftmax: _stale_softmax,
    st.Calm: _calm,
    st.Hold: lambda s, x: ("hold", {"parts": x.parts(s.row)}),
    st.CopyRow: lambda s, x: ("copy_row_values", {"parts": x.zipped(dst=s.dst, src=s.src)}),
    st.AddSums: lambda s, x: ("add_sums", {"parts": x.zipped(l=s.l, part=s.part)}),
    st.Move: lambda s, x: ("move", {"parts": x.zipped(dst=s.dst, src=s.src)}),
    st.Vote: lambda s, x: ("vote", {"unless": s.unless}),
    st.Pack: _pack,
    st.Rescale: _rescale,
    st.Promote: lambda s, x: ("promote", {"parts": x.zipped(total=s.total, o=s.o)}),
    **views_ladder.VIEWS,
    **views_removal.VIEWS,
    **views_quantise.VIEWS,
    **debug.VIEWS,
    **trace.VIEWS,
}
