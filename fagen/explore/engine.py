"""A clock, things that wait for it, and units that serve one at a time: what `replay` runs on."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Union

Until = Union[float, "Signal"]
Actor = Generator[Until, None, None]
"""Yields what it waits for: a time, or a signal."""


class Signal:
    """Something that happens once."""

    __slots__ = ("time", "waiters")

    def __init__(self) -> None:
        self.time: float | None = None
        self.waiters: list[Actor] = []


class Engine:
    """Runs actors in the order of time. Times are clocks of an SM."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1  # ties in the order in which they were asked for
        heapq.heappush(self._queue, (max(time, self.now), self._count, action))

    def start(self, actor: Actor, time: float = 0.0) -> None:
        self.at(time, lambda: self._resume(actor))

    def fire(self, signal: Signal) -> None:
        signal.time = self.now
        for actor in signal.waiters:
            self.start(actor, self.now)
        signal.waiters.clear()

    def run(self) -> float:
        """Until nothing happens any more; the time of the last event."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return self.now

    def _resume(self, actor: Actor) -> None:
        until = next(actor, None)
        if until is None:
            return
        if not isinstance(until, Signal):
            self.start(actor, until)
        elif until.time is None:
            until.waiters.append(actor)
        else:
            self.start(actor, self.now)


class Unit:
    """Serves requests one after the other, in the order in which they are made."""

    __slots__ = ("busy", "free")

    def __init__(self) -> None:
        self.free = 0.0
        self.busy = 0.0
        """Clocks served in all."""

    def serve(self, now: float, clocks: float) -> float:
        """When a request of this length, made now, is done."""
        self.free = max(self.free, now) + clocks
        self.busy += clocks
        return self.free
