"""fagen explain: what a kernel does, in text or as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..errors import CompileError, InputError
from . import common
from . import needed as need
from .bench import check_output

if TYPE_CHECKING:
    from ..plan import Plan, Problem
    from ..report import CompileReport


@click.command()
@click.argument("schedule", metavar="SCHEDULE")
@common.set_option
@common.causal_option
@click.option("--shape", metavar="B,HQ,HKV,SQ,SK", help="Also count what these sizes cost, and say what binds, on an H200.")
@click.option(
    "--no-compile",
    is_flag=True,
    help="Only what the plan says, and as many registers as the launch allows instead of the compiler's.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Time the kernel on this GPU, and what is left of it without softmax, loads, P·V or idle SMs. Without --shape: one sequence of 16384.",
)
@click.option("--rounds", type=int, metavar="N", help="With --measure: measurements of each kernel. Default: 10.")
@click.option("--output", metavar="FILE", help="With --measure: write the times there, as `fagen bench --output` does.")
@click.option("--from-results", metavar="FILE", help="The times that `fagen bench` or --measure wrote there, on --shape.")
@click.option(
    "--html", metavar="FILE", help="Also write a page there: all of it as pictures, with the code and the knobs behind it."
)
@common.from_option
@common.json_option
def command(
    schedule: str,
    settings: tuple[str, ...],
    causal: bool,
    shape: str | None,
    no_compile: bool,
    measure: bool,
    rounds: int | None,
    output: str | None,
    from_results: str | None,
    html: str | None,
    folder: str | None,
    as_json: bool,
) -> None:
    """Show a kernel's loop nest, where its tiles and barriers lie in shared memory, which registers each role holds, how the work is
    divided and what overlaps; with --shape, what binds there: hbm, tensor, exp, parallelism or latency, and beside it the time that
    --measure or --from-results has, or the tuned table.

    SCHEDULE `tuned` is the one that the tuned table has for --shape (on this GPU, or on an H200 where there is none): it is said which
    entry that is and why. `fagen build SCHEDULE --removals -o DIR` builds what --measure times, for --from DIR.
    """
    from ..explore.explain import explain
    from .explain_measure import check_device, check_options, time_of

    check_options(measure, rounds, output, from_results, shape, folder)
    page = check_output("--html", html)
    item, about = _chosen(schedule, settings, causal, shape)
    problem = parse_problem(shape) if shape is not None else need.problems_of(item.attention, None, ())[0] if measure else None
    plan = common.planned(item)
    if measure:
        check_device()
    report = common.built(item, folder=folder).report if folder else None if no_compile else report_of(plan, item.name)
    found = None
    if problem is not None:
        found = time_of(item, plan, problem, report, measure, rounds, output, from_results, folder)
    if report is None and problem is not None:
        common.note("without the compiler's registers an SM may hold more CTAs than said here, which changes times and bounds")
    answer = explain(plan, report, problem, measured=found)
    if page is not None:
        from ..explore.page import write_page

        write_page(page, item.name, about, plan, answer)
    if as_json:
        common.write_json({"name": item.name, **({"about": about} if about else {}), **answer})
    else:
        if about:
            common.write(f"{schedule} is {about}", "")
        _print(item, answer)
        if found is not None:
            from ..explore.shares import sentences

            common.write(*sentences(found))
        if page is not None:
            common.write(f"{page}: open it in a browser")


def _chosen(schedule: str, settings: tuple[str, ...], causal: bool, shape: str | None) -> tuple[common.Selected, str]:
    """The kernel, and for `tuned` which one that is and why ("" for others)."""
    if schedule != need.TUNED:
        (item,) = common.select([schedule], settings, causal)
        return item, ""
    if shape is None:
        raise InputError("--shape", f"is needed: {need.TUNED} is a schedule for each size")
    (kernel,) = need.needed([schedule], settings, causal or None, None, [shape], False)
    return kernel.item, kernel.about


def parse_problem(shape: str) -> Problem:
    """B,HQ,HKV,SQ,SK as sizes; InputError naming --shape."""
    from ..check import parse_shape
    from ..plan import Problem

    p = parse_shape(shape)
    if not min(p.batch, p.hq, p.sq):
        raise InputError("--shape", f"{shape!r} has no rows of Q; nothing is launched, so nothing costs anything")
    return Problem(p.batch, p.sq, p.sk, p.hq, p.hkv)


def report_of(plan: Plan, name: str) -> CompileReport | None:
    """What the compiler makes of it, promises kept or not; None, and a line that says why, where it cannot be compiled."""
    from ..compile import build
    from ..emit import emit

    with common.Progress(f"compiling {name}", 1):
        try:
            report = build(plan, emit(plan, name), enforce=False).report
        except CompileError as e:
            common.note(f"compiled registers are left out: {e.message.splitlines()[0]}")
            return None
    for text in (*report.broken(), *report.notes):
        common.note(f"{name}: {text}")
    return report


def _print(item: common.Selected, answer: dict[str, Any]) -> None:
    from rich.table import Table

    for k in answer["kernels"]:
        common.write(
            f"{item.name}: {item.attention.label}, plan {answer['plan']}. Kernel {k['name']}: {k['threads']} threads, grid {k['grid']}, "
            f"{k['shared_memory_bytes']} of {k['shared_memory_limit']} bytes of shared memory"
        )
    common.write("", "Loop nest", *(f"  {line}" for line in answer["loop_nest"]), "")
    several = len(answer["kernels"]) > 1
    memory = Table(*(["kernel"] if several else []), "offset", "bytes", "name", "stages", "a slot", title="Shared memory")
    for m in answer["shared_memory"]:
        cells = (str(m["offset"]), str(m["bytes"]), m["name"], str(m["stages"]), m["slot"])
        memory.add_row(*([m["kernel"]] if several else []), *cells)
    registers = Table(*(["kernel"] if several else []), "role", "threads", "limit", "compiled", "tiles", title="Registers a thread")
    for r in answer["registers"]:
        limit = f"{r['planned']} (setmaxnreg)" if r["setmaxnreg"] else f"{r['planned']} (launch)"
        tiles = ", ".join(f"{name} {n}" for name, n in r["tiles"].items()) or "none"
        compiled = "?" if r["compiled"] is None else str(r["compiled"])
        registers.add_row(*([r["kernel"]] if several else []), r["role"], str(r["threads"]), limit, compiled, tiles)
    named = [
        f"Named barrier {b['name']}: ids {', '.join(map(str, b['ids']))}, {b['threads']} threads each"
        for b in answer["named_barriers"]
    ]
    common.write(memory, *named, registers)
    for question, sentences in answer["answers"].items():
        common.write(question, *(f"  {s}" for s in sentences), "")
    if "binds" in answer:
        _print_costs(answer)


def _print_costs(answer: dict[str, Any]) -> None:
    from rich.table import Table

    p, d = answer["problem"], answer["device"]
    names = [*answer["counts"]]
    shape = f"{p['batch']},{p['hq']},{p['hkv']},{p['sq']},{p['sk']}"
    common.write(f"{shape} on {d['name']}, {d['sms']} SMs at {d['clock_mhz']:.0f} MHz")
    table = Table("count", *names)
    for column in table.columns[1:]:
        column.justify = "right"
    columns = [_cells(k) for k in answer["counts"].values()]
    for name in dict.fromkeys(n for cells in columns for n in cells):
        table.add_row(name, *(cells.get(name, "") for cells in columns))
    common.write(table, f"Predicted: {answer['predicted_us']:,.1f} µs a launch.", answer["sentence"])


def _cells(k: dict[str, Any]) -> dict[str, str]:
    """One kernel's column: row → text."""
    cells = {f"{n}, instructions": f"{v:,}" for n, v in k["mma_instructions"].items()}
    cells |= {f"{n}, GFLOP": f"{v / 1e9:,.1f}" for n, v in k["mma_flops"].items()}
    cells["exponentials, millions"] = f"{k['exponentials'] / 1e6:,.1f}"
    for what, field in BYTES.items():
        cells |= {f"{what} {n}, MB": f"{v / 1e6:,.2f}" for n, v in k[field].items()}
    cells |= {f"{n}, µs": f"{v:,.2f}" for n, v in k["times_us"].items()}
    return {**cells, "binds": k["binds"]}


BYTES = {
    "into SMs:": "sm_read_bytes",
    "out of SMs:": "sm_written_bytes",
    "DRAM read:": "dram_read_bytes",
    "DRAM written:": "dram_written_bytes",
}
