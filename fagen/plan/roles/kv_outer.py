"""The kv_outer role (FlashAttention-1's loop): a key block stays in shared memory while query tiles pass by.

O, m and l of every query tile go through a float32 workspace: reloaded, corrected, stored again for each key block. A tile's first
block starts them instead of loading them; its last one finishes the tile. A CTA owns the query tiles m0 … m1 of one head.

Where copies stand (movement "cp_async": issued there and waited for at the end of an iteration; "ld_st": done there)
  Q(next)    behind the first barrier of an iteration, at which every warp is done with Q·Kᵀ and so with Q
  K, V       with one slot: at the start of their block. With more: at the start of a block, the block `stages` − 1 further on.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..expr import Expr, as_expr, ceildiv, eq, maximum, minimum, sym
from ..steps import (
    FEW_COPIES,
    MANY_COPIES,
    Advance,
    Body,
    Copy,
    CpAsync,
    CpCommit,
    CpWait,
    CtaSync,
    Cursor,
    Fill,
    If,
    Let,
    LoadAcc,
    LoadRow,
    Loop,
    Role,
    Slot,
    StoreAcc,
    StoreRow,
    SumRow,
)
from ..tiles import CTA, N_M, SK, SQ, B, H, J, M, N, Tiles
from .block import NEG_INF, Block
from .common import HEAD_KV, ROW0

M0, M1, N_ALL = sym("m0"), sym("m1"), sym("n_all")


@dataclass(frozen=True)
class KvOuter:
    """Builds the one role."""

    tiles: Tiles

    @property
    def block(self) -> Block:
        return Block(self.tiles)

    @property
    def asynchronous(self) -> bool:
        return self.tiles.schedule.movement == "cp_async"

    def role(self) -> Role:
        s = self.tiles.schedule
        assert s.warps is not None
        cursors: tuple[Cursor, ...] = ()
        if self.asynchronous:  # a slot is filled stages − 1 blocks before it is read
            cursors = tuple(Cursor(f"{n}{end}", stages, 0) for n, stages in self._stages() for end in ("", "_fill"))
        return Role("warps", s.warps, 1, False, None, self.block.frags(), cursors, self._body())

    def _stages(self) -> tuple[tuple[str, int], ...]:
        return ("k", self.tiles.schedule.stages_k), ("v", self.tiles.schedule.stages_v)

    # which tiles see which block --------------------------------------------------------------------------------------------

    def _first_tile(self, block: Expr) -> Expr:
        """The first of the CTA's tiles that sees the block."""
        if not self.tiles.attention.causal:
            return M0
        s = self.tiles.schedule
        return maximum(M0, maximum(block * s.tile_kv + (SQ - SK), 0) // s.tile_q)

    def _first_clean(self) -> Expr:
        """The first tile of which every row sees the whole of block j: it and those behind it need no mask."""
        s = self.tiles.schedule
        if not self.tiles.attention.causal:
            return ((J + 1) * s.tile_kv > SK) * N_M
        return ceildiv(maximum((J + 1) * s.tile_kv - 1 + (SQ - SK), 0), s.tile_q)

    def _blind(self) -> Expr:
        """Leading tiles that see no key at all."""
        none = eq(SK, 0) * N_M
        return maximum(none, maximum(SQ - SK, 0) // self.tiles.schedule.tile_q) if self.tiles.attention.causal else none

    def _decode(self) -> Body:
        s = self.tiles.schedule
        if s.parallelism == "batch_heads":
            own = (Let(var="pair", value=CTA), Let(var="m0", value=as_expr(0)), Let(var="m1", value=N_M - 1))
        else:
            span = sym("span")
            own = (
                Let(var="pair", value=CTA // sym("ranges")),
                Let(var="m0", value=(CTA - sym("pair") * sym("ranges")) * span, why="the CTA's range of query tiles"),
                Let(var="m1", value=minimum(M0 + span, N_M) - 1),
            )
        blocks = ceildiv(self.tiles.key_end().substitute({"m": M1}), s.tile_kv)
        return (
            *own,
            *self.tiles.decode_pair(),
            Let(var="n_all", value=blocks, why="key blocks that the last tile, and so any, sees"),
        )

    # copies -----------------------------------------------------------------------------------------------------------------

    def _copy(self, tensor: str, first: Expr, limit: Expr, head: Expr, cursor: str | None) -> Copy | CpAsync:
        name, dst = f"load_{tensor}", Slot(tensor.upper(), cursor)
        if self.asynchronous:
            return CpAsync(name=name, src=tensor, dst=dst, seq=first, limit=limit, head=head, batch=B)
        most = FEW_COPIES if tensor == "q" else MANY_COPIES  # K and V are copied where no tile is in registers
        return Copy(name=name, src=tensor, dst=dst, seq=first, limit=limit, head=head, batch=B, most=most)

    def _copy_q(self, tile: Expr, limit: Expr) -> Copy | CpAsync:
        return self._copy("q", tile * self.tiles.schedule.tile_q, limit, H, None)

    def _copy_block(self, tensor: str, block: Expr, exists: Expr | None = None) -> Body:
        limit: Expr = SK if exists is None else SK * exists
        cursor = f"{tensor}_fill" if self.asynchronous else None
        copy = self._copy(tensor, block * self.tiles.schedule.tile_kv, limit, HEAD_KV, cursor)
        return (copy, Advance(cursor=cursor)) if cursor else (copy,)

    def _commit(self) -> Body:
        return (CpCommit(),) if self.asynchronous else ()

    def _landed(self, why: str = "") -> Body:
        return (CpWait(pending=0, why=why),) if self.asynchronous else ()

    def _fill(self) -> Body:
        """The first Q, and all blocks that will be there before the first one is needed."""
        out: list[Body] = [(self._copy_q(self._first_tile(as_expr(0)), SQ),)]
        for tensor, stages in self._stages():
            for i in range(stages - 1):
                out.append(self._copy_block(tensor, as_expr(i), None if i == 0 else as_expr(i) < N_ALL))
        ahead = all(stages > 1 for _, stages in self._stages())
        there: Body = (*self._commit(), *self._landed(), CtaSync(why="the first Q, K and V are there")) if ahead else ()
        return tuple(step for body in out for step in body) + there

    def _next_block(self) -> Body:
        """At the start of block j: copies that the slots just freed can take. Those of blocks further on join the group of Q(next)."""
        out: list[Body] = []
        for tensor, stages in self._stages():
            block = J + (stages - 1)
            out.append(self._copy_block(tensor, block, None if stages == 1 else block < N_ALL))
        there: Body = ()
        if any(stages == 1 for _, stages in self._stages()):
            there = (*self._commit(), *self._landed(), CtaSync(why="K(j), V(j) and Q are there"))
        elif self.block.split_kv:
            there = (CtaSync(why="the rows that the first warp stored last are there"),)
        return tuple(step for body in out for step in body) + there

    def _next_q(self) -> Body:
        """The tile after m: in this block, or the first of the next one."""
        last = eq(M, M1)
        tile = M + 1 + last * (self._first_tile(J + 1) - M - 1)
        more = maximum(1 - last, J + 1 < N_ALL)
        return self._copy_q(tile, SQ * more), *self._commit()

    # the program ------------------------------------------------------------------------------------------------------------

    def _body(self) -> Body:
        cursors = ("k", "v") if self.asynchronous else ()
        block = (
            *self._next_block(),
            Let(var="clean", value=self._first_clean(), why="tiles from here on need no mask"),
            Loop(var="m", first=self._first_tile(J), last=M1, step=1, segment="tiles", body=self._pass()),
            *(Advance(cursor=c) for c in cursors),
        )
        return (
            *self._decode(),
            Loop(var="m", first=M0, last=minimum(self._blind(), M1 + 1) - 1, step=1, segment="blind", body=self._blind_tile()),
            If(
                name="keys",
                cond=N_ALL > 0,
                then=(
                    *self._fill(),
                    Loop(var="j", first=as_expr(0), last=N_ALL - 1, step=1, segment="blocks", body=block),
                ),
            ),
        )

    def _blind_tile(self) -> Body:
        """A tile without keys: out 0, lse −∞."""
        row0 = Let(var="row0", value=M * self.tiles.schedule.tile_q + self.block.first_row)
        return row0, Fill(dst="O", value=0.0), Fill(dst="lse", value=NEG_INF), *self.block.store()

    def _pass(self) -> Body:
        """One query tile under block j."""
        s, block = self.tiles.schedule, self.block
        q = Slot("Q", None, holds=M * s.tile_q, row=block.first_row)
        cursor = (lambda x: x) if self.asynchronous else (lambda x: None)
        ends = self._landed("Q(next) has landed")
        load_o = LoadAcc(dst="O", src="O_acc", tile=M * s.tile_q, first_row=ROW0, col=block.first_column, head=H, batch=B)
        start_o = (If(name="state_o", cond=J > 0, then=(load_o,), orelse=(Fill(dst="O", value=0.0),)),)
        end: Body = ()
        if not block.split_kv:
            end = (*ends, CtaSync(why="Q(next) is there; every warp is done with K(j) and V(j)"))
        return (
            *block.limits(),
            Let(var="n", value=ceildiv(self.tiles.key_end(), s.tile_kv), why="key blocks this tile sees"),
            *(() if block.split_kv else start_o),
            If(name="state", cond=J > 0, then=self._load_rows(), orelse=block.start_rows()),
            *block.scores(q, sym("clean") > M, cursor("k")),
            *block.softmax(),
            CtaSync(why="every warp is done with Q" + ("; the statistics are there" if block.split_kv else "")),
            *self._next_q(),
            *block.product(cursor("v"), (*start_o, *ends)),
            If(name="last", cond=eq(J, N - 1), then=block.finish(), orelse=self._store()),
            *end,
        )

    # O, m and l through the workspace ---------------------------------------------------------------------------------------

    def _load_rows(self) -> Body:
        def row(dst: str, src: str, share: bool = False) -> LoadRow:
            return LoadRow(dst=dst, src=src, first_row=ROW0, head=H, batch=B, share=share)

        parts: Body = (row("l_sum", "l_acc"),)
        if not self.block.split_kv:  # OnlineSoftmax continues a sum of which each thread has its own part
            total = (row("total", "l_acc"),) if self.block.each_step else ()
            parts = (row("l_sum", "l_acc", share=True), *total)
        return row("m_ref", "m_acc"), *parts

    def _store(self) -> Body:
        def row(src: str, dst: str) -> StoreRow:
            return StoreRow(src=src, dst=dst, first_row=ROW0, limit=ROW0 + self.block.rows, head=H, batch=B)

        block = self.block
        total: Body = () if block.split_kv or block.each_step else (SumRow(dst="total", src="l_sum"),)
        rows = block.once(row("m_ref", "m_acc"), row(block.total, "l_acc"))
        tile = M * self.tiles.schedule.tile_q
        store_o = StoreAcc(src="O", dst="O_acc", tile=tile, first_row=ROW0, col=block.first_column, head=H, batch=B)
        return store_o, *total, *rows
