"""fagen repro: the case of a bundle once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import common

if TYPE_CHECKING:
    from ..compile import Built


@click.command()
@click.argument("bundle", metavar="BUNDLE")
@click.option("--debug", is_flag=True, help="Compile a debug build of its plan and run that: it names the barrier that hangs.")
@click.option("--timeout", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Seconds a launch may take.")
@common.json_option
def command(bundle: str, debug: bool, timeout: float, as_json: bool) -> int:
    """Run the kernel and the case that a failed `fagen check` or `fagen run` left in BUNDLE. Exit 1 if it fails again."""
    from .. import guard
    from ..check import first_device
    from ..compile import load_built

    facts = guard.read_bundle(bundle)
    built = load_built(bundle, facts["name"])
    case = facts["case"]
    first_device()
    if debug:
        built = _debug_build(built)
    if "input" in case:
        from .run_command import on_gpu

        on_gpu(built, case["input"], None, bool(case.get("cast")), timeout, bundles=None)
        answer: dict[str, Any] = {"name": facts["name"], "passed": True, "reason": ""}
    else:
        answer = _check(bundle, facts, built, timeout)
    if as_json:
        common.write_json(answer)
    else:
        common.write(f"{facts['name']}: " + (f"fails again: {answer['reason']}" if answer["reason"] else "passes this time"))
    return int(not answer["passed"])


def _debug_build(built: Built) -> Built:
    from ..compile import build
    from ..emit import emit
    from ..plan import plan

    if built.plan.debug:
        return built
    debug = plan(built.plan.attention, built.plan.schedule, debug=True)
    return build(debug, emit(debug, f"{built.source.name}.debug"))


def _check(bundle: str, facts: dict[str, Any], built: Built, timeout: float) -> dict[str, Any]:
    from ..check import Item, check_gpu
    from ..oracle import CheckProblem

    case = facts["case"]
    try:
        problem = CheckProblem(**case["problem"])
        seed, repeat, jitter = int(case["seed"]), int(case["repeat"]), bool(case["jitter"])
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(bundle, f"its case cannot be read: {e!r}") from e
    item = Item(built.source.name, built.plan.attention, built.plan.schedule, (problem,))
    with common.Progress(f"running {item.name} on {problem}", 1):
        (result,) = check_gpu([item], [built], seed=seed, repeat=repeat, jitter=jitter, timeout=timeout, bundles=None).results
    return {"name": item.name, **result.to_dict(), "reason": result.verdict.reason}
