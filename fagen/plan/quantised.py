"""The kernels of a plan that quantises and attends, or only quantises: interfaces and workspaces around roles/quantise.py.

The attention kernel is the one that 8-bit tensors get; here its tensors become workspaces (batch, heads, seq, head_dim), in which a head's
tiles are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from . import memory
from .expr import Expr, as_expr, ceildiv, maximum, sym
from .kernel import KernelPlan, Param, Plan, Problem, TensorMapRecipe, Workspace
from .ladder import DIMS, Kernels, Space
from .precision import granularity, names
from .quantise_steps import LoadRows, StageRows
from .roles.quantise import SHIFTED, Quantise
from .steps import DTYPE_BYTES, Body, Gmem, Role, Smem, TmaLoad, bodies, number, walk
from .tiles import BATCH, HKV, HQ, SK, SQ, Tiles

SHIFTS = "lse_shifts"
"""(batch, heads, seqlen_q): what smoothing takes off the scores of each row, in natural units."""


def quantise_and_attend(tiles: Tiles, attention: KernelPlan) -> Kernels:
    """`attention`: the kernel for 8-bit tensors; it comes after those that quantise."""
    plan = Quantised(tiles)
    last = (plan.lse_shift(),) if tiles.schedule.smooth_k else ()
    return (*plan.kernels(), plan.reading(attention), *last), tuple(s.workspace for s in plan.spaces())


def quantise_only(tiles: Tiles) -> tuple[tuple[KernelPlan, ...], tuple[Workspace, ...], tuple[Workspace, ...]]:
    """The kernels that quantise, their workspaces, and what they leave: tensors (batch, seq, heads, head_dim), descales and shifts."""
    plan = Quantised(tiles)
    outputs = plan.outputs()
    kernels = tuple(
        replace(k, gmem=tuple(replace(g, use="out") if g.name in outputs else g for g in k.gmem), params=plan.contiguous(k.params))
        for k in plan.kernels()
    )
    spaces = [s.workspace for s in plan.spaces()]
    return kernels, tuple(w for w in spaces if w.name not in outputs), tuple(w for w in spaces if w.name in outputs)


@dataclass(frozen=True)
class Quantised:
    """`tiles` are those of the whole plan: 16-bit attention, schedule with `precision`."""

    tiles: Tiles

    @cached_property
    def build(self) -> Quantise:
        return Quantise(self.tiles)

    @property
    def names(self) -> dict[str, str]:
        """Tensor → the workspace (or output) that holds it in 8 bits."""
        return self.build.names

    @property
    def descales(self) -> tuple[str, ...]:
        return tuple(f"{t}_descale" for t in self.names)

    # memory -------------------------------------------------------------------------------------------------------------

    def spaces(self) -> tuple[Space, ...]:
        """Everything the kernels leave for one another."""
        d, build = as_expr(self.tiles.attention.head_dim), self.build
        out = [Space(n, build.type_of(t), SQ if t == "q" else SK, d, heads=HQ if t == "q" else HKV) for t, n in self.names.items()]
        out += [self._of_scales(f"{t}_descale", t) for t in self.names]
        if build.by != "block":
            out += [self._of_scales(f"{t}_inverse", t) for t in self.names]
            for t in self.names:
                parts = as_expr(1) if t == "k" and build.smooth else build.parts(t, True)
                out.append(Space(f"{t}_maxima", "fp32", parts, as_expr(1), heads=HQ if t == "q" else HKV))
        if build.smooth:
            stats = ("k_sums",) if build.by == "block" else ("k_sums", "k_high", "k_fall")
            out += [Space(n, "fp32", build.parts("k", True), d, heads=HKV) for n in stats]
            out.append(Space("k_mean", "fp32", as_expr(1), d, heads=HKV))
            out.append(Space(SHIFTS, "fp32", SQ, as_expr(1)))
        return tuple(out)

    def _of_scales(self, name: str, tensor: str) -> Space:
        one = as_expr(1)
        if self.build.by == "tensor":
            return Space(name, "fp32", one, one, batch=one, heads=one)
        if self.build.by == "head":
            return Space(name, "fp32", one, one, heads=HKV)
        return Space(name, "fp32", self.build.parts(tensor, False), one, heads=HQ if tensor == "q" else HKV)

    def outputs(self) -> tuple[str, ...]:
        """Of a plan that only quantises."""
        return (*self.names.values(), *self.descales, *((SHIFTS,) if self.build.smooth else ()))

    def contiguous(self, params: tuple[Param, ...]) -> tuple[Param, ...]:
        """Strides of (batch, seq, heads, head_dim) for the quantised tensors."""
        d = self.tiles.attention.head_dim
        values: dict[str, Expr] = {}
        for t, name in self.names.items():
            rows, heads = (SQ, HQ) if t == "q" else (SK, HKV)
            values |= {f"{name}_sb": rows * heads * d, f"{name}_ss": heads * d, f"{name}_sh": as_expr(d)}
        return tuple(replace(p, value=values.get(p.name, p.value)) for p in params)

    # the kernels --------------------------------------------------------------------------------------------------------

    def kernels(self) -> tuple[KernelPlan, ...]:
        """Those that quantise, in order."""
        build, pairs = self.build, BATCH * HKV
        smooth, block = build.smooth, build.by == "block"
        columns = ("k_sums",) if block else ("k_sums", "k_high", "k_fall")
        out = []
        if block and smooth:
            out.append(self._kernel("measure", build.measure(), ("k",), columns, sym("k_ctas"), streams=True))
        elif not block:
            kept = ((columns if smooth and t == "k" else (f"{t}_maxima",)) for t in self.names)
            out.append(self._by_tensor("measure", build.measure(), tuple(n for of in kept for n in of), streams=True))
        if smooth:
            largest = () if block else ("k_maxima",)
            out.append(self._kernel("mean", build.mean(), (), (*columns, "k_mean", *largest), pairs, streams=True))
        if not block:
            names = (*(f"{t}_maxima" for t in self.names), *(f"{t}_inverse" for t in self.names), *self.descales)
            each, count = as_expr(1) if build.by == "tensor" else pairs, len(self.names)
            scales = self._kernel("scales", build.scales(), (), names, each * count, streams=True)
            out.append(replace(scales, kinds=(each, each * 2)[: count - 1]))
        scales_of = self.descales if block else tuple(f"{t}_inverse" for t in self.names)
        means = ("k_mean", SHIFTS) if smooth else ()
        out.append(self._by_tensor("quantise", build.quantise(), (*self.names.values(), *scales_of, *means), streams=not block))
        return tuple(out)

    def _by_tensor(self, name: str, role: Role, spaces: tuple[str, ...], streams: bool) -> KernelPlan:
        q, k, others = sym("q_ctas"), sym("k_ctas"), len(self.names) - 1
        kernel = self._kernel(name, role, tuple(self.names), spaces, q + k * others, streams=streams)
        return replace(kernel, kinds=(q, q + k)[:others])

    def _kernel(
        self, name: str, role: Role, tensors: tuple[str, ...], spaces: tuple[str, ...], grid: Expr, streams: bool
    ) -> KernelPlan:
        """A kernel of one role over tensors and workspaces, all passed as pointers with their strides."""
        half = self.tiles.attention.dtype
        known = {s.name: s for s in self.spaces()}
        used = [known[n] for n in spaces]
        placed, _, total = memory.memory_map(self._smem(role), ())
        gmem = (*(Gmem(t, half, DIMS, "in") for t in tensors), *(s.gmem for s in used))
        strides = tuple(Param(f"{t}_{x}", "i64", sym(f"{t}_{x}")) for t in tensors for x in ("sb", "ss", "sh"))
        return KernelPlan(
            name=name,
            threads=role.threads,
            min_ctas=2 if self.build.smooth else 3,
            gmem=gmem,
            pointers=tuple(g.name for g in gmem),
            params=(*strides, *(p for s in used for p in s.params()), *self._sizes(streams)),
            maps=(),
            smem=placed,
            mbars=(),
            nbars=(),
            smem_bytes=total,
            roles=(replace(role, body=number(role.body, role.name)),),
            grid=grid,
        )

    def _sizes(self, streams: bool) -> tuple[Param, ...]:
        q_parts, k_parts = (self.build.parts(t, streams) for t in ("q", "k"))
        return (
            Param("sq", "i32", SQ),
            Param("sk", "i32", SK),
            Param("hq", "i32", HQ),
            Param("hkv", "i32", HKV),
            Param("group", "i32", HQ // maximum(HKV, 1)),
            Param("pairs", "i32", BATCH * HKV),
            Param("q_parts", "i32", q_parts),
            Param("k_parts", "i32", k_parts),
            Param("q_ctas", "i32", BATCH * HQ * sym("q_parts")),
            Param("k_ctas", "i32", BATCH * HKV * sym("k_parts")),
        )

    def _smem(self, role: Role) -> tuple[Smem, ...]:
        """Where warps meet: a row each."""
        frags, count = {f.name for f in role.frags}, role.count
        d = self.tiles.attention.head_dim
        rings = [Smem("maxima", count, 1, "fp32", 1, swizzle="none")] if "m" in frags else []
        if any(isinstance(s, StageRows) for s in walk(role.body)):
            rings.append(Smem("rows", count * self.build.staged_rows, d, self.tiles.attention.dtype, 1, swizzle="none"))
        rings += [Smem(f"all_{n}", count, d, "fp32", 1, swizzle="none") for n in ("sum", "high", "fall") if n in frags]
        return tuple(rings)

    def lse_shift(self) -> KernelPlan:
        """lse is contiguous, as the shifts are."""
        role = self.build.lse_shift()
        gmem = (Gmem("lse", "fp32", ("batch", "heads", "seq"), "out"), Gmem(SHIFTS, "fp32", ("batch", "heads", "seq"), "workspace"))
        return KernelPlan(
            name="lse_shift",
            threads=role.threads,
            min_ctas=1,
            gmem=gmem,
            pointers=("lse", SHIFTS),
            params=(Param("elements", "i32", BATCH * HQ * SQ),),
            maps=(),
            smem=(),
            mbars=(),
            nbars=(),
            smem_bytes=0,
            roles=(replace(role, body=number(role.body, role.name)),),
            grid=ceildiv(BATCH * HQ * SQ, SHIFTED),
        )

    # the attention kernel -----------------------------------------------------------------------------------------------

    def reading(self, kernel: KernelPlan) -> KernelPlan:
        """The kernel for 8-bit tensors, its inputs taken from the workspaces; a v that stays as it is, from the caller's tensor."""
        strides = {p.name: p for s in self.spaces() for p in s.params()}
        inputs = {**self.names, **{n: n for n in self.descales}}
        return replace(
            kernel,
            gmem=tuple(
                replace(g, name=inputs[g.name], use="workspace", dims=("batch", "heads", "rows", "cols")) if g.name in inputs else g
                for g in kernel.gmem
            ),
            params=tuple(strides.get(p.name, p) for p in kernel.params),
            maps=tuple(self._map(m, strides) for m in kernel.maps),
            roles=tuple(replace(r, body=self._renamed(r.body)) for r in kernel.roles),
        )

    def _map(self, recipe: TensorMapRecipe, strides: Mapping[str, Param]) -> TensorMapRecipe:
        if recipe.tensor not in self.names:  # the caller's own v
            return recipe
        name = self.names[recipe.tensor]
        least = self.tiles.attention.head_dim  # a tensor without rows is never loaded, but its map must encode
        values = {f"{recipe.tensor}_{x}": maximum(strides[f"{name}_{x}"].value, least) for x in ("sb", "ss", "sh")}
        return replace(recipe, tensor=name, strides=tuple(s.substitute(values) for s in recipe.strides))

    def _renamed(self, body: Body) -> Body:
        """The same steps, with loads from the workspaces."""
        out = []
        for step in body:
            if isinstance(step, TmaLoad):
                step = replace(step, src=self.names.get(step.src, step.src))
            out.append(replace(step, **{f: self._renamed(b) for f, b in bodies(step)}))  # type: ignore[arg-type]
        return tuple(out)


def idle(plan: Plan, problem: Problem) -> bool:
    """Whether a plan that only quantises has nothing to do, not even scales of tensors without rows."""
    rows = problem.sq + problem.sk
    return 0 in (problem.batch, problem.hq) or rows == 0 and granularity(plan.schedule) == "block"


def moved_bytes(plan: Plan, problem: Problem) -> int:
    """What the kernels of a plan that quantise move of tensors: q, k and v (if quantised) as often as they read them, the 8-bit copies once."""
    p, d = problem, plan.attention.head_dim
    elements = {"q": p.batch * p.sq * p.hq * d, "k": p.batch * p.sk * p.hkv * d, "v": p.batch * p.sk * p.hkv * d}
    total = sum(elements[t] for t in names(plan.attention, plan.schedule))  # of one byte
    for kernel in plan.part("quantise").kernels:
        read = {s.src for r in kernel.roles for s in walk(r.body) if isinstance(s, (LoadRows, StageRows))}
        total += sum(elements[t] for t in read) * DTYPE_BYTES[plan.attention.dtype]
    return total
