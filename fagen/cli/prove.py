"""fagen prove: the synchronisation proof, and the mutants that prove the proof."""

from __future__ import annotations

import time
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import click

from . import common

if TYPE_CHECKING:
    from ..plan.kernel import KernelPlan
    from ..plan.mutants import MutantReport
    from ..plan.proof import ProofResult


@click.command()
@click.argument("schedules", nargs=-1, required=True, metavar="SCHEDULE...")
@common.set_option
@common.causal_option
@common.variants_option
@click.option(
    "--mutants", is_flag=True, help="Break every kernel in every way its steps offer; each must be noticed, or be harmless."
)
@common.json_option
def command(
    schedules: tuple[str, ...], settings: tuple[str, ...], causal: bool, variants: bool, mutants: bool, as_json: bool
) -> int:
    """Prove that no interleaving hangs or reads a tile too early, too late or torn, for every trip count that matters.

    With --mutants the last line is "N mutants: F flagged, E equivalent". Exit 1 if a kernel is not proven or a mutant slips through.
    """
    from ..plan import assemble

    items = common.select(schedules, settings, causal, variants)
    plans = []
    for item in items:
        with common.refusing(item):
            plans.append(assemble(item.attention, item.schedule))
    answers, reports = [], []
    for item, plan in zip(items, plans):
        for kernel in plan.kernels:
            answer, report = _kernel(item, kernel, mutants)
            answers.append(answer)
            reports += [report] if report else []
            if not as_json:
                _print(answer, report)
    total = reduce(add, reports) if reports else None
    if as_json:
        common.write_json({"kernels": answers, **({"mutants": _facts(total)} if total else {})})
    elif total:
        common.write(str(total))
    return int(not all(a["proven"] for a in answers) or bool(total and total.survivors))


def _kernel(item: common.Selected, kernel: KernelPlan, mutants: bool) -> tuple[dict[str, Any], MutantReport | None]:
    from ..plan.mutants import run_mutants
    from ..plan.proof import prove

    start = time.perf_counter()
    result: ProofResult = prove(kernel, item.attention, item.schedule)
    answer: dict[str, Any] = {
        "name": item.name,
        "attention": item.attention.label,
        "kernel": kernel.name,
        "proven": result.ok,
        "cases": result.cases,
        "events": result.events,
        "seconds": round(time.perf_counter() - start, 3),
        "failures": [str(f) for f in result.failures],
    }
    report = None
    if mutants and result.ok:
        with common.Progress(f"proving the mutants of {item.name}", 1):
            report = run_mutants(kernel, item.attention, item.schedule)
        answer["mutants"] = _facts(report)
    return answer, report


def _facts(report: MutantReport) -> dict[str, Any]:
    return {
        "total": report.total,
        "flagged": report.flagged,
        "equivalent": [{"mutant": m.description, "reason": why} for m, why in report.equivalent],
        "survivors": [m.description for m in report.survivors],
    }


def _print(answer: dict[str, Any], report: MutantReport | None) -> None:
    verdict = "proven" if answer["proven"] else "NOT proven"
    common.write(
        f"{answer['name']} ({answer['attention']}), kernel {answer['kernel']}: {verdict}, {answer['cases']} cases, "
        f"{answer['events']} events, {answer['seconds']:.2f} s"
    )
    for failure in answer["failures"]:
        common.write(f"  {failure}")
    if report:
        for mutant, why in report.equivalent:
            common.write(f"  equivalent: {mutant.description}: {why}")
        for mutant in report.survivors:
            common.write(f"  NOT NOTICED: {mutant.description}")
