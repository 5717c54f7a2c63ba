"""A case through the simulator, held to float64 as `fagen check` holds it."""

from __future__ import annotations

from typing import Any

from fagen import Attention, Schedule
from fagen.oracle import Case, CheckProblem, Verdict, check, make_case, simulate


def simulated(
    attention: Attention, schedule: Schedule, problem: CheckProblem, case_seed: int = 3, **options: Any
) -> tuple[Case, Verdict]:
    """The case's inputs, and what `check` says of the simulator's out and lse. `options`: of `simulate`."""
    c = make_case(attention, schedule, problem, seed=case_seed)
    out, lse = simulate(attention, schedule, c.q, c.k, c.given_v, **options, **c.descales)
    return c, check(attention, c.q, c.k, c.v, out, lse, schedule=schedule, **c.row_descales)
