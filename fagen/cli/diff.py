"""fagen diff: what two schedules do differently."""

from __future__ import annotations

from typing import Any

import click

from ..errors import InputError
from . import common
from .bench import read_results
from .explain import parse_problem, report_of


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@common.set_option
@click.option(
    "--set-b", "settings_b", multiple=True, metavar="KNOB=VALUE", help="Change a field of B alone, instead of --set; repeatable."
)
@common.causal_option
@click.option("--shape", metavar="B,HQ,HKV,SQ,SK", help="Also what the model says of both on these sizes, on an H200.")
@click.option("--from-results", metavar="FILE", help="Also the times that `fagen bench --output` wrote there, on --shape.")
@click.option("--source", is_flag=True, help="Show the whole difference of the generated code.")
@click.option("--no-compile", is_flag=True, help="Leave the counts of machine instructions out.")
@common.json_option
def command(
    a: str,
    b: str,
    settings: tuple[str, ...],
    settings_b: tuple[str, ...],
    causal: bool,
    shape: str | None,
    from_results: str | None,
    source: bool,
    no_compile: bool,
    as_json: bool,
) -> None:
    """Compare two schedules: knobs, the programs step by step, the generated code without its comments, machine instructions; with
    --shape the times that the model predicts, and with --from-results those that were measured.

    `fagen diff fa3 fa3 --set-b overlap=within` shows what one knob does.
    """
    from ..emit import emit
    from ..explore.diff import diff, measured_times

    if from_results is not None and shape is None:
        raise InputError("--from-results", "needs --shape: times are of one size")
    problem = None if shape is None else parse_problem(shape)
    of_b = common.parse_settings(settings_b, option="--set-b")
    others = [text for text in settings if common.knob_of(text) not in of_b]
    items = [
        common.select([a], settings, causal)[0],
        common.select([b], (*others, *settings_b), causal and "mask" not in of_b)[0],
    ]
    plans = [common.planned(item) for item in items]
    names = (items[0].name, items[1].name if items[1].name != items[0].name else f"{items[1].name}.{items[1].schedule.id}")
    sources = [emit(plan, name) for plan, name in zip(plans, names)]
    reports = [None if no_compile else report_of(plan, name) for plan, name in zip(plans, names)]
    found = None
    if from_results is not None and problem is not None:
        found = measured_times(plans[0], plans[1], problem, read_results(from_results), from_results)
    answer = diff(plans[0], plans[1], names, (sources[0], sources[1]), (reports[0], reports[1]), problem, found)
    if as_json:
        common.write_json(answer)
    else:
        _print(answer, source)


def _print(answer: dict[str, Any], whole: bool) -> None:
    from rich.table import Table

    from ..explore.diff import changed

    names = answer["a"]["name"], answer["b"]["name"]
    table = Table("knob", *names, title="Knobs")
    for knob, pair in answer["knobs"].items():
        table.add_row(knob, *map(str, pair))
    common.write(table, "Program", *(f"  {line}" for line in answer["program"]), "")
    removed, added = changed(answer["source"])
    common.write(f"Generated code without comments: {removed} lines of {names[0]} are not in {names[1]}, which has {added} others")
    if whole:
        common.write(*(f"  {line}" for line in answer["source"]))
    if answer["sass"] is not None:
        counts = Table("instruction", *names, title="Machine instructions, as printed")
        for name, (mine, its) in answer["sass"].items():
            counts.add_row(name, str(mine), str(its))
        common.write(counts)
    if "times" in answer:
        both = answer["times"]["a"], answer["times"]["b"]
        times = Table("µs", *names, title="Time")
        for resource in both[0]["times_us"]:
            times.add_row(resource, *(f"{x['times_us'][resource]:.4g}" for x in both))
        times.add_row("bound", *(f"{x['bound_us']:.4g}" for x in both))
        measured = answer.get("measured")
        if measured:
            times.add_row("measured", *(_measured(measured[key]) for key in "ab"))
        common.write(times, *(f"{name}: {x['sentence']}" for name, x in zip(names, both)))
        if measured and "speedup" in measured:
            s = measured["speedup"]
            noise = ", within noise" if s["low"] <= 1 <= s["high"] else ""
            common.write(f"{names[1]} is {s['median']:.3f} times as fast as {names[0]} ({s['low']:.3f} to {s['high']:.3f}{noise}).")


def _measured(found: dict[str, Any] | None) -> str:
    return "not in the file" if found is None else f"{1e3 * found['ms']['median']:.4g}"
