"""The synchronisation proof: that a kernel neither hangs nor reads a tile too early, too late or torn, in any interleaving.

`prove` runs one CTA's roles with concrete sizes (`cases`), one order a case (`run`), builds the happens-before order of
everything that took place, asynchronous completions as events of their own (`order`), and checks it (`checks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...attention import Attention
from ...schedule import Schedule
from ...target import target
from ..kernel import KernelPlan
from .cases import Case, Cases
from .checks import check, static
from .evaluate import Evaluator
from .run import Run
from .state import Failure

__all__ = ["Case", "Cases", "Failure", "ProofResult", "prove"]


@dataclass(frozen=True)
class ProofResult:
    """What the proof found. `events` and `cases` say how much it looked at; `failures` are those of the first case that fails."""

    ok: bool
    events: int
    cases: int
    failures: tuple[Failure, ...]

    def __str__(self) -> str:
        head = f"{self.cases} cases, {self.events} events"
        return f"proven: {head}" if self.ok else "\n".join((f"not proven after {head}", *map(str, self.failures)))


def prove(
    kernel: KernelPlan,
    attention: Attention,
    schedule: Schedule,
    cases: Iterable[Case] | None = None,
    evaluate: Evaluator | None = None,
) -> ProofResult:
    """Prove `kernel`'s synchronisation for `cases` (default: all of `Cases`). `evaluate` may be shared between calls."""
    failures = static(kernel, target(schedule.arch).named_barriers)
    if failures:
        return ProofResult(False, 0, 0, tuple(failures))
    chosen = Cases(kernel, attention, schedule).all() if cases is None else cases
    evaluate = evaluate or Evaluator()
    events = count = 0
    for case in chosen:
        run = Run(kernel, case.scope(kernel), str(case), evaluate)
        run.execute()
        found = run.failures or check(run)
        events, count = events + len(run.order.masks), count + 1
        if found:
            distinct = {(f.kind, f.message): f for f in reversed(found)}
            return ProofResult(False, events, count, tuple(reversed(distinct.values())))
    return ProofResult(True, events, count, ())
