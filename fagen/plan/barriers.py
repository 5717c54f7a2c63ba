"""Arrive and byte counts of a kernel's mbarriers, derived from the steps that arrive at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import InternalError
from .steps import Arrive, Body, Elected, MBar, Role, Smem, Step, TmaLoad, bodies


def derive(bars: tuple[MBar, ...], roles: tuple[Role, ...], smem: tuple[Smem, ...]) -> tuple[MBar, ...]:
    """The same barriers with `arrivals` and `tx_bytes` of one phase.

    A phase of a full barrier takes the announcing arrival of its load and the load's bytes; a phase of an empty barrier one arrival
    of every warp that reads the slot. A role that arrives at several places of its program arrives once a phase.
    """
    tile_bytes = {t.name: t.tile_bytes for t in smem}
    arrivals: dict[str, dict[str, int]] = {b.name: {} for b in bars}
    tx: dict[str, set[int]] = {b.name: set() for b in bars}
    for role in roles:
        for step, one_thread in _with_width(role.body, role.elect):
            if isinstance(step, TmaLoad):
                arrivals[step.full][role.name] = 1
                tx[step.full].add(tile_bytes[step.dst.smem])
            elif isinstance(step, Arrive):
                width = 1 if one_thread or step.who == "thread" else role.count * role.warps
                if arrivals[step.bar].setdefault(role.name, width) != width:
                    raise InternalError(f"role {role.name} arrives at {step.bar} in two different widths")
    for name, sizes in tx.items():
        if len(sizes) > 1:
            raise InternalError(f"loads of different sizes complete barrier {name}: {sorted(sizes)}")
    return tuple(replace(b, arrivals=sum(arrivals[b.name].values()), tx_bytes=next(iter(tx[b.name]), 0)) for b in bars)


def _with_width(body: Body, one_thread: bool) -> Iterator[tuple[Step, bool]]:
    """Every step, and whether a single thread runs it."""
    for step in body:
        yield step, one_thread
        for _, inner in bodies(step):
            yield from _with_width(inner, one_thread or isinstance(step, Elected))
