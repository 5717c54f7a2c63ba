"""Trace builds: the program with its marks, as steps that only the emitter knows.

`instrument` puts them into the roles of a trace kernel just before it is printed; the plan that the proof and the simulator see is the
program itself. What a mark is and where it goes: `fagen.trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import trace
from ..plan import steps as st
from ..plan.expr import Expr, sym
from ..plan.kernel import TRACE_CTAS, TRACE_HEADER_WORDS, TRACE_NOTE, TRACE_WORDS, KernelPlan, trace_buffer
from .templates import View

if TYPE_CHECKING:
    from .views import Scope

RECORDED = sym("cta") - sym("trace_first")
"""Number of the CTA among those that are recorded."""


@dataclass(frozen=True, kw_only=True)
class StartLane(st.Step):
    """The clocks at the lane's start are noted, and where its first run goes."""

    lane: Expr


@dataclass(frozen=True, kw_only=True)
class FinishLane(st.Step):
    """The clocks at the lane's end are noted, and how many words."""

    lane: Expr


@dataclass(frozen=True, kw_only=True)
class Tell(st.Step):
    """A run is told."""

    told: trace.Told


def instrument(kernel: KernelPlan) -> KernelPlan:
    """A trace plan's kernel with everything a trace build prints."""
    instances, first, roles = len(trace.instances_of(kernel)), 0, []
    for role in trace.marked(kernel).roles:
        lane = RECORDED * instances + (first if role.elect or role.count == 1 else sym("w") + first)
        roles.append(replace(role, body=(StartLane(lane=lane), *_with_tells(role.body), FinishLane(lane=lane))))
        first += role.count
    return replace(kernel, roles=tuple(roles))


def _with_tells(body: st.Body) -> Iterator[st.Step]:
    for step in body:
        inner: dict[str, Any] = {n: tuple(_with_tells(b)) for n, b in st.bodies(step)}
        if not (isinstance(step, trace.Mark) and step.joint):
            yield replace(step, **inner) if inner else step
        if isinstance(step, trace.Mark) and step.tells is not None:
            yield Tell(told=step.tells)
        if isinstance(step, st.Vote) and (
            joint := [b[-1] for _, b in st.bodies(step) if isinstance(b[-1], trace.Mark) and b[-1].joint]
        ):
            other, usual = joint
            yield replace(usual, what=f"{usual.what} or {other.what}", name=f"{usual.name} or {other.name}")


# views ------------------------------------------------------------------------------------------------------------------


def _place(x: Scope) -> View:
    """The buffer and its measures in words: between two words of a lane, of all words, of a lane's header."""
    lanes = TRACE_CTAS * len(trace.instances_of(x.kernel))
    return {
        "buffer": f"p.{trace_buffer(x.kernel.name)}",
        "shared": f"smem_{TRACE_NOTE}",
        "threads": x.role.warps * 32,
        "cta": x.c(RECORDED),
        "ctas": TRACE_CTAS,
        "lanes": lanes,
        "all": lanes * TRACE_WORDS,
        "first": lanes * (TRACE_WORDS - _longest_run(x.kernel)),
        "header_words": TRACE_HEADER_WORDS,
    }


def _longest_run(kernel: KernelPlan) -> int:
    """Of an instrumented kernel, in words."""
    steps = (s for role in kernel.roles for s in st.walk(role.body))
    return max(s.told.words for s in steps if isinstance(s, Tell))


def _template(name: str, x: Scope) -> str:
    return f"trace/{name}_shared" if x.role.elect else f"trace/{name}"


def _end(name: str) -> Callable[[Any, Scope], tuple[str, View]]:
    def make(s: StartLane | FinishLane, x: Scope) -> tuple[str, View]:
        values = _place(x)
        x.helpers.need("trace/lane", values)
        return _template(name, x), values | {"lane": x.c(s.lane)}

    return make


def _bytes(words: int, x: Scope) -> int:
    """Between two words of a lane that are `words` apart."""
    return 4 * words * TRACE_CTAS * len(trace.instances_of(x.kernel))


def _word(at: int, x: Scope) -> int:
    """Bytes from a lane's place, which is the last word that its next run would have if it were the longest, to a word of that run."""
    return _bytes(_longest_run(x.kernel) - 1 + at, x)


def _mark(s: trace.Mark, x: Scope) -> tuple[str, View]:
    about = f"{s.what}: {s.name}" if s.group else s.what
    return _template("mark", x), _place(x) | {"word": _word(s.at, x), "about": about}


def _tell(s: Tell, x: Scope) -> tuple[str, View]:
    told, value = s.told, f"{s.told.code << trace.ARGUMENT_BITS:#x}u"
    return _template("next_run" if told.words else "tell", x), _place(x) | {
        "word": _word(told.at, x),
        "run": _bytes(told.words, x),
        "value": f"{value} + {x.c(told.argument)}" if told.variable else value,
    }


VIEWS: dict[type[st.Step], Callable[[Any, Scope], tuple[str, View]]] = {
    StartLane: _end("start"),
    FinishLane: _end("finish"),
    trace.Mark: _mark,
    Tell: _tell,
}
