"""The Hopper roles: a TMA producer, and warpgroups that compute with WGMMA; or warpgroups that do both (uniform).

The consumer's tile is prologue, steady loop(s), tail. What `overlap` changes is which products are in flight during the softmax:

  none       QK · wait · softmax · PV · wait
  within     the loop is rotated: QK(j) and PV(j+1) are issued together, softmax(j) runs under PV(j+1)
  pingpong   rotated; both products are waited for, the softmax runs under the *other* warpgroup's products, which named
             barriers keep in turn
  both       within and ping-pong (FlashAttention-3, algorithm 2 and section 3.1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import scales
from ..expr import Expr, as_expr, eq, minimum, sym
from ..registers import keeps_hints, transposed_at_once, transposes
from ..steps import (
    DTYPE_BYTES,
    AddSums,
    Advance,
    Arrive,
    Body,
    Calm,
    CopyRow,
    Cursor,
    Elected,
    Fill,
    Frag,
    Hold,
    If,
    IntToFloat,
    Let,
    LoadFrag,
    Loop,
    Mask,
    Mma,
    MmaWait,
    Move,
    NArrive,
    OnlineSoftmax,
    Pack,
    Promote,
    ProxyFence,
    Rescale,
    Role,
    Set,
    Slot,
    StaleSoftmax,
    Sync,
    TmaLoad,
    TransposeV,
    Var,
    Vote,
    Wait,
)
from ..tiles import N_TILE, B, H, J, M, N, Tiles, W
from .common import HEAD_KV, ROW0, clear, epilogue, lift, locate, nothing_seen, p_offset, setup, sums, totals

LAST = as_expr(0)
CALM = {"bf16": 2.0**-8, "fp16": 2.0**-8, "e4m3": 2.0**-4}
"""Growth of a row's reference within a block, as alpha, that the next block's stale reference is likely to bear."""
ENOUGH = 16
"""Keys of a first block that say enough of the row's others."""
FIRST, NEXT = "first_", "next_"
"""Prefixes of the scalars of a tile's first block, and of the tile's that is joined to it."""
OLD = ("row0", "h", "b", "h_kv")
"""What the epilogue of a tile needs when the variables already speak of the next one."""


@dataclass(frozen=True)
class Wgmma:
    """Builds the roles of one schedule. `registers` is (producer, consumer), or None for uniform roles."""

    tiles: Tiles
    registers: tuple[int, int] | None

    # operands -------------------------------------------------------------------------------------------------------------

    def _q(self) -> Slot:
        return Slot("Q", "q", holds=M * self.tiles.schedule.tile_q, row=W * 64)

    def _k(self, j: Expr) -> Slot:
        return Slot("K", "k", holds=self.tiles.key_row(j))

    def _v(self, j: Expr) -> Slot:
        return Slot("V", "v", holds=self.tiles.key_row(j))

    def _qk(self, j: Expr, why: str = "") -> Mma:
        a = "Q_frag" if self._q_in_registers else self._q()
        return Mma(name="qk", d=self._raw_s, a=a, b=self._k(j), accumulate=False, trans_b=False, unit="wgmma", why=why)

    @property
    def _q_in_registers(self) -> bool:
        return self.tiles.schedule.q_operand == "registers"

    def _await_q(self) -> Body:
        """Q is there; in registers, if that is where the products take it from."""
        wait = Wait(bar="q_full", cursor="q")
        return (wait, LoadFrag(dst="Q_frag", src=self._q())) if self._q_in_registers else (wait,)

    @property
    def _scored(self) -> tuple[str, ...]:
        """What the end of Q·Kᵀ leaves to be used."""
        return (self._raw_s, "Q_frag") if self._q_in_registers else (self._raw_s,)

    def _end_of_q(self) -> Body:
        """Behind the last product that reads Q: on to the next tile's slot."""
        return () if self._q_in_registers else (Advance(cursor="q"),)

    @property
    def _raw_s(self) -> str:
        """The accumulator of the scores: integers of 8-bit integers."""
        return "S_int" if self.tiles.attention.dtype == "int8" else "S"

    def _pv(self, j: Expr, why: str = "") -> Mma:
        trans = self.tiles.attention.value_dtype != "e4m3"  # 8-bit V stands transposed in shared memory
        anew = self.tiles.schedule.promote_every == 1
        return Mma(name="pv", d="O", a="P", b=self._v(j), accumulate=not anew, trans_b=trans, unit="wgmma", why=why)

    def _promote(self, j: Expr) -> Body:
        """Once P·V of block j is done: every `promote_every` blocks, and after the last one, its sum so far joins the float32 copy."""
        every = self.tiles.schedule.promote_every
        if every is None:
            return ()
        add = Promote(total="O_sum", o="O")
        if every == 1 or j == LAST:
            return (add,)
        due = eq((N - j) % every, 0)
        return (If(name="promote", cond=due, then=(add, Fill(dst="O", value=0.0))),)

    def _rescale(self, *, unpromoted: bool = False) -> Body:
        """What was summed against the old reference, in units of the new one. `unpromoted`: the last block's product as well."""
        lasting = sums(self.tiles)
        own = ("O",) if unpromoted and "O" not in lasting else ()
        return tuple(Rescale(o=o, alpha="alpha") for o in (*own, *lasting))

    # loads ----------------------------------------------------------------------------------------------------------------

    def _load_q(self) -> Body:
        q = Slot("Q", "load_q")
        row = M * self.tiles.schedule.tile_q
        return (
            Wait(bar="q_empty", cursor="load_q"),
            TmaLoad(
                name="load_q",
                src="q",
                dst=q,
                full="q_full",
                seq=row,
                head=H,
                batch=B,
                hint="evict_first",
                keeps_hint=self.keeps_hints,
            ),
            Advance(cursor="load_q"),
        )

    def _load(self, tensor: str, j: Expr) -> Body:
        """A block of K, or of V: to where the products read it, or (to be transposed) to the ring V_raw."""
        cursor, row = f"load_{tensor}", self.tiles.key_row(j)
        ring, smem = ("raw", "V_raw") if tensor == "v" and self.transposes else (tensor, tensor.upper())
        load = TmaLoad(
            name=cursor,
            src=tensor,
            dst=Slot(smem, cursor),
            full=f"{ring}_full",
            seq=row,
            head=HEAD_KV,
            batch=B,
            hint="evict_last",
            transposed=tensor == "v" and self.tiles.schedule.v_transposed,
            keeps_hint=self.keeps_hints,
        )
        return Wait(bar=f"{ring}_empty", cursor=cursor), load, Advance(cursor=cursor)

    def producer(self) -> Role:
        """K(n−1), Q, then K(j−1) and V(j) in turn from the last block to the first: the order in which consumers need them. A V that has
        to be transposed comes a block earlier, the first one before K and Q, which may have to wait for the tile before to end."""
        last: Body = ()
        if self.transposes:
            body = (*self._load("v", J - 1), *self._load("k", J - 1))
            first = (*self._load("v", N - 1), *self._load("k", N - 1), *self._load_q())
        else:
            body = (*self._load("k", J - 1), *self._load("v", J))
            first, last = (*self._load("k", N - 1), *self._load_q()), self._load("v", LAST)
        steady = Loop(var="j", first=N - 1, last=as_expr(1), step=-1, segment="steady", body=body)
        some = (*first, steady, *self.tiles.claim("next"), *last)
        tile = (*self.tiles.decode(), If(name="tile", cond=N > 0, then=some, orelse=self.tiles.claim("next")))
        cursors = (*self._load_cursors(), *self.tiles.ring_cursors("put_t"))
        assert self.registers is not None
        warps = 1 if self.transposes else 4
        return Role("producer", 1, warps, True, self.registers[0], (), cursors, self.tiles.producer_loop(tile))

    @property
    def keeps_hints(self) -> bool:
        return self._is_uniform or keeps_hints(self.tiles.attention, self.tiles.schedule)

    @property
    def transposes(self) -> bool:
        return transposes(self.tiles.attention, self.tiles.schedule)

    def transposer(self) -> Role:
        """The producer's other three warps: V as it came from memory → Vᵀ, whose rows the tensor core reads along the keys. One cursor tells
        both slots where the two rings are as long as one another."""
        s = self.tiles.schedule
        alike = s.stages_k == s.stages_v
        turned = "raw" if alike else "turned"
        block = (
            Wait(bar="raw_full", cursor="raw"),
            Wait(bar="v_empty", cursor=turned, refill=alike),
            TransposeV(
                dst=Slot("V", turned),
                src=Slot("V_raw", "raw", holds=self.tiles.key_row(J)),
                at_once=transposed_at_once(self.tiles.attention, s),
            ),
            ProxyFence(why="the products read Vᵀ through the asynchronous proxy"),
            Arrive(bar="v_full", cursor=turned),
            Arrive(bar="raw_empty", cursor="raw"),
            *(Advance(cursor=c) for c in dict.fromkeys(("raw", turned))),
        )
        blocks = Loop(var="j", first=N - 1, last=LAST, step=-1, segment="blocks", body=block)
        own = () if alike else (Cursor(turned, s.stages_v, 1),)
        cursors = (Cursor("raw", s.stages_k, 0), *own, *self.tiles.ring_cursors("get_t"))
        assert self.registers is not None
        body = self.tiles.consumer_loop((*self.tiles.decode(), blocks))
        return Role("transposer", 3, 1, False, self.registers[0], (), cursors, body)

    def _load_cursors(self) -> tuple[Cursor, ...]:
        s = self.tiles.schedule
        loads_v = s.stages_k if self.transposes else s.stages_v
        return Cursor("load_q", s.slots_q, 1), Cursor("load_k", s.stages_k, 1), Cursor("load_v", loads_v, 1)

    # compute --------------------------------------------------------------------------------------------------------------

    def consumer(self) -> Role:
        s = self.tiles.schedule
        assert self.registers is not None and s.consumers is not None
        cursors = (*self._read_cursors(), *self.tiles.ring_cursors("get_t"))
        body = self._joined_tiles() if s.fuse_tiles else self.tiles.consumer_loop(self._tile())
        if s.overlap in ("pingpong", "both"):
            last = eq(W, s.consumers - 1)
            body = (
                If(name="start", cond=last, then=(NArrive(bar="order", index=LAST, why="lets the first warpgroup start"),)),
                *body,
                If(name="drain", cond=eq(W, 0), then=(Sync(bar="order", index=LAST, why="takes the arrival left over"),)),
            )
        return Role("consumer", s.consumers, 4, False, self.registers[1], self._frags(), cursors, body)

    def uniform(self) -> Role:
        """One kind of warpgroup: thread 0 of the first also issues the loads, `stages` blocks ahead of their use."""
        s = self.tiles.schedule
        assert s.consumers is not None
        cursors = (*self._load_cursors(), *self._read_cursors(), *self.tiles.ring_cursors("put_t", "get_t"))
        body = self.tiles.uniform_loop(self._tile())
        return Role("warpgroup", s.consumers, 4, False, None, self._frags(), cursors, body)

    def _read_cursors(self) -> tuple[Cursor, ...]:
        s = self.tiles.schedule
        return Cursor("q", s.slots_q, 0), Cursor("k", s.stages_k, 0), Cursor("v", s.stages_v, 0)

    def _frags(self) -> tuple[Frag, ...]:
        a, s = self.tiles.attention, self.tiles.schedule
        return (
            *(
                Frag("Q_frag", 64, a.head_dim, a.dtype, "a64" if DTYPE_BYTES[a.dtype] == 2 else "a64_e4m3")
                for _ in range(self._q_in_registers)
            ),
            *(Frag("S_int", 64, s.tile_kv, "i32", "acc64") for _ in range(self._raw_s != "S")),
            Frag("S", 64, s.tile_kv, "fp32", "acc64"),
            Frag("O", 64, a.dv, "fp32", "acc64"),
            *(Frag("O_sum", 64, a.dv, "fp32", "acc64") for _ in range(s.promote_every is not None)),
            Frag("P", 64, s.tile_kv, a.value_dtype, self._p_layout()),
            *self._early_frags(),
            *(Frag(name, 64, 1, "fp32", "row64") for name in ("m_old", "l_old") if s.fuse_tiles),
            *(Frag(name, 64, 1, "fp32", "row64") for name in ("m_ref", "l_sum", "alpha", "inverse", "lse")),
            Frag("last_key", 64, 1, "i32", "row64"),
        )

    def _early_frags(self) -> tuple[Frag, ...]:
        """With a stale reference: P of the next block, computed while this block's is still an operand, and its row sums."""
        a, s = self.tiles.attention, self.tiles.schedule
        if s.reference != "stale":
            return ()
        return Frag("E", 64, s.tile_kv, a.value_dtype, self._p_layout()), Frag("part", 64, 1, "fp32", "row64")

    def _p_layout(self) -> str:
        return "a64_e4m3perm" if self.transposes else "a64_e4m3" if self.tiles.attention.value_dtype == "e4m3" else "a64"

    @property
    def _is_uniform(self) -> bool:
        return self.registers is None

    def _ahead(self, tensor: str, stages: int) -> Body:
        """Uniform roles: the loads that fill a fresh ring, blocks n−1, n−2, …"""
        first, *others = (self._load(tensor, N - 1 - s) for s in range(stages))
        return (*first, *(If(name=f"ahead_{tensor}", cond=s < N, then=x) for s, x in enumerate(others, 1)))

    def _refill(self, tensor: str, stages: int, j: Expr) -> Body:
        """Uniform roles: once block j is released, its slot takes block j − stages."""
        if not self._is_uniform or j == LAST:  # nothing comes after the last block
            return ()
        load = If(name="more", cond=j >= stages, then=self._load(tensor, j - stages))
        return (Elected(name=f"refill_{tensor}", body=(load,)),)

    def _release(self, tensor: str, j: Expr) -> Body:
        stages = self.tiles.schedule.stages_k if tensor == "k" else self.tiles.schedule.stages_v
        return (
            Arrive(bar=f"{tensor}_empty", cursor=tensor),
            Advance(cursor=tensor),
            *self._refill(tensor, stages, j),
        )

    def _softmax(self, j: Expr, masked: bool, first: str = "") -> Body:
        """From what the product left to exponentials. `first`: nothing comes before this block, whose scales have names with this prefix."""
        convert = (IntToFloat(dst="S", src=self._raw_s),) if self._raw_s != "S" else ()
        mask = (Mask(s="S", limits="last_key", first_key=j * self.tiles.schedule.tile_kv),) if masked else ()
        of_block = scales.of_softmax(self.tiles, first)
        soft = OnlineSoftmax(
            s="S",
            m="m_ref",
            l="l_sum",
            alpha="alpha",
            scale_log2=self.tiles.attention.scale_log2,
            first=bool(first),
            offset=p_offset(self.tiles),
            # Row sums do not have a V block's share of P, which references have.
            lift=lift(self.tiles) if first or "shift" not in of_block else 0,
            **of_block,
        )
        return (*convert, *mask, soft)

    def _in_turn(self, *products: Mma | Wait) -> Body:
        """Ping-pong: the products of a warpgroup are issued in its turn, then the turn goes to the next one."""
        s = self.tiles.schedule
        if s.overlap not in ("pingpong", "both"):
            return products
        assert s.consumers is not None
        return (
            Sync(bar="order", index=W, why="this warpgroup's turn to issue products"),
            *products,
            NArrive(bar="order", index=(W + 1) % s.consumers),
        )

    def _tile(self) -> Body:
        """Everything a computing warpgroup does for one tile."""
        t, s = self.tiles, self.tiles.schedule
        fill_rings = (*self._load_q(), *self._ahead("k", s.stages_k), *self._ahead("v", s.stages_v))
        loads: Body = (Elected(name="fill", body=fill_rings),) if self._is_uniform else ()
        blocks = self._blocks_in_order() if s.overlap == "none" else self._blocks_rotated()
        skip = self._skip() if s.skip_masked else ()
        work = (*loads, *skip, *self._await_q(), *blocks)
        some = N_TILE if s.skip_masked else N
        claim = (Elected(name="claim", body=self.tiles.claim("next")),) if self._is_uniform and t.dynamic else ()
        calm = (self._calm(declare=True),) if s.reference == "stale" else ()
        return (
            *setup(t, 64),
            *calm,
            If(name="tile", cond=some > 0, then=work, orelse=nothing_seen()),
            *claim,
            *epilogue(t),
        )

    def _joined_tiles(self) -> Body:
        """All tiles of a warpgroup, each joined to the next: its last P·V is issued behind the next one's first Q·Kᵀ, so that the next
        one's first softmax and this one's epilogue run under products."""
        t = self.tiles
        blocks = (*self._segments(N - 2, {m: self._block_stale(m) for m in (True, False)}, always_masked=t.attention.causal),)
        first = (
            *setup(t, 64, Var),
            self._calm(declare=True),
            *(Var(var=f"old_{n}", value=sym(n)) for n in OLD),
            *self._await_q(),
            *self._first_block(),
        )
        more = (*(Set(var=f"old_{n}", value=sym(n)) for n in OLD), *locate(t, 64, Set))
        done = MmaWait(pending=0, ready=("O", "P"))
        join = (
            self._calm(),
            CopyRow(dst="m_old", src="m_ref"),
            CopyRow(dst="l_old", src="l_sum"),
            *self._await_q(),
            *self._block_scales(N - 1, NEXT),
            Wait(bar="k_full", cursor="k"),
            *self._in_turn(self._qk(N - 1), Wait(bar="v_full", cursor="v"), self._pv_of_old()),
            *totals(t, old=True),
            MmaWait(pending=1, ready=self._scored, why="the next tile's first scores are there, this tile's last P·V still runs"),
            *self._release_q(N - 1),
            *self._release("k", N - 1),
            *self._softmax(N - 1, masked=True, first=NEXT),
            Pack(p="E", s="S"),
            Hold(row="l_sum"),
            done,
            *self._release("v", LAST),
            *self._promote(LAST),
            *epilogue(t, old=True),
            Move(dst="P", src="E"),
            *clear(t),
        )
        last = (
            Wait(bar="v_full", cursor="v"),
            self._pv(LAST),
            *totals(t),
            done,
            *self._release("v", LAST),
            *self._promote(LAST),
            *epilogue(t),
        )
        return t.joined_loop(first, more, (*blocks, *self._end_of_q()), join, last)

    def _pv_of_old(self) -> Mma:
        """The last product of the tile before: its contract speaks of that tile's head and batch."""
        v = replace(self._v(LAST), head=sym("old_h") // sym("group"), batch=sym("old_b"))
        return replace(self._pv(LAST), b=v)

    def _first_block(self) -> Body:
        """Q·Kᵀ of the tile's last block and its exact softmax: nothing to run it under yet."""
        return (
            *self._block_scales(N - 1, FIRST),
            Wait(bar="k_full", cursor="k"),
            *self._in_turn(self._qk(N - 1)),
            MmaWait(pending=0, ready=self._scored),
            *self._release_q(N - 1),
            *self._release("k", N - 1),
            *self._softmax(N - 1, masked=True, first=FIRST),
            Pack(p="P", s="S"),
        )

    def _skip(self) -> Body:
        """Pass over the blocks that no row of this warpgroup sees, with ping-pong in an empty turn each. V(j + 1) comes with K(j): the
        last V of them is left to `_skip_last_v`, since waiting for it here would keep the first products waiting."""
        v = If(name="v", cond=J < N_TILE - 1, then=self._pass_over("v"))
        body = (*self._pass_over("k"), v)
        return (Loop(var="j", first=N_TILE - 1, last=N, step=-1, segment="skip", body=body, why="no row here sees these"),)

    def _skip_last_v(self) -> Body:
        return (If(name="skip_v", cond=N < N_TILE, then=self._pass_over("v")),) if self.tiles.schedule.skip_masked else ()

    def _pass_over(self, tensor: str) -> Body:
        turn = self._in_turn() if tensor == "k" else ()
        return (
            Wait(bar=f"{tensor}_full", cursor=tensor),
            *turn,
            Arrive(bar=f"{tensor}_empty", cursor=tensor),
            Advance(cursor=tensor),
        )

    def _release_q(self, j: Expr) -> Body:
        """Behind the scores of block j: those of block 0 were the last product to read Q, whose successor may come. From registers, those
        of the tile's last block were the first, without which ldmatrix might not have read Q: nothing else waits for what it loads."""
        if self._q_in_registers:
            free: Body = (Arrive(bar="q_empty", cursor="q", why="Q is in registers, and has come there"), Advance(cursor="q"))
            if self.tiles.schedule.overlap == "none":
                return (If(name="first", cond=eq(j, N - 1), then=free),)
            return free if j == N - 1 else ()
        return (
            If(
                name="last",
                cond=eq(N, 1) if j == N - 1 else eq(j, 0),
                then=(Arrive(bar="q_empty", cursor="q", why="no product of this tile reads Q any more"),),
            ),
        )

    def _segments(self, first: Expr, block: dict[bool, Body], always_masked: bool) -> Body:
        """The loop over blocks first … 0 in two segments: blocks that need the mask, then clean ones."""
        clean = self.tiles.clean_blocks(ROW0)
        masked = Loop(
            var="j", first=first, last=sym("clean"), step=-1, segment="masked", body=block[True], why="right edge of the mask"
        )
        steady = Loop(var="j", first=minimum(first, sym("clean") - 1), last=LAST, step=-1, segment="steady", body=block[False])
        let = Let(var="clean", value=clean, why="blocks below this one are seen whole")
        if always_masked:
            return (let, masked, steady)
        # The full mask: only the last block can be ragged, and the prologue has done it.
        return (Loop(var="j", first=first, last=LAST, step=-1, segment="steady", body=block[False]),)

    def _blocks_in_order(self) -> Body:
        block = {masked: self._block_in_order(masked) for masked in (True, False)}
        rest = self._promote(LAST) if "O" in sums(self.tiles) else ()
        blocks = self._segments(N - 1, block, always_masked=True)
        return (*self._skip_last_v(), *blocks, *rest, *self._end_of_q(), *totals(self.tiles))

    def _block_in_order(self, masked: bool) -> Body:
        return (
            *self._block_scales(J),
            Wait(bar="k_full", cursor="k"),
            self._qk(J),
            MmaWait(pending=0, ready=self._scored),
            *self._release_q(J),
            *self._release("k", J),
            *self._softmax(J, masked),
            Pack(p="P", s="S"),
            *self._rescale(),
            Wait(bar="v_full", cursor="v"),
            self._pv(J),
            MmaWait(pending=0, ready=("O", "P")),
            *self._release("v", J),
            *self._promote(J),
        )

    def _block_scales(self, j: Expr, prefix: str = "") -> Body:
        return scales.of_block(self.tiles, HEAD_KV, B, j, prefix)

    def _blocks_rotated(self) -> Body:
        s = self.tiles.schedule
        prologue = (*self._first_block(), *self._skip_last_v())
        overlapped = self._block_stale if s.reference == "stale" else self._block_overlapped
        build = self._block_waited if s.overlap == "pingpong" else overlapped
        block = {masked: build(masked) for masked in (True, False)}
        tail = (
            *self._end_of_q(),
            Wait(bar="v_full", cursor="v"),
            self._pv(LAST),
            *totals(self.tiles),
            MmaWait(pending=0, ready=("O", "P")),
            *self._release("v", LAST),
            *self._promote(LAST),
        )
        return (*prologue, *self._segments(N - 2, block, always_masked=self.tiles.attention.causal), *tail)

    def _scores_over_pv(self) -> Body:
        """The scores of block j, and P(j+1)·V(j+1) behind them, still in flight."""
        return (
            *self._block_scales(J),
            Wait(bar="k_full", cursor="k"),
            *self._in_turn(self._qk(J), Wait(bar="v_full", cursor="v"), self._pv(J + 1)),
            MmaWait(pending=1, ready=self._scored, why="the scores are there, P·V still runs"),
            *self._release_q(J),
            *self._release("k", J),
        )

    def _block_overlapped(self, masked: bool) -> Body:
        """within, both: the softmax of block j runs while P(j+1)·V(j+1) is in flight."""
        return (
            *self._scores_over_pv(),
            *self._softmax(J, masked),
            MmaWait(pending=0, ready=("O", "P")),
            *self._release("v", J + 1),
            *self._promote(J + 1),
            Pack(p="P", s="S"),
            *self._rescale(),
        )

    def _calm(self, *, declare: bool = False) -> Calm:
        """At a tile's start. Rows that see little of their first block are lifted little, and what they see next is likely to be more."""
        if not lift(self.tiles):
            return Calm(var="calm", declare=declare)
        first_key = (N - 1) * self.tiles.schedule.tile_kv
        return Calm(var="calm", declare=declare, limits="last_key", first_key=first_key, seen=ENOUGH)

    def _block_stale(self, masked: bool) -> Body:
        """within, both, against a stale reference: neither maximum nor rescaling stands between the scores and the exponentials.

        A warp whose values do not fit computes the block again, exactly, from the scores, which are still there.
        """
        *before, exact = self._softmax(J, masked)
        assert isinstance(exact, OnlineSoftmax)
        done = MmaWait(pending=0, ready=("O", "P"))
        stale = StaleSoftmax(
            calm="calm",
            e="E",
            s="S",
            m="m_ref",
            part="part",
            fits="fits",
            scale_log2=exact.scale_log2,
            offset=exact.offset,
            **scales.of_softmax(self.tiles),
        )
        vote = Vote(
            name="exact",
            unless="fits",
            then=(
                exact,
                Pack(p="E", s="S"),
                done,
                *self._rescale(unpromoted=True),
                Calm(var="calm", alpha="alpha", least=CALM[self.tiles.attention.value_dtype]),
            ),
            orelse=(AddSums(l="l_sum", part="part"), done),
        )
        return (
            *self._scores_over_pv(),
            *before,
            stale,
            vote,
            *self._release("v", J + 1),
            *self._promote(J + 1),
            Move(dst="P", src="E"),
        )

    def _block_waited(self, masked: bool) -> Body:
        """pingpong: both products are done before the softmax, which runs under the other warpgroup's."""
        return (
            *self._block_scales(J),
            Wait(bar="v_full", cursor="v"),
            Wait(bar="k_full", cursor="k"),
            *self._in_turn(self._pv(J + 1), self._qk(J)),
            MmaWait(pending=0, ready=("O", "P", *self._scored)),
            *self._release_q(J),
            *self._release("v", J + 1),
            *self._release("k", J),
            *self._promote(J + 1),
            *self._softmax(J, masked),
            Pack(p="P", s="S"),
            *self._rescale(),
        )
