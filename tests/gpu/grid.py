"""All cases of `fagen check`, on a device that other tests may have at the same time."""

from __future__ import annotations

from pathlib import Path

from fagen.check import Item, check_gpu
from fagen.compile import Built
from fagen.oracle import check_problems

PATIENCE = 90.0
"""Seconds until a launch counts as hung."""


def passes_the_grid(b: Built, repeat: int, bundles: Path) -> None:
    """Every case is right, and `repeat` launches of it give the same bits."""
    problems = check_problems(b.plan.attention, b.plan.schedule)
    item = Item(b.source.name, b.plan.attention, b.plan.schedule, problems)
    outcome = check_gpu([item], [b], seed=1, repeat=repeat, timeout=PATIENCE, bundles=bundles)
    assert len(outcome.results) == len(problems) >= 60
    assert [(str(r.problem), r.verdict.reason) for r in outcome.results if not r.verdict.passed] == []
