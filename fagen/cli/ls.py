"""fagen ls: the built-in schedules, the steps between them, and the state of their evidence."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import evidence
from ..errors import ScheduleError
from ..library import builtin_names, chain_names, load, resource_dir
from . import common

if TYPE_CHECKING:
    from rich.table import Table

REQUIRE = "FAGEN_REQUIRE_EVIDENCE"


@click.command()
@click.option("--generated", metavar="DIR", help="Where NAME.json stand. Default: ./generated, else that of the checkout.")
@common.json_option
def command(generated: str | None, as_json: bool) -> int:
    """List the built-in schedules and the chains between them, with what a GPU has shown of exactly today's code.

    fresh: at least 60 cases passed on this code. stale: the code has changed since. failed: a case or check did not pass. none: nothing
    is known. illegal: the rules refuse it. FAGEN_REQUIRE_EVIDENCE=1 makes everything but fresh, of any variant of a built-in schedule,
    exit 1; steps of a chain are shown, not required.
    """
    folder = Path(generated) if generated else default_generated()
    builtins = builtin_names()
    rows = [survey(name, folder) for name in (*builtins, *chain_names())]
    if as_json:
        common.write_json(rows)
    else:
        common.write(_table(rows))
    lacking = [f"{r['name']} ({', '.join(missing)})" for r in rows if r["name"] in builtins and (missing := _missing(r))]
    if lacking and os.environ.get(REQUIRE, "") not in ("", "0"):
        common.note(f"{REQUIRE} is set, and evidence is not fresh: {'; '.join(lacking)}")
        return 1
    return 0


def default_generated() -> Path:
    """./generated, or the checkout's folder where there is none here."""
    here = Path("generated")
    return here if here.is_dir() else resource_dir("schedules").parent / "generated"


def survey(name: str, folder: Path) -> dict[str, Any]:
    """A schedule by name: its plan, its tiles, and the state of the evidence of its own attention and of every variant."""
    from ..emit import emit
    from ..plan import assemble

    own = load(name)
    record = evidence.read(folder / f"{Path(name).name}.json")
    states: dict[str, str] = {}
    for item in common.select([name], variants=True):
        label = evidence.variant_id(item.attention)
        try:
            plan = assemble(item.attention, item.schedule)  # unproven: its text is the same, and only its hash is wanted
        except ScheduleError:
            states[label] = "illegal"
            continue
        code = emit(plan, item.name).code_sha256
        states[label] = evidence.state(record, code, item.variant, min_cases=evidence.MIN_CASES)
    mine = evidence.variant_id(own.attention)
    about = record.get("evidence") or {}
    return {
        "name": name,
        "plan": f"{own.attention.id}-{own.schedule.id}",
        "attention": own.attention.label,
        "arch": own.schedule.arch,
        "tile_q": own.schedule.tile_q,
        "tile_kv": own.schedule.tile_kv,
        "evidence": states.pop(mine),
        "variants": states,
        "gpu": about.get("gpu"),
        "date": about.get("date"),
    }


def _missing(row: dict[str, Any]) -> list[str]:
    """What is not fresh, in words."""
    count = Counter(s for s in row["variants"].values() if s != "fresh")
    own = [] if row["evidence"] == "fresh" else [f"own attention {row['evidence']}"]
    return own + [f"{n} variants {state}" for state, n in sorted(count.items())]


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("schedule", "attention", "target", "tiles (q × kv)", "plan", "evidence", "variants", "measured on")
    for r in rows:
        count = Counter(r["variants"].values())
        variants = ", ".join(f"{count[s]} {s}" for s in ("fresh", "stale", "failed", "none", "illegal") if count[s])
        on = f"{r['gpu']}, {r['date']}" if r["gpu"] else ""
        table.add_row(
            r["name"], r["attention"], r["arch"], f"{r['tile_q']} × {r['tile_kv']}", r["plan"], r["evidence"], variants, on
        )
    return table
