"""Removals: a plan without its softmax, its loads, its P·V or its idle SMs, to measure what each of them takes.

A removal rewrites the program: the steps go, and what made their input and what uses their output stays, so that the compiler drops
nothing else. All waits and arrivals that other steps need stay too, and the rest is proven like every plan. What such a kernel writes
is wrong; it is no schedule, and nothing but `explain --measure` and the bench behind it runs one.

  softmax  no mask, maximum, exponential, sum or rescaling: P is the rounded scores. Standard attention loses its whole middle kernel.
  loads    nothing comes from global memory: rings are filled once with ordinary numbers, and arrivals stand for the copies. Waits,
           arrivals and everything that reads the rings stay. (Row passes of standard attention keep their reads: they are its softmax.)
  pv       the second product goes; V is still loaded, P still made.
  idle     no SM has to idle: each CTA does the part of its key blocks that would be its SM's if all SMs shared the work evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from ..errors import InputError, InternalError
from . import barriers
from . import steps as st
from .expr import as_expr, ceildiv, minimum, sym
from .kernel import KernelPlan, Param, Plan
from .proof import prove
from .proof.registers import frag_uses
from .tiles import N_CTAS

Rule = Callable[[st.Step], st.Body]
"""What stands in a step's place; its own bodies are rewritten already."""


def without(plan: Plan, what: str) -> Plan:
    """The plan after a removal of `REMOVALS`, proven. InputError for another name, for a debug or trace plan, a plan that something was
    removed from already, or where there is nothing of that kind to remove."""
    if what not in REMOVALS:
        raise InputError("without", f"no removal {what!r}; removals: {', '.join(REMOVALS)}")
    if plan.without or plan.debug or plan.trace:
        kind = "of a debug build" if plan.debug else "of a trace build" if plan.trace else f"without {plan.without}"
        raise InputError("without", f"{what} is removed from a whole plan only, not from one {kind}")
    return _without(plan, what)


def removable(plan: Plan) -> tuple[str, ...]:
    """The removals that change the plan, in the order of `REMOVALS`."""
    return tuple(name for name, remove in REMOVALS.items() if tuple(map(remove, _kept(plan, name))) != plan.kernels)


def file_of(name: str, removed: str) -> str:
    """Name of the files of a kernel without something; `name`: of the whole kernel's."""
    return f"{name}.without-{removed}"


@lru_cache(maxsize=64)
def _without(plan: Plan, what: str) -> Plan:
    kernels = tuple(map(REMOVALS[what], _kept(plan, what)))
    if kernels == plan.kernels:
        raise InputError("without", f"{what}: {plan.id} has nothing of that kind")
    kernels = tuple(_renumbered(k) for k in kernels)
    for kernel in kernels:
        result = prove(kernel, plan.attention, plan.schedule)
        if not result.ok:
            raise InternalError(f"{kernel.name} without {what} is not synchronised: {result.failures[0]}")
    return replace(plan, kernels=kernels, without=what)


def _kept(plan: Plan, what: str) -> tuple[KernelPlan, ...]:
    """The kernels that are left: those that only pass over rows are softmax and nothing else."""
    return tuple(k for k in plan.kernels if what != "softmax" or not _has(k, st.RowPass))


# the four removals --------------------------------------------------------------------------------------------------------

SOFTMAX = (
    *(st.Mask, st.Limits, st.OnlineSoftmax, st.AddSums, st.Calm, st.Hold, st.Rescale),
    *(st.MulRow, st.Reciprocal, st.StoreStats, st.MergeStats),
)
"""Steps that go with the softmax. What they leave undefined nothing reads: row sums are set to 1."""


def _no_softmax(kernel: KernelPlan) -> KernelPlan:
    steps = [s for r in kernel.roles for s in st.walk(r.body)]
    sums = {getattr(s, "l", "") for s in steps if isinstance(getattr(s, "lse", None), str)}  # row sums, of which lse is made

    def rule(step: st.Step) -> st.Body:
        if isinstance(step, st.StaleSoftmax):  # P is packed early, into E
            return (st.Pack(p=step.e, s=step.s),)
        if isinstance(step, st.Vote):  # both sides have the same waits; the second has nothing else that stays
            return step.orelse
        if isinstance(step, st.SumRow):  # a running part becomes a sum of its own
            return () if step.src == step.dst else (st.CopyRow(dst=step.dst, src=step.src),)
        if isinstance(step, st.Fill) and step.dst in sums and step.value == 0:
            return (replace(step, value=1.0),)
        return () if isinstance(step, SOFTMAX) else (step,)

    return _rewritten(kernel, rule)


def _no_pv(kernel: KernelPlan) -> KernelPlan:
    products = [s for r in kernel.roles for s in st.walk(r.body) if isinstance(s, st.Mma) and s.b.smem == "V"]
    gone = {s.d for s in products} | {s.a for s in products if isinstance(s.a, str)}

    def rule(step: st.Step) -> st.Body:
        if isinstance(step, st.Mma) and step.b.smem == "V":
            start = () if step.accumulate else (st.Fill(dst=step.d, value=0.0),)
            reads = (step.a,) if isinstance(step.a, str) else ()
            return (*start, st.Opaque(name=step.name, reads=reads, changes=(step.d,)))
        if isinstance(step, st.MmaWait):  # the products that are left are in flight alone
            ready = tuple(f for f in step.ready if f not in gone)
            return (replace(step, pending=0, ready=ready),) if ready else ()
        return (step,)

    return _rewritten(kernel, rule)


def _no_loads(kernel: KernelPlan) -> KernelPlan:
    loads = (st.TmaLoad, st.CpAsync, st.Copy)
    rings = {s.dst.smem for r in kernel.roles for s in st.walk(r.body) if isinstance(s, loads)}

    def rule(step: st.Step) -> st.Body:
        if isinstance(step, st.TmaLoad):
            assert step.dst.cursor is not None
            return (st.Arrive(bar=step.full, cursor=step.dst.cursor, who="thread", why="nothing is loaded"),)
        if isinstance(step, st.LoadAcc):
            return st.Fill(dst=step.dst, value=1.0), st.Opaque(reads=(), changes=(step.dst,))
        if isinstance(step, st.LoadRow):
            return (st.Fill(dst=step.dst, value=1.0),)
        return () if isinstance(step, (st.CpAsync, st.Copy, st.CpCommit, st.CpWait)) else (step,)

    return _prefilled(_rewritten(kernel, rule), rings)


def _prefilled(kernel: KernelPlan, rings: set[str]) -> KernelPlan:
    """Every role fills the rings that it reads before it does anything else; a named barrier of its own tells its threads when."""
    roles, named = [], list(kernel.nbars)
    proxy = any(isinstance(s, st.Mma) and s.unit == "wgmma" for r in kernel.roles for s in st.walk(r.body))
    for role in kernel.roles:
        mine = [name for name in (t.name for t in kernel.smem) if name in rings & _read(role)]
        if mine:
            bar = st.NBar(f"filled_{role.name}", max((b.first_id + b.count for b in named), default=1), 1, role.threads)
            named.append(bar)
            fence = (st.ProxyFence(why="the products read through the asynchronous proxy"),) if proxy else ()
            first = (*(st.Prefill(smem=n) for n in mine), *fence, st.Sync(bar=bar.name, index=as_expr(0)))
            role = replace(role, body=(*first, *role.body))
        roles.append(role)
    return replace(kernel, roles=tuple(roles), nbars=tuple(named))


def _read(role: st.Role) -> set[str]:
    """Rings that steps of the role read."""
    operands = (getattr(s, f, None) for s in st.walk(role.body) for f in ("src", "a", "b"))
    return {x.smem for x in operands if isinstance(x, st.Slot)}


BLOCKS = ("n", "n_all", "n_tile")
"""Variables that hold how many key blocks a tile, a range of tiles or a warpgroup's part sees."""


def _no_idle(kernel: KernelPlan) -> KernelPlan:
    """The number of key blocks, times the CTAs there are over those there could be. The part is rounded up to whole blocks."""
    sms = sym("num_sms")

    def rule(step: st.Step) -> st.Body:
        if isinstance(step, (st.Let, st.Var, st.Set)) and step.var in BLOCKS:
            return (replace(step, value=ceildiv(step.value * minimum(N_CTAS, sms), sms)),)
        return (step,)

    known = any(p.name == "num_sms" for p in kernel.params)
    params = kernel.params if known else (*kernel.params, Param("num_sms", "i32", sms))
    return _rewritten(replace(kernel, params=params), rule)


SPILL_BYTES = 16
"""Tolerated a thread in what is left of a kernel, which is timed and nothing else."""

REMOVALS: dict[str, Callable[[KernelPlan], KernelPlan]] = {
    "softmax": _no_softmax,
    "loads": _no_loads,
    "pv": _no_pv,
    "idle": _no_idle,
}
"""Name → what it makes of a kernel."""


# rewriting ----------------------------------------------------------------------------------------------------------------


def _has(kernel: KernelPlan, kind: type[st.Step]) -> bool:
    return any(isinstance(s, kind) for r in kernel.roles for s in st.walk(r.body))


def _rewritten(kernel: KernelPlan, rule: Rule) -> KernelPlan:
    """All roles under a rule, with the registers that are still used and barrier counts as the steps that are left make them."""
    roles = tuple(replace(r, body=st.rewritten(r.body, rule)) for r in kernel.roles)
    if roles == kernel.roles:
        return kernel
    roles = tuple(replace(r, frags=tuple(f for f in r.frags if f.name in _frags(r))) for r in roles)
    return replace(kernel, roles=roles, mbars=barriers.derive(kernel.mbars, roles, kernel.smem))


def _frags(role: st.Role) -> set[str]:
    return {f for s in st.walk(role.body) for side in frag_uses(s) for f in side}


def _renumbered(kernel: KernelPlan) -> KernelPlan:
    return replace(kernel, roles=tuple(replace(r, body=st.number(r.body, r.name)) for r in kernel.roles))
