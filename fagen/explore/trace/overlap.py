"""What a trace says in numbers: how much of the softmax runs under products, how much of the loads under work, where time goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .reader import CtaTrace, KernelTrace, Lane, Span

Intervals = list[tuple[int, int]]

WORKING = ("issue", "product", "softmax", "rescale", "merge", "epilogue")
"""Kinds of time in which a computing role gets on."""


@dataclass(frozen=True)
class SoftmaxOverlap:
    """Of a lane's softmax in all recorded CTAs: its cycles, and the shares of them under products of others, of its own, of either."""

    lane: str
    cycles: int
    under_others: float
    under_own: float
    under_any: float


@dataclass(frozen=True)
class Measured:
    """Numbers of a kernel's trace. `loads_cycles`: during which a load was in flight (from its issue until the first consumer saw it,
    so at most); `loads_under_work`: the share of them during which a product ran or a computing role got on. Both None without
    asynchronous loads. `time`: by role, the share of each kind. `tile_cycles`: (least, mean, most) of a tile, `tiles` of them."""

    kernel: str
    ctas: int
    cycles_per_us: float
    dropped: int
    softmax: tuple[SoftmaxOverlap, ...]
    loads_cycles: int | None
    loads_under_work: float | None
    products_share: float | None
    """Of the recorded CTAs' time, during which a WGMMA was in flight; None without any."""
    time: dict[str, dict[str, float]]
    tiles: int
    tile_cycles: tuple[int, float, int] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def measure(trace: KernelTrace) -> Measured:
    """Of all recorded CTAs together. Where marks were dropped, a CTA counts up to the end of its shortest cut lane."""
    softmax: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    time: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    loads = [0, 0]
    products = [0, 0]
    tiles: list[int] = []
    for cta in trace.ctas:
        end = min((lane.end for lane in cta.lanes if lane.dropped), default=max(lane.end for lane in cta.lanes))
        own = {i: union(_clip((s for t in cta.products if t.lane == i for s in t.spans), end)) for i in range(len(cta.lanes))}
        for i, lane in enumerate(cta.lanes):
            mine = union(_clip(_of(lane, "softmax"), end))
            others = union([x for j, spans in own.items() if j != i for x in spans])
            either = union([*others, *own[i]])
            for k, part in enumerate((length(mine), common(mine, others), common(mine, own[i]), common(mine, either))):
                softmax[lane.name][k] += part
            for span in lane.spans:
                time[lane.role][span.what] += max(0, min(span.end, end) - span.start)
            whole = lane.tiles[:-1] if lane.dropped else lane.tiles
            tiles += [t.cycles for t in whole if t.end <= end] if _computes(lane) else []
        flying = union(_clip((s for t in cta.loads for s in t.spans), end))
        work = union([*(x for spans in own.values() for x in spans), *_work(cta, end)])
        loads[0] += length(flying)
        loads[1] += common(flying, work)
        products[0] += length(union([x for spans in own.values() for x in spans]))
        products[1] += end - min(lane.spans[0].start if lane.spans else 0 for lane in cta.lanes)
    return Measured(
        trace.kernel,
        len(trace.ctas),
        trace.cycles_per_us,
        trace.dropped,
        tuple(SoftmaxOverlap(name, x[0], *(_share(p, x[0]) for p in x[1:])) for name, x in softmax.items() if x[0]),
        loads[0] or None,
        _share(loads[1], loads[0]) if loads[0] else None,
        _share(products[0], products[1]) if products[0] else None,
        {role: {what: _share(c, sum(of.values())) for what, c in of.items()} for role, of in time.items()},
        len(tiles),
        (min(tiles), sum(tiles) / len(tiles), max(tiles)) if tiles else None,
    )


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def _of(lane: Lane, *kinds: str) -> Iterable[Span]:
    return (s for s in lane.spans if s.what in kinds)


def _computes(lane: Lane) -> bool:
    return any(s.what in ("softmax", "epilogue") for s in lane.spans)


def _work(cta: CtaTrace, end: int) -> Intervals:
    return [x for lane in cta.lanes for x in _clip(_of(lane, *WORKING), end)]


# intervals --------------------------------------------------------------------------------------------------------------


def _clip(spans: Iterable[Span], end: int) -> Intervals:
    return [(s.start, min(s.end, end)) for s in spans if s.start < min(s.end, end)]


def union(intervals: Sequence[tuple[int, int]]) -> Intervals:
    """Sorted, without overlap."""
    out: Intervals = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def length(intervals: Intervals) -> int:
    """Of a union."""
    return sum(end - start for start, end in intervals)


def common(a: Intervals, b: Intervals) -> int:
    """Length of what two unions have in common."""
    total, i, j = 0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
