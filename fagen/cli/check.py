"""fagen check: is it right? Against float64, on the GPU or in the simulator."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import common
from . import needed as need

if TYPE_CHECKING:
    from ..check import CaseResult, GpuRun, Item
    from ..compile import Built
    from ..oracle import CheckProblem


@click.command()
@click.argument("schedules", nargs=-1, required=True, metavar="SCHEDULE...")
@common.device_option("the GPU, or the simulator on the CPU")
@click.option("--shape", "shapes", multiple=True, metavar="B,HQ,HKV,SQ,SK", help="Check this size instead of the grid; repeatable.")
@common.causal_option
@common.set_option
@common.variants_option
@click.option("--grid", metavar="NAME", help="Of `tuned`: the kernels that `fagen bench tuned --grid NAME` needs (paper, ladder).")
@common.from_option
@click.option("--evidence", metavar="FILE", help="Write the results there, as evidence of this code (a JSON beside the .cu).")
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=1,
    help="Run every case so often; all runs must give the same bits. (On the CPU cases too large to simulate whole run once.)",
)
@click.option(
    "--jitter",
    type=click.IntRange(2),
    metavar="N",
    help="N runs of a debug build, other delays in each; all must give the same bits.",
)
@click.option("--seed", type=click.IntRange(0), help="Of the random inputs. Default: a fresh one, which is told.")
@click.option("--timeout", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Seconds a launch may take.")
@click.option(
    "--accuracy",
    is_flag=True,
    help="Instead of the checks: RMSE against float64 on tensors with outliers, of each SCHEDULE and, if it is for e4m3, of each way to quantise.",
)
@click.option("--input", "input_", metavar="FILE.npz", help="Of --accuracy: the q, k and v of this file, fp16 or bf16.")
@click.option("--output", metavar="FILE", help="Of --accuracy: write the results there as JSON.")
@click.option("--markdown", is_flag=True, help="Of --accuracy: print the tables in Markdown.")
@common.json_option
def command(
    schedules: tuple[str, ...],
    device: str | None,
    shapes: tuple[str, ...],
    causal: bool,
    settings: tuple[str, ...],
    variants: bool,
    grid: str | None,
    folder: str | None,
    evidence: str | None,
    repeat: int,
    jitter: int | None,
    seed: int | None,
    timeout: float,
    accuracy: bool,
    input_: str | None,
    output: str | None,
    markdown: bool,
    as_json: bool,
) -> int:
    """Run each SCHEDULE on random inputs and compare out and lse with float64. Exit 1 if a case fails.

    Without --shape on the grid of shapes where kernels go wrong: tile edges, lengths 0 and 1, more queries than keys, grouped heads,
    strides, several tiles a CTA. A kernel on the GPU that hangs is killed after --timeout; it and a wrong one leave a bundle for
    `fagen repro`.

    SCHEDULE `tuned` is every kernel of the tuned table, each once; with --set of head_dim, dtype or mask, those of the entries that have
    it. With --grid, it is what the table has for the sizes of that grid.

    With --accuracy, on the tensors of the FlashAttention-3 paper's experiment (2,16,16,4096,4096 and long keys, or the sizes of
    --shape) or on those of --input. On a GPU every row is also predicted by the simulator; exit 1 if the two differ by more than 10 %.
    """
    if accuracy:
        common.refuse_given("has no meaning beside --accuracy", "variants", "grid", "evidence", "jitter", "repeat")
        return _accuracy(schedules, settings, causal, shapes, device, folder, seed, timeout, input_, output, markdown, as_json)
    common.refuse_given("has a meaning with --accuracy only", "input_", "output", "markdown")
    if jitter is not None:
        common.refuse_given("has no meaning beside --jitter, which says how often", "repeat")
    from ..check import parse_shape

    items = _select(schedules, settings, causal, variants, grid)
    problems = [parse_shape(s) for s in shapes]
    where = common.choose_device(device)
    if evidence and need.TUNED in schedules:
        raise InputError("--evidence", f"one file holds one schedule's; {need.TUNED} is many")
    _refuse_clashes(where, items, folder, evidence, jitter, bool(shapes))
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    kernels = [_item(i, problems, jitter is not None) for i in items]
    if where == "gpu":
        builts = _builts(items, jitter is not None, folder)
        run = _on_gpu(kernels, builts, seed, jitter or repeat, jitter is not None, timeout)
        results: Sequence[CaseResult] = run.results
        about: dict[str, Any] = {"gpu": run.gpu, "driver": run.driver, "bundles": {k: str(v) for k, v in run.bundles.items()}}
        if evidence:
            _keep(evidence, items, builts, run, jitter)
    else:
        results, about = _on_cpu(items, kernels, seed, repeat), {}
    failed = [r for r in results if not r.verdict.passed]
    if as_json:
        cases = [{"kernel": r.item, **r.to_dict()} for r in results]
        counts = {"passed": len(results) - len(failed), "failed": len(failed)}
        common.write_json({"device": where, "seed": seed, **about, **counts, "cases": cases})
    else:
        _print(items, results, failed, f"{about.get('gpu') or 'simulator'}, seed {seed}")
        for name, path in about.get("bundles", {}).items():
            common.note(f"{name}: repro bundle {path}")
    return int(bool(failed))


def _accuracy(
    schedules: Sequence[str],
    settings: Sequence[str],
    causal: bool,
    shapes: tuple[str, ...],
    device: str | None,
    folder: str | None,
    seed: int | None,
    timeout: float,
    input_: str | None,
    output: str | None,
    markdown: bool,
    as_json: bool,
) -> int:
    from . import accuracy as acc
    from .bench import check_output
    from .tune_options import write_file

    if as_json and markdown:
        raise InputError("--markdown", "given beside --json; one of them is enough")
    target = check_output("--output", output)
    trials = acc.trials(acc.select(schedules, settings, causal), acc.Options(shapes, input_, seed))
    where = common.choose_device(device)
    if folder is not None and where == "cpu":
        raise InputError("--from", "speaks of compiled kernels on a GPU; the simulator runs the plan itself")
    result = acc.run(trials, where, folder, timeout, seed)
    if target is not None:
        write_file(target, result.to_json() + "\n")
    if as_json:
        common.write_json(result.to_dict())
    elif markdown:
        from ..accuracy import markdown_table

        common.write(markdown_table(result))
    else:
        common.write(*acc.report(result))
    return 0 if result.ok else 1


def _select(
    schedules: Sequence[str], settings: Sequence[str], causal: bool, variants: bool, grid: str | None
) -> list[common.Selected]:
    """The kernels named, in that order; `tuned` among them stands for those of the tuned table."""
    if need.TUNED not in schedules:
        if grid is not None:
            raise InputError("--grid", f"chooses among the kernels of `{need.TUNED}`; sizes to check are given by --shape")
        return common.select(schedules, settings, causal, variants)
    if variants:
        raise InputError("--variants", f"given beside {need.TUNED}, whose kernels have an attention each; one of them is enough")
    items: list[common.Selected] = []
    named = iter(common.select([s for s in schedules if s != need.TUNED], settings, causal))
    for source in dict.fromkeys(schedules):
        if source != need.TUNED:
            items.append(next(named))
        elif grid is None:
            items += need.entries(settings, causal)
        else:
            items += need.distinct(need.needed([source], settings, causal or None, grid, (), False))
    return items


def _refuse_clashes(
    where: str, items: list[common.Selected], folder: str | None, evidence: str | None, jitter: int | None, shapes: bool
) -> None:
    if where == "cpu":
        for option, value in (("--from", folder), ("--evidence", evidence), ("--jitter", jitter)):
            if value is not None:
                raise InputError(option, "speaks of compiled kernels on a GPU; the simulator runs the plan itself")
    if evidence:
        if len({i.stem for i in items}) > 1:
            raise InputError(
                "--evidence", f"one file holds one schedule's: {', '.join(sorted({i.stem for i in items}))} were given"
            )
        if shapes:
            raise InputError("--evidence", "needs the whole grid; leave --shape away")
        other = next((i for i in items if not i.own_schedule), None)
        if other:
            raise InputError("--evidence", f"belongs to the schedule as its file says it; {other.name} was changed by --set")


def _item(item: common.Selected, problems: list[CheckProblem], jitter: bool) -> Item:
    from ..check import Item, jitter_problems
    from ..oracle import check_problems

    if not problems:
        with common.refusing(item):
            chosen = jitter_problems(item.attention, item.schedule) if jitter else check_problems(item.attention, item.schedule)
    return Item(common.built_name(item, jitter), item.attention, item.schedule, tuple(problems or chosen))


def _builts(items: list[common.Selected], debug: bool, folder: str | None) -> list[Built]:
    with common.Progress("loading" if folder else "compiling", len(items)) as progress:
        builts = []
        for item in items:
            builts.append(common.built(item, debug=debug, folder=folder))
            progress.step(item.name)
    return builts


def _on_gpu(kernels: list[Item], builts: list[Built], seed: int, runs: int, jitter: bool, timeout: float) -> GpuRun:
    from ..check import check_gpu

    total = sum(len(k.problems) for k in kernels)
    with common.Progress(f"checking on the GPU (seed {seed})", total) as progress:
        return check_gpu(
            kernels,
            builts,
            seed=seed,
            repeat=runs,
            jitter=jitter,
            timeout=timeout,
            on_result=lambda r: progress.step(_line(r)),
        )


def _on_cpu(items: list[common.Selected], kernels: list[Item], seed: int, repeat: int) -> list[CaseResult]:
    from ..check import check_cpu

    for item in items:
        common.planned(item)
    with common.Progress(f"simulating (seed {seed})", sum(len(k.problems) for k in kernels)) as progress:
        return check_cpu(kernels, seed=seed, repeat=repeat, on_result=lambda r: progress.step(_line(r)))


def _keep(path: str, items: list[common.Selected], builts: list[Built], run: GpuRun, jitter: int | None) -> None:
    """Write evidence: the cases, or what the jitter runs showed of the same kernel's ordinary build."""
    from .. import evidence
    from ..emit import emit

    for item, built in zip(items, builts):
        mine = [r for r in run.results if r.item == built.source.name]
        if jitter is None:
            evidence.store(
                path,
                built.source.code_sha256,
                [evidence.case(r.problem, r.mask, r.verdict) for r in mine],
                gpu=run.gpu,
                driver=run.driver,
                compiler=built.report.compiler,
                variant=item.variant,
            )
        else:
            code = emit(common.planned(item), item.name).code_sha256
            result = {"runs": jitter, "cases": len(mine), "passed": all(r.verdict.passed for r in mine)}
            evidence.record(path, "jitter", result, code_sha256=code, variant=item.variant)
    common.note(f"evidence of {len(items)} kernel{'s' if len(items) != 1 else ''} in {Path(path)}")


# ---------------------------------------------------------------------------------------------------------------- output


def _line(result: CaseResult) -> str:
    return f"{result.item} {result.problem} {'ok' if result.verdict.passed else 'FAILED'}"


def _print(items: list[common.Selected], results: Sequence[CaseResult], failed: list[CaseResult], where: str) -> None:
    from rich.table import Table

    if len(items) == 1:
        common.write(_cases(results))
    else:
        table = Table("kernel", "attention", "cases", "passed", "worst ratio", "at")
        for item in items:
            mine = [r for r in results if r.item.removesuffix(".debug") == item.name]
            worst = max(mine, key=lambda r: r.verdict.error_ratio)
            passed = sum(r.verdict.passed for r in mine)
            ratio, at = f"{worst.verdict.error_ratio:.3f}", str(worst.problem)
            table.add_row(item.name, item.attention.label, str(len(mine)), str(passed), ratio, at)
        common.write(table)
        if failed:
            common.write(_cases(failed, with_kernel=True))
    for r in failed:
        common.write(f"{r.item} on {r.problem}, seed {r.seed}: {r.verdict.reason}")
    common.write(f"{len(results) - len(failed)} of {len(results)} cases passed ({where})")


def _cases(results: Sequence[CaseResult], with_kernel: bool = False) -> Any:
    from rich.table import Table

    head = ("B,HQ,HKV,SQ,SK", "mask", "inputs", "layout", "error", "bound", "ratio", "")
    table = Table(*(["kernel"] if with_kernel else []), *head)
    for r in results:
        p, v = r.problem, r.verdict
        shape = f"{p.batch},{p.hq},{p.hkv},{p.sq},{p.sk}"
        cells = (shape, r.mask, p.inputs, p.layout, f"{v.error:.2e}", f"{v.bound:.2e}", f"{v.error_ratio:.3f}")
        table.add_row(*([r.item] if with_kernel else []), *cells, "passed" if v.passed else "FAILED")
    return table
