"""The program with a clock: the same steps that the emitter prints and the proof runs, timed on one SM.

Every role instance of every CTA on the SM is an actor that walks its program. What it waits for (barriers, products, copies) it waits
for here; what it computes keeps the SM's units busy for as long as `pace` says, and units are shared: four partitions with
ordinary pipes and an exponential unit each, the tensor cores, shared memory, the link to L2. So a change of overlap, stages, roles or
tile sizes shows in the time because it shows in the program, without a formula of its own.

What is left out: which instruction ptxas puts where inside a step, bank conflicts, and L2 misses (DRAM is `model`'s matter).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import InternalError
from ..plan import steps as S
from ..plan.expr import Expr
from ..plan.kernel import KernelPlan
from ..plan.proof.evaluate import Evaluator
from . import pace as P
from .engine import Actor, Engine, Signal, Unit, Until

PIECES = 4
"""A long stretch of a warp's arithmetic is asked for in so many parts, between which other warps get their turn."""
LONG = 200.0
LAUNCH_CLOCKS = 550.0
"""Of a CTA before its first step: barriers initialised, registers set, maps fetched."""

Walk = Generator[Until, None, bool]
"""An actor's part; whether a Break fired."""


@dataclass(frozen=True)
class Replayed:
    """`clocks` from the launch of the CTAs to the end of the last; `tensor`: clocks in which the tensor cores worked, `mufu`: likewise the
    exponential units (each the mean over partitions)."""

    clocks: float
    tensor: float
    mufu: float


def replay(kernel: KernelPlan, scalars: Mapping[str, int], ctas: Sequence[int]) -> Replayed:
    """Run these CTAs side by side on one SM. `scalars`: as for `tally`. InternalError where they never end."""
    sm = _Sm(kernel, scalars)
    for cta in ctas:
        sm.launch(cta)
    clocks = sm.engine.run()
    if sm.running:
        raise InternalError(f"{kernel.name}: the model's clock stops before its program ends ({sm.running} roles wait)")
    tensor, mufu = (sum(u.busy for u in units) / P.PARTITIONS for units in (sm.tensor, sm.mufu))
    return Replayed(clocks, tensor, mufu)


@dataclass(eq=False)
class _Line:
    """A role instance. `parts`: the partitions on which its warps run."""

    role: S.Role
    w: int
    warps: int
    env: dict[str, int]
    parts: tuple[int, ...]
    cta: _Cta
    slots: dict[str, tuple[int, int]]
    """Cursor → (slot, passes)."""
    single: bool
    products: deque[tuple[P.Product, Signal]] = field(default_factory=deque)
    multiplying: bool = False
    groups: list[Signal] = field(default_factory=list)
    """Products, as committed."""
    copied: float = 0.0
    """When the copies issued so far have landed."""
    copies: list[float] = field(default_factory=list)
    claimed: float = 0.0
    """When the tile asked for is known."""


@dataclass
class _Bar:
    """One mbarrier: arrivals and bytes of the phase under way, and a signal for every phase."""

    arrivals: int
    left: int
    pending: int = 0
    """Copies by TMA that have not landed."""
    phase: int = 0
    done: list[Signal] = field(default_factory=list)

    def signal(self, phase: int) -> Signal:
        while len(self.done) <= phase:
            self.done.append(Signal())
        return self.done[phase]


@dataclass
class _Meeting:
    """A named barrier, or the CTA's."""

    expected: int
    threads: int = 0
    signal: Signal = field(default_factory=Signal)


class _Cta:
    def __init__(self, kernel: KernelPlan):
        self.bars = {(b.name, i): _Bar(b.arrivals, b.arrivals) for b in kernel.mbars for i in range(b.stages)}
        self.named = {(b.name, i): _Meeting(b.threads) for b in kernel.nbars for i in range(b.count)}
        self.everyone = _Meeting(kernel.threads)
        self.rings: dict[tuple[str, int], int] = {}
        """Slot of a ring of tile numbers → what it holds."""


class _Sm:
    def __init__(self, kernel: KernelPlan, scalars: Mapping[str, int]):
        self.kernel, self.scalars, self.engine = kernel, scalars, Engine()
        self.evaluate = Evaluator()
        self.tensor, self.alu, self.mufu = ([Unit() for _ in range(P.PARTITIONS)] for _ in range(3))
        self.smem, self.link = Unit(), Unit()
        self.running = 0
        self.claims = 0
        self._paces: dict[str, P.Pace | P.Product] = {}
        self._warps = 0

    def launch(self, cta: int) -> None:
        state = _Cta(self.kernel)
        for role in self.kernel.roles:
            for w in range(role.count):
                parts = tuple(range(P.PARTITIONS)) if role.warps >= P.PARTITIONS else (self._warps % P.PARTITIONS,)
                self._warps += role.warps
                slots = {c.name: (0, 0) for c in role.cursors}
                env = {**self.scalars, "cta": cta, "w": w}
                line = _Line(role, w, role.warps, env, parts, state, slots, role.elect)
                self.running += 1
                self.engine.start(self._whole(line), LAUNCH_CLOCKS)

    def _whole(self, line: _Line) -> Actor:
        yield from self._body(line, line.role.body)
        self.running -= 1

    # control --------------------------------------------------------------------------------------------------------------

    def _body(self, line: _Line, body: S.Body) -> Walk:
        for step in body:
            if isinstance(step, (S.Let, S.Var, S.Set)):
                line.env[step.var] = self.evaluate(step.value, line.env)
            elif isinstance(step, S.Break):
                if self.evaluate(step.cond, line.env):
                    return True
            elif isinstance(step, S.Loop):
                first, last = self.evaluate(step.first, line.env), self.evaluate(step.last, line.env)
                by = self.evaluate(step.step, line.env) if isinstance(step.step, Expr) else step.step
                for value in range(first, last + (1 if by > 0 else -1), by):
                    line.env[step.var] = value
                    if (yield from self._body(line, step.body)):
                        return True
            elif isinstance(step, S.Forever):
                while not (yield from self._body(line, step.body)):
                    pass
            elif isinstance(step, S.If):
                if (yield from self._body(line, step.then if self.evaluate(step.cond, line.env) else step.orelse)):
                    return True
            elif isinstance(step, S.Vote):
                if (yield from self._body(line, step.orelse)):  # the exact step is rare
                    return True
            elif isinstance(step, S.Elected):
                if line.w == 0 and (yield from self._elected(line, step.body)):
                    return True
            else:
                handler = HANDLERS.get(type(step))
                yield from handler(self, line, step) if handler else self._work(line, step)
        return False

    def _elected(self, line: _Line, body: S.Body) -> Walk:
        line.single = True
        left = yield from self._body(line, body)
        line.single = False
        return left

    # arithmetic -----------------------------------------------------------------------------------------------------------

    def _work(self, line: _Line, step: S.Step) -> Actor:
        known = self._paces.get(step.id)
        if known is None:
            known = self._paces[step.id] = P.pace(self.kernel, line.role, step)
        assert isinstance(known, P.Pace)
        yield from self.spend(line, known)

    def spend(self, line: _Line, work: P.Pace) -> Actor:
        """Keep the units of the line's partitions busy, and the line with them."""
        longest = max(work.alu, work.mufu)
        pieces = PIECES if longest > LONG else 1
        for _ in range(pieces if longest else 0):
            now, end = self.engine.now, self.engine.now
            for p in line.parts:
                if work.mufu:
                    end = max(end, self.mufu[p].serve(now, work.mufu / pieces))
                end = max(end, self.alu[p].serve(now, work.alu / pieces))
            yield end
        if work.smem:
            yield self.smem.serve(self.engine.now, work.smem * line.warps / P.SMEM_BYTES)
        if work.latency:
            yield self.engine.now + work.latency

    # products -------------------------------------------------------------------------------------------------------------

    def _mma(self, line: _Line, step: S.Mma) -> Actor:
        known = self._paces.get(step.id)
        if known is None:
            known = self._paces[step.id] = P.product(self.kernel, line.role, step)
        assert isinstance(known, P.Product)
        if step.unit == "mma_sync":
            yield from self._mma_sync(line, known)
            return
        done = Signal()
        line.products.append((known, done))
        line.groups.append(done)
        if not line.multiplying:
            line.multiplying = True
            self.engine.start(self._multiply(line), self.engine.now)
        yield self.engine.now + known.issue

    def _multiply(self, line: _Line) -> Actor:
        """A warpgroup's products in order, k-step by k-step: between two of them another warpgroup's may be served."""
        while line.products:
            product, done = line.products.popleft()
            for _ in range(product.count):
                end = max(self.tensor[p].serve(self.engine.now, product.clocks) for p in line.parts)
                yield end
            self.engine.at(self.engine.now + P.WGMMA_LATENCY, partial(self.engine.fire, done))
        line.multiplying = False

    def _mma_sync(self, line: _Line, product: P.Product) -> Actor:
        for _ in range(product.count):
            now = self.engine.now
            operands = self.smem.serve(now, product.smem / P.SMEM_BYTES)
            yield max(operands, *(self.tensor[p].serve(now, product.clocks) for p in line.parts))
        yield self.engine.now + P.HMMA_LATENCY

    def _mma_wait(self, line: _Line, step: S.MmaWait) -> Actor:
        if len(line.groups) > step.pending:
            yield line.groups[len(line.groups) - 1 - step.pending]
            del line.groups[: len(line.groups) - step.pending]

    # barriers -------------------------------------------------------------------------------------------------------------

    def _bar(self, line: _Line, name: str, cursor: str) -> _Bar:
        return line.cta.bars[name, line.slots[cursor][0]]

    def _wait(self, line: _Line, step: S.Wait) -> Actor:
        start = next(c.start_phase for c in line.role.cursors if c.name == step.cursor)
        phase = line.slots[step.cursor][1] - start
        if phase >= 0:
            yield self._bar(line, step.bar, step.cursor).signal(phase)
        yield self.engine.now + P.BARRIER_LATENCY

    def _arrive(self, line: _Line, step: S.Arrive) -> Actor:
        self._arrived(self._bar(line, step.bar, step.cursor), 1 if line.single else line.warps)
        yield self.engine.now + 4.0

    def _arrived(self, bar: _Bar, count: int) -> None:
        bar.left -= count
        if bar.left == 0 and bar.pending == 0:
            signal, bar.left, bar.phase = bar.signal(bar.phase), bar.arrivals, bar.phase + 1
            self.engine.fire(signal)

    def _advance(self, line: _Line, step: S.Advance) -> Actor:
        stages = next(c.stages for c in line.role.cursors if c.name == step.cursor)
        slot, passes = line.slots[step.cursor]
        line.slots[step.cursor] = (slot + 1, passes) if slot + 1 < stages else (0, passes + 1)
        return
        yield

    def _meet(self, line: _Line, meeting: _Meeting) -> Signal:
        meeting.threads += P.LANES * (1 if line.single else line.warps)
        signal = meeting.signal
        if meeting.threads >= meeting.expected:
            meeting.threads, meeting.signal = 0, Signal()
            self.engine.fire(signal)
        return signal

    def _sync(self, line: _Line, step: S.Sync) -> Actor:
        yield self._meet(line, line.cta.named[step.bar, self.evaluate(step.index, line.env)])
        yield self.engine.now + P.BARRIER_LATENCY

    def _narrive(self, line: _Line, step: S.NArrive) -> Actor:
        self._meet(line, line.cta.named[step.bar, self.evaluate(step.index, line.env)])
        return
        yield

    def _cta_sync(self, line: _Line, step: S.CtaSync) -> Actor:
        yield self._meet(line, line.cta.everyone)
        yield self.engine.now + P.CTA_BARRIER_LATENCY

    # tiles claimed at run time --------------------------------------------------------------------------------------------

    def _claim(self, line: _Line, step: S.ClaimTile) -> Actor:
        line.env[step.var] = line.env["n_ctas"] + self.claims
        self.claims += 1
        line.claimed = self.engine.now + P.ATOMIC_LATENCY
        return
        yield

    def _put(self, line: _Line, step: S.PutTile) -> Actor:
        yield max(line.claimed, self.engine.now) + P.SMALL
        line.cta.rings[self._slot(line, step.dst)] = self.evaluate(step.value, line.env)

    def _get(self, line: _Line, step: S.GetTile) -> Actor:
        line.env[step.var] = line.cta.rings[self._slot(line, step.src)]
        yield from self._work(line, step)

    def _slot(self, line: _Line, slot: S.Slot) -> tuple[str, int]:
        return slot.smem, line.slots[slot.cursor][0] if slot.cursor else 0

    # global memory --------------------------------------------------------------------------------------------------------

    def _tma(self, line: _Line, step: S.TmaLoad) -> Actor:
        tile = self.kernel.smem_of(step.dst.smem)
        cursor = step.dst.cursor
        bar = line.cta.bars[step.full, line.slots[cursor][0] if cursor else 0]
        bar.pending += 1
        landed = self.link.serve(self.engine.now, tile.tile_bytes / P.LINK_BYTES) + P.LOAD_LATENCY

        def land() -> None:
            bar.pending -= 1
            self._arrived(bar, 0)

        self._arrived(bar, 1)
        self.engine.at(landed, land)
        yield self.engine.now + P.SMALL

    def _share(self, line: _Line, nbytes: float) -> float:
        """Of a tile that all instances of the role move together."""
        return nbytes / line.role.count

    def _cp_async(self, line: _Line, step: S.CpAsync) -> Actor:
        nbytes = self._share(line, self.kernel.smem_of(step.dst.smem).tile_bytes)
        instructions = nbytes / (P.COPY_BYTES * P.LANES * line.warps)
        now = self.engine.now
        self.smem.serve(now, nbytes / P.SMEM_BYTES)
        line.copied = max(line.copied, self.link.serve(now, nbytes / P.LINK_BYTES) + P.LOAD_LATENCY)
        yield from self.spend(line, P.Pace(alu=instructions * P.CP_ASYNC))

    def _cp_commit(self, line: _Line, step: S.CpCommit) -> Actor:
        line.copies.append(line.copied)
        return
        yield

    def _cp_wait(self, line: _Line, step: S.CpWait) -> Actor:
        if len(line.copies) > step.pending:
            yield line.copies[len(line.copies) - 1 - step.pending]

    def _copy(self, line: _Line, step: S.Copy) -> Actor:
        """A thread has `most` loads in flight, and waits for them before it asks for more."""
        tile = self.kernel.smem_of(step.dst.smem)
        nbytes = self._share(line, tile.tile_bytes)
        batches = max(1.0, nbytes / (P.COPY_BYTES * P.LANES * line.warps) / step.most)
        yield from self._through(line, nbytes, batches)
        yield self.smem.serve(self.engine.now, nbytes / P.SMEM_BYTES)

    def _through(self, line: _Line, nbytes: float, batches: float) -> Actor:
        """Loads into registers, batch after batch."""
        whole = max(1, round(batches))
        for _ in range(whole):
            yield self.link.serve(self.engine.now, nbytes / whole / P.LINK_BYTES) + P.GATHER_LATENCY * batches / whole

    def _load(self, line: _Line, step: Any) -> Actor:
        """LoadAcc, LoadRow."""
        frag = next(f for f in line.role.frags if f.name == step.dst)
        yield from self._through(line, frag.rows * frag.cols * S.DTYPE_BYTES[frag.dtype], 1)

    def _store(self, line: _Line, step: Any) -> Actor:
        """StoreOut, StoreScores, StoreAcc, StoreRow: queued, and nobody waits."""
        frag = next(f for f in line.role.frags if f.name == step.src)
        n = P.each(frag, line.role)
        size = S.DTYPE_BYTES[self.kernel.gmem_of(step.dst).dtype]
        self.link.serve(self.engine.now, frag.rows * frag.cols * size / P.LINK_BYTES)
        yield from self.spend(line, P.Pace(alu=n * P.STORE, latency=P.SMALL))

    def _row_pass(self, line: _Line, step: S.RowPass) -> Actor:
        """A warp reads its row in pieces of `STORE_BATCH` loads a lane."""
        cols = self.evaluate(step.cols, line.env)
        nbytes = cols * 4.0
        yield from self._through(line, nbytes, nbytes / (P.COPY_BYTES * P.LANES * P.STORE_BATCH))
        n = cols / P.LANES
        exps = 0.0 if step.op == "max" else n * P.EX2
        yield from self.spend(line, P.Pace(alu=n * 2 * P.SLOW, mufu=exps, latency=2 * P.SMALL))

    def _load_scale(self, line: _Line, step: S.LoadScale) -> Actor:
        yield self.engine.now + P.LOAD_LATENCY




HANDLERS: Mapping[type[S.Step], Callable[[_Sm, _Line, Any], Actor]] = {
    S.Mma: _Sm._mma,
    S.MmaWait: _Sm._mma_wait,
    S.Wait: _Sm._wait,
    S.Arrive: _Sm._arrive,
    S.Advance: _Sm._advance,
    S.Sync: _Sm._sync,
    S.NArrive: _Sm._narrive,
    S.CtaSync: _Sm._cta_sync,
    S.ClaimTile: _Sm._claim,
    S.PutTile: _Sm._put,
    S.GetTile: _Sm._get,
    S.TmaLoad: _Sm._tma,
    S.CpAsync: _Sm._cp_async,
    S.CpCommit: _Sm._cp_commit,
    S.CpWait: _Sm._cp_wait,
    S.Copy: _Sm._copy,
    S.LoadAcc: _Sm._load,
    S.LoadRow: _Sm._load,
    S.StoreOut: _Sm._store,
    S.StoreScores: _Sm._store,
    S.StoreAcc: _Sm._store,
    S.StoreRow: _Sm._store,
    S.RowPass: _Sm._row_pass,
    S.LoadScale: _Sm._load_scale,
}
"""Steps that wait, synchronise or touch global memory; all others are arithmetic (`pace`)."""
