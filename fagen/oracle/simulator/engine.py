"""The scheduler: which role goes on, and when what TMA carries lands. Seeded, and unkind: late data, long runs of one role."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from ...plan.kernel import KernelPlan
from ...plan.steps import CpAsync, PutTile, TmaLoad, Wait, walk
from .instance import CtaState, Instance
from .machine import GlobalMemory, MBarrier, NamedBarrier, SharedSlot, SimulatedDeadlock, SimulatedFault, Transfer, named_barriers


class Engine:
    """Runs the CTAs `ctas` of one kernel, `resident` of them at a time, interleaved step by step.

    Two habits are drawn from the seed: how readily an instance that runs keeps running, and how early TMA data lands: at random
    moments, or only when nobody can go on without it.
    """

    def __init__(
        self, kernel: KernelPlan, env: dict[str, int], memory: GlobalMemory, ctas: Sequence[int], *, resident: int, seed: int
    ) -> None:
        self._kernel, self._env, self._memory = kernel, env, memory
        self._random = random.Random(seed)
        self._keeps_running = self._random.choice((0.0, 0.5, 0.95))
        self._lands_early = self._random.choice((0.0, 0.0, 0.02, 0.3))
        self._waiting = deque(ctas)
        self._transfers: list[Transfer] = []
        self._running: list[Instance] = []
        self._current: Instance | None = None
        self._freed = _freed_by(kernel)
        for _ in range(resident):
            self._start_next()

    def run(self) -> None:
        """Until every CTA is done. Raises SimulatedDeadlock if nobody can go on, SimulatedFault as steps find it."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # NaN is how a mistake shows
            while self._running:
                self._step()

    def _step(self) -> None:
        if self._transfers and self._random.random() < self._lands_early:
            self._land_one()
        instance = self._pick()
        if instance is not None:
            instance.advance()
            if instance.done:
                self._finish(instance)
        elif self._transfers:
            self._land_one()
        else:
            standing = "; ".join(i.describe() for i in self._running)
            raise SimulatedDeadlock(f"{self._kernel.name}: no role can go on: {standing}")

    def _pick(self) -> Instance | None:
        current = self._current
        if current is not None and self._random.random() < self._keeps_running and current.ready:
            return current
        start = self._random.randrange(len(self._running))
        for instance in (*self._running[start:], *self._running[:start]):
            if instance.ready:
                self._current = instance
                return instance
        return None

    def _land_one(self) -> None:
        self._transfers.pop(self._random.randrange(len(self._transfers))).land()

    def _finish(self, instance: Instance) -> None:
        self._running.remove(instance)
        self._current = None
        if any(i.cta is instance.cta for i in self._running):
            return
        for transfer in self._transfers:
            if transfer.cta == instance.cta.index:
                raise SimulatedFault(f"CTA {transfer.cta} ends while the load of {transfer.step} is in flight")
        self._start_next()

    def _start_next(self) -> None:
        if self._waiting:
            cta = self._new_cta(self._waiting.popleft())
            self._running += [Instance(cta, role, w) for role in self._kernel.roles for w in range(role.count)]

    def _new_cta(self, index: int) -> CtaState:
        k = self._kernel
        slots = {s.name: [SharedSlot(s) for _ in range(s.stages)] for s in k.smem}
        mbars = {b.name: [MBarrier(b, i) for i in range(b.stages)] for b in k.mbars}
        for bar, smems in self._freed.items():
            for i, barrier in enumerate(mbars[bar]):
                barrier.frees = [slots[name][i] for name in sorted(smems)]
        sync = NamedBarrier("the CTA's barrier", k.threads)
        return CtaState(index, self._env, self._memory, slots, mbars, named_barriers(k.nbars), sync, self._transfers)


def _freed_by(kernel: KernelPlan) -> dict[str, set[str]]:
    """The rings whose slot is free once a phase of a barrier completes: those that a role fills at the cursor with which it waits
    for that barrier (and that the barrier does not announce as full)."""
    freed: dict[str, set[str]] = defaultdict(set)
    announcing = {step.full for role in kernel.roles for step in walk(role.body) if isinstance(step, TmaLoad)}
    for role in kernel.roles:
        filled: dict[str | None, set[str]] = defaultdict(set)
        for step in walk(role.body):
            if isinstance(step, (TmaLoad, CpAsync, PutTile)):
                filled[step.dst.cursor].add(step.dst.smem)
        for step in walk(role.body):
            if isinstance(step, Wait) and step.cursor in filled and step.bar not in announcing:
                freed[step.bar] |= filled[step.cursor]
    return freed
