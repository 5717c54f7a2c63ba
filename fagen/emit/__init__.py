"""`emit()`: from a Plan to its CUDA source. It prints the program; it decides nothing."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import steps as st
from ..plan.kernel import KernelPlan, Plan
from ..plan.matrix import wgmma_operand
from . import debug, header
from .templates import Helpers, View, environment, line
from .views import Scope, view


@dataclass(frozen=True)
class Source:
    """A self-contained CUDA file with all kernels of a plan."""

    text: str
    arch: str
    kernels: tuple[str, ...]
    """Entry points (extern "C"), in launch order."""
    name: str

    @property
    def code_sha256(self) -> str:
        return code_sha256(self.text)


def code_sha256(text: str) -> str:
    """Hash of the code alone: without `//` comments and blank lines, each line stripped. What GPU evidence belongs to."""
    lines = (ln.split("//", 1)[0].strip() for ln in text.splitlines())
    return hashlib.sha256("\n".join(ln for ln in lines if ln).encode()).hexdigest()


def emit(plan: Plan, name: str | None = None) -> Source:
    """The CUDA source of a plan. `name` stands in the header only; default: the plan's id."""
    helpers = Helpers()
    if plan.debug:
        kernels = [_kernel(debug.instrument(k, i), helpers, debug.prologue(k, helpers)) for i, k in enumerate(plan.kernels)]
    else:
        kernels = [_kernel(k, helpers) for k in plan.kernels]
    text = _render(
        "kernels/source",
        {
            "header": header.lines(plan, name or plan.id),
            "scale_log2": _float(plan.attention.scale_log2),
            "uses_maps": any(k.maps for k in plan.kernels),
            "kernels": [{"params_type": _params_type(k), "params": _params(k), "text": t} for k, t in zip(plan.kernels, kernels)],
            "helpers": helpers.texts(),
        },
    )
    text = "\n".join(ln.rstrip() for ln in text.splitlines()) + "\n"
    return Source(text, plan.schedule.arch, tuple(k.name for k in plan.kernels), name or plan.id)


def _render(template: str, values: View) -> str:
    return environment().get_template(f"{template}.jinja").render(values)


def _float(x: float) -> str:
    text = f"{x:.9g}"
    return (text if any(c in text for c in ".e") else text + ".0") + "f"


# a kernel ---------------------------------------------------------------------------------------------------------------

C_TYPES = {"fp32": "float", "i32": "int", "bf16": "u16", "fp16": "u16", "e4m3": "unsigned char"}
SCALAR_TYPES = {"i32": "int", "i64": "i64"}


def _params_type(kernel: KernelPlan) -> str:
    return "Params" if kernel.name == "attention" else f"{kernel.name.title().replace('_', '')}Params"


def _params(kernel: KernelPlan) -> list[str]:
    """Members of the Params struct: pointers, then 64-bit, then 32-bit scalars."""
    out = []
    for name in kernel.pointers:
        g = kernel.gmem_of(name)
        out.append(f"{'const ' if g.use == 'in' else ''}{C_TYPES[g.dtype]}* {name}")
    return out + [f"{SCALAR_TYPES[p.ctype]} {p.name}" for p in kernel.params]


def _kernel(kernel: KernelPlan, helpers: Helpers, prologue: Sequence[str] = ()) -> str:
    helpers.need("ptx/smem_address")
    if kernel.mbars:
        for name in ("mbarrier_init", "fence_mbarrier_init", "fence_proxy_async"):
            helpers.need(f"ptx/{name}")
    maps = [f"const __grid_constant__ TensorMap map_{m.tensor}" for m in kernel.maps]
    roles = _render("kernels/roles", {"roles": [_role(kernel, i, helpers) for i in range(len(kernel.roles))]})
    return _render(
        "kernels/kernel",
        {
            "name": kernel.name,
            "threads": kernel.threads,
            "min_ctas": kernel.min_ctas,
            "arguments": ", ".join([*maps, f"const __grid_constant__ {_params_type(kernel)} p"]),
            "prologue": [*_addresses(kernel), *prologue],
            "uses_n_ctas": "n_ctas" in roles,
            "barriers": [{"name": b.name, "stages": b.stages, "arrivals": b.arrivals} for b in kernel.mbars],
            "roles": textwrap.indent(roles, "  ", _not_directive),
        },
    )


def _addresses(kernel: KernelPlan) -> list[str]:
    tiles = ", ".join(f"smem_{t.name} = smem + {t.offset}" if t.offset else f"smem_{t.name} = smem" for t in kernel.smem)
    bars = ", ".join(f"{b.name} = smem + {b.offset}" for b in kernel.mbars)
    return [f"const u32 {group};" for group in (tiles, bars) if group]


# a role -----------------------------------------------------------------------------------------------------------------


def _role(kernel: KernelPlan, index: int, helpers: Helpers) -> View:
    role = kernel.roles[index]
    first = sum(r.threads for r in kernel.roles[:index])
    last = index == len(kernel.roles) - 1
    groups = (
        f"warpgroup {first // 128}" if role.threads == 128 else f"warpgroups {first // 128} to {(first + role.threads) // 128 - 1}"
    )
    who = f"warps 0 to {role.count - 1}" if role.warps == 1 else groups
    branch = f"if (threadIdx.x / 128 == {first // 128})" if index == 0 else "} else"
    setmaxnreg = ""
    if role.registers is not None:
        launched = 65536 // kernel.threads // 8 * 8
        direction = "dec" if role.registers < launched else "inc"
        helpers.need(f"ptx/setmaxnreg_{direction}")
        setmaxnreg = f"setmaxnreg_{direction}<{role.registers}>()"
    scope = Scope(kernel, role, helpers)
    body = _preamble(kernel, role, first, helpers) + _body(role.body, scope)
    if role.elect:
        body = f"if (threadIdx.x == {first}) {{\n{textwrap.indent(body, '  ', _not_directive)}}}\n"
    return {
        "open": "{"
        if len(kernel.roles) == 1
        else f"{branch} {{"
        if not (index and not last)
        else f"}} else if (threadIdx.x / 128 == {first // 128}) {{",
        "title": f"{role.name}: {who}",
        "setmaxnreg": setmaxnreg,
        "body": textwrap.indent(body, "  ", _not_directive),
    }


def _preamble(kernel: KernelPlan, role: st.Role, first: int, helpers: Helpers) -> str:
    """Declarations of a role: who the thread is, descriptors, cursors, register tiles, cache policies."""
    out = []
    steps = list(st.walk(role.body))
    if not role.elect:
        index = f"threadIdx.x / {role.warps * 32}" + (f" - {first // (role.warps * 32)}" if first else "")
        out.append(
            f"const int w = __shfl_sync(~0u, {index}, 0), lane = threadIdx.x % 32{', warp = threadIdx.x / 32 % 4' if role.warps == 4 else ''};"
        )
    operands: dict[str, tuple[st.Slot, bool]] = {}
    for s in steps:
        if isinstance(s, st.Mma) and s.unit == "wgmma":
            operands[s.b.smem] = (s.b, s.trans_b)
            if isinstance(s.a, st.Slot):
                operands[s.a.smem] = (s.a, False)
    scope = Scope(kernel, role, helpers)
    for name, (slot, trans) in operands.items():
        d = wgmma_operand(kernel.smem_of(name), trans)
        row = f" + {scope.c(slot.row * d.row_bytes)}" if slot.row is not None else ""
        out.append(f"const u64 desc_{name} = wgmma_descriptor(smem_{name}{row}, {d.leading}, {d.stride});")
    hints = sorted({s.hint for s in steps if isinstance(s, st.TmaLoad)})
    out += [f"const u64 {h} = l2_{h}();" for h in hints]
    out += [f"Cursor<{c.stages}> {c.name}{{0, {c.start_phase}}};" for c in role.cursors]
    out += [_declare(f) for f in role.frags]
    return "".join(x + "\n" for x in out)


def _declare(f: st.Frag) -> str:
    kind = {"fp32": "float", "i32": "int"}.get(f.dtype, "u32")
    size = f"[{f.registers}]" if f.unit_rows == 64 else f"[{f.blocks}][{f.registers // f.blocks}]"
    return f"{kind} {f.name}{size};"


def _body(body: st.Body, scope: Scope) -> str:
    return "".join(_step(s, scope) for s in body)


def _step(step: st.Step, scope: Scope) -> str:
    inner = {field: textwrap.indent(_body(b, scope), "  ", _not_directive) for field, b in st.bodies(step)}
    template, values = view(step, scope)
    title = f"[{step.id}]" + (f" {step.why}" if step.why else "")
    text = line(template, {**values, **inner, "title": title})
    if step.why and not inner:
        text = _comment(text, step.why)
    return text


def _comment(text: str, why: str) -> str:
    """The reason at the end of a one-line step, above a longer one."""
    lines = text.splitlines()
    if len(lines) == 1 and len(lines[0]) + len(why) < 110:
        return f"{lines[0]}  // {why}\n"
    return f"// {why}\n{text}"


def _not_directive(text: str) -> bool:
    return not text.startswith("#") and bool(text.strip())
