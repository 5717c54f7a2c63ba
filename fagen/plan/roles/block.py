"""What an mma.sync warp does with one key block: scores, softmax, and its share of P·V, for both partitions and both ways to normalise.

split_q    A warp owns rows of the query tile and sees all keys of the block. Nothing crosses between warps.
split_kv   A warp owns keys of the block and sees all rows. Its maximum, sum and product are partial, and merged through shared memory:
           first the statistics, so that P is taken against the merged maximum; then the products, of which each warp adds up its
           columns of O. Two CTA barriers, one of them the one that V needs anyway. A warp computes and stores its partial product
           in chunks of 64 columns, so that it need not hold all of it.

Normalised once, O is Σ 2^(s − m)·v and divided at the end. Normalised each step (FlashAttention-1), O is divided by the row sum after
every block, so alpha also undoes the division of the block before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..expr import Expr, as_expr, eq
from ..registers import PART_COLUMNS
from ..steps import (
    AddParts,
    Body,
    CopyRow,
    CtaSync,
    Fill,
    Frag,
    If,
    Let,
    Limits,
    LogSumExp,
    Mask,
    MergeStats,
    Mma,
    MulRow,
    OnlineSoftmax,
    Pack,
    Reciprocal,
    Rescale,
    Slot,
    StoreFrag,
    StoreOut,
    StoreRow,
    StoreStats,
    SumRow,
)
from ..tiles import SQ, B, H, J, M, Tiles, W
from .common import ROW0

NEG_INF = float("-inf")
STATS, PARTS = Slot("stats", None), Slot("O_parts", None)
"""Shared memory of a split_kv tile: row statistics and partial products of every warp."""


@dataclass(frozen=True)
class Block:
    """The register tiles of a warp and the steps on them. Shapes are of one warp."""

    tiles: Tiles

    @property
    def warps(self) -> int:
        assert self.tiles.schedule.warps is not None
        return self.tiles.schedule.warps

    @property
    def split_kv(self) -> bool:
        return self.tiles.schedule.partition == "split_kv"

    @property
    def each_step(self) -> bool:
        return self.tiles.schedule.normalise == "each_step"

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.tiles.schedule.tile_q // (1 if self.split_kv else self.warps)

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.tiles.schedule.tile_kv // (self.warps if self.split_kv else 1)

    @property
    def columns(self) -> int:
        """Columns of O that it holds."""
        return self.tiles.attention.dv // (self.warps if self.split_kv else 1)

    @property
    def first_row(self) -> Expr:
        """In the tile."""
        return as_expr(0) if self.split_kv else W * self.rows

    @property
    def first_column(self) -> Expr:
        return W * self.columns if self.split_kv else as_expr(0)

    @property
    def total(self) -> str:
        """The Frag that holds whole row sums after a block (`l_sum` holds each thread's own part under split_q)."""
        return "l_sum" if self.split_kv else "total"

    def frags(self, *q: Frag) -> tuple[Frag, ...]:
        a = self.tiles.attention
        extra: tuple[str, ...] = ("m_part", "l_part", "beta") if self.split_kv else ()
        if self.each_step or self.split_kv:
            extra += ("inverse",)
        if self.each_step or self.tiles.schedule.loop_order == "kv_outer" and not self.split_kv:
            extra += ("total",)
        part = (Frag("O_part", self.rows, PART_COLUMNS, "fp32", "acc16"),) if self.split_kv else ()
        rows = ("m_ref", "l_sum", "alpha", "lse", *extra)
        return (
            *q,
            Frag("S", self.rows, self.keys, "fp32", "acc16"),
            *part,
            Frag("O", self.rows, self.columns, "fp32", "acc16"),
            Frag("P", self.rows, self.keys, a.dtype, "a16"),
            *(Frag(name, self.rows, 1, "fp32", "row16") for name in rows),
            Frag("last_key", self.rows, 1, "i32", "row16"),
        )

    # the ends of a tile ---------------------------------------------------------------------------------------------------

    def limits(self) -> Body:
        """First query row of the instance, and what its rows see."""
        return (
            Let(var="row0", value=M * self.tiles.schedule.tile_q + self.first_row, why="first query row of this instance"),
            Limits(dst="last_key", first_row=ROW0, limit=self.tiles.key_limit()),
        )

    def start(self) -> Body:
        """O = 0, m = −∞, l = 0."""
        return Fill(dst="O", value=0.0), *self.start_rows()

    def start_rows(self) -> Body:
        """m = −∞, l = 0."""
        total = (Fill(dst="total", value=0.0),) if self.each_step and not self.split_kv else ()
        return Fill(dst="m_ref", value=NEG_INF), Fill(dst="l_sum", value=0.0), *total

    def finish(self) -> Body:
        """Normalise what is left to normalise, and write out and lse. A row that saw no key has l = 0: out 0, lse −∞."""
        if self.each_step:
            return LogSumExp(lse="lse", m="m_ref", l=self.total), *self.store()
        if self.split_kv:
            divide = (Reciprocal(dst="inverse", src="l_sum"), Rescale(o="O", alpha="inverse"))
            return *divide, LogSumExp(lse="lse", m="m_ref", l="l_sum"), *self.store()
        return (
            SumRow(dst="l_sum", src="l_sum"),
            Reciprocal(dst="alpha", src="l_sum"),
            LogSumExp(lse="lse", m="m_ref", l="l_sum"),
            Rescale(o="O", alpha="alpha", why="divided once, by the row sum"),
            *self.store(),
        )

    def store(self) -> Body:
        """out and lse. All warps of a split_kv tile hold all rows' lse: one of them writes it."""
        column = self.first_column if self.split_kv else None
        row = StoreRow(src="lse", dst="lse", first_row=ROW0, limit=SQ, head=H, batch=B)
        return StoreOut(src="O", dst="out", first_row=ROW0, limit=SQ, head=H, batch=B, col=column), *self.once(row)

    def once(self, *steps: StoreRow) -> Body:
        """Rows that all warps hold alike are written by the first."""
        return (If(name="first_warp", cond=eq(W, 0), then=steps),) if self.split_kv else steps

    # a block --------------------------------------------------------------------------------------------------------------

    def scores(self, q: str | Slot, masked: bool | Expr, k_cursor: str | None) -> Body:
        """S = Q·Kᵀ of the warp's keys, masked; or masked if an expression holds."""
        tile_kv = self.tiles.schedule.tile_kv
        k = Slot("K", k_cursor, holds=J * tile_kv, row=self._key_row())
        first_key = J * tile_kv + (W * self.keys if self.split_kv else 0)
        mask: Body = (Mask(s="S", limits="last_key", first_key=first_key),)
        if isinstance(masked, Expr):
            mask = (If(name="edge", cond=masked, then=mask),)
        elif not masked:
            mask = ()
        return Mma(name="qk", d="S", a=q, b=k, accumulate=False, trans_b=False, unit="mma_sync"), *mask

    def softmax(self) -> Body:
        """All that needs S only: up to the barrier before V is read."""
        scale = self.tiles.attention.scale_log2
        if self.split_kv:
            return (
                OnlineSoftmax(s="S", m="m_part", l="l_part", alpha="alpha", scale_log2=scale, first=True),
                SumRow(dst="l_part", src="l_part"),
                StoreStats(m="m_part", l="l_part", dst=self._own(STATS, 1)),
            )
        return (
            OnlineSoftmax(s="S", m="m_ref", l="l_sum", alpha="alpha", scale_log2=scale, first=False),
            *self._divide_later(),
            Pack(p="P", s="S"),
            Rescale(o="O", alpha="alpha"),
        )

    def product(self, v_cursor: str | None, before_merge: Body = ()) -> Body:
        """O += P·V, after the barrier: every warp's statistics and V are there. `before_merge` stands (under split_kv) in front of
        the barrier at which the partial products meet, where they need no registers any more."""
        columns = range(0, self.tiles.attention.dv, PART_COLUMNS)
        v = Slot("V", v_cursor, holds=J * self.tiles.schedule.tile_kv, row=self._key_row())
        divide = (Rescale(o="O", alpha="inverse"),) if self.each_step else ()
        if not self.split_kv:
            return Mma(name="pv", d="O", a="P", b=v, accumulate=True, trans_b=True, unit="mma_sync"), *divide
        keep = (CopyRow(dst="total", src="l_sum"),) if self.each_step else ()
        return (
            *keep,
            MergeStats(m="m_ref", l="l_sum", alpha="alpha", part="m_part", beta="beta", src=STATS),
            *self._divide_later(),
            Rescale(o="S", alpha="beta", why="P against the merged maximum"),
            Pack(p="P", s="S"),
            *(step for col in columns for step in self._part(replace(v, col=col))),
            *before_merge,
            CtaSync(name="merge", why="every warp's part is there"),
            Rescale(o="O", alpha="alpha"),
            AddParts(dst="O", src=PARTS),
            *divide,
        )

    def _part(self, v: Slot) -> Body:
        """Some columns of the warp's partial product."""
        return (
            Mma(name="pv", d="O_part", a="P", b=v, accumulate=False, trans_b=True, unit="mma_sync"),
            StoreFrag(src="O_part", dst=replace(self._own(PARTS, self.rows), col=v.col)),
        )

    def _divide_later(self) -> Body:
        """normalise="each_step": alpha undoes the division of the block before; the new row sum divides after the product."""
        if not self.each_step:
            return ()
        undo = MulRow(dst="alpha", src="total", why="undoes the division of the block before")
        total: Body = () if self.split_kv else (SumRow(dst="total", src="l_sum"),)
        return undo, *total, Reciprocal(dst="inverse", src=self.total)

    def _key_row(self) -> Expr | None:
        return W * self.keys if self.split_kv else None

    def _own(self, slot: Slot, rows: int) -> Slot:
        return Slot(slot.smem, None, row=W * rows)
