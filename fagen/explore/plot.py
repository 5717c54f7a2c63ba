"""Results as a picture: TFLOP/s over the shapes, a panel for each head_dim and mask. Needs matplotlib (extra `plot`).

python -m fagen.explore.plot RESULTS.json PICTURE.svg
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

from ..errors import FagenError, InputError
from ..plan.kernel import Problem
from .bench_result import BenchResult
from .series import Panel, Series, length, panels

SUFFIXES = (".svg", ".png", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito (2008): apart in every common form of colour blindness."""
GREYS = ("#555555", "#888888", "#AAAAAA")
LINE_HEIGHT = 0.055
"""Of a written value, as a part of the highest one."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#666666",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "svg.hashsalt": "fagen",
}


def require_matplotlib(path: Path) -> None:
    """InputError where no picture could be written: another suffix, or no matplotlib."""
    if path.suffix not in SUFFIXES:
        raise InputError("--plot", f"{path.name} has none of the suffixes {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot", "matplotlib draws the picture and is not installed; pip install 'fagen[plot]'")


def write_plot(result: BenchResult, path: Path) -> None:
    """Draw the results into a file. InputError if there is nothing to draw or the file cannot be written."""
    require_matplotlib(path)
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = draw(result)
        try:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as e:
            raise InputError("--plot", f"{path} cannot be written: {e.strerror or e}") from e


def draw(result: BenchResult) -> Any:
    """The matplotlib Figure. One head_dim: its masks side by side; several: a row for each mask, a column for each head_dim."""
    from matplotlib.figure import Figure

    found = [p for p in panels(result) if any(v is not None for s in p.series for v in s.tflops)]
    if not found:
        raise InputError("--plot", "nothing was timed, so there is nothing to draw")
    masks, head_dims = list(dict.fromkeys(p.mask for p in found)), sorted({p.head_dim for p in found})
    masks.sort(key=lambda m: m != "full")
    rows, cols = (1, len(masks)) if len(head_dims) == 1 else (len(masks), len(head_dims))
    figure = Figure(figsize=(max(1.2 + 3.9 * cols, 6.0), 1.25 + 2.75 * rows), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, cols, sharey="row", squeeze=False)
    looks = _looks(found)
    top = max(v for p in found for s in p.series for v in s.tflops if v is not None)
    for panel in found:
        r, c = (0, masks.index(panel.mask)) if len(head_dims) == 1 else (masks.index(panel.mask), head_dims.index(panel.head_dim))
        _draw_panel(axes[r][c], panel, looks, top)
        if c == 0:
            axes[r][c].set_ylabel("TFLOP/s")
    for ax in axes.flat:
        if not ax.has_data():
            ax.set_visible(False)
        ax.margins(y=0.08)
        ax.set_ylim(bottom=0)
    handles = {name: line for ax in axes.flat for line in ax.get_lines() for name in [line.get_label()] if name in looks}
    order = [name for name in looks if name in handles]
    figure.legend([handles[n] for n in order], order, loc="outside upper left", ncols=min(len(order), 3 * cols), frameon=False)
    figure.supxlabel(_caption(result, found), fontsize=7.5, color="#555555", x=0.01, ha="left")
    return figure


def _looks(found: list[Panel]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every function: schedules in colour, peers in grey and dashed."""
    names = {kind: list(dict.fromkeys(s.name for p in found for s in p.series if s.kind == kind)) for kind in ("schedule", "peer")}
    looks: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names["schedule"]):
        looks[name] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "linewidth": 1.8, "zorder": 3}
    for i, name in enumerate(names["peer"]):
        looks[name] = {
            "color": GREYS[i % len(GREYS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linewidth": 1.2,
            "linestyle": "--",
            "markerfacecolor": "white",
            "zorder": 2,
        }
    return looks


def _draw_panel(ax: Any, panel: Panel, looks: dict[str, dict[str, Any]], top: float) -> None:
    for series in panel.series:
        if all(v is None for v in series.tflops):
            continue
        for n, (first, last) in enumerate(_runs(panel.problems)):
            _draw_run(ax, series, first, last, looks[series.name], label=series.name if n == 0 else f"_{series.name}")
    _write_last_values(ax, [s for s in panel.series if s.kind == "schedule"], looks, top)
    ax.set_xticks(range(len(panel.problems)), [_tick(p) for p in panel.problems])
    ax.set_xlim(-0.4, len(panel.problems) - 0.45)
    ax.tick_params(length=0)
    ax.grid(axis="y")
    for first, _ in _runs(panel.problems)[1:]:
        ax.axvline(first - 0.5, color="#cccccc", linewidth=0.8, zorder=1)
    ax.set_title(f"head_dim {panel.head_dim}, {panel.mask}", loc="left", fontsize=9.5, fontweight="bold", color="#333333")


def _draw_run(ax: Any, series: Series, first: int, last: int, look: dict[str, Any], label: str) -> None:
    points = [(i, v) for i, v in enumerate(series.tflops) if first <= i <= last and v is not None]
    ax.plot([i for i, _ in points], [v for _, v in points], label=label, markersize=4.5, clip_on=False, **look)


def _write_last_values(ax: Any, found: list[Series], looks: dict[str, dict[str, Any]], top: float) -> None:
    """Beside the last point of each; where two would overlap, the lower one moves down."""
    place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
    ends = [(*max((i, v) for i, v in enumerate(s.tflops) if v is not None), s.name) for s in found if any(s.tflops)]
    free = math.inf
    for i, value, name in sorted(ends, key=lambda end: -end[1]):
        at = min(value, free)
        free = at - LINE_HEIGHT * top
        ax.annotate(f"{value:.0f}", (i, at), fontsize=8, color=looks[name]["color"], annotation_clip=False, **place)


def _runs(problems: tuple[Problem, ...]) -> list[tuple[int, int]]:
    """Stretches (first, last) of neighbours that a line may join: as many sequences, or as many tokens in all."""
    runs: list[tuple[int, int]] = []
    for i, p in enumerate(problems):
        before = problems[i - 1] if i else None
        joined = before is not None and (p.batch == before.batch or p.batch * p.sq == before.batch * before.sq)
        runs = [*runs[:-1], (runs[-1][0], i)] if joined else [*runs, (i, i)]
    return runs


def _tick(p: Problem) -> str:
    lengths = length(p.sq) if p.sq == p.sk else f"{length(p.sq)}, {length(p.sk)}"
    return f"{lengths}\n× {p.batch}"


def _caption(result: BenchResult, found: list[Panel]) -> str:
    heads = sorted({(p.head_dim, q.hq, q.hkv) for p in found for q in p.problems})
    told = "; ".join(
        f"{hq} heads" + (f", {hkv} of KV" if hkv != hq else "") + (f" at head_dim {d}" if len(heads) > 1 else "")
        for d, hq, hkv in heads
    )
    types = " and ".join(dict.fromkeys(case.attention.products for case in result.cases))
    return f"sequence length × sequences; {told}; {types}; {result.machine.gpu}, {result.started[:10]}; median of bursts"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m fagen.explore.plot RESULTS.json PICTURE.svg", file=sys.stderr)
        return 2
    try:
        write_plot(BenchResult.from_json(Path(arguments[0]).read_text()), Path(arguments[1]))
    except (FagenError, OSError) as e:
        print(f"fagen.explore.plot: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
