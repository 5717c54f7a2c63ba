"""`emit()`: from a Plan to its CUDA source. It prints the program; it decides nothing."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.kernel import KernelPlan, Plan
from . import debug, header, trace
from .roles import branches, not_directive
from .templates import Helpers, View, environment


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
    elif plan.trace:
        kernels = [_kernel(trace.instrument(k), helpers) for k in plan.kernels]
    else:
        kernels = [_kernel(k, helpers) for k in plan.kernels]
    text = _render(
        "kernels/source",
        {
            "header": header.lines(plan, name or plan.id),
            "scale_log2": _float(plan.attention.scale_log2),
            "uses_maps": any(k.maps for k in plan.kernels),
            "uses_divisors": any(p.ctype == "divisor" for k in plan.kernels for p in k.params),
            "uses_cursors": any(r.cursors for k in plan.kernels for r in k.roles),
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

C_TYPES = {"fp32": "float", "i32": "int", "bf16": "u16", "fp16": "u16", "e4m3": "unsigned char", "int8": "unsigned char"}
SCALAR_TYPES = {"i32": "int", "i64": "i64", "f32": "float", "divisor": "Divisor"}


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
    roles = _render("kernels/roles", {"branches": branches(kernel, helpers)})
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
            "roles": textwrap.indent(roles, "  ", not_directive),
        },
    )


def _addresses(kernel: KernelPlan) -> list[str]:
    tiles = ", ".join(f"smem_{t.name} = smem + {t.offset}" if t.offset else f"smem_{t.name} = smem" for t in kernel.smem)
    bars = ", ".join(f"{b.name} = smem + {b.offset}" for b in kernel.mbars)
    return [f"const u32 {group};" for group in (tiles, bars) if group]
