"""Happens-before, as one integer bitset of ancestors for each event.

An event is something that happens at one moment: a step issued, the bytes of a load landing, a group of matrix products
completing, a barrier's phase completing. Event numbers follow the one run that made them, which is therefore a legal order;
`before` says which pairs are ordered in *every* legal order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..steps import Step


class Label(NamedTuple):
    """What an event is: `step` (None for a barrier's completion) of the thread called `who`, and what happens there."""

    step: Step | None
    who: str
    what: str = ""

    def __str__(self) -> str:
        name = self.step.id or self.step.kind if self.step is not None else self.who
        instance = self.who if self.step is not None else ""
        return " ".join(x for x in (f"{name}{instance}", self.what) if x)


@dataclass
class Order:
    """The events of one run. `masks[e]` has bit a set if event a happens before e, or is e."""

    masks: list[int] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def add(self, label: Label, after: int) -> int:
        """A new event after all events of the mask `after`; returns its number."""
        e = len(self.masks)
        self.masks.append(after | 1 << e)
        self.labels.append(label)
        return e

    def before(self, a: int, b: int) -> bool:
        """Event a happens before b in every interleaving (or is b)."""
        return bool(self.masks[b] >> a & 1)

    def completed(self, done: int, b: int) -> bool:
        """A barrier's completion event `done` happens before b: it takes place with the last of what it is made of, so it is enough
        that all of that happens before b, whether b is told of it by this barrier or by others."""
        return not self.masks[done] & ~(1 << done) & ~self.masks[b]

    def witness(self, *last: int, after: int = 0, keep: int = 8) -> tuple[str, ...]:
        """A legal interleaving that ends with the events `last` in that order: the last `keep` of what must precede the first of
        them (and of the mask `after`), then what only the others need is left out, then they themselves."""
        prefix = (self.masks[last[0]] | after) & ~sum(1 << e for e in set(last))
        events = [e for e in range(prefix.bit_length()) if prefix >> e & 1]
        return tuple(str(self.labels[e]) for e in (*events[-keep:], *last))
