"""What a replay keeps: role instances, and a CTA's barriers and rings."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..plan import steps as S
from ..plan.kernel import KernelPlan
from .engine import Signal
from .pace import Product


@dataclass(eq=False)
class Line:
    """A role instance. `parts`: the partitions on which its warps run."""

    role: S.Role
    w: int
    warps: int
    env: dict[str, int]
    parts: tuple[int, ...]
    cta: Cta
    slots: dict[str, tuple[int, int]]
    """Cursor → (slot, passes)."""
    single: bool
    products: deque[tuple[Product, Signal]] = field(default_factory=deque)
    multiplying: bool = False
    groups: list[Signal] = field(default_factory=list)
    """Products, as committed."""
    copied: float = 0.0
    """When the copies issued so far have landed."""
    copies: list[float] = field(default_factory=list)
    claimed: float = 0.0
    """When the tile asked for is known."""


@dataclass
class Bar:
    """One mbarrier: arrivals and bytes of the phase under way, and a signal for every phase."""

    arrivals: int
    left: int
    pending: int = 0
    """Copies by TMA that have not landed."""
    phase: int = 0
    done: list[Signal] = field(default_factory=list)

    def signal(self, phase: int) -> Signal:
        while len(self.done) <= phase:
            self.done.append(Signal())
        return self.done[phase]


@dataclass
class Meeting:
    """A named barrier, or the CTA's."""

    expected: int
    threads: int = 0
    signal: Signal = field(default_factory=Signal)


class Cta:
    def __init__(self, kernel: KernelPlan):
        self.bars = {(b.name, i): Bar(b.arrivals, b.arrivals) for b in kernel.mbars for i in range(b.stages)}
        self.named = {(b.name, i): Meeting(b.threads) for b in kernel.nbars for i in range(b.count)}
        self.everyone = Meeting(kernel.threads)
        self.rings: dict[tuple[str, int], int] = {}
        """Slot of a ring of tile numbers → what it holds."""
