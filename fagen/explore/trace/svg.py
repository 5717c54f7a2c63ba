"""A picture of one CTA: its lanes side by side in time, products and loads in flight beneath the lane that issued them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .reader import CtaTrace, KernelTrace, Span

COLOURS = {
    "load": ("#2a9d8f", "issuing loads"),
    "in flight": ("#8fd3c8", "load in flight"),
    "transpose": ("#5b8c5a", "transposing V"),
    "issue": ("#264b96", "issuing products"),
    "product": ("#6f9ceb", "product in flight"),
    "softmax": ("#e4572e", "softmax"),
    "rescale": ("#f3a65a", "pack, rescale"),
    "merge": ("#c77dba", "merging warps"),
    "epilogue": ("#7b4ba8", "normalise, store"),
    "tile": ("#9aa0a6", "finding the tile"),
    "wait data": ("#e9e4d4", "waiting for data"),
    "wait slot": ("#eef1f4", "waiting for a free slot"),
    "wait tile": ("#e3e8ee", "waiting for a tile"),
    "wait turn": ("#f6e58d", "waiting for its turn"),
    "wait product": ("#d3d9e4", "waiting for a product"),
    "wait CTA": ("#dcd6e8", "waiting for the CTA"),
}
"""Kind → fill, and what it is called."""

WIDTH, LEFT, RIGHT = 1400, 170, 20
LANE, TRACK, GAP = 22, 9, 8
TITLE, AXIS, LEGEND = 46, 30, 22
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Panel:
    """A CTA to draw, from `start` on for `cycles` cycles. `title` and `note` stand above it."""

    title: str
    note: str
    trace: KernelTrace
    cta: CtaTrace
    start: int
    cycles: int


def panel(title: str, note: str, trace: KernelTrace, tile: int, cycles: int) -> Panel:
    """The first recorded CTA from the beginning of its tile number `tile` on (counted from 0; its last one, if it has fewer)."""
    cta = trace.ctas[0]
    begins = sorted(min(t.start for t in of) for of in zip(*(lane.tiles for lane in cta.lanes if lane.tiles)))
    start = begins[min(tile, len(begins) - 1)] if begins else 0
    return Panel(title, note, trace, cta, start, max(1, min(cycles, max(lane.end for lane in cta.lanes) - start)))


def picture(panels: Sequence[Panel]) -> str:
    """SVG text, self-contained. Panels share one scale: the longest fills the width."""
    scale = (WIDTH - LEFT - RIGHT) / max(p.cycles for p in panels)
    body: list[str] = []
    top = 10
    for p in panels:
        drawn, height = _panel(p, top, scale)
        body += drawn
        top += height + 16
    used = {s.what for p in panels for s in _spans(p)}
    legend, height = _legend([k for k in COLOURS if k in used], top)
    size = f"viewBox='0 0 {WIDTH} {top + height}' width='{WIDTH}' height='{top + height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}>"
    return "\n".join([head, "<rect width='100%' height='100%' fill='white'/>", *body, *legend, "</svg>"]) + "\n"


def _rows(p: Panel) -> Iterator[tuple[str, Sequence[Span], int]]:
    """Name, spans and height of each row, from top to bottom."""
    for i, lane in enumerate(p.cta.lanes):
        yield lane.name, lane.spans, LANE
        for track in p.cta.products:
            if track.lane == i:
                what = track.spans[0].name if track.spans else "product"
                yield f"{what} → {track.name.rpartition(': ')[2]}", track.spans, TRACK
        for track in p.cta.loads:
            if track.lane == i:
                yield track.name, track.spans, TRACK


def _spans(p: Panel) -> Iterator[Span]:
    """Those that are seen."""
    return (s for _, spans, _ in _rows(p) for s in spans if s.end > p.start and s.start < p.start + p.cycles)


def _panel(p: Panel, top: int, scale: float) -> tuple[list[str], int]:
    out = [_text(10, top + 18, p.title, 15, weight="bold"), _text(10, top + 36, p.note, 12, fill="#444")]
    y = top + TITLE
    for name, spans, height in _rows(p):
        y += GAP if height == LANE else 0
        out.append(_text(LEFT - 8, y + height - (6 if height == LANE else 1), name, 12 if height == LANE else 9, anchor="end"))
        for span in spans:
            start, end = max(span.start, p.start), min(span.end, p.start + p.cycles)
            if start < end:
                out.append(_span(span, LEFT + (start - p.start) * scale, (end - start) * scale, y, height, p.trace.cycles_per_us))
        y += height + 1
    out += _axis(p, y + 4, scale)
    return out, y + AXIS - top


def _span(span: Span, x: float, width: float, y: int, height: int, cycles_per_us: float) -> str:
    numbers = [f"{n} {v}" for n, v in (("tile", span.tile), ("block", span.block)) if v is not None]
    told = ", ".join([span.what, span.step, *numbers, f"{span.cycles} cycles, {span.cycles / cycles_per_us:.3f} µs"])
    place = f"x='{x:.2f}' y='{y}' width='{max(width, 0.3):.2f}' height='{height}'"
    return f"<rect {place} fill='{COLOURS[span.what][0]}' stroke='white' stroke-width='0.3'><title>{escape(told)}</title></rect>"


def _axis(p: Panel, y: int, scale: float) -> list[str]:
    step = _round_step(p.cycles / 8)
    right = LEFT + p.cycles * scale
    out = [f"<line x1='{LEFT}' y1='{y}' x2='{right:.1f}' y2='{y}' stroke='#666' stroke-width='1'/>"]
    for cycles in range(0, p.cycles + 1, step):
        x = LEFT + cycles * scale
        out.append(f"<line x1='{x:.1f}' y1='{y}' x2='{x:.1f}' y2='{y + 4}' stroke='#666' stroke-width='1'/>")
        out.append(_text(x, y + 15, f"{cycles:,} cycles" if cycles == 0 else f"{cycles:,}", 10, anchor="middle", fill="#444"))
    out.append(
        _text(right, y + 26, f"{p.cycles / p.trace.cycles_per_us:.2f} µs at {p.trace.cycles_per_us:.0f} MHz", 10, "end", "#444")
    )
    return out


def _round_step(rough: float) -> int:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 1
    while power * 10 < rough:
        power *= 10
    return int(next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power))


def _legend(kinds: Sequence[str], top: int) -> tuple[list[str], int]:
    out: list[str] = []
    x, y = float(LEFT), top + 4
    for kind in kinds:
        colour, name = COLOURS[kind]
        width = 26 + 6.6 * len(name)
        if x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + LEGEND
        out.append(f"<rect x='{x:.0f}' y='{y}' width='12' height='12' fill='{colour}' stroke='#999' stroke-width='0.5'/>")
        out.append(_text(x + 17, y + 10, name, 11))
        x += width
    return out, y - top + LEGEND + 6


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", fill: str = "#111", weight: str = "normal") -> str:
    style = f"font-size='{size}' text-anchor='{anchor}' fill='{fill}' font-weight='{weight}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"
