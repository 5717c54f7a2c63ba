"""Quantising as kernels: 16-bit q, k and v → 8-bit tensors and their descales, in workspaces that the attention kernel reads.

A CTA owns some rows of one head of one of the tensors; CTAs of q stand first, then those of k, then those of v. Heads vary fastest,
so that CTAs side by side read whole rows of (batch, seq, heads, head_dim) together. With precision "int8_qk" there are none of v, which the
attention kernel reads as it is.

  measure   one read: the largest |value| of each part of q, k and v; of a smoothed k the sum and the extremes of each column instead,
            from which both its mean and the largest |value − mean| follow
  mean      of a smoothed k: its mean over the sequence
  scales    from the parts' maxima to one descale for each (batch, KV head), or for each tensor
  quantise  rotates, subtracts, scales, rounds and stores. With scales per block it finds its block's maximum itself, from a copy in
            shared memory: then nothing is read twice
  lse_shift after the attention kernel: gives lse what smoothing took off the scores of a row

Rotation and mean exchange: K's mean is taken, and subtracted, after the rotation, which costs nothing more and is the same number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..expr import Expr, as_expr, ceildiv, maximum, minimum, sym
from ..precision import attended, granularity, names
from ..quantise_steps import (
    AbsMax,
    AddShift,
    ColumnMean,
    ColumnStats,
    Descale,
    LoadColumns,
    LoadFlips,
    LoadRows,
    LoadScalar,
    QuantiseRows,
    ReduceParts,
    ShareColumns,
    ShareMax,
    Staged,
    StageRows,
    StoreColumns,
    StoreMax,
    TakeMax,
    WarpSync,
)
from ..steps import Body, CpCommit, CpWait, CtaSync, Fill, Frag, If, Let, Loop, Role, Slot, walk
from ..tiles import CTA, HKV, HQ, SK, SQ, B, H, Tiles, W
from .common import ROW0

WARPS = 8
"""Of a CTA."""
ROWS = 4
"""Rows of a lane where it streams: 128 bytes in flight."""
TURNS = 4
"""Turns of the loop over a part: 128 KiB of 16-bit values, so that a CTA's beginning and end weigh little and there are still
several CTAs an SM."""
SHIFTED = 256
"""Elements of lse a CTA of lse_shift."""
PART, PAIRS = sym("part"), sym("pairs")


@dataclass(frozen=True)
class Quantise:
    """Builds the roles. `tiles` are those of the whole plan: 16-bit attention, schedule with `precision`."""

    tiles: Tiles

    # sizes --------------------------------------------------------------------------------------------------------------

    @cached_property
    def by(self) -> str:
        return granularity(self.tiles.schedule)

    @property
    def smooth(self) -> bool:
        return self.tiles.schedule.smooth_k

    @property
    def head_dim(self) -> int:
        return self.tiles.attention.head_dim

    @property
    def warp_rows(self) -> int:
        """Rows of a warp for each row of a lane."""
        return 512 // self.head_dim

    @cached_property
    def names(self) -> dict[str, str]:
        """Tensor → the workspace (or output) that holds it in 8 bits: q and k, and v unless it stays as it is."""
        return names(self.tiles.attention, self.tiles.schedule)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Those that are quantised."""
        return tuple(self.names)

    def type_of(self, tensor: str) -> str:
        """What it is quantised to."""
        inner, _ = attended(self.tiles.attention, self.tiles.schedule)
        return inner.dtype_of(tensor)

    def _or_inf(self, tensor: str) -> bool:
        """Whether a value that is not finite must show in the scale: int8 has no code for it."""
        return self.type_of(tensor) == "int8"

    def block(self, tensor: str) -> int:
        """Rows that share a scale, "block"."""
        return self.tiles.schedule.tile_q if tensor == "q" else self.tiles.schedule.tile_kv

    def rows_of(self, tensor: str) -> int:
        """Rows of a warp in a block."""
        return -(-self.block(tensor) // (WARPS * self.warp_rows)) * self.warp_rows

    @property
    def step_rows(self) -> int:
        """Rows of a warp at a time where it streams."""
        return ROWS * self.warp_rows

    @property
    def staged_rows(self) -> int:
        """Rows of a warp for which there is room in shared memory."""
        return max(self.rows_of(t) for t in self.tensors)

    @property
    def part_rows(self) -> int:
        """Rows of a CTA that streams."""
        return TURNS * WARPS * ROWS * self.warp_rows

    def parts(self, tensor: str, streams: bool) -> Expr:
        """CTAs for a head; at least one where it streams, so that there is a maximum and a mean even of no rows."""
        rows = _limit(tensor)
        return maximum(ceildiv(rows, self.part_rows), 1) if streams else ceildiv(rows, self.block(tensor))

    # the kernels --------------------------------------------------------------------------------------------------------

    def measure(self) -> Role:
        """With scales per block only K's mean is wanted."""
        if self.by == "block":
            return self._role("measure", (*self._decode("k", CTA), *self._columns(("sum",))), WARPS, ("x", "sum"))
        names = ("sum", "high", "fall")
        of_k = self._columns(names) if self.smooth else self._part_max("k")
        bodies = tuple(of_k if t == "k" else self._part_max(t) for t in self.tensors)
        frags = ("x", "m", *(names if self.smooth else ()))
        return self._role("measure", self._by_tensor(bodies, sym("q_ctas"), sym("k_ctas")), WARPS, frags)

    def mean(self) -> Role:
        where: dict[str, Any] = {"head": H, "batch": B}
        high, fall = (None, None) if self.by == "block" else ("k_high", "k_fall")
        mean = ColumnMean(
            dst="k_mean", sums="k_sums", m="m", cols=self.head_dim, parts=sym("k_parts"), rows=SK, high=high, fall=fall, **where
        )
        mean = mean if high is None else replace(mean, or_inf=self._or_inf("k"))
        largest = () if self.by == "block" else (*self._all_warps(), StoreMax(m="m", dst="k_maxima", row=as_expr(0), **where))
        return self._role("mean", (*self._pair(CTA), mean, *largest), WARPS, ("m",) if largest else ())

    def scales(self) -> Role:
        bodies = []
        for t in self.tensors:
            parts = as_expr(1) if t == "k" and self.smooth else sym("q_parts") * sym("group") if t == "q" else sym("k_parts")
            if self.by == "tensor":
                body: Body = (ReduceParts(m="m", src=f"{t}_maxima", first=as_expr(0), count=PAIRS * parts),)
            else:
                first = sym("pair") * parts
                body = (*self._pair(sym("pair")), ReduceParts(m="m", src=f"{t}_maxima", first=first, count=parts))
            bodies.append((*body, *self._all_warps(), self._descale(t, f"{t}_inverse")))
        each = as_expr(1) if self.by == "tensor" else PAIRS
        return self._role("scales", self._chosen(tuple(bodies), each, each, "pair"), WARPS, ("m",))

    def quantise(self) -> Role:
        streams = self.by != "block"
        bodies = tuple(self._streamed(t) if streams else self._block(t) for t in self.tensors)
        frags: tuple[str, ...] = ("x",) if streams else ("m",)
        frags += ("mean",) if self.smooth else ()
        return self._role("quantise", self._by_tensor(bodies, sym("q_ctas"), sym("k_ctas")), WARPS, frags)

    def lse_shift(self) -> Role:
        add = AddShift(dst="lse", src="lse_shifts", first=CTA * SHIFTED, limit=sym("elements"))
        return self._role("lse_shift", (add,), SHIFTED // 32, ())

    # their parts ----------------------------------------------------------------------------------------------------------

    def _role(self, name: str, body: Body, warps: int, frags: tuple[str, ...]) -> Role:
        d, half = self.head_dim, self.tiles.attention.dtype
        if any(isinstance(s, LoadFlips) for s in walk(body)):
            frags = (*frags, "flips")
        shapes = {
            "flips": Frag("flips", 1, d, half, "masks"),
            "x": Frag("x", self.step_rows, d, half, "lanes"),
            "m": Frag("m", 1, 1, "fp32", "lane"),
            **{n: Frag(n, 1, d, "fp32", "columns") for n in ("sum", "high", "fall", "mean")},
        }
        return Role(name, warps, 1, False, None, tuple(shapes[n] for n in frags), (), body)

    def _x(self, tensor: str) -> str | Staged:
        return Staged("rows", self.rows_of(tensor), W * self.staged_rows) if self.by == "block" else "x"

    def _rotated(self, tensor: str) -> bool:
        return self.tiles.schedule.hadamard and tensor != "v"

    def _flips(self, tensor: str) -> str | None:
        """The masks by which a tensor's rows are rotated."""
        return "flips" if self._rotated(tensor) else None

    def _load_flips(self, tensor: str) -> Body:
        return (LoadFlips(dst="flips"),) if self._rotated(tensor) else ()

    def _by_tensor(self, bodies: tuple[Body, ...], q_ctas: Expr, k_ctas: Expr) -> Body:
        """The body of the tensor that a CTA works on, after part, head and batch."""
        full = tuple((*self._decode(t, sym("index")), *body) for t, body in zip(self.tensors, bodies))
        return self._chosen(full, q_ctas, k_ctas, "index")

    def _chosen(self, bodies: tuple[Body, ...], first: Expr, second: Expr, var: str) -> Body:
        """The body of q, of k, or of v where there is one. `var` counts the CTAs of a tensor from 0."""
        cta, starts = CTA, (as_expr(0), first, first + second)
        q, k, *v = ((Let(var=var, value=CTA - start), *body) for start, body in zip(starts, bodies))
        rest: Body = (If(name="k", cond=cta < first + second, then=k, orelse=v[0]),) if v else k
        return (If(name="q", cond=cta < first, then=q, orelse=rest),)

    def _decode(self, tensor: str, index: Expr) -> Body:
        heads = HQ if tensor == "q" else HKV
        parts = sym("q_parts" if tensor == "q" else "k_parts")
        return (
            Let(var="h", value=index % heads),
            Let(var="part", value=index // heads % parts),
            Let(var="b", value=index // heads // parts),
        )

    def _pair(self, index: Expr) -> Body:
        return (Let(var="h", value=index % HKV), Let(var="b", value=index // HKV))

    def _rows(self, tensor: str, body: Body) -> Body:
        """`body` for the warp's rows from `row0` on, again and again until the part is done."""
        step, first = self.step_rows, PART * self.part_rows
        return (
            *self._load_flips(tensor),
            Let(var="end", value=minimum(first + self.part_rows, _limit(tensor)), why="of the part's rows"),
            Loop(var="row0", first=first + W * step, last=sym("end") - 1, step=WARPS * step, segment="rows", body=body),
        )

    def _load(self, tensor: str) -> LoadRows:
        return LoadRows(name=f"load_{tensor}", dst="x", src=tensor, first_row=ROW0, limit=_limit(tensor), head=H, batch=B)

    def _all_warps(self) -> Body:
        """m becomes the largest of the CTA."""
        maxima = Slot("maxima", None, row=W)
        return (ShareMax(m="m", dst=maxima), CtaSync(why="every warp's maximum is there"), TakeMax(m="m", src=Slot("maxima", None)))

    def _part_max(self, tensor: str) -> Body:
        largest = AbsMax(m="m", x="x", flips=self._flips(tensor), first_row=ROW0, limit=_limit(tensor), or_inf=self._or_inf(tensor))
        rows = self._rows(tensor, (self._load(tensor), largest))
        return (
            Fill(dst="m", value=0.0),
            *rows,
            *self._all_warps(),
            StoreMax(m="m", dst=f"{tensor}_maxima", row=PART, head=H, batch=B),
        )

    def _columns(self, names: tuple[str, ...]) -> Body:
        """The part's sums of K's columns, and with "high" and "fall" their extremes."""
        extremes = {"high": "high", "fall": "fall"} if len(names) > 1 else {"high": None, "fall": None}
        stats = ColumnStats(x="x", sum="sum", flips=self._flips("k"), first_row=ROW0, limit=SK, **extremes)
        spaces = {"sum": "k_sums", "high": "k_high", "fall": "k_fall"}
        return (
            *(Fill(dst=n, value=0.0 if n == "sum" else float("-inf")) for n in names),
            *self._rows("k", (self._load("k"), stats)),
            *(ShareColumns(src=n, dst=Slot(f"all_{n}", None, row=W), op="sum" if n == "sum" else "max") for n in names),
            CtaSync(why="every warp's columns are there"),
            *(
                StoreColumns(
                    src=Slot(f"all_{n}", None), dst=spaces[n], op="sum" if n == "sum" else "max", row=PART, head=H, batch=B
                )
                for n in names
            ),
        )

    def _place(self, tensor: str) -> dict[str, Any]:
        """Of the scale of a CTA's rows."""
        if self.by == "tensor":
            return {"batch": as_expr(0), "head": as_expr(0), "row": as_expr(0)}
        if self.by == "block":
            return {"batch": B, "head": H, "row": PART}
        return {"batch": B, "head": H // sym("group") if tensor == "q" else H, "row": as_expr(0)}

    def _descale(self, tensor: str, inverse: str | None) -> Descale:
        """The rotation makes values head_dim ** 0.5 times as large: q's and k's descales take it back."""
        factor = self.head_dim**-0.5 if self._rotated(tensor) else 1.0
        place = self._place(tensor) if self.by != "head" else {"batch": B, "head": H, "row": as_expr(0)}
        dtype = self.type_of(tensor)
        return Descale(var="scale", m="m", dst=f"{tensor}_descale", dtype=dtype, factor=factor, inverse=inverse, **place)

    def _mean(self, tensor: str) -> Body:
        if not self.smooth or tensor == "v":
            return ()
        return (LoadColumns(dst="mean", src="k_mean", head=H // sym("group") if tensor == "q" else H, batch=B),)

    def _store(self, tensor: str) -> QuantiseRows:
        rotated = self._rotated(tensor)
        shifted = self.smooth and tensor == "q"
        return QuantiseRows(
            x=self._x(tensor),
            dst=self.names[tensor],
            scale="scale",
            flips=self._flips(tensor),
            first_row=ROW0,
            limit=_limit(tensor) if self.by != "block" else sym("end"),
            head=H,
            batch=B,
            centre="mean" if self.smooth and tensor == "k" else None,
            dots="mean" if shifted else None,
            shift="lse_shifts" if shifted else None,
            factor=self.tiles.attention.softmax_scale / (self.head_dim if rotated else 1) if shifted else 0.0,
        )

    def _streamed(self, tensor: str) -> Body:
        scale = LoadScalar(var="scale", src=f"{tensor}_inverse", **self._place(tensor))
        return (*self._mean(tensor), scale, *self._rows(tensor, (self._load(tensor), self._store(tensor))))

    def _block(self, tensor: str) -> Body:
        """The block is read once, and waits in shared memory for its scale."""
        size, x, end = self.block(tensor), self._x(tensor), sym("end")
        assert isinstance(x, Staged)
        first = PART * size
        return (
            Let(var="end", value=minimum(first + size, _limit(tensor)), why="of the block's rows"),
            Let(var="row0", value=first + W * self.rows_of(tensor)),
            StageRows(name=f"stage_{tensor}", dst=x, src=tensor, first_row=ROW0, limit=end, head=H, batch=B),
            CpCommit(),
            *self._load_flips(tensor),
            *self._mean(tensor),
            Fill(dst="m", value=0.0),
            CpWait(pending=0),
            WarpSync(why="lanes read what others copied"),
            AbsMax(
                m="m",
                x=x,
                flips=self._flips(tensor),
                first_row=ROW0,
                limit=end,
                centre="mean" if self.smooth and tensor == "k" else None,
                or_inf=self._or_inf(tensor),
            ),
            *self._all_warps(),
            self._descale(tensor, None),
            self._store(tensor),
        )


def _limit(tensor: str) -> Expr:
    return SQ if tensor == "q" else SK
