"""Views of the steps that stand where a removal took others away."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..plan import steps as st
from .templates import View

if TYPE_CHECKING:
    from .views import Scope

ORDINARY = {
    "bf16": (0x807F807F, 0x3F003F00),
    "fp16": (0x83FF83FF, 0x38003800),
    "e4m3": (0x87878787, 0x30303030),
    "int8": (0xFEFEFEFE, 0x01010101),
}
"""Bits kept of a random word (sign and fraction), and set in it (the exponent of 0.5), by type; of int8 the odd numbers."""


def _prefill(s: st.Prefill, x: Scope) -> tuple[str, View]:
    tile, threads = x.kernel.smem_of(s.smem), x.role.warps * 32
    first = sum(r.threads for r in x.kernel.roles[: x.kernel.roles.index(x.role)])
    kept, given = ORDINARY[tile.dtype]
    return "prefill", {
        "dst": f"smem_{s.smem}",
        "bytes": tile.stages * tile.tile_bytes,
        "thread": f"threadIdx.x - {first}" if first else "threadIdx.x",
        "stride": 4 * threads * x.role.count,
        "kept": f"{kept:#010x}",
        "given": f"{given:#010x}",
    }


def _opaque(s: st.Opaque, x: Scope) -> tuple[str, View]:
    """A branch that is never taken. An empty asm statement would do for the front end, but ptxas does not see it."""
    calls = []
    for function, frags in (("keep", s.reads), ("alter", s.changes)):
        calls += [f"{function}({part}, smem)" for f in frags for part in x.parts(f)]
        if frags:
            x.helpers.need(f"steps/{function}")
    return "opaque", {"calls": calls}


VIEWS: dict[type[st.Step], Callable[[Any, Scope], tuple[str, View]]] = {st.Prefill: _prefill, st.Opaque: _opaque}
