"""fagen trace: a timeline from inside the kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import common
from . import needed as need

if TYPE_CHECKING:
    from rich.table import Table

    from ..compile import Built
    from ..explore.timing import Interval
    from ..explore.trace.run import Run, Traced
    from ..plan import Problem


@click.command()
@click.argument("schedule", metavar="SCHEDULE")
@click.option("--shape", metavar="B,HQ,HKV,SQ,SK", help="The size. Default: the longest of the paper's grid.")
@common.set_option
@common.causal_option
@click.option(
    "--beside",
    "beside",
    multiple=True,
    metavar="KNOB=VALUE",
    help="Trace the same with this changed, too, as a second panel; repeatable.",
)
@click.option("-o", "--output", default="trace.json", show_default=True, metavar="FILE", help="Trace for ui.perfetto.dev.")
@click.option("--svg", metavar="FILE", help="Also draw a picture of the first CTA recorded.")
@click.option("--cta", type=click.IntRange(0), default=0, show_default=True, help="The first of the four CTAs to record.")
@click.option(
    "--tile", type=click.IntRange(0), default=1, show_default=True, help="Of the picture: it begins with this tile of the CTA."
)
@click.option(
    "--cycles", type=click.IntRange(100), default=24000, show_default=True, help="Of the picture: so many SM cycles are shown."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random normal inputs.")
@common.from_option
@click.option("--timeout", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Seconds a launch may take.")
@common.json_option
def command(
    schedule: str,
    shape: str | None,
    settings: tuple[str, ...],
    causal: bool,
    beside: tuple[str, ...],
    output: str,
    svg: str | None,
    cta: int,
    tile: int,
    cycles: int,
    seed: int,
    folder: str | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Run SCHEDULE's trace build on the GPU: each role instance notes when it comes from one step to the next. Writes the timeline, prints
    what overlaps and where the time goes, and what tracing cost beside the normal build in the same run.

    SCHEDULE `tuned` is the one that the tuned table has for --shape. --from needs what `fagen build SCHEDULE --trace` wrote. Exit 1 if
    the trace build gives other results than the normal one.
    """
    from ..check import first_device
    from ..explore.trace.run import trace_gpu

    for path in filter(None, (output, svg)):
        _check_writable(path)
    items, problem = _chosen(schedule, settings, beside, causal, shape)
    for item in items:
        common.planned(item, trace=True)
    first_device()  # what is wrong with the call itself has been said by now
    pairs = [(common.built(i, folder=folder), common.built(i, trace=True, folder=folder)) for i in items]
    for _, traced in pairs:
        _tell_spills(traced)
    with common.Progress("tracing", len(pairs)) as progress:
        run = trace_gpu(pairs, problem, cta=cta, seed=seed, timeout=timeout, on_step=progress.step)
    titles = _titles(items, beside)
    facts = _facts(run, pairs, titles, problem)
    _write(output, svg, run, facts, titles, tile, cycles)
    for entry, (normal, _) in zip(facts["kernels"], pairs):
        _warn(entry, normal)
    if as_json:
        common.write_json(facts)
    else:
        _print(facts, [output, *([svg] if svg else [])])
    return int(not all(t.same_bits for t in run.traced))


def _chosen(
    schedule: str, settings: Sequence[str], beside: Sequence[str], causal: bool, shape: str | None
) -> tuple[list[common.Selected], Problem]:
    """The kernels, and the size."""
    from ..explore.bench import one_problem
    from .explain import parse_problem

    def item(changes: Sequence[str]) -> common.Selected:
        if schedule == need.TUNED:
            (wanted,) = need.needed([schedule], changes, causal or None, None, [shape] if shape else [], False)
            return wanted.item
        (selected,) = common.select([schedule], changes, causal)
        return selected

    items = [item(settings)]
    if beside:
        names = common.parse_settings(beside, option="--beside")
        kept = [s for s in settings if common.knob_of(s) not in names]
        items.append(item([*kept, *beside]))
        if items[0].attention != items[1].attention:
            raise InputError(
                "--beside", "changes the attention; both panels are of one attention, only knobs of the schedule may differ"
            )
        if items[0].schedule == items[1].schedule:
            raise InputError("--beside", f"{', '.join(beside)} is what {schedule} has already")
    return items, one_problem(items[0].attention.head_dim) if shape is None else parse_problem(shape)


def _titles(items: Sequence[common.Selected], beside: Sequence[str]) -> list[str]:
    first = f"{items[0].name}, {items[0].attention.label}"
    return [first] if len(items) == 1 else [first, f"{items[0].stem} with {', '.join(beside)}, {items[1].attention.label}"]


def _check_writable(path: str) -> None:
    """Before the GPU works: is there a folder to write to?"""
    parent = Path(path).parent
    if Path(path).is_dir():
        raise InputError(path, "is a folder; expected the name of a file")
    if not parent.is_dir():
        raise InputError(path, f"cannot be written: there is no folder {parent}")
    if not os.access(parent, os.W_OK):
        raise InputError(path, f"cannot be written: no permission in {parent}")


def _tell_spills(traced: Built) -> None:
    for k in traced.report.kernels:
        if most := max(k.spill_stores, k.spill_loads):
            common.note(f"{traced.source.name}: {k.name} spills {most} bytes a thread, which the normal build does not")


# ---------------------------------------------------------------------------------------------------------------- results


def _facts(run: Run, pairs: Sequence[tuple[Built, Built]], titles: Sequence[str], problem: Problem) -> dict[str, Any]:
    kernels = [_kernel_facts(*x) for x in zip(run.traced, (n for n, _ in pairs), titles)]
    return {"gpu": run.gpu, "driver": run.driver, "problem": str(problem), "kernels": kernels}


def _kernel_facts(traced: Traced, normal: Built, title: str) -> dict[str, Any]:
    from ..explore.trace import measure

    def cost(of: Interval | None) -> dict[str, float] | None:
        return None if of is None else {"median": of.median, "low": of.low, "high": of.high}

    return {
        "title": title,
        "plan": normal.plan.id,
        "normal_ms": traced.normal_ms,
        "traced_ms": traced.traced_ms,
        "writing_ms": traced.writing_ms,
        "overhead": cost(traced.overhead),
        "cta_overhead": cost(traced.cta_overhead),
        "overhead_unknown": traced.why_not,
        "same_bits": traced.same_bits,
        "traces": [measure(k).to_dict() for k in traced.kernels],
    }


def _write(output: str, svg: str | None, run: Run, facts: dict[str, Any], titles: Sequence[str], tile: int, cycles: int) -> None:
    from ..explore.trace import panel, perfetto, picture

    traces = [(title, kernel) for title, traced in zip(titles, run.traced) for kernel in traced.kernels]
    text = json.dumps(
        perfetto(traces, facts), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )  # long sequences: 10^5 events
    Path(output).write_text(text + "\n", encoding="utf-8")
    if svg is not None:
        measured = [m for k in facts["kernels"] for m in k["traces"]]
        about = f"{facts['problem']} on {facts['gpu']}"
        panels = [panel(t, f"{about}; {_sentence(m)}", k, tile, cycles) for (t, k), m in zip(traces, measured)]
        Path(svg).write_text(picture(panels), encoding="utf-8")


def _sentence(measured: dict[str, Any]) -> str:
    """What overlaps, for the picture."""
    parts = []
    if of := measured["softmax"]:
        total = sum(x["cycles"] for x in of)
        shares = [sum(x["cycles"] * x[n] for x in of) / total for n in ("under_any", "under_others", "under_own")]
        told = "{:.0%} under products ({:.0%} under another's, {:.0%} under its own)".format(*shares)
        parts.append(f"softmax: {told}")
    if measured["products_share"] is not None:
        parts.append(f"a product in flight {measured['products_share']:.0%} of the time")
    return "; ".join(parts)


def _warn(entry: dict[str, Any], normal: Built) -> None:
    from ..explore.trace.run import MOST_OVERHEAD

    title = entry["title"]
    costs = {"the launch": entry["overhead"], "a recorded CTA": entry["cta_overhead"]}
    high = [f"{of} {c['median']:.1%}" for of, c in costs.items() if c is not None and c["median"] > MOST_OVERHEAD]
    if high:
        common.note(f"warning: {title}: tracing costs {' and '.join(high)}, above {MOST_OVERHEAD:.0%}; read its times with care")
    for m in entry["traces"]:
        if m["dropped"]:
            common.note(
                f"warning: {title}: no room for the last {m['dropped']} words of marks; a smaller --shape is recorded whole"
            )
    for k in normal.report.kernels:
        for fault in (f for f in k.faults if f.startswith("early-wait")):
            common.note(
                f"{title}: {fault} in the normal build, whose compiler moved the wait up; the trace build keeps the program's order, so its "
                "softmax runs under its own product where the normal build's does not"
            )
    if not entry["same_bits"]:
        common.note(f"{title}: the trace build gives other results than the normal one")


def _print(facts: dict[str, Any], files: Sequence[str]) -> None:
    common.write(f"{facts['problem']} on {facts['gpu']}, driver {facts['driver']}")
    for entry in facts["kernels"]:
        common.write("", entry["title"], _cost(entry))
        for m in entry["traces"]:
            common.write(*_measured(m, len(entry["traces"]) > 1))
    common.write("", f"written: {', '.join(files)}")


def _cost(entry: dict[str, Any]) -> str:
    times = f"normal {entry['normal_ms']:.4f} ms, traced {entry['traced_ms']:.4f} ms a launch"
    whole, cta = (
        c and f"{c['median']:+.1%} ({c['low']:+.1%} to {c['high']:+.1%})" for c in (entry["overhead"], entry["cta_overhead"])
    )
    if whole is None:
        return f"  {times}; overhead unknown: {entry['overhead_unknown']}"
    return f"  {times}: overhead {whole}, within a recorded CTA {cta}"


def _measured(m: dict[str, Any], named: bool) -> list[str | Table]:
    from rich.table import Table

    lines: list[str | Table] = []
    name = f"{m['kernel']}: " if named else ""
    clock = m["cycles_per_us"]
    lines.append(f"  {name}{m['ctas']} CTAs recorded, SM clock {clock:.0f} MHz")
    for x in m["softmax"]:
        shares = f"{x['under_any']:.1%} under products: {x['under_others']:.1%} under another's, {x['under_own']:.1%} under its own"
        lines.append(f"  softmax of {x['lane']}: {x['cycles']} cycles, {shares}")
    if m["products_share"] is not None:
        lines.append(f"  a product is in flight {m['products_share']:.1%} of the time")
    if m["loads_cycles"]:
        lines.append(
            f"  a load is in flight for {m['loads_cycles']} cycles at most, {m['loads_under_work']:.1%} of them under work"
        )
    if m["tile_cycles"]:
        least, mean, most = m["tile_cycles"]
        lines.append(f"  a tile takes a role {mean:.0f} cycles, {mean / clock:.2f} µs ({least} to {most}; {m['tiles']} measured)")
    table = Table("role", "time", title_justify="left")
    for role, shares in m["time"].items():
        ordered = sorted(shares.items(), key=lambda x: -x[1])
        table.add_row(role, ", ".join(f"{what} {share:.1%}" for what, share in ordered if share >= 0.0005))
    lines.append(table)
    return lines
