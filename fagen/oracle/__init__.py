"""What is right, and how to tell: float64 reference, same-precision baseline, comparison, inputs, and the simulator of plans."""

from __future__ import annotations

from .baseline import baseline, baseline_rows
from .compare import Verdict, check, compare, sample_rows
from .inputs import Case, CheckProblem, check_problems, make_case, make_descales, make_inputs, transpose_v
from .numeric import DTYPES, cast, ulp
from .reference import reference, reference_rows
from .simulator import SimulatedDeadlock, SimulatedFault, Simulation, simulate, simulate_sample

__all__ = [
    "DTYPES",
    "Case",
    "CheckProblem",
    "SimulatedDeadlock",
    "SimulatedFault",
    "Simulation",
    "Verdict",
    "baseline",
    "baseline_rows",
    "cast",
    "check",
    "check_problems",
    "compare",
    "make_case",
    "make_descales",
    "make_inputs",
    "reference",
    "reference_rows",
    "sample_rows",
    "simulate",
    "simulate_sample",
    "transpose_v",
    "ulp",
]
