"""The timeline of a kernel: what its role instances noted (`fagen.trace`) as spans, measured, and as files to look at.

reader    words of a trace buffer → `KernelTrace`
overlap   what runs under what, and where the time goes
events    the trace as JSON for Perfetto or chrome://tracing
svg       a picture of one CTA
run       on a GPU, in a watched subprocess
"""

from __future__ import annotations

from .events import perfetto
from .overlap import Measured, measure
from .reader import CtaTrace, KernelTrace, Lane, Span, Track, read
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
