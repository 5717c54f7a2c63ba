"""The kernels that a bench needs: of the schedules named, of the tuned table, and with something removed.

`bench` times them, `build` compiles the same ones for a machine without this compiler, `check` compares those of the tuned table with
float64, and `explain` shows the one for a size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from .. import driver, tuned
from ..attention import Attention
from ..check import first_device, parse_shape
from ..errors import InputError, LaunchError
from ..evidence import variant_id
from ..explore.ablation import ablations
from ..library import load
from ..plan.kernel import Problem
from ..plan.precision import quantised
from ..plan.rules import HEAD_DIMS
from ..schedule import Schedule
from .common import Selected, knob_of, note, parse_settings, select

if TYPE_CHECKING:
    from ..explore.bench_result import CaseSpec

TUNED = "tuned"
"""In the place of a schedule's name: for each problem the schedule that the tuned table has for it."""

grid_option = click.option(
    "--grid",
    metavar="NAME",
    help="paper: lengths 512 to 16384 of 16384 tokens, hidden size 2048, head_dim 64, 128 and 256. ladder: 16 heads; 16 sequences of 1024, "
    "2048 and 4096, 4 of 4096, one of 16384. Both full and causal, as far as the other options leave it open.",
)
shape_option = click.option(
    "--shape", "shapes", multiple=True, metavar="B,HQ,HKV,SQ,SK", help="A size, besides the grid's; repeatable."
)
ablate_option = click.option(
    "--ablate",
    is_flag=True,
    help="Beside each schedule the same without ping-pong, overlap, specialised warps, stale maximum or fused tiles, as far as it has them.",
)


@dataclass(frozen=True)
class Needed:
    """A kernel and the problems it is for. `label`: its name in tables; `about`: which schedule that is and why, "" if the name says it."""

    item: Selected
    label: str
    problems: tuple[Problem, ...]
    about: str = ""


def needed(
    schedules: Sequence[str], settings: Sequence[str], causal: bool | None, grid: str | None, shapes: Sequence[str], ablate: bool
) -> list[Needed]:
    """The kernels in the order of their rows, attention by attention. Raises as `common.select` and `problems_of`."""
    whole: list[Needed] = []
    for extra in open_settings(settings, causal, grid):
        named = iter(select([s for s in schedules if s != TUNED], (*settings, *extra)))
        for source in schedules:
            if source == TUNED:
                whole += _tuned((*settings, *extra), grid, shapes)
            else:
                item = next(named)
                whole.append(Needed(item, label(item), problems_of(item.attention, grid, shapes)))
    return [n for w in whole for n in (w, *(_ablated(w) if ablate else ()))]


def open_settings(settings: Sequence[str], causal: bool | None, grid: str | None) -> list[list[str]]:
    """Settings for every head_dim (paper) and mask (paper, ladder) of the grid that the options leave open."""
    from ..explore.bench import HEAD_DIMS

    given = {knob_of(text) for text in settings}
    masks = [] if causal is None else [f"mask={'causal' if causal else 'full'}"]
    if masks and "mask" in given:
        raise InputError("--causal" if causal else "--full", "given beside --set mask=…; one of them is enough")
    if grid is not None:
        masks = masks or ([] if "mask" in given else ["mask=full", "mask=causal"])
    head_dims = [f"head_dim={d}" for d in HEAD_DIMS] if grid == "paper" and "head_dim" not in given else []
    return [[x for x in (d, m) if x] for d in head_dims or [""] for m in masks or [""]]


def problems_of(attention: Attention, grid: str | None, shapes: Sequence[str]) -> tuple[Problem, ...]:
    """The sizes to time: the grid's, then those of --shape; the longest of the paper's where neither is given."""
    from ..explore.bench import grid_problems, one_problem

    wanted = [] if grid is None else list(grid_problems(grid, attention.head_dim))
    if grid is None and not shapes:
        wanted = [one_problem(attention.head_dim)]
    parsed = [parse_shape(text) for text in shapes]
    return tuple(dict.fromkeys(wanted + [Problem(p.batch, p.sq, p.sk, p.hq, p.hkv) for p in parsed]))


def label(item: Selected) -> str:
    """The schedule's name in tables; a changed schedule shows its id."""
    return item.stem if item.own_schedule else f"{item.stem}.{item.schedule.id}"


def cases(kernels: Sequence[Needed], places: Sequence[tuple[str, str]], parts: bool = False) -> tuple[CaseSpec, ...]:
    """Kernels for one attention and problem are timed together. `places`: (folder, file) of each built kernel. `parts`: those that
    quantise and attend also in two parts."""
    from ..explore.bench_result import CaseSpec, KernelRef

    found: dict[Attention, dict[Problem, list[KernelRef]]] = {}
    for kernel, place in zip(kernels, places):
        for problem in kernel.problems:
            refs = found.setdefault(kernel.item.attention, {}).setdefault(problem, [])
            refs.append(KernelRef(kernel.label, *place, kernel.about))
            if parts and kernel.item.schedule.precision is not None:
                refs += [KernelRef(f"{kernel.label}, {part}", *place, kernel.about, part=part) for part in ("quantise", "attend")]
    return tuple(CaseSpec(a, problem, tuple(refs)) for a, of in found.items() for problem, refs in of.items())


# the tuned table ----------------------------------------------------------------------------------------------------------


def _tuned(settings: Sequence[str], grid: str | None, shapes: Sequence[str]) -> list[Needed]:
    """One for each problem, though many may share a schedule; knobs of a schedule among the settings change all of them. With `precision`
    among them: what `fagen.attention` picks for 16-bit tensors that are quantised first.
    """
    changes = parse_settings(settings)
    fields = Attention.field_names()
    attention = load("fa3").attention.replace(**{n: v for n, v in changes.items() if n in fields})
    knobs = {n: v for n, v in changes.items() if n not in fields}
    device = _device()
    found = []
    for problem in problems_of(attention, grid, shapes):
        precision = _quantised_to(attention.dtype, knobs)
        choice = (
            tuned.choose_quantised(attention, problem, device, precision=precision)
            if precision
            else tuned.choose(attention, problem, device)
        )
        schedule = choice.schedule.replace(**knobs)
        item = _item(TUNED, variant_id(attention), attention, schedule, own_schedule=not knobs)
        about = f"{_knobs(attention, schedule)}, {schedule.id}: {choice.why}"
        found.append(Needed(item, label(item), (problem,), about))
    return found


def _quantised_to(dtype: str, knobs: Mapping[str, Any]) -> str | None:
    """The `precision` that 16-bit tensors are quantised to; None: they are not (what cannot be, the plan refuses)."""
    precision: str | None = knobs.get("precision")
    return precision if dtype in tuned.HALF_TYPES and precision in tuned.PRECISIONS.values() else None


def entries(settings: Sequence[str], causal: bool) -> list[Selected]:
    """Each kernel of the tuned tables once, whatever the sizes it is for. Settings of head_dim, dtype and mask keep the entries that have
    them (dtype=int8 those of e4m3 too, which serve it; with a 16-bit v_dtype those of int8_qk); others change every kernel. A precision:
    the entries of that type, for 16-bit tensors (bf16, or as dtype says) that are quantised first. An entry that `tuned.choose` would pass
    over is left out, and said. InputError where none is left.
    """
    changes = parse_settings(settings, causal)
    wanted = {n: changes.pop(n) for n in ("head_dim", "mask") if n in changes}
    types: dict[str, Any] = {n: changes.pop(n) for n in ("dtype", "v_dtype") if n in changes}
    products = Attention(head_dim=HEAD_DIMS[0], **types).products if types else None
    mine = {n: v for n, v in changes.items() if n in Attention.field_names()}
    knobs = {n: v for n, v in changes.items() if n not in mine}
    precision = _quantised_to(types.get("dtype", "bf16"), knobs)
    if precision:
        products, types, knobs = precision, {"dtype": "bf16"} | types, tuned.QUANTISED | knobs
    found: dict[Selected, None] = {}
    for entry in (e for table in tuned.builtin_tables() for e in table.entries):
        of_type = products in (None, entry.dtype) or (products, entry.dtype) == ("int8", "e4m3")
        if not of_type or any(getattr(entry, n) != v for n, v in wanted.items()):
            continue
        own = types or tuned.types_of(entry.dtype)
        whose = "fa3" if precision else entry.base  # its output is of its own type
        attention = load(whose, head_dim=entry.head_dim, mask=entry.mask, **own).attention.replace(**mine)
        if reason := entry.unusable(quantised(attention, precision) if precision else attention):
            note(f"the tuned table's {entry.label} is left out: {reason}")
            continue
        schedule = entry.schedule.replace(**knobs)
        found[_item(TUNED, variant_id(attention), attention, schedule, own_schedule=not knobs)] = None
    if not found:
        which = ", ".join(f"{n}={v}" for n, v in (wanted | types).items())
        raise InputError(TUNED, f"the tuned table has no usable entry{f' with {which}' if which else ''}; --grid takes the nearest")
    return list(found)


def _device() -> tuned.Device:
    """The GPU, or an H200 where there is none: kernels are built for it."""
    try:
        return driver.device_info(first_device())
    except LaunchError:
        return tuned.H200


def _knobs(attention: Attention, schedule: Schedule) -> str:
    """A schedule by its differences from the built-in one for these types: with them and --set it is built by hand."""
    name = tuned.BUILTIN.get(schedule.precision or attention.products, "fa3") if schedule.mma == "wgmma" else "fa2"
    types = {n: x for n in ("dtype", "v_dtype") if (x := getattr(attention, n)) is not None}
    quantised_to = {} if schedule.precision is None else {"precision": schedule.precision}
    differences = load(name, head_dim=attention.head_dim, **types, **quantised_to).schedule.diff(schedule)
    changes = quantised_to | {n: new for n, (_, new) in differences.items()}
    return name + (" with " if changes else "") + ", ".join(f"{n}={new}" for n, new in changes.items())


# ablations ----------------------------------------------------------------------------------------------------------------


def _ablated(whole: Needed) -> list[Needed]:
    item, found = whole.item, []
    for a in ablations(item.attention, item.schedule):
        changed = _item(item.stem, item.variant, item.attention, a.schedule, own_schedule=False)
        found.append(Needed(changed, f"{whole.label}, {a.name}", whole.problems, f"{whole.label} with {a.changed}"))
    return found


def _item(stem: str, variant: str | None, attention: Attention, schedule: Schedule, *, own_schedule: bool) -> Selected:
    name = ".".join([stem, *([variant] if variant else []), schedule.id])
    return Selected(stem, name, variant, attention, schedule, own_schedule)


def distinct(kernels: Sequence[Needed]) -> list[Selected]:
    """Each kernel once, though several rows may need it."""
    return list(dict.fromkeys(k.item for k in kernels))
