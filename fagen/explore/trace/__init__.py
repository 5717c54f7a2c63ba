"""The timeline of a kernel: what its role instances noted (`fagen.trace`) as spans, measured, and as files to look at.

read      words of a trace buffer → `KernelTrace`
measure   how much of it overlaps, and where the time goes
perfetto  the trace as JSON for Perfetto or chrome://tracing
svg       a picture of one CTA
run       on a GPU, in a watched subprocess
"""

from __future__ import annotations

from .measure import Measured, measure
from .perfetto import perfetto
from .read import CtaTrace, KernelTrace, Lane, Span, Track, read
from .svg import Panel, panel, picture

__all__ = [
    "CtaTrace",
    "KernelTrace",
    "Lane",
    "Measured",
    "Panel",
    "Span",
    "Track",
    "measure",
    "panel",
    "perfetto",
    "picture",
    "read",
]
