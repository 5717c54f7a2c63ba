"""Trace builds (`plan(…, trace=True)`): kernels in which every role instance notes when it comes from one thing to the next.

What a trace build has beside the normal one: after each step that takes time, or after a run of steps of one kind, the instance reads
the SM's clock (`Mark`). One thread stores what was read, up to four words at once (`Note`); its warp alone takes the way to the stores,
of each instance another one, so that the four schedulers of an SM share that work. Which marks follow one another without a jump is
known from the program, so only a name is stored for each such `Run`. Products and TMA loads run on by themselves: a product is in flight
from the mark of its issue to that of the `MmaWait` that names its accumulator, a load from the mark of its issue to the first one of a
`Wait` for its barrier. So the marks tell everything; `fagen.explore.trace` reads them.

Reading a clock is a place that ptxas moves no instruction across: a trace shows the program in the order in which it is written, also
where the normal build has waits moved up in front of arithmetic (the fault early-wait of its report). The roles get no more registers
than in the normal build; the largest tiles spill a little (at most `SPILL_BYTES`), which the report tells.

The buffer, in 32-bit words, E = `TRACE_WORDS`; a lane is a role instance of one of the `TRACE_CTAS` CTAs from `trace_first` on, L lanes
  E · L   what the lanes noted, in quads of four words, from the end to the beginning: the n-th quad of lane i is quad (E / 4 − 1 − n) · L
          + i, so that whether there is room shows in the sign of a lane's place
  8 · L   of lane i at its start: global timer (low, high), clock, SM number; at its end: timer (low, high), clock, words noted
A run takes whole quads. Its first word is code << ARGUMENT_BITS | argument, the code of its first mark; each mark has a word with the low
half of the clock (`Mark.word`). A run around a vote has the code of the first mark on the side `then` where the warp that stores took
that side. Where a run is told the lane's place moves on; below 0 there is no room for the longest run, and all later ones are counted
(up to 2^30 bytes of them), not kept.

marks     what is marked
runs      which marks follow one another, and what is stored together
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..plan import steps as st
from ..plan.kernel import KernelPlan
from .marks import ARGUMENT_BITS, CODE_BITS, KINDS, SILENT, Mark, Note, kind_of, mark_roles
from .runs import QUAD, Run, place_roles

__all__ = [
    "ARGUMENT_BITS",
    "CODE_BITS",
    "KINDS",
    "QUAD",
    "SILENT",
    "SPILL_BYTES",
    "Mark",
    "Note",
    "Run",
    "instances_of",
    "kind_of",
    "longest_run",
    "marked",
    "marks_of",
    "runs_of",
]

SPILL_BYTES = 64
"""What `compile.build` allows a trace build (`allow_spill_bytes`): most do not spill at all."""


def marked(kernel: KernelPlan) -> KernelPlan:
    """The kernel with its marks; codes count from 0 in printed order."""
    return _marked(kernel)[0]


def runs_of(kernel: KernelPlan) -> Mapping[int, Run]:
    """The runs of a kernel's marks by the codes that tell them."""
    return _marked(kernel)[1]


def marks_of(kernel: KernelPlan) -> tuple[tuple[st.Role, Mark], ...]:
    """The marks of a kernel by their codes, each with its role."""
    return tuple((role, step) for role in marked(kernel).roles for step in st.walk(role.body) if isinstance(step, Mark))


def longest_run(kernel: KernelPlan) -> int:
    """Words that the longest run of a kernel takes."""
    return max(run.words for run in runs_of(kernel).values())


def instances_of(kernel: KernelPlan) -> tuple[tuple[st.Role, int], ...]:
    """The role instances in the order of a CTA's lanes."""
    return tuple((role, w) for role in kernel.roles for w in range(role.count))


def _marked(kernel: KernelPlan) -> tuple[KernelPlan, dict[int, Run]]:
    roles, runs = place_roles(mark_roles(kernel.roles))
    return replace(kernel, roles=roles), runs
