"""Standard attention as three kernels, through memory: S = Q·Kᵀ in float32, its softmax row by row, P·V.

A CTA of each kernel owns the same query tile. S and P are workspaces (batch, heads, seqlen_q, keys) whose rows are a whole number of
key blocks long, so that every access is 16 bytes wide and none needs a column's limit: qk writes −∞ past the last key a row sees,
whose exponential is 0, and V's rows past the end are read as 0.

  qk       Q once, then K block by block → S
  softmax  a warp a row: "three_pass" reads S for the maximum, for the sum, and to write P; "two_pass" finds maximum and sum at once
  pv       P and V block by block → out, divided by the row sum at the end: divided before it is rounded, every P of a row would carry
           the same error of 1/l
"""

from __future__ import annotations

from dataclasses import dataclass

from ..expr import Expr, as_expr, minimum, sym
from ..steps import (
    MANY_COPIES,
    Body,
    Copy,
    CtaSync,
    Fill,
    Frag,
    If,
    Let,
    Limits,
    LoadFrag,
    LoadRow,
    LogSumExp,
    Loop,
    Mask,
    Mma,
    Reciprocal,
    Rescale,
    Role,
    RowPass,
    Slot,
    StoreOut,
    StoreRow,
    StoreScores,
)
from ..tiles import SK, SQ, B, H, J, M, N, Tiles, W
from .common import HEAD_KV, ROW0

R = sym("r")
PASSES = {"three_pass": ("max", "sum", "exponentials"), "two_pass": ("max_sum", "exponentials")}


@dataclass(frozen=True)
class Standard:
    """Builds the roles of the three kernels. `q_in_registers`: Q's fragments are loaded once a tile."""

    tiles: Tiles
    q_in_registers: bool

    @property
    def warps(self) -> int:
        assert self.tiles.schedule.warps is not None
        return self.tiles.schedule.warps

    @property
    def rows(self) -> int:
        """Query rows of a warp."""
        return self.tiles.schedule.tile_q // self.warps

    def _role(self, frags: tuple[Frag, ...], body: Body) -> Role:
        return Role("warps", self.warps, 1, False, None, frags, (), self.tiles.loop((*self.tiles.decode(), *body)))

    def _row0(self) -> Let:
        return Let(var="row0", value=M * self.tiles.schedule.tile_q + W * self.rows, why="first query row of this warp")

    def _copy(self, tensor: str, first: Expr, limit: Expr, head: Expr, col: Expr | None = None) -> Copy:
        dst = Slot(tensor.upper(), None)
        return Copy(
            name=f"load_{tensor.lower()}",
            src=tensor,
            dst=dst,
            seq=first,
            limit=limit,
            head=head,
            batch=B,
            col=col,
            most=MANY_COPIES,
        )

    # S = Q·Kᵀ -------------------------------------------------------------------------------------------------------------

    def qk(self) -> Role:
        a, s = self.tiles.attention, self.tiles.schedule
        q = (Frag("Q_frag", self.rows, a.head_dim, a.dtype, "a16"),) if self.q_in_registers else ()
        frags = (*q, Frag("S", self.rows, s.tile_kv, "fp32", "acc16"), Frag("last_key", self.rows, 1, "i32", "row16"))
        first = M * s.tile_q
        slot = Slot("Q", None, holds=first, row=W * self.rows)
        load: Body = (self._copy("q", first, SQ, H),)
        if self.q_in_registers:
            load = (*load, CtaSync(why="Q is there"), LoadFrag(dst="Q_frag", src=slot))
        a_operand: str | Slot = "Q_frag" if self.q_in_registers else slot
        edge = self.tiles.clean_blocks(first)
        work = (
            *load,
            Let(var="edge", value=edge, why="blocks below this one are seen whole by every row of the tile"),
            Loop(
                var="j",
                first=as_expr(0),
                last=minimum(N, sym("edge")) - 1,
                step=1,
                segment="steady",
                body=self._qk(a_operand, False),
            ),
            Loop(
                var="j",
                first=minimum(N, sym("edge")),
                last=N - 1,
                step=1,
                segment="masked",
                body=self._qk(a_operand, True),
                why="right edge of the mask",
            ),
        )
        limits = Limits(dst="last_key", first_row=ROW0, limit=self.tiles.key_limit())
        return self._role(frags, (self._row0(), limits, If(name="tile", cond=N > 0, then=work)))

    def _qk(self, q: str | Slot, masked: bool) -> Body:
        first_key = J * self.tiles.schedule.tile_kv
        mask = (Mask(s="S", limits="last_key", first_key=first_key),) if masked else ()
        return (
            self._copy("k", first_key, SK, HEAD_KV),
            CtaSync(why="K(j) is there"),
            Mma(name="scores", d="S", a=q, b=Slot("K", None, holds=first_key), accumulate=False, trans_b=False, unit="mma_sync"),
            CtaSync(why="every warp is done with K(j)"),
            *mask,
            StoreScores(src="S", dst="S", first_row=ROW0, limit=SQ, head=H, batch=B, col=first_key),
        )

    # P = softmax(S) ---------------------------------------------------------------------------------------------------------

    def softmax(self) -> Role:
        a, s = self.tiles.attention, self.tiles.schedule
        frags = tuple(Frag(name, 1, 1, "fp32", "uniform") for name in ("m_ref", "l_sum", "lse"))
        passes = tuple(
            RowPass(
                name=op,
                op=op,  # type: ignore[arg-type]
                src="S",
                m="m_ref",
                l="l_sum",
                row=R,
                cols=N * s.tile_kv,
                head=H,
                batch=B,
                scale_log2=a.scale_log2,
                dst="P" if op == "exponentials" else "",
            )
            for op in PASSES[s.softmax]
        )
        stores = (
            StoreRow(src=src, dst=dst, first_row=R, limit=SQ, head=H, batch=B) for src, dst in (("lse", "lse"), ("l_sum", "l_row"))
        )
        row = (*passes, LogSumExp(lse="lse", m="m_ref", l="l_sum"), *stores)
        last = minimum(sym("row0") + self.rows, SQ) - 1
        return self._role(frags, (self._row0(), Loop(var="r", first=ROW0, last=last, step=1, segment="row", body=row)))

    # O = P·V ----------------------------------------------------------------------------------------------------------------

    def pv(self) -> Role:
        a, s = self.tiles.attention, self.tiles.schedule
        first, first_key = M * s.tile_q, J * s.tile_kv
        p, v = Slot("P", None, holds=first, row=W * self.rows), Slot("V", None, holds=first_key)
        block = (
            self._copy("P", first, SQ, H, first_key),
            self._copy("v", first_key, SK, HEAD_KV),
            CtaSync(why="P(j) and V(j) are there"),
            Mma(name="values", d="O", a=p, b=v, accumulate=True, trans_b=True, unit="mma_sync"),
            CtaSync(why="every warp is done with P(j) and V(j)"),
        )
        body = (
            self._row0(),
            Fill(dst="O", value=0.0),
            Loop(var="j", first=as_expr(0), last=N - 1, step=1, segment="steady", body=block),
            LoadRow(dst="l_sum", src="l_row", first_row=ROW0, head=H, batch=B),
            Reciprocal(dst="inverse", src="l_sum"),
            Rescale(o="O", alpha="inverse"),
            StoreOut(src="O", dst="out", first_row=ROW0, limit=SQ, head=H, batch=B),
        )
        rows = (Frag(name, self.rows, 1, "fp32", "row16") for name in ("l_sum", "inverse"))
        return self._role((Frag("O", self.rows, a.dv, "fp32", "acc16"), *rows), body)
