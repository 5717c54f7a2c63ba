"""fagen: a code-generating kernel compiler for attention."""

from __future__ import annotations

from .attention import Attention
from .errors import CompileError, FagenError, InputError, InternalError, LaunchError, ScheduleError, Violation
from .library import load
from .plan import Plan, plan
from .schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "CompileError",
    "FagenError",
    "InputError",
    "InternalError",
    "LaunchError",
    "Plan",
    "Schedule",
    "ScheduleError",
    "Violation",
    "load",
    "plan",
]
