"""Successive halving: who is measured how often. Rounds double from one rung to the next, and the slower half drops out.

Candidates are compared round by round (`timing.order` interleaves them), so what the clock and the temperature do cancels: one is *within
noise* of another if the 95 % interval of their times' ratio over common rounds, half a percent to both sides, contains 1. In the slower half those stay that are
within noise of the last one of the faster half. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .timing import Interval, interval

FIRST_ROUNDS = 2
FEW = 3
"""So many are never halved: they go to the end together."""
SAME = 0.005
"""Medians of one binary given twice to a run differ by so much (its place in the order, the clock): less is never a difference."""
STORED_NOISE = 0.03
"""Times of different runs of one binary differ by so much (temperature, clocks); within it a stored time says nothing."""

Measure = Callable[[Sequence[str], int], Mapping[str, Sequence[float]]]
"""(names, rounds) → the milliseconds of each, a round in the same place of every list."""


@dataclass(frozen=True)
class Rung:
    """One stage of a race: who was measured, how many rounds each, who dropped out after it, and who stayed only for being within noise."""

    names: tuple[str, ...]
    rounds: int
    dropped: tuple[str, ...]
    within_noise: tuple[str, ...]


@dataclass
class Race:
    """The state of a race, and its outcome once `run` has ended."""

    names: tuple[str, ...]
    rounds: int
    """Of those that get to the end, in all."""
    guests: tuple[str, ...] = ()
    """Measured in the last rung beside the others, for comparison."""
    stored: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds known from an earlier run: such a candidate is measured only once it stands behind the first rung."""
    samples: dict[str, list[float | None]] = field(default_factory=dict)
    """By round of the race; None: not measured in it."""
    rungs: list[Rung] = field(default_factory=list)
    left: tuple[str, ...] = ()
    """Those in the last rung, the fastest first."""
    stopped: bool = False
    """Time was up before the last rung."""

    def run(
        self, measure: Measure, on_rung: Callable[[Race], None] = lambda _: None, expired: Callable[[], bool] = lambda: False
    ) -> None:
        """`measure` is called once a rung, `on_rung` after it. Ends early, with what is known, when `expired`."""
        self.samples = {n: [] for n in (*self.names, *self.guests)}
        left, rounds, done = self.names, min(FIRST_ROUNDS, self.rounds), 0
        while left:
            last = done + rounds >= self.rounds
            fresh = [n for n in left if done or last or n not in self.stored]
            guests = self.guests if last else ()
            self._take(measure((*fresh, *guests), rounds) if fresh or guests else {}, rounds)
            done += rounds
            ranked = tuple(sorted(left, key=lambda n: (self.median(n), n)))
            keep, noisy = self._keep(ranked)
            out = () if last else tuple(n for n in ranked if n not in keep)
            self.rungs.append(Rung(tuple(fresh), rounds, out, () if last else noisy))
            self.left = ranked if last else tuple(n for n in ranked if n in keep)
            on_rung(self)
            if last:
                return
            if expired():
                self.stopped = True
                return
            left, rounds = self.left, min(2 * rounds, self.rounds - done)

    def _take(self, found: Mapping[str, Sequence[float]], rounds: int) -> None:
        for name, of in self.samples.items():
            of += list(found[name]) if name in found else [None] * rounds

    def median(self, name: str) -> float:
        """Of its own rounds, or what is stored."""
        own = self.own(name)
        return interval(own).median if own else self.stored.get(name, float("inf"))

    def own(self, name: str) -> list[float]:
        """What it was measured at in this run."""
        return [x for x in self.samples.get(name, []) if x is not None]

    def ratio(self, name: str, to: str) -> Interval | None:
        """Its time over the other's, over the rounds that both were in; None where there is no such round."""
        pairs = [(a, b) for a, b in zip(self.samples[name], self.samples[to]) if a is not None and b is not None]
        return interval([a / b for a, b in pairs]) if pairs else None

    def near(self, name: str, to: str) -> bool:
        """Whether it is within noise of the other."""
        ratio = self.ratio(name, to)
        if ratio is None:
            return self.median(name) <= self.median(to) * (1 + STORED_NOISE)
        return ratio.low - SAME <= 1 <= ratio.high + SAME

    def _keep(self, ranked: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(who stays, those of them that stay for being within noise of the last one of the faster half)."""
        half = max(FEW, -(-len(ranked) // 2))
        fast, slow = tuple(ranked[:half]), ranked[half:]
        noisy = tuple(n for n in slow if self.near(n, fast[-1]))
        return fast + noisy, noisy
