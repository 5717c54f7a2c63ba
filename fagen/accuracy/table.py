"""Accuracy tables for reading: the cells, and the tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .recipes import PLAIN
from .result import AccuracyResult, AccuracyRow, Experiment, agreement

HEAD = ("kernel", "inputs", "RMSE of out", "of per tensor", "of rms(out)", "RMSE of lse", "largest", "predicted / measured")
"""Of a table with a GPU's measurements; without them the last column is left out."""


def cells(experiment: Experiment, row: AccuracyRow) -> tuple[str, ...]:
    """A row's cells under `HEAD`. `of per tensor`: relative to the same kernel with one scale a tensor."""
    e = row.errors
    if e is None:
        return (row.kernel, row.recipe, row.outcome, "", "", "", "", "")
    plain = next((r.errors for r in experiment.rows if r.kernel == row.kernel and r.recipe == PLAIN.label and r.quantiser), None)
    ratio = "" if plain is None else f"{e.rmse / plain.rmse:.2f}"
    share = f"{100 * e.rmse / experiment.rms_out:.2g} %"
    agreed = agreement(row)
    told = "" if row.predicted is None or row.sampled is None or agreed is None else f"{1 / agreed:.3f}"
    lse = "" if e.rmse_lse is None else f"{e.rmse_lse:.1e}"
    return (row.kernel, row.recipe, f"{e.rmse:.2e}", ratio, share, lse, f"{e.largest:.1e}", told)


def head(result: AccuracyResult) -> tuple[str, ...]:
    return HEAD if result.gpu else HEAD[:-1]


def best(experiment: Experiment) -> list[str]:
    """For every kernel quantised in several ways, a sentence on the best one."""
    out = []
    naive = next((r.errors.rmse for r in experiment.rows if r.kind == "standard" and "e4m3" in r.recipe and r.errors), None)
    for kernel in dict.fromkeys(r.kernel for r in experiment.rows if r.kind == "schedule" and r.quantiser):
        found = [(r.errors.rmse, r.recipe) for r in experiment.rows if r.kernel == kernel and r.errors and not r.bad]
        plain = next((rmse for rmse, recipe in found if recipe == PLAIN.label), None)
        if plain:
            rmse, recipe = min(found)
            beside = "" if naive is None else f", {rmse / naive:.2f} of standard attention in e4m3"
            out.append(f"{kernel}: best is {recipe}, {rmse / plain:.2f} of {PLAIN.label}{beside}.")
    return out


def about(experiment: Experiment) -> str:
    """What was computed, and on which rows the errors are."""
    p, first = experiment.problem, next((r.errors for r in experiment.rows if r.errors), None)
    rows = first.rows if first else 0
    which = f"all {rows}" if rows == p.batch * p.hq * p.sq else f"{rows} of {p.batch * p.hq * p.sq}"
    return f"{experiment.title} (B,HQ,HKV,SQ,SK {p.batch},{p.hq},{p.hkv},{p.sq},{p.sk}, {experiment.mask}, {experiment.dtype}; {experiment.inputs}); errors against float64 of {which} query rows; rms(out) {experiment.rms_out:.3g}"


def reasons(experiment: Experiment) -> list[str]:
    """Why a row has no numbers, or bad ones; rows with the same reason in one line."""
    rows: dict[str, list[str]] = {}
    for r in experiment.rows:
        if r.reason:
            rows.setdefault(f"{r.outcome}: {r.reason}", []).append(f"{r.kernel}, {r.recipe}")
    return [f"{'; '.join(names)}: {reason}" for reason, names in rows.items()]


def where(result: AccuracyResult) -> str:
    if not result.gpu:
        return "Predicted by the simulator on the CPU."
    versions = ", ".join(f"{n} {v}" for n, v in result.versions.items())
    return f"Measured on {result.gpu}, driver {result.driver}{', ' if versions else ''}{versions}; predicted by the simulator."


def markdown_table(result: AccuracyResult) -> str:
    """A table for each experiment, with a line above it that says what was computed, and one below on the best way and on what is missing."""
    out = [where(result)]
    for e in result.experiments:
        out += [about(e) + ":", "\n".join(_table(result, e))]
        out += ["\n".join(f"- {line}" for line in (*best(e), *reasons(e)))] if best(e) or reasons(e) else []
    return "\n\n".join(out)


def _table(result: AccuracyResult, experiment: Experiment) -> Sequence[str]:
    names = head(result)
    lines = [f"| {' | '.join(names)} |", f"|---|---|{'---:|' * (len(names) - 2)}"]
    for row in experiment.rows:
        found = cells(experiment, row)[: len(names)]
        name = f"`{found[0]}`" if row.kind == "schedule" else found[0]
        lines.append(f"| {' | '.join((name, *found[1:]))} |")
    return lines
