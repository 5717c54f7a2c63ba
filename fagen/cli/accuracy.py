"""What `fagen check --accuracy` does, and which kernels it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..evidence import variant_id
from ..plan.kernel import Problem
from . import common
from . import needed as need

if TYPE_CHECKING:
    from ..accuracy import AccuracyResult, Recipe, Trial
    from ..accuracy.gpu import Builts

PAPER = Problem(2, 4096, 4096, 16, 16)
LONG = (Problem(1, 128, 32768, 2, 2), Problem(1, 128, 131072, 2, 2))
"""Few query rows and long keys, where the tensor core's sums lose most."""
V_MEANS = (0.0, 1.0)
"""Of long keys: around 0, errors of the sums cancel; away from it, what joins a large sum is cut off it, key after key."""
SEED = 0


@dataclass(frozen=True)
class Options:
    """As given on the command line."""

    shapes: tuple[str, ...] = ()
    input_: str | None = None
    seed: int | None = None


def trials(items: Sequence[common.Selected], options: Options) -> list[Trial]:
    """The tables to make: on the tensors of --input, or on random ones of the sizes of --shape, or of the paper's and of long keys."""
    from ..accuracy import FileSource, RandomSource, Source, Trial, long_recipes, recipes
    from ..check import parse_shape

    if options.input_ is not None and options.shapes:
        raise InputError("--shape", "given beside --input, whose tensors have sizes of their own")
    seed = SEED if options.seed is None else options.seed
    head_dims = {i.attention.head_dim for i in items}
    if len(head_dims) > 1:
        raise InputError("SCHEDULE", f"one table is of one head_dim; the schedules have {', '.join(map(str, sorted(head_dims)))}")
    (head_dim,) = head_dims

    def random(problem: Problem, v_mean: float = 0.0) -> RandomSource:
        return RandomSource(problem, head_dim, seed, v_mean)

    wanted: list[tuple[str, Source, Any]]
    if options.input_ is not None:
        wanted = [("tensors of a file", FileSource(options.input_), recipes)]
    elif options.shapes:
        sizes = [parse_shape(s) for s in options.shapes]
        wanted = [("outliers", random(Problem(p.batch, p.sq, p.sk, p.hq, p.hkv)), recipes) for p in sizes]
    else:
        wanted = [("outliers", random(PAPER), recipes)]
        wanted += [(_long_title(p, mean), random(p, mean), long_recipes) for p in LONG for mean in V_MEANS]
    return [
        Trial(title, source, tuple((i.stem, r) for i in items for r in rows(i.attention, i.schedule, source.dtype)))
        for title, source, rows in wanted
    ]


def _long_title(problem: Problem, v_mean: float) -> str:
    return f"{problem.sk // 1024}k keys" + (f", V around {v_mean:g}" if v_mean else "")


def select(schedules: Sequence[str], settings: Sequence[str], causal: bool) -> list[common.Selected]:
    """The schedules named, each legal as it stands; InputError for a setting that the table varies itself."""
    from ..accuracy import SET_BY_RECIPES

    if need.TUNED in schedules:
        raise InputError("SCHEDULE", f"the table is of named schedules; {need.TUNED} is another one for every size")
    for name in common.parse_settings(settings, causal):
        if name in SET_BY_RECIPES:
            raise InputError("--set", f"{name} is what --accuracy varies; leave it to the table")
    items = common.select(schedules, settings, causal)
    for item in items:
        common.planned(item)
    return items


def kernels(found: Sequence[Trial]) -> list[common.Selected]:
    """Every legal kernel of the tables, once."""
    return list(dict.fromkeys(_kernel(stem, r) for t in found for stem, r in t.recipes if not r.refused))


def _kernel(stem: str, recipe: Recipe) -> common.Selected:
    name = ".".join([stem, variant_id(recipe.attention), recipe.schedule.id])
    return common.Selected(stem, name, variant_id(recipe.attention), recipe.attention, recipe.schedule, False)


def run(found: Sequence[Trial], where: str, folder: str | None, timeout: float, seed: int | None) -> AccuracyResult:
    """Measure (on a GPU) and predict."""
    from ..accuracy import run_trials
    from ..accuracy.gpu import run_on_gpu

    seed = SEED if seed is None else seed
    rows = sum(len(t.recipes) for t in found)
    gpu: dict[str, Any] = {}
    if where == "gpu":
        builts = _builts(found, folder)
        with common.Progress("running on the GPU", rows) as progress:
            measured, gpu = run_on_gpu(found, builts, timeout=timeout, say=progress.step)
        gpu["measured"] = measured
    with common.Progress("reference and simulator", rows) as progress:
        return run_trials(found, seed=seed, say=lambda what: progress.step(what, counts="reference" not in what), **gpu)


def _builts(found: Sequence[Trial], folder: str | None) -> Builts:
    items = kernels(found)
    with common.Progress("loading" if folder else "compiling", len(items)) as progress:
        builts = {}
        for item in items:
            builts[item.attention, item.schedule] = common.built(item, folder=folder)
            progress.step(item.name)
    return builts


def report(result: AccuracyResult) -> list[Any]:
    """The tables, for a terminal."""
    from rich import box
    from rich.table import Table

    from ..accuracy import table as text

    parts: list[Any] = [text.where(result)]
    for e in result.experiments:
        found = Table(box=box.SIMPLE, pad_edge=False)
        for i, name in enumerate(text.head(result)):
            found.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
        for row in e.rows:
            found.add_row(*text.cells(e, row)[: len(text.head(result))])
        parts += [text.about(e), found, *text.best(e), *text.reasons(e)]
    return parts
