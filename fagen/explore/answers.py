"""Four questions about a kernel, answered from its program: how tiles are cut and where they stay, how blocks cover the problem, how
warps share the work and what crosses between them, what overlaps what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..plan.expr import Expr
from ..plan.kernel import KernelPlan, Plan
from ..plan.quantise_steps import MEMORY
from ..plan.steps import Body, ClaimTile, Forever, Frag, IntToFloat, Let, Loop, Mma, Role, Slot, Smem, Step, Var, bodies, walk
from .contexts import closure
from .roofline import KernelCost

TILES = "How tiles are cut, and what stays in registers and shared memory"
COVER = "How blocks cover batch, heads and sequence"
WARPS = "How warps are divided, and what crosses between them"
OVERLAP = "What overlaps what"

VARIABLES = {"j": "key block j", "m": "query tile m"}


def answers(plan: Plan, costs: tuple[KernelCost, ...] = ()) -> dict[str, list[str]]:
    """Question → sentences, kernel by kernel (begun with the kernel's name where there are several). With `costs`, of one problem on one
    device, the numbers of that problem too."""
    out: dict[str, list[str]] = {TILES: [], COVER: [], WARPS: [], OVERLAP: []}
    by_name = {c.name: c for c in costs}
    for kernel in plan.kernels:
        begin = f"{kernel.name}: " if len(plan.kernels) > 1 else ""
        found = {
            TILES: list(_tiles(kernel)),
            COVER: list(_cover(kernel, by_name.get(kernel.name))),
            WARPS: list(_warps(kernel)),
            OVERLAP: list(_overlap(kernel)),
        }
        for question, sentences in found.items():
            out[question] += [begin + s for s in sentences]
    return out


# tiles --------------------------------------------------------------------------------------------------------------------


def _tiles(kernel: KernelPlan) -> Iterator[str]:
    for role in kernel.roles:
        behind = {s.var: s.value.symbols() for s in walk(role.body) if isinstance(s, (Let, Var))}
        loops = list(dict.fromkeys(s.var for s in walk(role.body) if isinstance(s, Loop)))
        loaded: dict[str, tuple[str, set[str]]] = {}
        for step in walk(role.body):
            dst, src, seq, col = (getattr(step, n, None) for n in ("dst", "src", "seq", "col"))
            if isinstance(dst, Slot) and isinstance(src, str) and isinstance(seq, Expr):
                symbols = closure(seq.symbols() | (col.symbols() if isinstance(col, Expr) else frozenset()), behind)
                loaded.setdefault(dst.smem, (src, set()))[1].update(v for v in loops if v in symbols)
        for smem, (src, variables) in loaded.items():
            tile = kernel.smem_of(smem)
            each = [VARIABLES.get(v, v) for v in loops if v in variables]
            when = f"a new one for every {' and '.join(each)}" if each else "loaded once for a query tile"
            slots = f"{tile.stages} slots" if tile.stages > 1 else "1 slot"
            size = tile.stages * tile.tile_bytes / 1024
            yield f"{src} lies in shared memory as {tile.rows} × {tile.cols} {tile.dtype} ({slots}, {size:.4g} KB), {when}."
        turned = converted(role)
        held = [_held(f, turned.get(f.name)) for f in role.frags if f.registers > 2 * f.blocks]
        if held:
            owner = "warpgroup" if any("64" in f.layout for f in role.frags) else "warp"
            yield f"In registers, each {owner} of {role.name}: {', '.join(held)}."
    spaces = [g.name for g in kernel.gmem if g.use == "workspace" and len(g.dims) > 1]
    for name in spaces:
        verbs = [
            verb
            for verb, field in (("read", "src"), ("written", "dst"))
            if any(_touches(s, field, name) for r in kernel.roles for s in walk(r.body))
        ]
        yield f"{name} is in global memory: {' and '.join(verbs)} by this kernel."


def converted(role: Role) -> dict[str, str]:
    """Frag of integers → the one of float32 that it becomes, number by number: the same registers can hold both."""
    return {s.src: s.dst for s in walk(role.body) if isinstance(s, IntToFloat)}


def _held(frag: Frag, becomes: str | None) -> str:
    where = f"the registers of {becomes}, which it becomes" if becomes else f"{frag.registers} registers a thread"
    return f"{frag.name} {frag.rows} × {frag.cols} {frag.dtype} in {where}"


def _touches(step: Step, field: str, name: str) -> bool:
    """Whether a step reads ("src") or writes ("dst") the workspace."""
    if type(step) in MEMORY:
        reads, writes = MEMORY[type(step)]
        return name in (getattr(step, f) for f in (reads if field == "src" else writes))
    return getattr(step, field, None) == name and _touches_memory(step, field)


def _touches_memory(step: Step, field: str) -> bool:
    """Names of register tiles and of tensors may coincide (S): a tensor is the source of a load and the target of a store."""
    loads = ("TmaLoad", "CpAsync", "Copy", "LoadAcc", "LoadRow", "RowPass")
    stores = ("StoreOut", "StoreScores", "StoreAcc", "StoreRow", "RowPass")
    return step.kind in (loads if field == "src" else stores)


# blocks -------------------------------------------------------------------------------------------------------------------


def _cover(kernel: KernelPlan, cost: KernelCost | None) -> Iterator[str]:
    steps = [s for role in kernel.roles for s in walk(role.body)]
    lets = {s.var: s.value for s in reversed(steps) if isinstance(s, Let)}
    loops = [s for s in steps if isinstance(s, Loop)]
    grid = f"{kernel.grid} CTAs"
    if any(isinstance(s, ClaimTile) for s in steps):
        yield f"{grid}, one an SM; each claims query tiles from a counter until none is left."
    elif any(isinstance(s, Forever) for s in steps) or any(s.var == "tile" for s in loops):
        yield f"{grid}, one an SM; CTA c takes the query tiles c, c + CTAs, …"
    elif any(s.var == "m" for s in loops):
        own = (
            "all query tiles"
            if "span" not in closure(frozenset(("m1",)), {k: v.symbols() for k, v in lets.items()})
            else "a range of query tiles"
        )
        yield f"{grid}; each owns {own} of one head of one sequence, and walks them."
    elif "m" in lets:
        yield f"{grid}; each owns one query tile of one head of one sequence."
    elif any(s.kind == "LoadRows" for s in steps):
        yield f"{grid}; each owns some rows of one head of q, k or v."
    else:
        yield f"{grid}."
    shown = [f"{name} = {lets[name]}" for name in ("pair", "m", "part", "b", "h", "h_kv") if name in lets]
    if shown:
        yield f"A CTA finds its place by {', '.join(shown)}."
    blocks = next((s for s in loops if s.var == "j"), None)
    if blocks is not None:
        down = not isinstance(blocks.step, Expr) and blocks.step < 0
        outer = any(s.var == "m" for s in walk(blocks.body) if isinstance(s, Loop))
        where = "outside, query tiles inside" if outer else "from the last to the first" if down else "from the first to the last"
        yield f"Key blocks j are walked {where}" + (f"; a tile sees n = {lets['n']} of them." if "n" in lets and not outer else ".")
    if cost is not None:
        what = "tiles" if cost.claimed else "CTAs"
        spread = f"the busiest SM has {cost.busiest:.2f} × the average work"
        yield f"Here: {cost.units} {what}, {cost.ctas_per_sm} CTA{'s' * (cost.ctas_per_sm > 1)} an SM at a time (by {cost.fits_by}); {spread}."


# warps --------------------------------------------------------------------------------------------------------------------


def _warps(kernel: KernelPlan) -> Iterator[str]:
    for role in kernel.roles:
        yield _role(kernel, role)
    merges = [s for r in kernel.roles for s in walk(r.body) if s.kind in ("MergeStats", "AddParts")]
    if merges:
        what = {"MergeStats": "row maxima and sums", "AddParts": "partial products"}
        yield f"Between warps, through shared memory: {' and '.join(dict.fromkeys(what[s.kind] for s in merges))}."
    signals: dict[tuple[str, str, str], list[str]] = {}
    for bar in kernel.mbars:
        waits = [r.name for r in kernel.roles if any(s.kind == "Wait" and getattr(s, "bar", "") == bar.name for s in walk(r.body))]
        tells = [
            r.name
            for r in kernel.roles
            if any(
                bar.name in (getattr(s, "bar", ""), getattr(s, "full", "")) and s.kind in ("Arrive", "TmaLoad")
                for s in walk(r.body)
            )
        ]
        how = ", completed by TMA" if bar.tx_bytes else ""
        signals.setdefault((" and ".join(tells), " and ".join(waits), how), []).append(bar.name)
    for (teller, waiter, how), names in signals.items():
        yield f"{teller} → {waiter}{how}: {', '.join(names)}."
    for named in kernel.nbars:
        yield f"{named.name}: {named.count} named barriers keep the {named.count} warpgroups in turn."
    syncs = [s for r in kernel.roles for s in walk(r.body) if s.kind == "CtaSync"]
    if syncs:
        inside = sum(s.kind == "CtaSync" for s in _innermost(kernel.roles[0].body))
        yield f"CTA barriers: {inside} in each round of the inner loop." if inside else "CTA barriers stand outside the inner loop."


def _role(kernel: KernelPlan, role: Role) -> str:
    members = f"{role.count} × {role.warps} warps" if role.warps > 1 else f"{role.count} warp{'s' * (role.count > 1)}"
    text = f"{role.name}: {members}" + (", of which one thread works" if role.elect else "")
    products = [s for s in walk(role.body) if isinstance(s, Mma)]
    if not products:
        loads = list(dict.fromkeys(s.kind for s in walk(role.body) if s.kind in ("TmaLoad", "TransposeV", "RowPass")))
        what = {"TmaLoad": "issues the loads", "TransposeV": "transposes V", "RowPass": "takes a row at a time"}
        return f"{text}; {' and '.join(what[k] for k in loads)}." if loads else f"{text}."
    frags = {f.name: f for f in role.frags}
    d, b = frags[products[0].d], kernel.smem_of(products[0].b.smem)
    each = "each" if role.count > 1 else "it"
    wide = b.rows if not products[0].trans_b else b.cols
    if d.cols < wide:
        return f"{text}; {each} owns {d.cols} keys of a block's {wide} and sees all {d.rows} query rows."
    return f"{text}; {each} owns {d.rows} query rows and sees whole blocks."


def _innermost(body: Body) -> Body:
    """The body of the last innermost loop."""
    for step in reversed(body):
        for _, inner in reversed(bodies(step)):
            deeper = _innermost(inner)
            if deeper:
                return deeper
            if isinstance(step, Loop):
                return inner
    return ()


# overlap ------------------------------------------------------------------------------------------------------------------

SOFTMAX = ("OnlineSoftmax", "StaleSoftmax")


def _overlap(kernel: KernelPlan) -> Iterator[str]:
    moved: dict[str, list[Smem]] = {}
    for tile in kernel.smem:
        steps = (s for r in kernel.roles for s in walk(r.body))
        for kind in {s.kind for s in steps if getattr(getattr(s, "dst", None), "smem", None) == tile.name}:
            moved.setdefault(kind, []).append(tile)
    if "TmaLoad" in moved:
        ahead = ", ".join(f"{t.name} {t.stages}" for t in moved["TmaLoad"])
        yield f"TMA loads run beside everything else, as many tiles ahead as there are slots: {ahead}."
    if "CpAsync" in moved:
        yield f"cp.async copies of {_names(moved['CpAsync'])} run beside products and softmax until they are waited for."
    if "Copy" in moved:
        yield f"Copies of {_names(moved['Copy'])} go through registers: a warp waits for its own, and only other warps and CTAs overlap."
    for role in kernel.roles:
        products = [s for s in walk(role.body) if isinstance(s, Mma)]
        if not products:
            continue
        softmax = any(s.kind in SOFTMAX for s in walk(role.body))
        if products[0].unit == "mma_sync":
            what = "a warp's softmax runs" if softmax else "they run"
            yield f"{role.name}: products are synchronous; {what} beside those of other warps only."
            continue
        flying = sorted({name for s in _under_softmax(_innermost(role.body)) for name in s})
        if flying:
            yield f"{role.name}: the softmax of a block runs while {' and '.join(flying)} of the same warpgroup is in flight."
        else:
            yield f"{role.name}: no product of a warpgroup is in flight during its own softmax."
        if kernel.nbars:
            yield f"{role.name}: warpgroups take turns with their products, so that one's run under another's softmax (ping-pong)."


def _names(tiles: list[Smem]) -> str:
    *others, last = (t.name for t in tiles)
    return f"{', '.join(others)} and {last}" if others else last


def _under_softmax(body: Body) -> list[tuple[str, ...]]:
    """The products in flight at each softmax of a loop's body, which begins with none."""
    flying: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(steps: Body) -> None:
        for step in steps:
            values: dict[str, Any] = vars(step)
            if isinstance(step, Mma):
                operand = step.a if isinstance(step.a, str) else step.a.smem
                flying.append(f"{operand}·{step.b.smem}{'' if step.trans_b or operand == 'P' else 'ᵀ'}")
            elif step.kind == "MmaWait":
                del flying[: max(len(flying) - values["pending"], 0)]
            elif step.kind in SOFTMAX:
                found.append(tuple(flying))
            for name, inner in bodies(step):
                if name != "then" or step.kind != "Vote":  # both sides of a Vote wait alike
                    visit(inner)

    visit(body)
    return found
