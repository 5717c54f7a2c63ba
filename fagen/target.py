"""The machine, as data: what an architecture can do and how much of it there is. Nothing here asks a device."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ScheduleError, Violation


@dataclass(frozen=True)
class Target:
    """One compilation target. Sizes are per CTA unless named otherwise."""

    arch: str
    """As in `Schedule.arch` and on the compiler's command line."""
    compute_capability: tuple[int, int]
    """Devices that can load its cubin have this major version, and at least this minor one (the a-suffix: exactly this one)."""
    matrix_units: tuple[str, ...]
    movements: tuple[str, ...]
    smem_bytes: int
    """Dynamic shared memory a CTA may opt in to."""
    registers_per_sm: int = 65536
    named_barriers: int = 16
    """Hardware barriers of a CTA; 0 is __syncthreads."""
    l2_bytes: int = 50 << 20
    """Used to choose how many heads run side by side; a hint, never a correctness matter."""


TARGETS = {
    t.arch: t
    for t in (
        Target("sm_80", (8, 0), ("mma_sync",), ("ld_st", "cp_async"), smem_bytes=163 * 1024, l2_bytes=40 << 20),
        Target("sm_90", (9, 0), ("mma_sync",), ("ld_st", "cp_async"), smem_bytes=227 * 1024),
        Target("sm_90a", (9, 0), ("wgmma",), ("tma",), smem_bytes=227 * 1024),
    )
}


def target(arch: str) -> Target:
    """The target of that name, or a ScheduleError that lists them."""
    if arch not in TARGETS:
        raise ScheduleError([Violation("arch", "arch", f"unknown target {arch!r}", tuple(TARGETS))])
    return TARGETS[arch]
