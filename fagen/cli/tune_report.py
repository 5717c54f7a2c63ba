"""What `fagen tune` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import common

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from ..explore.timing import Interval
    from ..explore.tune_result import Failure, Prepared, Rate, Shape, TuneResult

SHOWN = 5
"""Candidates a problem shows."""


def tell_prepared(prepared: Prepared, place: str) -> None:
    common.write(*_failures(prepared.failures))
    common.write(f"{len(prepared.candidates)} candidates for {prepared.attention.label} compiled into {place}")


def report(result: TuneResult) -> list[Any]:
    prepared = result.prepared
    took = ", ".join(f"{phase} {s:.0f} s" for phase, s in result.seconds.items())
    head = (
        f"{prepared.attention.label} on {result.gpu}: {space_line(prepared)}; {sum(not c.beside for c in prepared.candidates)} compiled, "
        f"{result.compiler or 'compiler unknown'}, driver {result.driver}"
    )
    said = [line for shape in result.shapes for line in _sentences(result, shape)]
    return [head, *([took] if took else []), _table(result), *said, *_failures((*prepared.failures, *result.failures))]


def space_line(prepared: Prepared) -> str:
    """How many schedules each step left."""
    sampled = "" if prepared.enumerated >= prepared.combinations else f" (a sample of {prepared.combinations})"
    excluded = f", {prepared.excluded} known ones left out" if prepared.excluded else ""
    return (
        f"{prepared.enumerated} schedules{sampled}, {prepared.legal} legal{counted(prepared.illegal)}{excluded}; "
        f"the model dropped {prepared.pruned}"
    )


def _sentences(result: TuneResult, shape: Shape) -> list[str]:
    schedules = {c.name: c.schedule for c in result.prepared.candidates}
    if shape.winner is None:
        return [f"{shape.problem}: no candidate was left"]
    best = shape.final[0]
    said = [f"{shape.problem}: {schedules[best.name].id} wins with {best.tflops.median:.1f} TFLOP/s, {_interval(best.tflops)}"]
    if shape.within_noise:
        near = ", ".join(schedules[n].id for n in shape.within_noise)
        said.append(f"  within noise of it: {near}")
    else:
        said.append("  nothing else is within noise of it")
    for other in shape.beside:
        said.append(f"  {_beside(other, schedules[other.name].id)}")
    start = next((r for r in (*shape.final, *shape.screened) if schedules[r.name] == result.prepared.start), None)
    if start is not None and start.name != best.name:
        said.append(f"  {start.ms.median / best.ms.median:.2f} × as fast as where it started ({start.tflops.median:.1f} TFLOP/s)")
    said += [f"  not timed: {why}" for why in shape.absent]
    if shape.stopped:
        said.append("  the budget ended the race before its last rung: fewer rounds than asked for")
    if shape.reused:
        said.append(f"  {shape.reused} candidates were known from an earlier run, and not tried again unless near the best")
    return said


def _beside(other: Rate, name: str) -> str:
    """The tuned table's entry beside the winner."""
    ratio = other.vs_winner
    if ratio is None:
        return f"the tuned entry {name}: {other.tflops.median:.1f} TFLOP/s"
    share = ratio.map(lambda x: 1 / x)
    return f"{share.median:.3f} ({share.low:.3f}–{share.high:.3f}) of the tuned entry {name}, {other.tflops.median:.1f} TFLOP/s, timed beside it"


def _interval(x: Interval) -> str:
    return f"{100 * x.confidence:.0f} % interval {x.low:.1f}–{x.high:.1f}"


def _table(result: TuneResult) -> RichTable:
    from rich import box
    from rich.table import Table

    candidates = {c.name: c for c in result.prepared.candidates}
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("B,HQ,HKV,SQ,SK", no_wrap=True)
    for title in ("TFLOP/s", "interval", "rounds", "µs", "predicted", "vs winner"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("schedule")
    for shape in result.shapes:
        first = str(shape.problem)
        rows = [*shape.final, *shape.screened][:SHOWN]
        for rate in [*rows, *shape.beside, *shape.peers]:
            c = candidates.get(rate.name)
            predicted = None if c is None else c.predicted_us.get(str(shape.problem))
            marks = "  (winner)" if rate.name == shape.winner else "  (within noise)" if rate.name in shape.within_noise else ""
            table.add_row(
                first,
                f"{rate.tflops.median:.1f}",
                f"{rate.tflops.low:.1f}–{rate.tflops.high:.1f}" if rate.rounds else "stored",
                str(rate.rounds or ""),
                f"{1e3 * rate.ms.median:.1f}",
                "" if predicted is None else f"{predicted:.1f}",
                "" if rate.vs_winner is None else f"{rate.vs_winner.median:.3f}",
                rate.name if c is None else ("tuned entry: " if c.beside else "") + _knobs(result, c.schedule.to_dict()) + marks,
            )
            first = ""
        table.add_section()
    return table


def _knobs(result: TuneResult, values: dict[str, Any]) -> str:
    """The knobs in which the candidates differ."""
    all_ = [c.schedule.to_dict() for c in result.prepared.candidates]
    differ = [n for n in values if any(other[n] != values[n] for other in all_)]
    return ", ".join(f"{n}={values[n]}" for n in differ) or "as given"


def _failures(failures: Sequence[Failure]) -> list[str]:
    """One line a reason, with how many candidates it befell."""
    if not failures:
        return []
    groups: dict[tuple[str, str], list[Failure]] = {}
    for f in failures:
        whole = f.reason.replace(f.name, "it").splitlines()
        groups.setdefault((f.stage, "; ".join(whole[:2])), []).append(f)
    lines = []
    for (stage, reason), of in groups.items():
        ids = ", ".join(f.schedule.id for f in of[:4]) + (" …" if len(of) > 4 else "")
        lines.append(f"  {stage}: {len(of)} × {reason} ({ids})")
        lines += [f"    fagen repro {f.bundle}" for f in of[:1] if f.bundle]
    return ["\n".join([f"failed ({len(failures)}):", *lines])]


def counted(illegal: dict[str, int]) -> str:
    return f" ({', '.join(f'{n} break {code}' for code, n in illegal.items())})" if illegal else ""
