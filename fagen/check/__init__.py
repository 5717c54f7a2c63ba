"""Checking kernels against float64: which cases, on the GPU or in the simulator, and what became of each.

A kernel runs on fresh random inputs into outputs poisoned with NaN between guard bands; `oracle.compare` judges. The reference is
computed by processes of their own, beside the GPU (`judge`); the GPU's side runs in a watched subprocess (`device`).
"""

from __future__ import annotations

from .cpu import check_cpu, tiles_of
from .gpu import GpuRun, check_gpu, first_device, reason_no_gpu
from .items import CaseResult, Item, jitter_problems, parse_shape

__all__ = [
    "CaseResult",
    "GpuRun",
    "Item",
    "check_cpu",
    "check_gpu",
    "first_device",
    "jitter_problems",
    "parse_shape",
    "reason_no_gpu",
    "tiles_of",
]
