"""Trace builds: the program with its marks, as steps that only the emitter knows.

`instrument` puts them into the roles of a trace kernel just before it is printed; the plan that the proof and the simulator see is the
program itself. What a mark is and where it goes: `fagen.trace`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import trace
from ..plan import steps as st
from ..plan.expr import Expr, sym
from ..plan.kernel import TRACE_CTAS, TRACE_EVENTS, TRACE_HEADER_WORDS, TRACE_NOTE, KernelPlan, trace_buffer
from .templates import View

if TYPE_CHECKING:
    from .views import Scope

RECORDED = sym("cta") - sym("trace_first")
"""Number of the CTA among those that are recorded."""


@dataclass(frozen=True, kw_only=True)
class StartLane(st.Step):
    """The clocks at the lane's start are noted, and where its first mark goes."""

    lane: Expr


@dataclass(frozen=True, kw_only=True)
class FinishLane(st.Step):
    """The clocks at the lane's end are noted, and how many marks it made."""

    lane: Expr


def instrument(kernel: KernelPlan) -> KernelPlan:
    """A trace plan's kernel with everything a trace build prints."""
    instances, first, roles = len(trace.instances_of(kernel)), 0, []
    for role in trace.marked(kernel).roles:
        lane = RECORDED * instances + (first if role.elect or role.count == 1 else sym("w") + first)
        roles.append(replace(role, body=(StartLane(lane=lane), *role.body, FinishLane(lane=lane))))
        first += role.count
    return replace(kernel, roles=tuple(roles))


# views ------------------------------------------------------------------------------------------------------------------


def _place(x: Scope) -> View:
    """The buffer and its measures: between marks of a lane and of all marks, in bytes; where the lanes' headers begin, in words."""
    stride = 8 * TRACE_CTAS * len(trace.instances_of(x.kernel))
    return {
        "buffer": f"p.{trace_buffer(x.kernel.name)}",
        "shared": f"smem_{TRACE_NOTE}",
        "threads": x.role.warps * 32,
        "cta": x.c(RECORDED),
        "ctas": TRACE_CTAS,
        "events": TRACE_EVENTS,
        "stride": stride,
        "limit": stride * TRACE_EVENTS,
        "headers": stride * TRACE_EVENTS // 4,
        "header_words": TRACE_HEADER_WORDS,
    }


def _template(name: str, x: Scope) -> str:
    return f"trace/{name}_shared" if x.role.elect else f"trace/{name}"


def _end(name: str) -> Callable[[Any, Scope], tuple[str, View]]:
    def make(s: StartLane | FinishLane, x: Scope) -> tuple[str, View]:
        values = _place(x)
        x.helpers.need("trace/lane", values)
        return _template(name, x), values | {"lane": x.c(s.lane)}

    return make


def _mark(s: trace.Mark, x: Scope) -> tuple[str, View]:
    value = f"{s.code << trace.ARGUMENT_BITS:#x}u"
    return _template("mark", x), _place(x) | {
        "value": f"{value} + {x.c(s.argument)}" if s.variable else value,
        "about": f"{s.what}: {s.name}" if s.group else s.what,
    }


VIEWS: dict[type[st.Step], Callable[[Any, Scope], tuple[str, View]]] = {
    StartLane: _end("start"),
    FinishLane: _end("finish"),
    trace.Mark: _mark,
}
