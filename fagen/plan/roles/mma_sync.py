"""The FlashAttention-2 role: uniform warps, each owning rows of the query tile; K and V arrive by cp.async, `stages` blocks deep.

Groups of cp.async are committed in a fixed alternation … V(i), K(i+1), V(i+1), K(i+2) … (empty where there is no such block), so the
number of younger groups allowed open at each wait is a constant: 2·(stages − 1). Two CTA barriers a block: before a block's product
reads a slot that every warp helped to fill, which is also when every warp is done with the slot that the next copy overwrites.

One cursor a ring is enough. A copy of K goes to the slot just read, and the next slot is the oldest. A copy of V goes to the slot
read in the block before, and the next one, again the oldest, is read in this block.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..expr import Expr, as_expr, maximum, minimum, sym
from ..steps import (
    Advance,
    Body,
    CpAsync,
    CpCommit,
    CpWait,
    CtaSync,
    Cursor,
    Frag,
    If,
    Let,
    LoadFrag,
    Loop,
    Mask,
    Mma,
    OnlineSoftmax,
    Pack,
    Rescale,
    Role,
    Slot,
)
from ..tiles import SK, SQ, B, H, J, M, N, Tiles, W
from .common import HEAD_KV, epilogue, setup


@dataclass(frozen=True)
class MmaSync:
    """Builds the one role. `q_in_registers`: Q's fragments are loaded once a tile; else re-read from shared memory each block."""

    tiles: Tiles
    q_in_registers: bool

    @property
    def rows(self) -> int:
        """Query rows of a warp."""
        s = self.tiles.schedule
        assert s.warps is not None
        return s.tile_q // s.warps

    def role(self) -> Role:
        s = self.tiles.schedule
        assert s.warps is not None
        cursors = (Cursor("k", s.stages_k, 0), Cursor("v", s.stages_v, 0))
        return Role("warps", s.warps, 1, False, None, self._frags(), cursors, self.tiles.loop(self._tile()))

    def _frags(self) -> tuple[Frag, ...]:
        a, s = self.tiles.attention, self.tiles.schedule
        q = (Frag("Q_frag", self.rows, a.head_dim, a.dtype, "a16"),) if self.q_in_registers else ()
        return (
            *q,
            Frag("S", self.rows, s.tile_kv, "fp32", "acc16"),
            Frag("O", self.rows, a.dv, "fp32", "acc16"),
            Frag("P", self.rows, s.tile_kv, a.dtype, "a16"),
            *(Frag(name, self.rows, 1, "fp32", "row16") for name in ("m_ref", "l_sum", "alpha", "lse")),
            Frag("last_key", self.rows, 1, "i32", "row16"),
        )

    # loads ----------------------------------------------------------------------------------------------------------------

    def _copy_q(self) -> CpAsync:
        row = M * self.tiles.schedule.tile_q
        return CpAsync(name="load_q", src="q", dst=Slot("Q", None), seq=row, limit=SQ, head=H, batch=B)

    def _copy(self, tensor: str, block: Expr, exists: Expr | None = None) -> Body:
        """Copy a block and commit its group. Where there is no such block, the same copies read nothing and fill the slot with 0:
        a branch would end the basic block in which ptxas mixes loads with products."""
        first: Expr = block
        limit: Expr = SK
        if exists is not None:
            first, limit = maximum(block, 0), SK * exists
        copy = CpAsync(
            name=f"load_{tensor}",
            src=tensor,
            dst=Slot(tensor.upper(), tensor),
            seq=first * self.tiles.schedule.tile_kv,
            limit=limit,
            head=HEAD_KV,
            batch=B,
        )
        return copy, Advance(cursor=tensor), CpCommit()

    def _fill_rings(self) -> Body:
        """The alternation up to the first block: what the loop's copies would have issued in the blocks before it."""
        s = self.tiles.schedule
        out: list[Body] = []
        for i in range(-max(s.stages_k, s.stages_v), 0):  # the loop's step i issues V(i + stages_v − 1), then K(i + stages_k)
            for tensor, block in (("v", i + s.stages_v - 1), ("k", i + s.stages_k)):
                if block > 0:
                    out.append(self._copy(tensor, N - 1 - block, block < N))
                elif block == 0:
                    q = (self._copy_q(),) if tensor == "k" else ()
                    out.append((*q, *self._copy(tensor, N - 1)))
                elif out:
                    out.append((CpCommit(why="keeps the alternation of groups"),))
        return tuple(step for body in out for step in body)

    # compute --------------------------------------------------------------------------------------------------------------

    def _q_slot(self) -> Slot:
        return Slot("Q", None, holds=M * self.tiles.schedule.tile_q, row=W * self.rows)

    def _arrived(self, stages: int, why: str) -> Body:
        return CpWait(pending=2 * (stages - 1), why=why), CtaSync()

    def _tile(self) -> Body:
        t, s = self.tiles, self.tiles.schedule
        reuse: Body = (CtaSync(why="every warp is done with the last tile's Q, K and V"),) if s.parallelism == "batch_heads" else ()
        load_frag: Body = ()
        if self.q_in_registers:
            load_frag = (*self._arrived(s.stages_k, "Q came with the first K"), LoadFrag(dst="Q_frag", src=self._q_slot()))
        work = (
            *reuse,
            *self._fill_rings(),
            *load_frag,
            Let(
                var="edge", value=t.clean_blocks(M * s.tile_q), why="blocks below this one are seen whole by every row of the tile"
            ),
            Loop(
                var="j",
                first=N - 1,
                last=sym("edge"),
                step=-1,
                segment="masked",
                body=self._block(True),
                why="right edge of the mask",
            ),
            Loop(var="j", first=minimum(N, sym("edge")) - 1, last=as_expr(0), step=-1, segment="steady", body=self._block(False)),
            CpWait(pending=0, why="the last copies, of blocks that do not exist, land before the tile is left"),
        )
        return (
            *setup(t, self.rows),
            If(name="tile", cond=N > 0, then=work),
            *epilogue(t),
        )

    def _block(self, masked: bool) -> Body:
        s = self.tiles.schedule
        k = Slot("K", "k", holds=J * s.tile_kv)
        v = Slot("V", "v", holds=J * s.tile_kv)
        q: str | Slot = "Q_frag" if self.q_in_registers else self._q_slot()
        mask: Body = (Mask(s="S", limits="last_key", first_key=J * s.tile_kv),) if masked else ()
        return (
            *self._arrived(s.stages_k, "K(j) is there; P·V of the block before is done everywhere"),
            *self._copy("v", J - (s.stages_v - 1), s.stages_v - 1 <= J if s.stages_v > 1 else None),
            Mma(name="qk", d="S", a=q, b=k, accumulate=False, trans_b=False, unit="mma_sync"),
            *mask,
            OnlineSoftmax(s="S", m="m_ref", l="l_sum", alpha="alpha", scale_log2=self.tiles.attention.scale_log2, first=False),
            Pack(p="P", s="S"),
            Rescale(o="O", alpha="alpha"),
            *self._arrived(s.stages_v, "V(j) is there; Q·K of this block is done everywhere"),
            *self._copy("k", J - s.stages_k, s.stages_k <= J),
            Mma(name="pv", d="O", a="P", b=v, accumulate=True, trans_b=True, unit="mma_sync"),
        )
