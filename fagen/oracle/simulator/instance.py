"""One role instance: a generator that walks the role's steps over its own registers, cursors and variables.

It yields before every step that others can notice (None: may go on at once) and where it must wait (a `Blocked`); the scheduler
decides who goes next. Register steps run straight through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...plan import steps as st
from ...plan.expr import Expr, as_expr
from ..numeric import F32, Array, rounded
from . import ladder, quantise
from .machine import GlobalMemory, MBarrier, NamedBarrier, SharedSlot, SimulatedFault, Transfer
from .registers import Product, Register, SharedOperand, multiply

LN2 = np.float32(np.log(2.0))


@dataclass
class Blocked:
    """Why an instance stands: it may go on once `ready()`."""

    ready: Callable[[], bool]
    reason: Callable[[], str]


@dataclass
class CtaState:
    """What the instances of a CTA share; `launch` transfers is where TMA loads under way are put."""

    index: int
    env: Mapping[str, int]
    memory: GlobalMemory
    slots: dict[str, list[SharedSlot]]
    mbars: dict[str, list[MBarrier]]
    nbars: dict[tuple[str, int], NamedBarrier]
    sync: NamedBarrier
    transfers: list[Transfer]


class _Cursor:
    def __init__(self, cursor: st.Cursor):
        self.stages, self.slot, self.phase = cursor.stages, 0, cursor.start_phase

    def advance(self) -> None:
        self.slot += 1
        if self.slot == self.stages:
            self.slot, self.phase = 0, self.phase ^ 1


STALE_LIMIT = {"bf16": 65536.0, "fp16": 65504.0}
E4M3_MAX = 448.0
LARGEST_CONVERTED = 1 << 22
"""IntToFloat is exact up to here."""


@dataclass
class _Copy:
    """The part of a cp.async tile that one instance copies."""

    slot: SharedSlot
    values: Array
    where: npt.NDArray[np.bool_]


class Instance:
    """Runs `role`'s body as instance `index` of a CTA."""

    def __init__(self, cta: CtaState, role: st.Role, index: int):
        self.cta, self.role, self.index = cta, role, index
        self.name = f"{role.name}[{index}] of CTA {cta.index}"
        self.env: dict[str, int] = {**cta.env, "cta": cta.index, "w": index}
        self.registers = {f.name: Register(f) for f in role.frags}
        self.scalars: dict[str, np.float32] = {}
        self.votes: dict[str, npt.NDArray[np.bool_]] = {}  # of each row, whether its warp's values fit
        self._rows: npt.NDArray[np.bool_] | None = None  # inside a Vote: the rows of the warps that run this side
        self.cursors = {c.name: _Cursor(c) for c in role.cursors}
        self.at: st.Step | None = None
        self.blocked: Blocked | None = None
        self.done = False
        self._single_thread = role.elect
        self._open: deque[Product] = deque()
        self._copies: list[_Copy] = []
        self._groups: deque[list[_Copy]] = deque()
        self._generator = self._run(role.body)

    # for the scheduler ----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.blocked is None or self.blocked.ready()

    def advance(self) -> None:
        """Go on to the next place where others may come in between."""
        try:
            self.blocked = next(self._generator)
        except StopIteration:
            self.done = True
            if self._open or self._copies or any(self._groups):
                kind = "products" if self._open else "copies"
                raise SimulatedFault(f"{self.name} ends with {kind} in flight") from None

    def describe(self) -> str:
        step = self.at.id or self.at.kind if self.at else "its start"
        return f"{self.name} at {step}: {self.blocked.reason() if self.blocked else 'could go on'}"

    # control --------------------------------------------------------------------------------------------------------------

    def _run(self, body: st.Body) -> Iterator[Blocked | None]:
        yield from self._body(body)

    def _body(self, body: st.Body) -> Any:
        """Generator; its value is True if a Break fired."""
        for step in body:
            self.at = step
            action = _ACTIONS.get(type(step))
            if action is not None:
                if type(step) not in _PRIVATE:
                    yield None
                    self.at = step
                blocked = action(self, step)
                if blocked is not None:
                    yield blocked
            elif isinstance(step, st.Break):
                if self.value(step.cond):
                    return True
            elif (yield from self._nested(step)):
                return True
        return False

    def _nested(self, step: st.Step) -> Any:
        """A step that holds others; True if a Break inside is to leave what is around it as well."""
        if isinstance(step, st.Loop):
            i, last, stride = self.value(step.first), self.value(step.last), self.value(as_expr(step.step))
            while i <= last if stride > 0 else i >= last:
                self.env[step.var] = i
                if (yield from self._body(step.body)):
                    return True
                i += stride
        elif isinstance(step, st.Forever):
            while not (yield from self._body(step.body)):
                yield None
        elif isinstance(step, st.If):
            return (yield from self._body(step.then if self.value(step.cond) else step.orelse))
        elif isinstance(step, st.Vote):
            return (yield from self._vote(step))
        elif isinstance(step, st.Elected):
            if self.index == 0:
                outer, self._single_thread = self._single_thread, True
                broke = yield from self._body(step.body)
                self._single_thread = outer
                return broke
        else:
            raise SimulatedFault(f"{step.id}: the simulator does not know a {step.kind}")
        return False

    def _vote(self, step: st.Vote) -> Any:
        """Each side in the rows of the warps that take it; the waits that both hold once, for the whole instance."""
        fits = self.votes[step.unless]
        self._rows = ~fits
        yield from self._body(step.then)
        self._rows = fits
        yield from self._body(tuple(x for x in step.orelse if not isinstance(x, st.MmaWait)))
        self._rows = None
        return False

    def _put(self, register: Register, value: Array) -> None:
        register.write(value if self._rows is None else np.where(self._rows[:, None], value, register.value))

    def value(self, e: Expr) -> int:
        return e.eval(self.env)

    def bind_variable(self, step: st.Let | st.Var | st.Set) -> None:
        self.env[step.var] = self.value(step.value)

    # copies ---------------------------------------------------------------------------------------------------------------

    def slot(self, slot: st.Slot) -> SharedSlot:
        return self.cta.slots[slot.smem][0 if slot.cursor is None else self.cursors[slot.cursor].slot]

    def tma_load(self, step: st.TmaLoad) -> None:
        slot = self.slot(step.dst)
        full = self.cta.mbars[step.full][0 if step.dst.cursor is None else self.cursors[step.dst.cursor].slot]
        slot.poison()  # from now on the bytes may come at any moment
        place = (self.value(step.batch), self.value(step.head), self.value(step.seq))
        values = self.cta.memory.tile(step.src, *place, rows=slot.data.shape[1 if step.transposed else 0])
        values = values.T if step.transposed else values
        full.arrive(1, step.id, expect_bytes=slot.bytes)
        self.cta.transfers.append(Transfer(slot, values, full, step.id, self.cta.index))

    def cp_async(self, step: st.CpAsync) -> None:
        slot = self.slot(step.dst)
        where = self.share(slot)
        slot.write(np.nan, where, generic=self.name)
        place = (self.value(step.batch), self.value(step.head), self.value(step.seq))
        values = self.cta.memory.tile(step.src, *place, rows=slot.data.shape[0], limit=self.value(step.limit))
        self._copies.append(_Copy(slot, values, where))

    def stage(self, slot: SharedSlot, values: Array, row: int) -> None:
        """A cp.async of whole rows, that nobody else copies or reads, into the rows of the slot from `row` on."""
        where = np.zeros(slot.data.shape, bool)
        where[row : row + len(values)] = True
        slot.write(np.nan, where)
        whole = np.zeros(slot.data.shape, np.float32)
        whole[where] = values.ravel()
        self._copies.append(_Copy(slot, whole, where))

    def share(self, slot: SharedSlot) -> npt.NDArray[np.bool_]:
        """The elements of a tile that this instance copies when the role's threads copy it together."""
        return _share(slot.data.shape, slot.bytes, self.role.threads, self.role.warps, self.index)

    def cp_commit(self, step: st.CpCommit) -> None:
        self._groups.append(self._copies)
        self._copies = []

    def cp_wait(self, step: st.CpWait) -> None:
        while len(self._groups) > step.pending:
            for copy in self._groups.popleft():
                copy.slot.write(copy.values, copy.where, generic=self.name)

    def transpose_v(self, step: st.TransposeV) -> None:
        raw, turned = self.slot(step.src), self.slot(step.dst)
        strips = np.arange(turned.data.shape[0]) // 16 % self.role.count == self.index
        turned.write(raw.data.T, np.broadcast_to(strips[:, None], turned.data.shape), generic=self.name)

    def prefill(self, step: st.Prefill) -> None:
        """All instances write all of it: the same numbers, whoever comes last."""
        for slot in self.cta.slots[step.smem]:
            slot.write(_ordinary(slot.data.shape), generic=self.name)

    def load_scale(self, step: st.LoadScale) -> None:
        place = [self.value(e) for e in (step.batch, step.head, step.block) if e is not None]
        product = np.float32(step.constant) * (np.float32(1) if step.times is None else self.scalars[step.times])
        for name in step.factors:
            product = _flushed(product * _flushed(np.float32(self.cta.memory.descale(name, *place))))
        self.scalars[step.var] = product if step.least is None else np.maximum(product, np.float32(step.least))

    def scale_shift(self, step: st.ScaleShift) -> None:
        shift = np.log2(np.maximum(self.scalars[step.scale], np.float32(step.least)))
        self.scalars[step.shift], self.scalars[step.weight] = shift, np.exp2(-shift)

    def _shift(self, step: st.OnlineSoftmax | st.StaleSoftmax) -> tuple[np.float32, np.float32, np.float32]:
        """What scores are multiplied by, what is added to them, and what their exponentials' sums are multiplied by."""
        scale = np.float32(step.scale_log2) if step.scale is None else self.scalars[step.scale]
        if step.shift is None or step.weight is None:
            return scale, np.float32(0), np.float32(1)
        return scale, self.scalars[step.shift], self.scalars[step.weight]

    def load_frag(self, step: st.LoadFrag) -> None:
        dst = self.registers[step.dst]
        dst.load(self._operand(step.src, dst.shape[0]))

    def store_out(self, step: st.StoreOut) -> None:
        self._store(step, self.registers[step.src].value)

    def store_row(self, step: st.StoreRow) -> None:
        self._store(step, self.registers[step.src].value[:, 0])

    def _store(self, step: st.StoreOut | st.StoreRow, rows: Array) -> None:
        batch, head, first, limit = (self.value(e) for e in (step.batch, step.head, step.first_row, step.limit))
        col = self.value(step.col) if isinstance(step, st.StoreOut) and step.col is not None else None
        self.cta.memory.store(step.dst, batch, head, first, limit, rows, col)

    # tiles claimed at run time ----------------------------------------------------------------------------------------------

    def claim_tile(self, step: st.ClaimTile) -> None:
        counter = self.cta.memory.counters[step.counter]
        self.env[step.var] = self.env["n_ctas"] + int(counter[0])
        counter[0] += 1

    def reset_counter(self, step: st.ResetCounter) -> None:
        counter = self.cta.memory.counters[step.counter]
        counter[1] += 1
        if counter[1] == self.env["n_ctas"]:
            counter[:] = 0

    def put_tile(self, step: st.PutTile) -> None:
        self.slot(step.dst).write(self.value(step.value), generic=self.name)

    def get_tile(self, step: st.GetTile) -> None:
        tile = self.slot(step.src).data[0, 0]
        if np.isnan(tile):
            raise SimulatedFault(f"{step.id}: {self.name} reads a tile number that is not there")
        self.env[step.var] = int(tile)

    # synchronisation --------------------------------------------------------------------------------------------------------

    def wait(self, step: st.Wait) -> Blocked | None:
        cursor = self.cursors[step.cursor]
        bar, parity = self.cta.mbars[step.bar][cursor.slot], cursor.phase ^ step.refill

        def reason() -> str:
            missing = f"{bar.pending} of {bar.arrivals} arrivals and {bar.bytes} bytes"
            return f"waits for parity {parity} of {bar.name}, whose phase {bar.phase} still misses {missing}"

        return None if bar.passed(parity) else Blocked(lambda: bar.passed(parity), reason)

    def arrive(self, step: st.Arrive) -> None:
        count = 1 if self._single_thread or step.who == "thread" else self.role.warps
        self.cta.mbars[step.bar][self.cursors[step.cursor].slot].arrive(count, step.id)

    def advance_cursor(self, step: st.Advance) -> None:
        self.cursors[step.cursor].advance()

    def named_sync(self, step: st.Sync) -> Blocked | None:
        return self._rendezvous(self._named(step), step.id)

    def named_arrive(self, step: st.NArrive) -> None:
        self._named(step).arrive(32 * self.role.warps, step.id)

    def cta_sync(self, step: st.CtaSync) -> Blocked | None:
        return self._rendezvous(self.cta.sync, step.id)

    def _named(self, step: st.Sync | st.NArrive) -> NamedBarrier:
        index = self.value(step.index)
        try:
            return self.cta.nbars[step.bar, index]
        except KeyError:
            raise SimulatedFault(f"{step.id}: there is no barrier {step.bar}[{index}]") from None

    def _rendezvous(self, bar: NamedBarrier, step: str) -> Blocked | None:
        mine = bar.arrive(32 * self.role.warps, step)
        if bar.generation > mine:
            return None
        return Blocked(
            lambda: bar.generation > mine, lambda: f"waits for {bar.name}, where {bar.arrived} of {bar.threads} threads are"
        )

    def proxy_fence(self, step: st.ProxyFence) -> None:
        for ring in self.cta.slots.values():
            for slot in ring:
                slot.unfenced.discard(self.name)

    # matrix -----------------------------------------------------------------------------------------------------------------

    def _operand(self, slot: st.Slot, rows: int | None = None, cols: int | None = None) -> SharedOperand:
        shared = self.slot(slot)
        first = 0 if slot.row is None else self.value(slot.row)
        height, width = shared.data.shape
        return SharedOperand(shared, first, height if rows is None else rows, slot.col, width if cols is None else cols)

    def mma(self, step: st.Mma) -> None:
        d = self.registers[step.d]
        a = self.registers[step.a] if isinstance(step.a, str) else self._operand(step.a, d.shape[0])
        depth = a.shape[1] if isinstance(a, Register) else a.now().shape[1]
        n = d.shape[1]
        b = self._operand(step.b, *((depth, n) if step.trans_b else (n, depth)))
        if step.unit == "wgmma":
            exact = self.cta.memory.exact_sums
            product = Product(step.id, d, a, b, accumulate=step.accumulate, trans_b=step.trans_b, exact_sums=exact)
            self._open.append(product)
        else:
            left = a.value if isinstance(a, Register) else a.now()
            d.write(multiply(step.id, d.shape, left, b.now(), step.trans_b, d.value if step.accumulate else None))

    def mma_wait(self, step: st.MmaWait) -> None:
        while len(self._open) > step.pending:
            self._open.popleft().complete()
        for name in step.ready:
            self.registers[name].settle()

    # registers --------------------------------------------------------------------------------------------------------------

    def fill(self, step: st.Fill) -> None:
        dst = self.registers[step.dst]
        self._put(dst, np.full(dst.shape, step.value, np.float32))

    def limits(self, step: st.Limits) -> None:
        dst = self.registers[step.dst]
        first, env = self.value(step.first_row), dict(self.env)
        rows = []
        for r in range(dst.shape[0]):
            env["row"] = first + r
            rows.append(step.limit.eval(env))
        self._put(dst, np.array(rows, np.int64)[:, None])

    def mask(self, step: st.Mask) -> None:
        s, limits = self.registers[step.s], self.registers[step.limits].value
        key = self.value(step.first_key) + np.arange(s.shape[1])
        self._put(s, np.where(key > limits, np.float32(-np.inf), s.value))

    def int_to_float(self, step: st.IntToFloat) -> None:
        """A use of `src` after this finds NaN."""
        dst, src = self.registers[step.dst], self.registers[step.src]
        if (np.abs(src.value) > LARGEST_CONVERTED).any():
            raise SimulatedFault(f"{step.id}: an integer past ±{LARGEST_CONVERTED} would not be converted exactly")
        self._put(dst, src.value)
        src.write(src.nan())

    def online_softmax(self, step: st.OnlineSoftmax) -> None:
        s, m, l, alpha = (self.registers[x] for x in (step.s, step.m, step.l, step.alpha))
        scale, shift, weight = self._shift(step)
        highest = s.value.max(axis=1, keepdims=True) * scale + shift
        new = highest
        if not step.first:
            raised = np.minimum(m.value + self._lift(step, l.value), highest + np.float32(step.lift))
            new = np.maximum(np.maximum(m.value, highest), raised)
        reference = np.where(np.isneginf(new), np.float32(0), new)  # a row without a key yet: 2^(−inf − 0) = 0
        # One FFMA, so rounded once: float64 holds the product exactly.
        lowered = reference - (shift + np.float32(step.offset))
        exponent: F32 = (s.value.astype(np.float64) * np.float64(scale) - lowered).astype(np.float32)
        p = np.exp2(exponent, out=exponent)
        total = p.sum(axis=1, keepdims=True)
        if step.first:
            up = np.minimum(self._lift(step, total), np.float32(step.lift))
            new, p = new + up, p * np.exp2(-up)
            self._put(l, total * np.exp2(-up) * weight)
            self._put(alpha, alpha.nan())  # not computed
        else:
            factor = np.exp2(m.value - reference)
            self._put(l, l.value * factor + total * weight)
            self._put(alpha, factor)
        self._put(s, p)
        self._put(m, new)

    def _lift(self, step: st.OnlineSoftmax, total: F32) -> F32:
        """Whole powers of two in row sums, over the largest value."""
        if not step.lift:
            return np.zeros_like(total)
        exponent = np.where(total > 0, np.frexp(total)[1] - 1 - step.offset, 0)
        return np.maximum(exponent, 0).astype(np.float32)

    def stale_softmax(self, step: st.StaleSoftmax) -> None:
        s, m, e, part = (self.registers[x] for x in (step.s, step.m, step.e, step.part))
        scale, shift, weight = self._shift(step)
        lowered = m.value - (shift + np.float32(step.offset))
        exponent: F32 = (s.value.astype(np.float64) * np.float64(scale) - lowered).astype(np.float32)
        p = np.exp2(exponent, out=exponent)
        self._put(part, p.sum(axis=1, keepdims=True) * weight)
        self._put(e, rounded(p, e.dtype))
        # The GPU votes on each thread's share of two rows, the model on whole rows: near the limit they may part, both right.
        fits = np.abs(e.value) < E4M3_MAX if e.dtype == "e4m3" else part.value < STALE_LIMIT[e.dtype]
        self.votes[step.fits] = _by_warp(fits) & self.votes[step.calm]

    def calm(self, step: st.Calm) -> None:
        rows = self.registers[next(iter(self.registers))].shape[0]
        if step.limits is not None:
            assert step.first_key is not None
            self.votes[step.var] = _by_warp(self.registers[step.limits].value >= self.value(step.first_key) + step.seen - 1)
        elif step.alpha is None:
            self.votes[step.var] = np.ones(rows, bool)
        else:
            assert self._rows is not None
            steady = _by_warp(self.registers[step.alpha].value >= step.least)
            self.votes[step.var] = np.where(self._rows, steady, self.votes[step.var])

    def add_sums(self, step: st.AddSums) -> None:
        l = self.registers[step.l]
        self._put(l, l.value + self.registers[step.part].value)

    def move(self, step: st.Move | st.CopyRow) -> None:
        self._put(self.registers[step.dst], self.registers[step.src].value)

    def pack(self, step: st.Pack) -> None:
        p = self.registers[step.p]
        self._put(p, rounded(self.registers[step.s].value, p.dtype))

    def rescale(self, step: st.Rescale) -> None:
        o = self.registers[step.o]
        self._put(o, o.value * self.registers[step.alpha].value)

    def promote(self, step: st.Promote) -> None:
        total = self.registers[step.total]
        self._put(total, total.value + self.registers[step.o].value)


def _flushed(x: np.float32) -> np.float32:
    """As multiplications take and leave numbers too small to be normal: as 0 (kernels are compiled with --use_fast_math, PTX's .ftz)."""
    return np.float32(0) if abs(x) < np.finfo(np.float32).tiny else x


def _by_warp(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """For each row, whether it holds for all that the 16 rows of its warp have."""
    return rows.reshape(-1, 16 * rows.shape[1]).all(axis=1).repeat(16)


@lru_cache(maxsize=16)
def _ordinary(shape: tuple[int, int]) -> Array:
    """Numbers as `Prefill` has them: 0.5 to 1 in size, of both signs, exact in every operand type."""
    rng = np.random.default_rng(0)
    return np.asarray(rng.choice((-1.0, 1.0), shape) * rng.integers(4, 8, shape) / 8, np.float32)


@lru_cache(maxsize=256)
def _share(shape: tuple[int, int], size: int, threads: int, warps: int, index: int) -> npt.NDArray[np.bool_]:
    """The elements of a tile of `size` bytes that instance `index` copies when a role's threads take 16-byte chunks in turn."""
    rows, cols = shape
    per_chunk = 16 * rows * cols // size
    thread = np.arange(rows * cols // per_chunk) % threads
    mine = thread // (32 * warps) == index
    return np.repeat(mine, per_chunk).reshape(rows, cols)


_PRIVATE = frozenset(
    (
        st.Opaque,
        *ladder.PRIVATE,
        *quantise.PRIVATE,
        *(st.Let, st.Var, st.Set, st.Advance, st.CpCommit, st.StoreOut, st.StoreRow, st.Fill, st.Limits, st.Mask),
        *(st.IntToFloat, st.OnlineSoftmax, st.Pack, st.Rescale, st.Promote, st.LoadScale, st.ScaleShift),
        *(st.StaleSoftmax, st.AddSums, st.Calm, st.CopyRow, st.Hold, st.Move),
    )
)
"""Steps that no other role can notice, so nobody needs to come in before them."""

_ACTIONS: dict[type[st.Step], Callable[[Instance, Any], Blocked | None]] = {
    st.Let: Instance.bind_variable,
    st.Var: Instance.bind_variable,
    st.Set: Instance.bind_variable,
    st.TmaLoad: Instance.tma_load,
    st.CpAsync: Instance.cp_async,
    st.CpCommit: Instance.cp_commit,
    st.CpWait: Instance.cp_wait,
    st.LoadFrag: Instance.load_frag,
    st.TransposeV: Instance.transpose_v,
    st.Prefill: Instance.prefill,
    st.Opaque: lambda instance, step: None,
    st.LoadScale: Instance.load_scale,
    st.ScaleShift: Instance.scale_shift,
    st.StoreOut: Instance.store_out,
    st.StoreRow: Instance.store_row,
    st.ClaimTile: Instance.claim_tile,
    st.PutTile: Instance.put_tile,
    st.GetTile: Instance.get_tile,
    st.ResetCounter: Instance.reset_counter,
    st.Wait: Instance.wait,
    st.Arrive: Instance.arrive,
    st.Advance: Instance.advance_cursor,
    st.Sync: Instance.named_sync,
    st.NArrive: Instance.named_arrive,
    st.CtaSync: Instance.cta_sync,
    st.ProxyFence: Instance.proxy_fence,
    st.Mma: Instance.mma,
    st.MmaWait: Instance.mma_wait,
    st.Fill: Instance.fill,
    st.Limits: Instance.limits,
    st.Mask: Instance.mask,
    st.IntToFloat: Instance.int_to_float,
    st.OnlineSoftmax: Instance.online_softmax,
    st.StaleSoftmax: Instance.stale_softmax,
    st.AddSums: Instance.add_sums,
    st.CopyRow: Instance.move,
    st.Calm: Instance.calm,
    st.Hold: lambda instance, step: None,
    st.Move: Instance.move,
    st.Pack: Instance.pack,
    st.Rescale: Instance.rescale,
    st.Promote: Instance.promote,
    **ladder.ACTIONS,
    **quantise.ACTIONS,
}
