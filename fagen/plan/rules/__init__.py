"""Which pairs of attention and schedule are legal, and what to say of the others.

Four layers, each checked only if the one before it holds: *types* (Python's values or those of a library), *values* (every field by
itself), *structure* (fields together) and *resources* (shared memory, registers, barriers). `check` raises one ScheduleError with every
violation of the first failing layer.
"""

from __future__ import annotations

from .knobs import CHOICES, HEAD_DIMS, INT8_DEPTH, MAX_TILE_KV, NOT_YET, NOT_YET_SET, SCALES
from .layers import check

__all__ = ["CHOICES", "HEAD_DIMS", "INT8_DEPTH", "MAX_TILE_KV", "NOT_YET", "NOT_YET_SET", "SCALES", "check"]
