"""A program as text: the loop nest that stands at the head of a generated file and that `explain` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .expr import Expr
from .kernel import KernelPlan
from .steps import (
    AddParts,
    Arrive,
    Body,
    Break,
    Calm,
    Copy,
    CpAsync,
    CpWait,
    Elected,
    Forever,
    If,
    IntToFloat,
    LoadAcc,
    LoadRow,
    LoadScale,
    Loop,
    MergeStats,
    Mma,
    MmaWait,
    NArrive,
    OnlineSoftmax,
    Opaque,
    Promote,
    RowPass,
    Slot,
    Step,
    StoreAcc,
    StoreFrag,
    StoreOut,
    StoreRow,
    StoreScores,
    StoreStats,
    Sync,
    TmaLoad,
    Vote,
    Wait,
    bodies,
    step_fields,
)

SILENT = ("Let", "Var", "Set", "Advance", "Limits", "Fill", "Hold")  # bookkeeping that would hide the shape of the loop


def loop_nest(kernel: KernelPlan) -> list[str]:
    """One line a step, indented by loop; bookkeeping left out."""
    lines = []
    for role in kernel.roles:
        threads = "one thread" if role.elect else f"{role.count} × {role.warps * 32} threads"
        registers = f", {role.registers} registers" if role.registers else ""
        lines.append(f"{role.name} ({threads}{registers})")
        lines += list(_lines(role.body, 1))
    return lines


def _lines(body: Body, depth: int) -> Iterator[str]:
    pad = "  " * depth
    for step in body:
        if step.kind in SILENT:
            continue
        named = f"  [{step.id}]" if isinstance(step, (Loop, Forever)) else ""
        yield pad + heading(step) + named
        for name, inner in bodies(step):
            if name == "orelse" and any(s.kind not in SILENT for s in inner):
                yield pad + ("in the others" if isinstance(step, Vote) else "else")
            yield from _lines(inner, depth + 1)


def heading(step: Step) -> str:
    """A step's own line: what a loop or a branch says of itself, or `describe`."""
    if isinstance(step, Loop):
        down = not isinstance(step.step, Expr) and step.step < 0
        return f"for {step.var} = {step.first} {'down to' if down else 'to'} {step.last}"
    if isinstance(step, Forever):
        return "until there is no tile left"
    if isinstance(step, If):
        return f"if {step.cond}"
    if isinstance(step, Vote):
        return "in warps where a value does not fit"
    if isinstance(step, Elected):
        return "one thread"
    return describe(step)


def describe(step: Step) -> str:
    """A step in a few words, with the tiles and barriers it touches."""
    if isinstance(step, TmaLoad):
        return f"TMA {step.dst.smem} ← {step.src}[{step.seq} …] → {step.full}"
    if isinstance(step, Copy):
        column = f", {step.col} …" if step.col is not None else ""
        return f"copy {step.dst.smem} ← {step.src}[{step.seq} …{column}] through registers"
    if isinstance(step, CpAsync):
        return f"cp.async {step.dst.smem} ← {step.src}[{step.seq} …]"
    if isinstance(step, CpWait):
        return f"wait for cp.async groups, {step.pending} may stay open"
    if isinstance(step, Mma):
        a = step.a if isinstance(step.a, str) else step.a.smem
        sign = "+=" if step.accumulate else "="
        columns = f"[:, {step.b.col} …]" if step.b.col or "part" in step.d else ""
        return f"{step.unit} {step.d} {sign} {a} · {step.b.smem}{'' if step.trans_b else 'ᵀ'}{columns}"
    if isinstance(step, MmaWait):
        return f"wait for {' and '.join(step.ready)}" + (f", {step.pending} product still in flight" if step.pending else "")
    if isinstance(step, Wait):
        return f"wait {step.bar}"
    if isinstance(step, Arrive):
        return f"arrive {step.bar}"
    if isinstance(step, Sync):
        return f"sync {step.bar}[{step.index}]"
    if isinstance(step, NArrive):
        return f"arrive {step.bar}[{step.index}]"
    if isinstance(step, (StoreOut, StoreRow, StoreScores, StoreAcc)):
        return f"store {step.dst} ← {step.src}"
    if isinstance(step, (LoadAcc, LoadRow)):
        return f"load {step.dst} ← {step.src}" + (", shared out" if isinstance(step, LoadRow) and step.share else "")
    if isinstance(step, RowPass):
        what = {"max": step.m, "sum": step.l, "max_sum": f"{step.m} and {step.l}", "exponentials": step.dst}[step.op]
        return f"row pass: {what} ← {step.src}[{step.row}]"
    if isinstance(step, Opaque):
        return f"in place of a product: {', '.join((*step.reads, *step.changes))}"
    if isinstance(step, StoreStats):
        return f"share {step.m} and {step.l} with the other warps"
    if isinstance(step, StoreFrag):
        return f"share {step.src} with the other warps" + (f", columns {step.dst.col} …" if step.dst.col else "")
    if isinstance(step, MergeStats):
        return f"merge {step.m} and {step.l} with all warps'"
    if isinstance(step, AddParts):
        return f"{step.dst} += all warps' parts"
    if isinstance(step, Break):
        return f"stop if {step.cond}"
    if isinstance(step, LoadScale):
        return f"load scale {step.var}" + (f", block {step.block}" if step.block is not None else "")
    if isinstance(step, IntToFloat):
        return f"{step.dst} = {step.src} as float32"
    if isinstance(step, OnlineSoftmax) and step.first:
        lift = f", its reference up to {step.lift} powers of two above the maximum" if step.lift else ""
        return f"softmax of a block by itself {step.s}, {step.m}, {step.l}{lift}"
    if isinstance(step, Calm):
        return f"{step.var} = {calm_if(step)}"
    if isinstance(step, Promote):
        return f"{step.total} += {step.o} in float32"
    words = [v for v in step_fields(step).values() if isinstance(v, str)]
    words += [v.smem for v in step_fields(step).values() if isinstance(v, Slot)]
    name = "".join((" " + c.lower()) if c.isupper() and i else c.lower() for i, c in enumerate(step.kind))
    return f"{name} {', '.join(words)}".rstrip()


def calm_if(step: Calm) -> str:
    """What makes it true, in a few words."""
    if step.alpha is not None:
        return f"no row's reference grew by more than {-math.log2(step.least):g} powers of two"
    return f"every row sees {step.seen} keys of the first block" if step.limits is not None else "true"
