"""A trace in the Trace Event Format that Perfetto (ui.perfetto.dev) and chrome://tracing open: a process a CTA, a thread a lane.

Products and loads in flight are threads of their own, below the lane that issued them, since they overlap what that lane does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .reader import CtaTrace, KernelTrace, Span

Event = dict[str, Any]


def perfetto(traces: Sequence[tuple[str, KernelTrace]], about: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values. `traces`: a title and a kernel's trace each; `about`: facts to keep with it. Times are µs from the first CTA's start."""
    events: list[Event] = []
    process = 0
    for title, trace in traces:
        for cta in trace.ctas:
            process += 1
            events += _cta(process, title, trace, cta)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(about)}


def _cta(process: int, title: str, trace: KernelTrace, cta: CtaTrace) -> Iterator[Event]:
    yield _name("process", process, 0, f"{title}: {trace.kernel}, CTA {cta.cta} on SM {cta.sm}")
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    threads: list[tuple[str, Sequence[Span]]] = []
    for i, lane in enumerate(cta.lanes):
        threads.append((lane.name, lane.spans))
        threads += [(f"{lane.name}: tiles", lane.tiles)] if lane.tiles else []
        threads += [(f"{t.name} in flight", t.spans) for t in cta.products if t.lane == i]
        threads += [(f"{lane.name}: {t.name} in flight", t.spans) for t in cta.loads if t.lane == i]
    for thread, (name, spans) in enumerate(threads, 1):
        yield _name("thread", process, thread, name)
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
        for span in spans:
            yield _span(span, process, thread, cta.start_ns / 1000, trace.cycles_per_us)


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _span(span: Span, process: int, thread: int, offset: float, cycles_per_us: float) -> Event:
    numbers = {n: v for n, v in (("tile", span.tile), ("block", span.block)) if v is not None}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.what,
        "pid": process,
        "tid": thread,
        "ts": round(offset + span.start / cycles_per_us, 5),
        "dur": round(span.cycles / cycles_per_us, 5),
        "args": {"step": span.step, "cycles": span.cycles, **numbers},
    }
