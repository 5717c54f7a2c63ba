"""The pictures of the page: memory and registers to scale, the roofline, lower bounds and measured savings. All from what `explain` says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .explain import us
from .machine import Device
from .shares import CALLED
from .svg import circle, line, picture, rect, text

WIDTH = 1000
KINDS = 8
"""Fill classes k0 … k7 for tiles, in order of appearance."""
GLYPH = 7.0
"""About the width of a letter: labels that do not fit their box are left out (the table and the tip have them)."""

Answer = dict[str, Any]


# memory and registers -----------------------------------------------------------------------------------------------------


def memory_map(answer: Answer, kernel: str) -> str:
    """A CTA's shared memory from 0 to the target's limit; a box for each slot."""
    found = next(k for k in answer["kernels"] if k["name"] == kernel)
    limit, used = found["shared_memory_limit"], found["shared_memory_bytes"]
    scale = WIDTH / limit
    parts = [rect(0, 18, WIDTH, 44, "free", f"free: {limit - used:,} bytes")]
    tiles = [m for m in answer["shared_memory"] if m["kernel"] == kernel]
    for i, m in enumerate(tiles):
        each = m["bytes"] / m["stages"]
        colour = f"k{i % KINDS}" if m["kind"] == "tile" else "barrier"
        for slot in range(m["stages"]):
            x, w = (m["offset"] + slot * each) * scale, each * scale
            name = m["name"] if m["stages"] == 1 else f"{m['name']}[{slot}]"
            parts.append(
                rect(
                    x,
                    18,
                    max(w - 1, 1),
                    44,
                    f"tile {colour}",
                    f"{name}: {int(each):,} bytes at {int(m['offset'] + slot * each):,}; {m['slot']}",
                )
            )
            if w > GLYPH * len(name) + 8:
                parts.append(text(x + w / 2, 38, name, "on", "middle"))
                if w > 70:
                    parts.append(text(x + w / 2, 54, f"{each / 1024:.4g} KB", "on small", "middle"))
    for kb in range(0, limit // 1024 - 8, 32):
        parts += [
            line(kb * 1024 * scale, 62, kb * 1024 * scale, 67, "axis"),
            text(kb * 1024 * scale, 80, f"{kb}", "small", "middle" if kb else "start"),
        ]
    parts.append(text(0, 11, f"{used:,} of {limit:,} bytes used"))
    parts.append(text(WIDTH, 80, f"{limit // 1024} KB", "small", "end"))
    return picture(WIDTH, 84, parts, f"Shared memory of kernel {kernel}: {used} of {limit} bytes")


def register_map(answer: Answer) -> str:
    """A bar for each role: tiles in registers, to scale, with the limit and what the compiler used."""
    roles = answer["registers"]
    left, scale = 150, (WIDTH - 220) / 256
    parts = []
    for row, r in enumerate(roles):
        y, x = 22 + 46 * row, float(left)
        parts += [
            text(0, y + 13, r["role"], "strong"),
            text(0, y + 27, f"{r['threads']} threads" + (f", {r['kernel']}" if len(answer["kernels"]) > 1 else ""), "small"),
        ]
        parts.append(rect(left, y, r["planned"] * scale, 28, "free", f"limit: {r['planned']} registers a thread"))
        for i, (name, n) in enumerate(r["tiles"].items()):
            parts.append(rect(x, y, max(n * scale - 1, 1), 28, f"tile k{i % KINDS}", f"{name}: {n} registers a thread"))
            if n * scale > GLYPH * len(f"{name} {n}") + 6:
                parts.append(text(x + n * scale / 2, y + 18, f"{name} {n}", "on", "middle"))
            x += n * scale
        end = left + r["planned"] * scale
        parts += [line(end, y - 4, end, y + 32, "limit"), text(end + 4, y + 12, str(r["planned"]), "strong")]
        if r["compiled"] is not None:
            at = left + r["compiled"] * scale
            parts += [line(at, y - 4, at, y + 32, "used"), text(end + 4, y + 27, f"{r['compiled']} used", "small usedtext")]
    height = 22 + 46 * len(roles)
    for n in range(0, 257, 64):
        parts += [
            line(left + n * scale, 8, left + n * scale, height - 12, "grid"),
            text(left + n * scale, height - 1, str(n), "small", "middle"),
        ]
    return picture(
        WIDTH,
        height + 4,
        [*[p for p in parts if 'class="grid"' in p], *[p for p in parts if 'class="grid"' not in p]],
        "Registers a thread, by role",
    )


# time ---------------------------------------------------------------------------------------------------------------------


def bounds(answer: Answer) -> str:
    """The lower bound of each resource beside the measured time."""
    times, found = answer["times_us"], answer.get("measured")
    rows = [(r, t, "binds" if r == answer["binds"] else "bound") for r, t in times.items()]
    if found:
        rows.append(("measured", 1e3 * found["ms"]["median"], "measured"))
    return bars([(name, t, us(t), kind) for name, t, kind in rows], "Time by resource")


def savings(answer: Answer) -> str:
    """What is saved without each part, in percent of the whole time, with its interval."""
    shares = sorted(answer["measured"]["shares"], key=lambda s: -s["saved"]["median"])
    rows = []
    for s in shares:
        saved = s["saved"]
        label = f"−{100 * saved['median']:.1f} %  ({100 * saved['low']:.1f} to {100 * saved['high']:.1f})"
        rows.append(
            (
                f"without {CALLED[s['removed']]}",
                max(saved["median"], 0.0),
                label,
                "binds" if s["removed"] in answer["measured"]["expected"] else "bound",
            )
        )
    return bars(rows, "Time saved without each part", whole=1.0)


def bars(rows: list[tuple[str, float, str, str]], title: str, whole: float | None = None) -> str:
    """(name, value, label, class) as horizontal bars."""
    left, room = 150, WIDTH - 150 - 190
    top = whole or max((v for _, v, _, _ in rows), default=1.0) or 1.0
    parts = []
    for i, (name, value, label, kind) in enumerate(rows):
        y = 4 + 26 * i
        parts += [
            text(left - 10, y + 14, name, "strong" if kind != "bound" else "", "end"),
            rect(left, y, max(value / top * room, 1), 19, f"bar {kind}", f"{name}: {label}"),
            text(left + max(value / top * room, 1) + 6, y + 14, label),
        ]
    return picture(WIDTH, 8 + 26 * len(rows), parts, title)


# roofline -----------------------------------------------------------------------------------------------------------------


def roofline(answer: Answer, device: Device) -> str:
    """Operations a second over operations a DRAM byte, both in powers of ten: the roofs of this kernel's mix, and where it stands. A kernel
    that has no products (standard attention's softmax) has no place in it."""
    kernels = {name: k for name, k in answer["counts"].items() if sum(k["mma_flops"].values())}
    flops = {name: sum(k["mma_flops"].values()) for name, k in kernels.items()}
    dram = {name: k["dram_read_bytes"]["all"] + k["dram_written_bytes"]["all"] for name, k in kernels.items()}
    total, total_dram = (
        sum(flops.values()),
        sum(k["dram_read_bytes"]["all"] + k["dram_written_bytes"]["all"] for k in answer["counts"].values()),
    )
    roofs = list(_roofs(answer, device, total))
    points = [
        (f"{name}, at its bound", flops[name] / max(dram[name], 1), flops[name] / k["times_us"][_longest(k)] / 1e6, "hollow")
        for name, k in kernels.items()
    ]
    if len(answer["counts"]) > 1:
        points.append(("all kernels, at their bound", total / max(total_dram, 1), total / answer["bound_us"] / 1e6, "hollow"))
    if answer.get("measured"):
        points.append(("measured", total / max(total_dram, 1), total / (1e9 * answer["measured"]["ms"]["median"]), "measured"))
    return _log_plot(device.hbm_bytes_per_second / 1e12, answer["binds"] == "hbm", roofs, points)


def _longest(k: dict[str, Any]) -> str:
    return str(max(k["times_us"], key=lambda r: k["times_us"][r]))


def _roofs(answer: Answer, device: Device, total: int) -> Iterator[tuple[str, float, str]]:
    """(name, TFLOP/s, class): all but HBM, which is a slope."""
    times = answer["times_us"]
    for r, name in (("tensor", "tensor cores"), ("exp", "exponentials"), ("parallelism", "the busiest SM")):
        if times[r] > 0 and (r != "parallelism" or answer["binds"] == r):
            yield name, total / times[r] / 1e6, "binds" if answer["binds"] == r else "other"


def _log_plot(
    hbm_tbs: float, memory_binds: bool, roofs: list[tuple[str, float, str]], points: list[tuple[str, float, float, str]]
) -> str:
    """x: FLOP a byte, y: TFLOP/s. The slope is `hbm_tbs` TB/s."""
    left, right, top, bottom = 60.0, WIDTH - 30.0, 14.0, 330.0
    highest = max(y for _, y, _ in roofs)
    xs = [x for _, x, _, _ in points]
    x0 = math.floor(math.log10(min(*xs, highest / hbm_tbs)) - 0.6)
    x1 = math.ceil(math.log10(max(xs)) + 0.4)
    y1 = math.ceil(math.log10(highest) * 2 + 0.2) / 2
    y0 = min(math.floor(math.log10(min(y for _, _, y, _ in points)) * 2 - 0.5) / 2, y1 - 1.5)

    def px(x: float) -> float:
        return left + (min(max(math.log10(x), x0), x1) - x0) / (x1 - x0) * (right - left)

    def py(y: float) -> float:
        return bottom - (min(max(math.log10(y), y0), y1) - y0) / (y1 - y0) * (bottom - top)

    parts = []
    for e in range(int(x0), int(x1) + 1):
        parts += [
            line(px(10.0**e), top, px(10.0**e), bottom, "grid"),
            text(px(10.0**e), bottom + 16, f"{10.0**e:,g}", "small", "middle"),
        ]
    for e in range(math.ceil(y0), math.floor(y1) + 1):
        parts += [
            line(left, py(10.0**e), right, py(10.0**e), "grid"),
            text(left - 6, py(10.0**e) + 4, f"{10.0**e:,g}", "small", "end"),
        ]
    ridge = max(highest / hbm_tbs, 10**x0)
    start = max(10**x0, 10**y0 / hbm_tbs)
    parts += [
        line(px(start), py(start * hbm_tbs), px(ridge), py(ridge * hbm_tbs), f"roof slope{' binds' * memory_binds}"),
        text(px(ridge) - 14, py(ridge * hbm_tbs) + 4, f"memory, {hbm_tbs:.2g} TB/s", "small", "end"),
    ]
    for _, y, kind in roofs:
        parts.append(line(px(max(y / hbm_tbs, 10**x0)), py(y), right, py(y), f"roof {kind}"))
    for (name, y, kind), at in zip(
        sorted(roofs, key=lambda r: -r[1]), _apart([py(y) - 5 for _, y, _ in sorted(roofs, key=lambda r: -r[1])], 13)
    ):
        parts.append(text(right, at, f"{name}, {y:,.4g} TFLOP/s", "strong small" if kind == "binds" else "small", "end"))
    labels = _apart([py(y) + 18 for _, _, y, _ in points], 14)
    for (name, x, y, kind), at in zip(points, labels):
        parts += [
            circle(px(x), py(y), 6, f"point {kind}", f"{name}: {y:,.4g} TFLOP/s at {x:,.4g} FLOP a byte"),
            text(
                px(x) + 9,
                at,
                f"{name}: {y:,.4g}",
                "small",
                "start" if px(x) < right - 200 else "end",
                dx=0 if px(x) < right - 200 else -18,
            ),
        ]
    parts += [
        text((left + right) / 2, bottom + 34, "operations a byte of DRAM", "small", "middle"),
        text(6, top + 2, "TFLOP/s", "small"),
    ]
    return picture(WIDTH, bottom + 42, parts, "Roofline")


def _apart(places: list[float], least: float) -> list[float]:
    """Heights of labels, moved down where they would touch; in the order given, which is downwards or not."""
    out: list[float] = []
    for y in places:
        while any(abs(y - other) < least for other in out):
            y += 1
        out.append(y)
    return out
