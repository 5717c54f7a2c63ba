"""Which tiles there are, who owns them and in which order: the steps around every role's per-tile body.

A tile is a (query tile m, head h, batch b). Under a causal mask the tiles are numbered longest first, inside sections of as many
(batch, head) pairs as have K and V fit the L2 cache together (FlashAttention-3's order); otherwise query tiles of a head follow
one another, so that CTAs running side by side share its K and V.

With loop order kv_outer a CTA owns a range of `span` query tiles of one head, for all of which it loads a key block once: the whole
head ("batch_heads"), or as many ranges of equal length as give every SM a CTA ("query_tiles").
"""

from __future__ import annotations

from dataclasses import dataclass

from ..attention import Attention
from ..schedule import Schedule
from ..target import Target
from .expr import Expr, as_expr, ceildiv, eq, maximum, minimum, pow2floor, sym, where
from .kernel import Param, Workspace
from .steps import (
    DTYPE_BYTES,
    Advance,
    Arrive,
    Body,
    Break,
    ClaimTile,
    Cursor,
    Elected,
    Forever,
    GetTile,
    If,
    Let,
    Loop,
    PutTile,
    ResetCounter,
    Set,
    Slot,
    Var,
    Wait,
)

CTA, N_CTAS, W = sym("cta"), sym("n_ctas"), sym("w")
SQ, SK, BATCH, HQ, HKV = sym("sq"), sym("sk"), sym("batch"), sym("hq"), sym("hkv")
TILE, M, H, B, N, J = sym("tile"), sym("m"), sym("h"), sym("b"), sym("n"), sym("j")
N_TILE = sym("n_tile")
"""Key blocks of the tile, where n is those of one warpgroup (skip_masked)."""
N_M, TOTAL, GROUP, PAIR = sym("n_m"), sym("total"), sym("group"), sym("pair")
SECTION, WHOLE_SECTIONS, LAST = sym("section_heads"), sym("whole_sections"), sym("last_heads")
SECTION_TILES = SECTION * N_M

L2_SHARE = 2  # a section's K and V may fill 1 / L2_SHARE of the L2 cache


@dataclass(frozen=True)
class Tiles:
    """The tile arithmetic of one (attention, schedule): parameters for the host, steps for the roles."""

    attention: Attention
    schedule: Schedule
    target: Target

    @property
    def dynamic(self) -> bool:
        return self.schedule.parallelism == "persistent_dynamic"

    def params(self) -> tuple[Param, ...]:
        """Scalars the decode needs, computed once on the host; last, of persistent CTAs, what it divides by: a division by any other
        number takes some forty instructions, and all roles decode each tile before they start on it."""
        return (*self._sizes(), *(Param(name, "divisor", value) for name, value in self._divisors()))

    def _divisors(self) -> tuple[tuple[str, Expr], ...]:
        if not self.schedule.parallelism.startswith("persistent"):
            return ()
        heads = (("by_heads", HQ), ("by_group", GROUP))
        if self.attention.causal:
            return (("by_section_tiles", SECTION_TILES), ("by_section_heads", SECTION), ("by_last_heads", LAST), *heads)
        return (("by_query_tiles", N_M), *heads)

    def _sizes(self) -> tuple[Param, ...]:
        a, s = self.attention, self.schedule
        out = [
            Param("sq", "i32", SQ),
            Param("sk", "i32", SK),
            Param("hq", "i32", HQ),
            Param("group", "i32", maximum(HQ // maximum(HKV, 1), 1)),
            Param("n_m", "i32", ceildiv(SQ, s.tile_q)),
            Param("total", "i32", N_M * BATCH * HQ),
        ]
        if s.parallelism == "batch_heads":
            return tuple(p for p in out if p.name != "total")
        if s.loop_order == "kv_outer":
            side_by_side = maximum(sym("num_sms") // maximum(BATCH * HQ, 1), 1)
            span, ranges = ceildiv(N_M, side_by_side), ceildiv(N_M, sym("span"))
            return (*(p for p in out if p.name != "total"), Param("span", "i32", span), Param("ranges", "i32", ranges))
        if a.causal:
            kv_bytes = maximum(SK * (a.head_dim * DTYPE_BYTES[a.dtype] + a.dv * DTYPE_BYTES[a.value_dtype]), 1)
            fit = minimum(BATCH * HQ, (self.target.l2_bytes // L2_SHARE) // kv_bytes)
            out += [
                Param("section_heads", "i32", pow2floor(maximum(fit, 1))),
                Param("whole_sections", "i32", BATCH * HQ // SECTION),
                Param("last_heads", "i32", BATCH * HQ - (ceildiv(BATCH * HQ, SECTION) - 1) * SECTION),
            ]
        return tuple(out)

    def grid(self) -> Expr:
        if self.schedule.parallelism == "batch_heads":
            return BATCH * HQ
        if self.schedule.loop_order == "kv_outer":
            return BATCH * HQ * sym("ranges")
        if self.schedule.parallelism == "query_tiles":
            return TOTAL
        return minimum(sym("num_sms"), TOTAL)

    def workspaces(self) -> tuple[Workspace, ...]:
        return (Workspace("counter", "i32", as_expr(2), zeroed=True),) if self.dynamic else ()

    # the steps ----------------------------------------------------------------------------------------------------------

    def decode(self, step: type[Let] | type[Var] | type[Set] = Let, blocks: Expr = N) -> Body:
        """From `tile` (or, for batch_heads, `cta` and `m`) to m, h, b and the number of key blocks, named `blocks`; as constants, or as
        variables that are declared (Var) and later set anew (Set)."""
        of_tile = Let(var=blocks.c(), value=self._blocks(), why="key blocks this tile sees")
        return tuple(step(var=x.var, value=x.value, why=x.why) for x in (*self._decode(), of_tile))

    def _decode(self) -> tuple[Let, ...]:
        s = self.schedule
        head: list[Let]
        if s.parallelism == "batch_heads":
            head = [Let(var="pair", value=CTA)]
        elif self.attention.causal:
            section, rest, rank = sym("section"), sym("rest"), sym("rank")
            heads = where(section < WHOLE_SECTIONS, SECTION, LAST)
            head = [
                Let(var="section", value=TILE // SECTION_TILES, why="heads whose K and V share the L2 cache"),
                Let(var="rest", value=TILE - section * SECTION_TILES),
                Let(var="rank", value=rest // heads, why="the last section may be smaller"),
                Let(var="m", value=N_M - 1 - rank, why="longest first"),
                Let(var="pair", value=section * SECTION + rest - rank * heads),
            ]
        else:
            head = [
                Let(var="pair", value=TILE // N_M),
                Let(var="m", value=TILE - PAIR * N_M, why="query tiles of a head run side by side and share its K and V"),
            ]
        return (
            *head,
            *self.decode_pair(),
        )

    def decode_pair(self) -> tuple[Let, ...]:
        """From `pair` to b, h and the KV head."""
        return (
            Let(var="b", value=PAIR // HQ),
            Let(var="h", value=PAIR - B * HQ),
            Let(var="h_kv", value=H // GROUP, why="the KV head that this query head shares"),
        )

    def _blocks(self) -> Expr:
        """Fused tiles have at least one, which may be masked whole: every tile then has a first and a last product."""
        n = ceildiv(self.key_end(), self.schedule.tile_kv)
        return maximum(n, 1) if self.schedule.fuse_tiles else n

    def key_row(self, block: Expr) -> Expr:
        """First row of a block of K or V. Without any key, the one block of a fused tile lies past the tensor, where TMA reads zeros."""
        row = block * self.schedule.tile_kv
        return row + eq(SK, 0) if self.schedule.fuse_tiles else row

    def blocks_of_warpgroup(self, first_row: Expr) -> Expr:
        """Leading key blocks that any of 64 rows sees; at least one if their tile (which may go further) has any."""
        return maximum(ceildiv(self._key_end(first_row + 64), self.schedule.tile_kv), 1)

    def key_end(self) -> Expr:
        """One past the last key that any row of tile m sees."""
        return self._key_end((M + 1) * self.schedule.tile_q)

    def _key_end(self, row_end: Expr) -> Expr:
        """One past the last key that any row before `row_end` sees."""
        return minimum(SK, maximum(row_end + SK - SQ, 0)) if self.attention.causal else SK

    def key_limit(self) -> Expr:
        """The last key that row `row` sees."""
        return minimum(sym("row") + (SK - SQ), SK - 1) if self.attention.causal else SK - 1

    def clean_blocks(self, first_row: Expr) -> Expr:
        """Leading key blocks that every row from first_row on sees whole: they need no mask."""
        if self.attention.causal:
            return minimum(SK, maximum(first_row + SK - SQ + 1, 0)) // self.schedule.tile_kv
        return SK // self.schedule.tile_kv

    # the loops around a tile's body ---------------------------------------------------------------------------------------

    def loop(self, body: Body) -> Body:
        """`body` (which starts with `decode`) for each tile a CTA owns, where ownership is known without asking."""
        s = self.schedule
        if s.parallelism == "batch_heads":
            return (Loop(var="m", first=N_M - 1, last=as_expr(0), step=-1, body=body, segment="tiles"),)
        if s.parallelism == "query_tiles":
            return (Let(var="tile", value=CTA), *body)
        return (Loop(var="tile", first=CTA, last=TOTAL - 1, step=N_CTAS, body=body, segment="tiles"),)

    def put_tile(self, tile: Expr) -> Body:
        """Hand a tile number to the other roles through the tile ring."""
        return (
            Wait(bar="tile_empty", cursor="put_t"),
            PutTile(dst=Slot("tile_id", "put_t"), value=tile),
            Arrive(bar="tile_full", cursor="put_t", who="thread"),
            Advance(cursor="put_t"),
        )

    def get_tile(self) -> Body:
        """Take the next tile number from the ring."""
        return (*self._take("tile"), Break(cond=TILE >= TOTAL))

    def claim(self, var: str) -> Body:
        why = "late: claiming at a tile's start would bind a second tile to this CTA"
        return (ClaimTile(var=var, counter="counter", why=why),) if self.dynamic else ()

    def producer_loop(self, body: Body) -> Body:
        """Around the producer's body, which must `claim("next")` somewhere."""
        if not self.dynamic:
            return self.loop(body)
        inner = (*self.put_tile(TILE), Break(cond=TILE >= TOTAL), Var(var="next", value=TOTAL), *body)
        return (
            Var(var="tile", value=CTA),
            Forever(name="tiles", body=(*inner, Set(var="tile", value=sym("next")))),
            ResetCounter(counter="counter"),
        )

    def consumer_loop(self, body: Body) -> Body:
        return (Forever(name="tiles", body=(*self.get_tile(), *body)),) if self.dynamic else self.loop(body)

    def joined_loop(self, first: Body, more: Body, blocks: Body, join: Body, last: Body) -> Body:
        """Fused tiles: `first` (which declares the decode's variables) opens the first tile; then for every tile its `blocks`, and if
        there is another one, `more` (which sets them anew) and `join`; at the end `last`."""
        opening: Body
        another: Body
        if self.dynamic:
            opening, another = self._take("first_tile"), self._take("next_tile")
        else:
            opening = (Let(var="first_tile", value=CTA),)
            another = (Let(var="next_tile", value=TILE + N_CTAS),)
        nxt = sym("next_tile")
        turn = (*blocks, *another, Break(cond=nxt >= TOTAL), Set(var="tile", value=nxt), *more, *join)
        work = (*first, Forever(name="tiles", body=turn), *last)
        return (*opening, Var(var="tile", value=sym("first_tile")), If(name="any", cond=TILE < TOTAL, then=work))

    def _take(self, var: str) -> Body:
        """The next tile number from the ring."""
        return (
            Wait(bar="tile_full", cursor="get_t"),
            GetTile(var=var, src=Slot("tile_id", "get_t")),
            Arrive(bar="tile_empty", cursor="get_t", behind=var),
            Advance(cursor="get_t"),
        )

    def uniform_loop(self, body: Body) -> Body:
        """Roles are alike: one elected thread claims and puts, all take. `body` must claim("next") in an Elected step."""
        if not self.dynamic:
            return self.loop(body)
        inner = (Elected(name="put", body=self.put_tile(sym("next"))), *self.get_tile(), *body)
        return (
            Var(var="next", value=CTA),
            Forever(name="tiles", body=inner),
            Elected(name="reset", body=(ResetCounter(counter="counter"),)),
        )

    def ring_cursors(self, *names: str) -> tuple[Cursor, ...]:
        start = {"put_t": 1, "get_t": 0}
        return tuple(Cursor(n, TILE_STAGES, start[n]) for n in names) if self.dynamic else ()


TILE_STAGES = 2  # the producer may be one tile ahead
