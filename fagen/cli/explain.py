"""fagen explain: what a kernel does, in text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..errors import CompileError
from . import common

if TYPE_CHECKING:
    from ..plan import Plan
    from ..report import CompileReport


@click.command()
@click.argument("schedule", metavar="SCHEDULE")
@common.set_option
@common.causal_option
@click.option("--no-compile", is_flag=True, help="Only what the plan says; leave the compiler's registers out.")
@common.json_option
def command(schedule: str, settings: tuple[str, ...], causal: bool, no_compile: bool, as_json: bool) -> None:
    """Show a kernel's loop nest, where its tiles and barriers lie in shared memory, and which registers each role holds."""
    from ..explore.explain import explain

    (item,) = common.select([schedule], settings, causal)
    plan = common.planned(item)
    answer = explain(plan, None if no_compile else _report(plan, item.name))
    if as_json:
        common.write_json({"name": item.name, **answer})
    else:
        _print(item, answer)


def _report(plan: Plan, name: str) -> CompileReport | None:
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
