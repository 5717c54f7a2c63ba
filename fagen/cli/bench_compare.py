"""`fagen bench --compare OLD NEW`: two result files in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bench import read_results
from .common import write, write_json

if TYPE_CHECKING:
    from ..explore.compare_results import Compared, Comparison


def compare(old: str, new: str, fail_below: float | None, as_json: bool) -> int:
    """Print what became of every function; 1 if a schedule is slower than `fail_below` of what it was, and not within noise."""
    from ..explore.compare_results import compare_results

    found = compare_results(read_results(old, "--compare"), read_results(new, "--compare"))
    slower = () if fail_below is None else found.slower(fail_below)
    if as_json:
        write_json({"old": old, "new": new, **found.to_dict(), "slower": [r.function for r in slower]})
    else:
        write(*_report(found, old, new, fail_below, slower))
    return 1 if slower else 0


def _report(found: Comparison, old: str, new: str, fail_below: float | None, slower: tuple[Compared, ...]) -> list[Any]:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("attention", "B,HQ,HKV,SQ,SK", "function", "load"):
        table.add_column(name, no_wrap=True)
    for name in ("old TFLOP/s", "new TFLOP/s", "ratio", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    before: tuple[str, str] | None = None
    for r in found.rows:
        here = (r.attention.label, str(r.problem))
        notes = [text for text, holds in (("within noise", r.within_noise), ("another plan", r.changed)) if holds]
        numbers = (f"{r.old.median:.1f}", f"{r.new.median:.1f}", f"{r.ratio.median:.3f}", f"{r.ratio.low:.3f}–{r.ratio.high:.3f}")
        table.add_row(*(("", "") if here == before else here), r.function, r.load, *numbers, ", ".join(notes))
        before = here
    lines = [f"old: {old}", f"new: {new}; a ratio above 1 is faster than before"]
    for name, texts in (("only in the old", found.only_old), ("only in the new", found.only_new)):
        lines += [f"{name}: {text}" for text in texts]
    for kind, title in (("schedule", "schedules"), ("peer", "peers")):
        mean = found.mean(kind)
        if mean is not None:
            lines.append(f"geometric mean of the {title}: {mean:.3f}")
    if fail_below is not None:
        lines += [
            f"slower than {fail_below:g}: {r.function} on {r.attention.label} {r.problem}: {r.ratio.median:.3f}" for r in slower
        ]
        lines += [] if slower else [f"no schedule is below {fail_below:g} of what it was"]
    return [table, "\n".join(lines)]
