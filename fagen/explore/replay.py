"""The program with a clock: the same steps that the emitter prints and the proof runs, timed on one SM.

Every role instance of every CTA on the SM is an actor that walks its program. What it waits for (barriers, products, copies) it waits
for here; what it computes keeps the SM's units busy for as long as `pace` says, and units are shared: four partitions with
ordinary pipes and an exponential unit each, the tensor cores, shared memory, the link to L2. So a change of overlap, stages, roles or
tile sizes shows in the time because it shows in the program, without a formula of its own.

What is left out: which instruction ptxas puts where inside a step, bank conflicts, and L2 misses (DRAM is `model`'s matter).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import InternalError
from ..plan import steps as S
from ..plan.expr import Expr
from ..plan.kernel import KernelPlan
from ..plan.proof.evaluate import Evaluator
from . import pace as P
from .engine import Actor, Engine, Signal, Unit, Until
from .replay_state import Bar, Cta, Line, Meeting

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
        state = Cta(self.kernel)
        for role in self.kernel.roles:
            for w in range(role.count):
                parts = tuple(range(P.PARTITIONS)) if role.warps >= P.PARTITIONS else (self._warps % P.PARTITIONS,)
                self._warps += role.warps
                slots = {c.name: (0, 0) for c in role.cursors}
                env = {**self.scalars, "cta": cta, "w": w}
                line = Line(role, w, role.warps, env, parts, state, slots, role.elect)
                self.running += 1
                self.engine.start(self._whole(line), LAUNCH_CLOCKS)

    def _whole(self, line: Line) -> Actor:
        yield from self._body(line, line.role.body)
        self.running -= 1

    # control --------------------------------------------------------------------------------------------------------------

    def _body(self, line: Line, body: S.Body) -> Walk:
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
            elif type(step) in PLAIN:
                PLAIN[type(step)](self, line, step)
            else:
                handler = HANDLERS.get(type(step))
                yield from handler(self, line, step) if handler else self._work(line, step)
        return False

    def _elected(self, line: Line, body: S.Body) -> Walk:
        line.single = True
        left = yield from self._body(line, body)
        line.single = False
        return left

    # arithmetic -----------------------------------------------------------------------------------------------------------

    def _work(self, line: Line, step: S.Step) -> Actor:
        known = self._paces.get(step.id)
        if known is None:
            known = self._paces[step.id] = P.pace(self.kernel, line.role, step)
        assert isinstance(known, P.Pace)
        yield from self.spend(line, known)

    def spend(self, line: Line, work: P.Pace) -> Actor:
        """Keep the units of the line's partitions busy, and the line with them."""
        now = end = self.engine.now
        for p in line.parts:
            end = max(end, self.mufu[p].serve(now, work.mufu) if work.mufu else now, self.alu[p].serve(now, work.alu))
        if end > now:
            yield end
        if work.smem:
            yield self.smem.serve(self.engine.now, work.smem * line.warps / P.SMEM_BYTES)
        if work.latency:
            yield self.engine.now + work.latency

    # products -------------------------------------------------------------------------------------------------------------

    def _mma(self, line: Line, step: S.Mma) -> Actor:
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

    def _multiply(self, line: Line) -> Actor:
        """A warpgroup's products in order, k-step by k-step: between two of them another warpgroup's may be served."""
        while line.products:
            product, done = line.products.popleft()
            for _ in range(product.count):
                end = max(self.tensor[p].serve(self.engine.now, product.clocks) for p in line.parts)
                yield end
            self.engine.at(self.engine.now + P.WGMMA_LATENCY, partial(self.engine.fire, done))
        line.multiplying = False

    def _mma_sync(self, line: Line, product: P.Product) -> Actor:
        """A warp's product is served whole, since schedulers favour the older warp: warps that began together drift apart, and one's softmax
        runs under the next one's product."""
        now, count = self.engine.now, product.count
        operands = self.smem.serve(now, count * product.smem / P.SMEM_BYTES)
        yield max(operands, *(self.tensor[p].serve(now, count * product.clocks) for p in line.parts)) + P.HMMA_LATENCY

    def _mma_wait(self, line: Line, step: S.MmaWait) -> Actor:
        if len(line.groups) > step.pending:
            yield line.groups[len(line.groups) - 1 - step.pending]
            del line.groups[: len(line.groups) - step.pending]

    # barriers -------------------------------------------------------------------------------------------------------------

    def _bar(self, line: Line, name: str, cursor: str) -> Bar:
        return line.cta.bars[name, line.slots[cursor][0]]

    def _wait(self, line: Line, step: S.Wait) -> Actor:
        start = next(c.start_phase for c in line.role.cursors if c.name == step.cursor)
        phase = line.slots[step.cursor][1] - start - step.refill
        if phase >= 0:
            yield self._bar(line, step.bar, step.cursor).signal(phase)
        yield self.engine.now + P.BARRIER_LATENCY

    def _arrive(self, line: Line, step: S.Arrive) -> Actor:
        self._arrived(self._bar(line, step.bar, step.cursor), 1 if line.single else line.warps)
        yield self.engine.now + 4.0

    def _arrived(self, bar: Bar, count: int) -> None:
        bar.left -= count
        if bar.left == 0 and bar.pending == 0:
            signal, bar.left, bar.phase = bar.signal(bar.phase), bar.arrivals, bar.phase + 1
            self.engine.fire(signal)

    def _advance(self, line: Line, step: S.Advance) -> None:
        stages = next(c.stages for c in line.role.cursors if c.name == step.cursor)
        slot, passes = line.slots[step.cursor]
        line.slots[step.cursor] = (slot + 1, passes) if slot + 1 < stages else (0, passes + 1)

    def _meet(self, line: Line, meeting: Meeting) -> Signal:
        meeting.threads += P.LANES * (1 if line.single else line.warps)
        signal = meeting.signal
        if meeting.threads >= meeting.expected:
            meeting.threads, meeting.signal = 0, Signal()
            self.engine.fire(signal)
        return signal

    def _sync(self, line: Line, step: S.Sync) -> Actor:
        yield self._meet(line, line.cta.named[step.bar, self.evaluate(step.index, line.env)])
        yield self.engine.now + P.BARRIER_LATENCY

    def _narrive(self, line: Line, step: S.NArrive) -> None:
        self._meet(line, line.cta.named[step.bar, self.evaluate(step.index, line.env)])

    def _cta_sync(self, line: Line, step: S.CtaSync) -> Actor:
        yield self._meet(line, line.cta.everyone)
        yield self.engine.now + P.CTA_BARRIER_LATENCY

    # tiles claimed at run time --------------------------------------------------------------------------------------------

    def _claim(self, line: Line, step: S.ClaimTile) -> None:
        line.env[step.var] = line.env["n_ctas"] + self.claims
        self.claims += 1
        line.claimed = self.engine.now + P.ATOMIC_LATENCY

    def _put(self, line: Line, step: S.PutTile) -> Actor:
        yield max(line.claimed, self.engine.now) + P.SMALL
        line.cta.rings[self._slot(line, step.dst)] = self.evaluate(step.value, line.env)

    def _get(self, line: Line, step: S.GetTile) -> Actor:
        line.env[step.var] = line.cta.rings[self._slot(line, step.src)]
        yield from self._work(line, step)

    def _slot(self, line: Line, slot: S.Slot) -> tuple[str, int]:
        return slot.smem, line.slots[slot.cursor][0] if slot.cursor else 0

    # global memory --------------------------------------------------------------------------------------------------------

    def _tma(self, line: Line, step: S.TmaLoad) -> Actor:
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

    def _share(self, line: Line, nbytes: float) -> float:
        """Of a tile that all instances of the role move together."""
        return nbytes / line.role.count

    def _cp_async(self, line: Line, step: S.CpAsync) -> Actor:
        nbytes = self._share(line, self.kernel.smem_of(step.dst.smem).tile_bytes)
        instructions = nbytes / (P.COPY_BYTES * P.LANES * line.warps)
        now = self.engine.now
        self.smem.serve(now, nbytes / P.SMEM_BYTES)
        line.copied = max(line.copied, self.link.serve(now, nbytes / P.LINK_BYTES) + P.LOAD_LATENCY)
        yield from self.spend(line, P.Pace(alu=instructions * P.CP_ASYNC))

    def _cp_commit(self, line: Line, step: S.CpCommit) -> None:
        line.copies.append(line.copied)

    def _cp_wait(self, line: Line, step: S.CpWait) -> Actor:
        if len(line.copies) > step.pending:
            yield line.copies[len(line.copies) - 1 - step.pending]

    def _copy(self, line: Line, step: S.Copy) -> Actor:
        """A thread has `most` loads in flight, and waits for them before it asks for more."""
        tile = self.kernel.smem_of(step.dst.smem)
        nbytes = self._share(line, tile.tile_bytes)
        batches = max(1.0, nbytes / (P.COPY_BYTES * P.LANES * line.warps) / step.most)
        yield from self._through(line, nbytes, batches)
        yield self.smem.serve(self.engine.now, nbytes / P.SMEM_BYTES)

    def _through(self, line: Line, nbytes: float, batches: float) -> Actor:
        """Loads into registers, batch after batch."""
        whole = max(1, round(batches))
        for _ in range(whole):
            yield self.link.serve(self.engine.now, nbytes / whole / P.LINK_BYTES) + P.GATHER_LATENCY * batches / whole

    def _load(self, line: Line, step: Any) -> Actor:
        """LoadAcc, LoadRow."""
        frag = next(f for f in line.role.frags if f.name == step.dst)
        yield from self._through(line, frag.rows * frag.cols * S.DTYPE_BYTES[frag.dtype], 1)

    def _store(self, line: Line, step: Any) -> Actor:
        """StoreOut, StoreScores, StoreAcc, StoreRow: queued, and nobody waits."""
        frag = next(f for f in line.role.frags if f.name == step.src)
        n = P.each(frag, line.role)
        size = S.DTYPE_BYTES[self.kernel.gmem_of(step.dst).dtype]
        self.link.serve(self.engine.now, frag.rows * frag.cols * size / P.LINK_BYTES)
        yield from self.spend(line, P.Pace(alu=n * P.STORE, latency=P.SMALL))

    def _row_pass(self, line: Line, step: S.RowPass) -> Actor:
        """A warp reads its row in pieces of `STORE_BATCH` loads a lane."""
        cols = self.evaluate(step.cols, line.env)
        nbytes = cols * 4.0
        yield from self._through(line, nbytes, nbytes / (P.COPY_BYTES * P.LANES * P.STORE_BATCH))
        n = cols / P.LANES
        exps = 0.0 if step.op == "max" else n * P.EX2
        yield from self.spend(line, P.Pace(alu=n * 2 * P.SLOW, mufu=exps, latency=2 * P.SMALL))

    def _load_scale(self, line: Line, step: S.LoadScale) -> Actor:
        yield self.engine.now + P.LOAD_LATENCY


PLAIN: Mapping[type[S.Step], Callable[[_Sm, Line, Any], None]] = {
    S.Advance: _Sm._advance,
    S.NArrive: _Sm._narrive,
    S.ClaimTile: _Sm._claim,
    S.CpCommit: _Sm._cp_commit,
}
"""Steps that take no time worth a name."""
HANDLERS: Mapping[type[S.Step], Callable[[_Sm, Line, Any], Actor]] = {
    S.Mma: _Sm._mma,
    S.MmaWait: _Sm._mma_wait,
    S.Wait: _Sm._wait,
    S.Arrive: _Sm._arrive,
    S.Sync: _Sm._sync,
    S.CtaSync: _Sm._cta_sync,
    S.PutTile: _Sm._put,
    S.GetTile: _Sm._get,
    S.TmaLoad: _Sm._tma,
    S.CpAsync: _Sm._cp_async,
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
