"""Results as Markdown tables, for pages: TFLOP/s of every function by shape, what loses to a peer marked, what binds in words."""

from __future__ import annotations

from .bench_result import BenchResult, Row
from .series import Panel, Series, panels, shape_name
from .summary import summaries


def markdown_table(result: BenchResult) -> str:
    """A table for each head_dim and mask; cells are TFLOP/s (median of the burst), of schedules also their speed relative to the best peer
    of that case, bold where they are slower. Below stand the means of many cases, what the model says of each schedule on the
    last shape it was timed on, and why something was not timed."""
    found = panels(result)
    parts = [_head(result)]
    for panel in found:
        parts += [f"**head_dim {panel.head_dim}, {panel.mask}**", "\n".join(_table(panel))]
    sentences = [line for panel in found for line in _sentences(panel)]
    reasons = dict.fromkeys(
        f"- {row.function} on {case.attention.label} was not timed ({row.outcome}): {row.reason}"
        for case in result.cases
        for row in case.rows
        if row.outcome != "timed"
    )
    parts += ["\n".join(x) for x in (_moving(result), _means(result), sentences, list(reasons)) if x]
    return "\n\n".join(parts)


def _head(result: BenchResult) -> str:
    c = result.ceilings
    limits = f"matrix product {c.gemm_tflops.median:.0f} TFLOP/s, copy {c.copy_tbs.median:.2f} TB/s"
    return f"TFLOP/s on one {result.machine.gpu}, {result.started[:10]}; columns: sequences × length. In brackets the speed relative to the best peer of the column, **bold** where it is slower. In the same run: {limits}."


def _table(panel: Panel) -> list[str]:
    shapes = [shape_name(p) for p in panel.problems]
    lines = [f"| | {' | '.join(shapes)} |", f"|---|{'---:|' * len(shapes)}"]
    for series in panel.series:
        name = f"`{series.name}`" if series.kind == "schedule" else series.name
        lines.append(f"| {name} | {' | '.join(_cell(row) for row in series.rows)} |")
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.burst is None:
        return row.outcome
    ratio = row.burst.ratio
    text = f"{row.burst.tflops.median:.0f}"
    if ratio is None:
        return text
    told = f"{ratio.median:.2f}" if ratio.median >= 1 or ratio.median < 0.995 else f"{ratio.median:.4f}"
    return f"{text} (**{told}**)" if ratio.median < 1 else f"{text} ({told})"


def _moving(result: BenchResult) -> list[str]:
    """Kernels that only move bytes."""
    lines = [
        "| kernels that quantise | | sequences × length | MB, each read counted | µs | TB/s | share of the copy |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for case in result.cases:
        for row in case.rows:
            if row.bytes is not None and row.burst is not None:
                ms, about = row.burst.ms.median, f"| `{row.function}` | {case.attention.label} | {shape_name(case.problem)} "
                rate = f"{row.bytes / 1e6:.1f} | {1000 * ms:.1f} | {row.bytes / ms / 1e9:.2f} | {100 * row.burst.copy_share:.0f} %"
                lines.append(f"{about}| {rate} |")
    return lines if len(lines) > 2 else []


def _means(result: BenchResult) -> list[str]:
    found = summaries(result)
    lines = ["| relative to the best peer | | cases | geometric mean | least | below 1 | share of the matrix product |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for s in found:
        share = f"{100 * s.gemm_share:.0f} %"
        lines.append(
            f"| `{s.function}`, {s.load} | {s.group} | {s.cases} | {s.mean:.3f} | {s.least:.3f} ({s.where}) | {s.below} | {share} |"
        )
    return lines if found else []


def _sentences(panel: Panel) -> list[str]:
    return [line for series in panel.series if (line := _sentence(panel, series))]


def _sentence(panel: Panel, series: Series) -> str:
    for problem, row in reversed(list(zip(panel.problems, series.rows))):
        if row is not None and row.burst is not None and row.prediction is not None:
            share = 100 * row.prediction.bound_us / (1000 * row.burst.ms.median)
            place = f"head_dim {panel.head_dim}, {panel.mask}, {shape_name(problem)}"
            return f"- `{series.name}` ({place}): {row.prediction.sentence} It reaches {share:.0f} % of that."
    return ""
