"""Debug builds: the program with bounded waits, notes of progress and delays, as steps that only the emitter knows.

`instrument` puts them into the roles of a debug kernel just before it is printed; the plan that the proof and the simulator see is
the program itself. What they do and how the record is laid out: `fagen.debug`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from .. import debug
from ..plan import steps as st
from ..plan.expr import Expr, as_expr, sym
from ..plan.kernel import KernelPlan
from .templates import Helpers, View

if TYPE_CHECKING:
    from .views import Scope

NONE = as_expr(-1)


@dataclass(frozen=True, kw_only=True)
class StartDelays(st.Step):
    """u32 delays = the state of the warp's delays."""


@dataclass(frozen=True, kw_only=True)
class Delay(st.Step):
    """Sleep for a while drawn from `delays`."""


@dataclass(frozen=True, kw_only=True)
class Progress(st.Step):
    """The instance whose note is word `word` has come to what `value` says."""

    word: Expr
    value: int


@dataclass(frozen=True, kw_only=True)
class BoundedWait(st.Wait):
    """A Wait with what the record shall say of it."""

    kernel: int
    role: int
    instance: Expr
    step: int
    one_thread: bool
    """Lane 0 waits alone (else all lanes of a warp)."""
    tile: Expr
    key_block: Expr


def instrument(kernel: KernelPlan, index: int) -> KernelPlan:
    """A debug plan's kernel, the `index`-th of its plan, with everything a debug build prints."""
    number = {step.id: i for i, step in enumerate(debug.steps_of(kernel))}
    first, roles = 0, []
    for at, role in enumerate(kernel.roles):
        roles.append(replace(role, body=_Instrument(kernel, index, at, first, number).role()))
        first += role.count
    return replace(kernel, roles=tuple(roles))


@dataclass(frozen=True)
class _Instrument:
    kernel: KernelPlan
    index: int
    at: int
    first_word: int
    number: dict[str, int]

    def role(self) -> st.Body:
        role = self.kernel.roles[self.at]
        body = tuple(self._body(role.body, frozenset(), role.elect))
        return (StartDelays(), *body, *self._progress("through", len(self.number)))

    @property
    def _instance(self) -> Expr:
        role = self.kernel.roles[self.at]
        return as_expr(0) if role.elect or role.count == 1 else sym("w")

    def _body(self, body: st.Body, known: frozenset[str], one_thread: bool) -> Iterator[st.Step]:
        """`known`: the variables in scope. A block's own are known in the steps after them, and in nested blocks."""
        for step in body:
            if isinstance(step, (st.Let, st.Var, st.GetTile)):
                known |= {step.var}
            inside = known | {step.var} if isinstance(step, st.Loop) else known
            one = one_thread or isinstance(step, st.Elected)
            inner: dict[str, Any] = {name: tuple(self._body(b, inside, one)) for name, b in st.bodies(step)}
            if not isinstance(step, debug.SYNC_STEPS):
                yield replace(step, **inner) if inner else step
                continue
            yield from self._progress(step.id, self.number[step.id])
            yield self._bounded(step, known, one_thread) if isinstance(step, st.Wait) else step
            yield Delay()

    def _progress(self, title: str, step: int) -> Iterator[Progress]:
        if self.kernel.mbars:
            yield Progress(name=title, word=self._instance + self.first_word, value=1 + step)

    def _bounded(self, step: st.Wait, known: frozenset[str], one_thread: bool) -> BoundedWait:
        tile = next((sym(v) for v in ("tile", "m") if v in known), NONE)
        return BoundedWait(
            **{f.name: getattr(step, f.name) for f in fields(step)},
            kernel=self.index,
            role=self.at,
            instance=self._instance,
            step=self.number[step.id],
            one_thread=one_thread,
            tile=tile,
            key_block=sym("j") if "j" in known else NONE,
        )


def prologue(kernel: KernelPlan, helpers: Helpers) -> list[str]:
    """C lines at the kernel's head, in front of its first barrier."""
    if not kernel.mbars:
        return []
    helpers.need("ptx/st_shared")
    count = len(debug.instances_of(kernel))
    return [f"if (threadIdx.x < {count}) st_shared(smem_progress + 4 * threadIdx.x, {debug.NOT_STARTED});"]


# views ------------------------------------------------------------------------------------------------------------------


def _delay(s: Delay, x: Scope) -> tuple[str, View]:
    return "debug/delay", {"longest": debug.LONGEST_DELAY_NS, "shift": 32 - debug.LONGEST_DELAY_NS.bit_length()}


def _progress(s: Progress, x: Scope) -> tuple[str, View]:
    address = f"smem_progress + {x.c(s.word * 4)}"
    return "debug/progress", {"threads": x.role.warps * 32, "address": address, "value": s.value, "step": s.name}


def parity(s: st.Wait) -> str:
    """Of the phase that a wait is for, in C."""
    return f"{s.cursor}.phase" + " ^ 1" * s.refill


def _wait(s: BoundedWait, x: Scope) -> tuple[str, View]:
    values = {
        "kernel": str(s.kernel),
        "role": str(s.role),
        "instance": x.c(s.instance),
        "step": str(s.step),
        "slot": f"(int){s.cursor}.slot",
        "phase": f"(int)({parity(s)})" if s.refill else f"(int){parity(s)}",
        "tile": x.c(s.tile),
        "key_block": x.c(s.key_block),
        "cta": "cta",
        "thread": "(int)threadIdx.x",
    }
    return "debug/wait", {
        "lanes": "1" if s.one_thread else "~0u",
        "bar": x.bar_address(s.bar, s.cursor),
        "phase": parity(s),
        "instances": len(debug.instances_of(x.kernel)),
        "at": [values[f] for f in debug.FIELDS],
        "fields": debug.FIELDS,
        "magic": f"{debug.MAGIC:#x}",
        "limit_ns": debug.WAIT_LIMIT_NS,
    }


VIEWS: dict[type[st.Step], Callable[[Any, Scope], tuple[str, View]]] = {
    StartDelays: lambda s, x: ("debug/start_delays", {}),
    Delay: _delay,
    Progress: _progress,
    BoundedWait: _wait,
}
