"""From (Attention, Schedule) to a legal, proven Plan."""

from __future__ import annotations

from .build import assemble, plan
from .kernel import KernelPlan, Launch, Plan, Problem

__all__ = ["KernelPlan", "Launch", "Plan", "Problem", "assemble", "plan"]
