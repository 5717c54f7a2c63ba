"""Trace builds: the program with its marks, as steps that only the emitter knows.

`instrument` puts them into the roles of a trace kernel just before it is printed; the plan that the proof and the simulator see is the
program itself. What a mark is and where it goes: `fagen.trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import trace
from ..plan import steps as st
from ..plan.expr import sym
from ..plan.kernel import TRACE_CTAS, TRACE_HEADER_WORDS, TRACE_NOTE, TRACE_WORDS, KernelPlan, trace_buffer
from .templates import View

if TYPE_CHECKING:
    from .views import Scope


@dataclass(frozen=True, kw_only=True)
class StartLane(st.Step):
    """The clocks at the lane's start are noted, and where its first run goes.

    `before`: of the CTA's lanes those in front of the role's, less the instances for which there is room in the threads in front of its."""

    before: int


@dataclass(frozen=True, kw_only=True)
class FinishLane(st.Step):
    """The clocks at the lane's end are noted, and how many words. `before`: as for `StartLane`."""

    before: int


@dataclass(frozen=True, kw_only=True)
class StoreNotes(st.Step):
    """Words of a run are stored, one note after the other."""

    notes: tuple[trace.Note, ...]


def instrument(kernel: KernelPlan) -> KernelPlan:
    """A trace plan's kernel with everything a trace build prints."""
    lanes, threads, roles = 0, 0, []
    for role in trace.marked(kernel).roles:
        before = lanes - threads // (role.warps * 32)
        roles.append(replace(role, body=(StartLane(before=before), *_with_notes(role.body), FinishLane(before=before))))
        lanes, threads = lanes + role.count, threads + role.threads
    return replace(kernel, roles=tuple(roles))


def _with_notes(body: st.Body) -> Iterator[st.Step]:
    for step in body:
        inner: dict[str, Any] = {n: tuple(_with_notes(b)) for n, b in st.bodies(step)}
        if not isinstance(step, trace.Mark):
            yield replace(step, **inner) if inner else step
        elif step.joint:  # stands behind the vote; only what the run is called differs between its sides
            yield from _stores(n for n in step.notes if n.code is not None)
        else:
            yield from _noting(step)
        if isinstance(step, st.Vote) and (
            joint := [b[-1] for _, b in st.bodies(step) if b and isinstance(b[-1], trace.Mark) and b[-1].joint]
        ):
            other, usual = joint
            both = replace(usual, what=f"{usual.what} or {other.what}", name=f"{usual.name} or {other.name}")
            yield from _noting(both)


def _noting(mark: trace.Mark) -> Iterator[st.Step]:
    yield mark
    yield from _stores(mark.notes)


def _stores(notes: Iterable[trace.Note]) -> Iterator[st.Step]:
    if together := tuple(notes):
        yield StoreNotes(notes=together)


# views ------------------------------------------------------------------------------------------------------------------


QUAD_BYTES = 4 * trace.QUAD


def _place(x: Scope) -> View:
    """The buffer and its measures: of all that is noted and of a lane's header in words, of a lane's first place in bytes."""
    lanes = TRACE_CTAS * len(trace.instances_of(x.kernel))
    return _lane(x) | {
        "threads": x.role.warps * 32,
        "first_cta": x.c(sym("trace_first")),
        "cta_count": x.c(sym("trace_count")),
        "instances": len(trace.instances_of(x.kernel)),
        "ctas": TRACE_CTAS,
        "all": lanes * TRACE_WORDS,
        "first": _bytes(TRACE_WORDS - _longest_run(x.kernel), x),
        "quad": QUAD_BYTES,
        "header_words": TRACE_HEADER_WORDS,
        "lowest": LOWEST_PLACE,
    }


LOWEST_PLACE = -(1 << 30)
"""Of a lane that has no room: so far it goes on counting, and there stay the threads that write no lane."""


def _lane(x: Scope) -> View:
    """The buffer, and where in shared memory an elected thread keeps its lane's place."""
    return {"buffer": f"p.{trace_buffer(x.kernel.name)}", "shared": f"smem_{TRACE_NOTE}"}


def _template(name: str, x: Scope) -> str:
    return f"trace/{name}_shared" if x.role.elect else f"trace/{name}"


def _longest_run(kernel: KernelPlan) -> int:
    """Of an instrumented kernel, in words."""
    steps = (s for role in kernel.roles for s in st.walk(role.body))
    return max(n.leaves for s in steps if isinstance(s, StoreNotes) for n in s.notes)


def _end(name: str) -> Callable[[Any, Scope], tuple[str, View]]:
    def make(s: StartLane | FinishLane, x: Scope) -> tuple[str, View]:
        values = _place(x)
        x.helpers.need("trace/lane", values)
        return _template(name, x), values | {"before": s.before}

    return make


def _bytes(words: int, x: Scope) -> int:
    """Between two words of a lane that are `words` apart, which are whole quads."""
    return 4 * words * TRACE_CTAS * len(trace.instances_of(x.kernel))


def _mark(s: trace.Mark, x: Scope) -> tuple[str, View]:
    return "trace/mark", {"clock": s.clock, "about": f"{s.what}: {s.name}" if s.group else s.what}


def _notes(s: StoreNotes, x: Scope) -> tuple[str, View]:
    stores = [_store(n, x) for n in s.notes]
    for store in stores:
        x.helpers.need("trace/note", _note(store["size"]))
    left = sum(n.leaves for n in s.notes)
    return _template("notes", x), _lane(x) | {"stores": stores, "run": _bytes(left, x), "lowest": LOWEST_PLACE}


def _note(size: int) -> View:
    """A store of `size` words; of three, one of a whole quad."""
    names, words = "abcd"[:size], ", ".join(f"%{3 + i}" for i in range(size))
    return {
        "size": size,
        "vector": ("", ".v2", ".v4", ".v4")[size - 1],
        "parameters": ", ".join(f"u32 {n}" for n in names),
        "words": words if size == 1 else f"{{{words}{', none' if size == 3 else ''}}}",
        "inputs": ", ".join(f'"r"({n})' for n in names),
    }


def _store(note: trace.Note, x: Scope) -> View:
    """A lane's place is the last quad of its next run if that were the longest."""
    words = list(note.clocks)
    if note.code is not None:
        told = f"{note.code << trace.ARGUMENT_BITS:#x}u"
        words = [f"{told} + {note.variable}" if note.variable else told, *words]
    quad, word = divmod(note.word, trace.QUAD)
    byte = _bytes(_longest_run(x.kernel) - trace.QUAD * (quad + 1) + note.left, x) + 4 * word
    return {"size": len(words), "byte": byte, "words": ", ".join(words)}


VIEWS: dict[type[st.Step], Callable[[Any, Scope], tuple[str, View]]] = {
    StartLane: _end("start"),
    FinishLane: _end("finish"),
    trace.Mark: _mark,
    StoreNotes: _notes,
}
