"""The q_outer role of mma.sync (FlashAttention-2's loop): a query tile stays, key blocks pass by. Uniform warps; what each does with a
block is `block.Block`'s.

movement "cp_async": K and V arrive `stages` blocks deep. Groups of cp.async are committed in a fixed alternation … V(i), K(i+1), V(i+1), K(i+2) … (empty where there is no such block), so the
number of younger groups allowed open at each wait is a constant: 2·(stages − 1). Two CTA barriers a block: before a block's product
reads a slot that every warp helped to fill, which is also when every warp is done with the slot that the next copy overwrites.

One cursor a ring is enough. A copy of K goes to the slot just read, and the next slot is the oldest. A copy of V goes to the slot
read in the block before, and the next one, again the oldest, is read in this block.

movement "ld_st": the same places, one slot, and a copy is over when the step is: nothing to commit or to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..expr import Expr, as_expr, maximum, minimum, sym
from ..steps import (
    Advance,
    Body,
    Copy,
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
    Role,
    Slot,
)
from ..tiles import SK, SQ, B, H, J, M, N, Tiles
from .block import Block
from .common import HEAD_KV


@dataclass(frozen=True)
class MmaSync:
    """Builds the one role. `q_in_registers`: Q's fragments are loaded once a tile; else re-read from shared memory each block."""

    tiles: Tiles
    q_in_registers: bool

    @property
    def block(self) -> Block:
        return Block(self.tiles)

    @property
    def asynchronous(self) -> bool:
        return self.tiles.schedule.movement == "cp_async"

    def role(self) -> Role:
        a, s = self.tiles.attention, self.tiles.schedule
        assert s.warps is not None
        cursors = (Cursor("k", s.stages_k, 0), Cursor("v", s.stages_v, 0)) if self.asynchronous else ()
        q = (Frag("Q_frag", self.block.rows, a.head_dim, a.dtype, "a16"),) if self.q_in_registers else ()
        return Role("warps", s.warps, 1, False, None, self.block.frags(*q), cursors, self.tiles.loop(self._tile()))

    # loads ----------------------------------------------------------------------------------------------------------------

    def _cursor(self, tensor: str) -> str | None:
        return tensor if self.asynchronous else None

    def _copy_q(self) -> CpAsync | Copy:
        copy = CpAsync if self.asynchronous else Copy
        row = M * self.tiles.schedule.tile_q
        return copy(name="load_q", src="q", dst=Slot("Q", None), seq=row, limit=SQ, head=H, batch=B)

    def _copy(self, tensor: str, block: Expr, exists: Expr | None = None) -> Body:
        """Copy a block and commit its group. Where there is no such block, the same copies read nothing and fill the slot with 0:
        a branch would end the basic block in which ptxas mixes loads with products."""
        first: Expr = block
        limit: Expr = SK
        if exists is not None:
            first, limit = maximum(block, 0), SK * exists
        copy = (CpAsync if self.asynchronous else Copy)(
            name=f"load_{tensor}",
            src=tensor,
            dst=Slot(tensor.upper(), self._cursor(tensor)),
            seq=first * self.tiles.schedule.tile_kv,
            limit=limit,
            head=HEAD_KV,
            batch=B,
        )
        return (copy, Advance(cursor=tensor), CpCommit()) if self.asynchronous else (copy,)

    def _fill_rings(self) -> Body:
        """The alternation up to the first block: what the loop's copies would have issued in the blocks before it."""
        if not self.asynchronous:
            return self._copy_q(), *self._copy("k", N - 1)
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
        return Slot("Q", None, holds=M * self.tiles.schedule.tile_q, row=self.block.first_row)

    def _arrived(self, stages: int, why: str) -> Body:
        wait = (CpWait(pending=2 * (stages - 1), why=why),) if self.asynchronous else ()
        return *wait, CtaSync(why="" if wait else why)

    def _tile(self) -> Body:
        t, s = self.tiles, self.tiles.schedule
        reuse: Body = (CtaSync(why="every warp is done with the last tile's Q, K and V"),) if s.parallelism == "batch_heads" else ()
        load_frag: Body = ()
        if self.q_in_registers:
            load_frag = (*self._arrived(s.stages_k, "Q came with the first K"), LoadFrag(dst="Q_frag", src=self._q_slot()))
        last: Body = ()
        if self.asynchronous:
            last = (CpWait(pending=0, why="the last copies, of blocks that do not exist, land before the tile is left"),)
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
            *last,
        )
        return (
            *t.decode(),
            *self.block.limits(),
            *self.block.start(),
            If(name="tile", cond=N > 0, then=work),
            *self.block.finish(),
        )

    def _block(self, masked: bool) -> Body:
        s, block = self.tiles.schedule, self.block
        q: str | Slot = "Q_frag" if self.q_in_registers else self._q_slot()
        return (
            *self._arrived(s.stages_k, "K(j) is there; P·V of the block before is done everywhere"),
            *self._copy("v", J - (s.stages_v - 1), s.stages_v - 1 <= J if s.stages_v > 1 else None),
            *block.scores(q, masked, self._cursor("k")),
            *block.softmax(),
            *self._arrived(s.stages_v, "V(j) is there; Q·K of this block is done everywhere"),
            *self._copy("k", J - s.stages_k, s.stages_k <= J),
            *block.product(self._cursor("v")),
        )
