"""Roles and steps as C text: who runs which branch, a role's declarations, and its steps line by line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..plan import steps as st
from ..plan.kernel import KernelPlan
from ..plan.matrix import wgmma_operand
from .templates import Helpers, View, line
from .views import Scope, view

WARPGROUP = 128  # threads
SWIZZLE_MODE = {128: 1, 64: 2}  # of a matrix descriptor


def branches(kernel: KernelPlan, helpers: Helpers) -> list[View]:
    """One branch for each group of warpgroups that run the same role, or whose warps share out one warpgroup."""
    groups = _groups(kernel)
    out = []
    for i, (first, roles) in enumerate(groups):
        only, last = len(groups) == 1, i == len(groups) - 1
        test = f"if (threadIdx.x / {WARPGROUP} == {first // WARPGROUP}) {{"
        body = "".join(_role(kernel, role, start, len(roles) > 1, helpers) for role, start in roles)
        out.append(
            {
                "open": "{" if only else test if i == 0 else "} else {" if last else f"}} else {test}",
                "setmaxnreg": _setmaxnreg(kernel, roles[0][0], helpers),
                "body": textwrap.indent(body, "  ", not_directive),
            }
        )
    return out


def _groups(kernel: KernelPlan) -> list[tuple[int, list[tuple[st.Role, int]]]]:
    """(first thread, [(role, its first thread)]): roles smaller than a warpgroup share one."""
    out: list[tuple[int, list[tuple[st.Role, int]]]] = []
    at = 0
    for role in kernel.roles:
        if at % WARPGROUP == 0 or role.registers is None:
            out.append((at, []))
        out[-1][1].append((role, at))
        at += role.threads
    return out


def _setmaxnreg(kernel: KernelPlan, role: st.Role, helpers: Helpers) -> str:
    """The statement that moves registers between warpgroups, or nothing. All warps of a warpgroup execute it."""
    if role.registers is None:
        return ""
    launched = 65536 // kernel.threads // 8 * 8
    direction = "dec" if role.registers < launched else "inc"
    helpers.need(f"ptx/setmaxnreg_{direction}")
    return f"setmaxnreg_{direction}<{role.registers}>()"


def _role(kernel: KernelPlan, role: st.Role, first: int, shares: bool, helpers: Helpers) -> str:
    scope = Scope(kernel, role, helpers)
    body = _preamble(kernel, role, first, helpers) + _body(st.without_unused(role.body), scope)
    if role.elect:
        body = f"if (threadIdx.x == {first}) {{\n{textwrap.indent(body, '  ', not_directive)}}}\n"
    elif shares:
        body = f"if (threadIdx.x >= {first}) {{\n{textwrap.indent(body, '  ', not_directive)}}}\n"
    return f"// {role.name}: {_who(role, first)}\n{body}"


def _who(role: st.Role, first: int) -> str:
    size, unit = (WARPGROUP, "warpgroup") if role.warps == 4 else (32, "warp")
    start, count = first // size, role.threads // size
    return f"{unit} {start}" if count == 1 else f"{unit}s {start} to {start + count - 1}"


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
        out.append(
            f"const u64 desc_{name} = wgmma_descriptor(smem_{name}{row}, {d.leading}, {d.stride}, {SWIZZLE_MODE[d.swizzle]});"
        )
    hints = sorted({s.hint for s in steps if isinstance(s, st.TmaLoad) and s.keeps_hint})
    out += [f"const u64 {h} = l2_{h}();" for h in hints]
    out += [f"Cursor<{c.stages}> {c.name}{{0, {c.start_phase}}};" for c in role.cursors]
    out += _declare(role.frags)
    return "".join(x + "\n" for x in out)


def _declare(frags: tuple[st.Frag, ...]) -> list[str]:
    """Register tiles, those of a type in one declaration."""
    kinds: dict[str, list[str]] = {}
    for f in frags:
        size = f"[{f.registers}]" if f.unit_rows == 64 else f"[{f.blocks}][{f.registers // f.blocks}]"
        kinds.setdefault({"fp32": "float", "i32": "int"}.get(f.dtype, "u32"), []).append(f"{f.name}{size}")
    return [f"{kind} {', '.join(names)};" for kind, names in kinds.items()]


def _body(body: st.Body, scope: Scope) -> str:
    return "".join(_step(s, scope) for s in body)


def _step(step: st.Step, scope: Scope) -> str:
    inner = {field: textwrap.indent(_body(b, scope), "  ", not_directive) for field, b in st.bodies(step)}
    template, values = view(step, scope)
    title = f"[{step.id}]" + (f" {step.why}" if step.why else "")
    text = line(template, {**values, **inner, "title": title})
    if step.why and not inner:
        text = _comment(text, step.why)
    return text


def opening_lines(kernel: KernelPlan) -> Iterator[tuple[st.Step, str]]:
    """Every printed step of a kernel in the order of the code, with the first line that it prints, stripped and without its comment."""
    for role in kernel.roles:
        scope = Scope(kernel, role, Helpers())
        for step in st.walk(st.without_unused(role.body)):
            code = (x.split("//", 1)[0].strip() for x in _step(step, scope).splitlines())
            yield step, next((x for x in code if x), "")


def _comment(text: str, why: str) -> str:
    """The reason at the end of a one-line step, above a longer one."""
    lines = text.splitlines()
    if len(lines) == 1 and len(lines[0]) + len(why) < 110:
        return f"{lines[0]}  // {why}\n"
    return f"// {why}\n{text}"


def not_directive(text: str) -> bool:
    return not text.startswith("#") and bool(text.strip())
