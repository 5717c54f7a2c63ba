"""fagen run: a user's tensors in, out and lse written."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import common

if TYPE_CHECKING:
    from ..compile import Built
    from ..guard import Channel

TASK = "fagen.cli.run_command:serve"
READ_SECONDS = 600.0
"""For reading, converting and writing files of any size; no kernel runs meanwhile."""
SECONDS_PER_TILE = 0.0015
"""Of the simulator, for a (query tile, key block) pair; measured 0.4 to 2.4 ms on one core."""
PATIENCE = 60.0
"""Estimated seconds above which the simulator asks for --force."""


@click.command()
@click.argument("schedule", metavar="SCHEDULE")
@click.option(
    "--input",
    "input_",
    required=True,
    metavar="FILE.npz",
    help="With arrays q, k, v; bf16 as uint16 with q_dtype = bf16, e4m3 as uint8 with q_dtype = e4m3 (and q_descale, k_descale, v_descale).",
)
@click.option("--output", required=True, metavar="FILE.npz", help="Gets out and lse.")
@common.device_option("the GPU, or the simulator on the CPU")
@click.option("--source", metavar="FILE.cu", help="Run this text instead of the generated one: a file edited by hand, same plan.")
@click.option("--cast", is_flag=True, help="Round inputs of another type to the attention's.")
@common.causal_option
@common.set_option
@common.from_option
@click.option("--timeout", type=click.FloatRange(0.1), default=60.0, show_default=True, help="Seconds the launch may take.")
@click.option("--force", is_flag=True, help="Simulate even if it takes minutes.")
@common.json_option
def command(
    schedule: str,
    input_: str,
    output: str,
    device: str | None,
    source: str | None,
    cast: bool,
    causal: bool,
    settings: tuple[str, ...],
    folder: str | None,
    timeout: float,
    force: bool,
    as_json: bool,
) -> None:
    """Run SCHEDULE on q, k, v of a file: q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, head_dim); with
    v_transposed, v (batch, kv_heads, head_dim, seqlen_k). Descales are numbers or fp32 arrays, as scale_granularity says: of
    one element, (batch, kv_heads), or by block (batch, heads, query tiles), (batch, kv_heads, key blocks).
    """
    (item,) = common.select([schedule], settings, causal)
    if source and folder:
        raise InputError("--source", "is compiled, --from takes kernels that are compiled: give one of them")
    if os.path.exists(input_) and os.path.exists(output) and os.path.samefile(input_, output):
        raise InputError("--output", f"{output} is the input, which it would replace")
    where = common.choose_device(device)
    start = time.perf_counter()
    if where == "gpu":
        facts = on_gpu(_built(item, source, folder), input_, output, cast, timeout)
    else:
        for option, value in (("--source", source), ("--from", folder)):
            if value is not None:
                raise InputError(option, "speaks of compiled kernels on a GPU; the simulator runs the plan itself")
        facts = _on_cpu(item, input_, output, cast, force)
    facts = {"output": output, "device": where, "seconds": round(time.perf_counter() - start, 3), **facts}
    if as_json:
        common.write_json(facts)
    else:
        shapes = ", ".join(f"{n} {tuple(facts[n])}" for n in ("out", "lse"))
        common.write(f"{output}: {shapes} by {item.name} on {facts.get('gpu') or 'the simulator'}, {facts['seconds']} s")


def _built(item: common.Selected, source: str | None, folder: str | None) -> Built:
    if source is None:
        return common.built(item, folder=folder)
    from ..compile import build
    from ..emit import Source

    try:
        text = Path(source).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(source, f"cannot be read: {getattr(e, 'strerror', None) or e}") from e
    plan = common.planned(item)
    edited = Source(text=text, arch=plan.schedule.arch, kernels=tuple(k.name for k in plan.kernels), name=Path(source).stem)
    built = build(plan, edited, enforce=False)
    for broken in built.report.broken():
        common.note(f"{source}: {broken}")
    return built


def _on_cpu(item: common.Selected, input_: str, output: str, cast: bool, force: bool) -> dict[str, Any]:
    from .. import npz
    from ..check import tiles_of
    from ..oracle import CheckProblem, simulate
    from ..oracle.blocks import problem_of

    plan = common.planned(item)
    q, k, v = npz.read_inputs(input_, item.attention, cast)
    descales = npz.read_descales(input_, item.attention, cast)
    _check_writable(output)
    p = problem_of(item.attention, q, k, v, item.schedule.v_transposed)
    seconds = SECONDS_PER_TILE * tiles_of(CheckProblem(p.batch, p.sq, p.sk, p.hq, p.hkv), item.schedule)
    if seconds > PATIENCE and not force:
        raise InputError("--device cpu", f"simulating {p} takes about {seconds / 60:.0f} minutes; --force does it all the same")
    with common.Progress(f"simulating {p} (about {max(seconds, 1):.0f} s)", 1):
        out, lse = simulate(item.attention, item.schedule, q, k, v, plan=plan, **descales)
    npz.write(output, {"out": out, "lse": lse})
    return {"out": list(out.shape), "lse": list(lse.shape)}


def on_gpu(
    built: Built, input_: str, output: str | None, cast: bool, timeout: float, bundles: str | Path | None = "repro"
) -> dict[str, Any]:
    """Run a built kernel on the tensors of a file, in a watched subprocess; shapes of out and lse, and the GPU's name. `output` None:
    the results are dropped. A LaunchError names the bundle if it hangs or faults."""
    import tempfile

    from .. import guard
    from ..compile import write_built

    if output is not None:
        _check_writable(output)
    facts: dict[str, Any] = {}
    case = {"input": os.path.abspath(input_), "cast": cast}
    with tempfile.TemporaryDirectory(prefix="fagen-run-") as folder:
        write_built(built, folder, built.source.name)
        request = {
            "folder": folder,
            "name": built.source.name,
            "input": case["input"],
            "output": output and os.path.abspath(output),
            "cast": cast,
            "timeout": timeout,
        }
        with common.Progress(f"running {built.source.name}", 1), guard.Watched(TASK, request) as worker:
            try:
                for message in worker.messages():
                    facts = {n: message[n] for n in ("out", "lse", "gpu")}
            except guard.GuardError as failure:
                raise guard.explained(failure, built, {"case": case, "reason": failure.detail}, bundles) from failure
    return facts


def serve(request: Mapping[str, Any], channel: Channel) -> None:
    """The worker's part of `on_gpu`: a task of the guard."""
    from .. import driver, npz
    from ..compile import load_built
    from ..guard import GuardError
    from ..launch import Kernel

    name = request["name"]
    channel.doing(f"{name} is loaded", READ_SECONDS)
    device = driver.current_device()
    info = driver.device_info(device)
    built = load_built(request["folder"], name)
    kernel = Kernel(built.plan, built.source.text, built.cubin, built.report)
    channel.doing(f"{request['input']} is read", READ_SECONDS)
    q, k, v = npz.read_inputs(request["input"], built.plan.attention, request["cast"])
    descales = npz.read_descales(request["input"], built.plan.attention, request["cast"])
    launch = f"launch of {name} on {request['input']}"
    channel.doing(launch, request["timeout"])
    try:
        out, lse = kernel(q, k, v, **descales)
    except driver.DriverError as e:
        record = kernel.debug_record(device) if built.plan.debug else ()
        raise GuardError("fault", launch, str(e), record=record) from e
    channel.doing("out and lse are written", READ_SECONDS)
    if request["output"] is not None:
        npz.write(request["output"], {"out": out, "lse": lse})
    channel.send("result", out=list(out.shape), lse=list(lse.shape), gpu=info.name)


def _check_writable(output: str) -> None:
    """Before minutes of work: is there a folder to write to?"""
    path = Path(output)
    if path.is_dir():
        raise InputError(output, "is a folder; expected the name of an .npz file")
    if not path.parent.is_dir():
        raise InputError(output, f"cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(output, f"cannot be written: no permission in {path.parent}")
