"""Trace buffers without a GPU: the simulator runs a kernel with its marks, and what a GPU would have stored is put together.

The words are put into the buffer as the emitted functions `note…` and `next_run` do it, the place kept step by step; what they leave
out holds what an earlier launch might have left. Every mark takes a random time from 10 to 99 cycles of its CTA's clock, whose lower half runs over soon after the start.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from fagen.explore.roofline import contiguous
from fagen.oracle import CheckProblem, make_case, simulate
from fagen.oracle.simulator import instance
from fagen.plan import Plan
from fagen.plan.expr import sym
from fagen.plan.kernel import TRACE_CTAS, TRACE_HEADER_WORDS, TRACE_WORDS, KernelLaunch
from fagen.trace import ARGUMENT_BITS, QUAD, Mark, instances_of, longest_run, marked

CYCLES_PER_NS = 1.5
START = 0xFFFFF000
"""Of every CTA's clock, 32 bits."""
ZERO_NS = 1 << 33
LEFT_BEHIND = 0x00000007
"""The word of a run that may well be one: a reader must not come to it."""
SPOILED = 0x00000009
"""Such a word, too, where a store writes more than it has."""

Noted = dict[tuple[str, int, str, int], list[tuple[int, Mark, list[int]]]]
"""(kernel, CTA, role, instance) → (cycles since the CTA's start, mark, arguments of its notes)."""


@contextmanager
def _noting(found: Noted, seed: int) -> Iterator[list[str]]:
    rng, now, kernel = random.Random(seed), defaultdict[tuple[str, int], int](int), [""]

    def note(self: instance.Instance, step: Mark) -> None:
        if self._rows is not None and not self._rows[0]:
            return  # inside a vote: the first warp takes the other side
        at = (kernel[0], self.cta.index)
        now[at] += rng.randint(10, 99)
        arguments = [self.value(sym(n.variable)) if n.variable else 0 for n in step.notes]
        found.setdefault((*at, self.role.name, self.index), []).append((now[at], step, arguments))

    instance._ACTIONS[Mark] = note
    try:
        yield kernel
    finally:
        del instance._ACTIONS[Mark]


def simulated(
    plan: Plan, problem: CheckProblem, num_sms: int = 2, first: int = 0, seed: int = 0, turned: bool = False
) -> tuple[tuple[KernelLaunch, ...], dict[str, Any]]:
    """The launches of a trace plan, and for each kernel the words that it would leave behind. `turned`: the keys from last to first."""
    found: Noted = {}
    case = make_case(plan.attention, plan.schedule, problem, seed=seed)
    with _noting(found, seed) as kernel:
        roles = {k.name: marked(k) for k in plan.kernels}
        names = {id(r.body): k.name for k in roles.values() for r in k.roles}
        original = instance.Instance.__init__

        def init(self: instance.Instance, cta: Any, role: Any, index: int) -> None:
            kernel[0] = names[id(role.body)]
            original(self, cta, role, index)
            found.setdefault((kernel[0], cta.index, role.name, index), [])

        instance.Instance.__init__ = init  # type: ignore[method-assign]
        try:
            whole = replace(plan, kernels=tuple(roles.values()))
            k = case.k[:, ::-1] if turned else case.k
            simulate(plan.attention, plan.schedule, case.q, k, case.given_v, plan=whole, num_sms=num_sms, seed=seed)
        finally:
            instance.Instance.__init__ = original  # type: ignore[method-assign]
    strides = contiguous(plan.attention, problem, plan.schedule.v_transposed)
    launches = plan.bind(problem, strides, num_sms, trace_first=first).kernels
    return launches, {k.name: _words(k, found, first) for k in plan.kernels}


def _words(kernel: Any, found: Noted, first: int) -> Any:
    instances = instances_of(kernel)
    lanes = TRACE_CTAS * len(instances)
    noted = np.full((TRACE_WORDS // QUAD, lanes, QUAD), LEFT_BEHIND, np.uint32)
    headers = np.full((lanes, TRACE_HEADER_WORDS), 0xFFFFFFFF, np.uint32)
    for c in range(TRACE_CTAS):
        of_cta = {k: v for k, v in found.items() if k[:2] == (kernel.name, first + c)}
        end = max((t for marks in of_cta.values() for t, *_ in marks), default=0) + 3000
        for i, (role, w) in enumerate(instances):
            marks = of_cta.get((kernel.name, first + c, role.name, w))
            if marks is None:
                continue
            lane, late = c * len(instances) + i, 5 * i
            words = _Lane(noted[:, lane], longest_run(kernel))
            for t, mark, arguments in marks:
                words.mark((START + t + late) & 0xFFFFFFFF, mark, arguments)
            headers[lane] = (
                *_timer(late + 1500 * c),
                START + late,
                40 + c,
                *_timer(end + 1500 * c),
                (START + end) & 0xFFFFFFFF,
                words.count,
            )
    return np.concatenate([noted.ravel(), headers.ravel()])


class _Lane:
    """A lane's quads of the buffer, and its place there as the kernel keeps it: that of the last quad of its next run, if it were the
    longest. Clocks stay in variables until they are stored."""

    def __init__(self, quads: Any, longest: int):
        self._quads, self._longest, self._clocks = quads, longest // QUAD, dict[str, int]()
        self._place = len(quads) - self._longest

    @property
    def count(self) -> int:
        return QUAD * (len(self._quads) - self._longest - self._place)

    def mark(self, clock: int, mark: Mark, arguments: list[int]) -> None:
        self._clocks[mark.clock] = clock
        for note, argument in zip(mark.notes, arguments):
            told = [] if note.code is None else [note.code << ARGUMENT_BITS | argument]
            words = [*told, *(self._clocks.pop(c) for c in note.clocks)]
            size = next(n for n in (1, 2, 4) if n >= len(words))
            assert note.word % size == 0 and note.word % QUAD + size <= QUAD  # what a store may write
            if self._place >= 0:
                quad, first = divmod(note.word, QUAD)
                row = self._quads[self._place + self._longest - 1 - quad + note.left // QUAD]
                row[first : first + size] = [*words, *[SPOILED] * (size - len(words))]
            self._place -= note.leaves // QUAD


def _timer(cycles: int) -> tuple[int, int]:
    ns = ZERO_NS + round(cycles / CYCLES_PER_NS)
    return ns & 0xFFFFFFFF, ns >> 32
