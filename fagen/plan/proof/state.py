"""What a run keeps: barriers, slots and threads of control."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ...errors import InternalError
from ..expr import Expr
from ..steps import Cursor, MBar, Role, Step
from .order import Label
from .registers import Registers

SlotKey = tuple[str, int]
"""(name of the ring, slot)."""


def name(key: SlotKey) -> str:
    """As failures write it: K[1]."""
    return f"{key[0]}[{key[1]}]"


@dataclass(frozen=True)
class Failure:
    """One thing the proof found. `kind` is stable and short ("deadlock", "race", "alias" …); `case` says for which sizes;
    `interleaving` is a short legal order that shows it, in step ids (with the instance and what happens, where that matters)."""

    kind: str
    message: str
    case: str = ""
    interleaving: tuple[str, ...] = ()

    def __str__(self) -> str:
        order = " → ".join(self.interleaving)
        return f"[{self.kind}] {self.message} ({self.case})" + (f": {order}" if order else "")


class Stop(Exception):
    """Ends a run at its first online failure."""

    def __init__(self, failure: Failure):
        self.failure = failure
        super().__init__(failure.message)


@dataclass
class CursorState:
    """`passes` counts how often the ring wrapped, so slot and parity are those of fill number passes · stages + slot."""

    spec: Cursor
    slot: int = 0
    passes: int = 0

    def advance(self) -> None:
        self.slot += 1
        if self.slot == self.spec.stages:
            self.slot, self.passes = 0, self.passes + 1


@dataclass(eq=False)
class Line:
    """A thread of control: warps that run the same steps and of which none does anything alone, or a single thread.

    The masks are what happens before its next event: `known` for all its threads; `own` what each thread knows of its own
    copies only (cp.async waits, fences); `first` what only thread 0 knows (elected bodies)."""

    index: int
    role: Role
    w: int
    warps: int
    leads: bool
    """Holds thread 0 of the role's first instance: runs Elected bodies."""
    single: bool
    """One thread runs."""
    env: dict[str, int]
    cursors: dict[str, CursorState]
    registers: Registers
    known: int = 0
    own: int = 0
    first: int = 0
    copies: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    parts: dict[SlotKey, int] = field(default_factory=dict)
    loading: dict[str, int] = field(default_factory=dict)
    """Fragments and tile numbers on their way from shared memory, and the event of their arrival."""
    at: Step | None = None
    """The step it waits in."""

    @cached_property
    def suffix(self) -> str:
        """Names the instance where a role has several."""
        return f"[{self.w}]" if self.role.count > 1 else ""

    def label(self, step: Step, what: str = "") -> Label:
        return Label(step, self.suffix, what)


@dataclass
class MBarState:
    """One slot's mbarrier: the phase under way, and the completion event of every phase before."""

    spec: MBar
    slot: int
    arrived: int = 0
    bytes: int = 0
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, ...]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.spec.name}[{self.slot}]" if self.spec.stages > 1 else self.spec.name


@dataclass
class NamedState:
    """One hardware barrier: the generation under way, and the completion event of every generation before."""

    name: str
    expected: int
    threads: int = 0
    events: dict[int, int] = field(default_factory=dict)
    """Thread of control (its index) → its arrival."""
    phases: list[tuple[int, ...]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)


class Read(NamedTuple):
    start: int
    end: int
    step: Step


@dataclass
class Fill:
    """One filling of a slot. `issues[i]` starts and `ends[i]` completes the part that `lines[i]` writes."""

    step: Step
    asynchronous: bool
    """Written through the async proxy (TMA)."""
    seq: int
    head: Expr | None
    batch: Expr | None
    identity: tuple[int, int]
    """(head, batch) loaded; (0, 0) for a tile number."""
    expected: int = 1
    """Parts it has when all have written."""
    issues: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)

    @property
    def ends_mask(self) -> int:
        mask = 0
        for e in self.ends:
            mask |= 1 << e
        return mask


class WaitRecord(NamedTuple):
    """A wait for phase `phase` of `bar`, from event `start` to event `end`."""

    bar: MBarState
    phase: int
    start: int
    end: int
    step: Step


def unknown(step: Step) -> InternalError:
    return InternalError(f"the proof does not know the step kind {step.kind} ({step.id})")
