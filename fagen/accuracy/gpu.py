"""Runs the kernels of accuracy tables on a GPU, in a watched subprocess, and another's e4m3 kernel beside them."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import driver, guard
from ..attention import Attention
from ..check.device import driver_text
from ..compile import Built, load_built, write_built
from ..explore import peers
from ..launch import Kernel
from ..oracle.numeric import DTYPES, Array
from ..oracle.quantise import Quantiser
from ..plan.kernel import Problem
from ..schedule import Schedule
from .recipes import WAYS
from .run import Measured, OnGpu, PeerRow, Trial
from .tensors import FileSource, RandomSource, Source, given, in_half

Builts = Mapping[tuple[Attention, Schedule], Built]
TASK = "fagen.accuracy.gpu:serve"
PREPARE_SECONDS = 600.0
"""For making and quantising tensors of any size on the CPU; no kernel runs meanwhile."""
PEER = "fa3"
PEER_WAYS = ("per tensor", "per head, Hadamard")
"""Ways of quantising that the peer's kernel takes: it reads descales (batch, kv_heads)."""


def run_on_gpu(
    trials: Sequence[Trial], builts: Builts, *, timeout: float, say: Callable[[str], None]
) -> tuple[list[OnGpu], dict[str, Any]]:
    """The outputs of every legal recipe and of the peer, for every trial; and facts: gpu, driver, versions. `builts`: the compiled
    kernel of every legal recipe. A LaunchError names the bundle of a kernel that hangs or faults."""
    rows = [peer_rows(t) for t in trials]
    with tempfile.TemporaryDirectory(prefix="fagen-accuracy-") as scratch:
        for built in builts.values():
            write_built(built, scratch, built.source.name)
        request = {"timeout": timeout, "folder": scratch, "trials": [_order(t, builts, p) for t, p in zip(trials, rows)]}
        found: dict[tuple[int, str, int], Measured] = {}
        facts: dict[str, Any] = {}
        last = ""
        with guard.Watched(TASK, request) as worker:
            try:
                for m in worker.messages():
                    if m["kind"] == "gpu":
                        facts = {n: m[n] for n in ("gpu", "driver", "versions")}
                    elif m["kind"] == "kernel":
                        last = m["name"]
                    elif m["kind"] == "row":
                        found[m["trial"], m["of"], m["row"]] = _load(m)
                        say(m["what"])
            except guard.GuardError as failure:
                culprit = next((b for b in builts.values() if b.source.name == last), None)
                if culprit is None:
                    raise
                raise guard.explained(failure, culprit, {"reason": failure.detail}, "repro") from failure
    outputs = [
        OnGpu(
            [found.get((i, "recipes", n)) for n in range(len(t.recipes))],
            [(p, found[i, "peers", n]) for n, p in enumerate(rows[i])],
        )
        for i, t in enumerate(trials)
    ]
    return outputs, facts


def peer_rows(trial: Trial) -> tuple[PeerRow, ...]:
    """The peer in 16 bits and in e4m3, as far as the trial has kernels of ours to compare it with."""
    title = peers.PEERS[PEER].title
    mine = {r.quantiser is not None: r for _, r in trial.recipes if r.attention.dtype != "int8"}
    rows = []
    if False in mine:
        rows.append(PeerRow(title, mine[False].label, mine[False].attention, None))
    if True in mine:
        for way in (w for w in WAYS if w.label in PEER_WAYS):
            quantiser = Quantiser(granularity=way.granularity, hadamard=way.hadamard, smooth_k=way.smooth_k)
            rows.append(PeerRow(title, way.label, mine[True].attention, quantiser))
    return tuple(rows)


def _order(trial: Trial, builts: Builts, rows: Sequence[PeerRow]) -> dict[str, Any]:
    source = trial.source
    return {
        "source": {"kind": type(source).__name__, **dataclasses.asdict(source)},
        "recipes": [
            None
            if r.refused
            else {"name": builts[r.attention, r.schedule].source.name, "label": r.label, "quantiser": _plain(r.quantiser)}
            for _, r in trial.recipes
        ],
        "peers": [{"label": p.label, "attention": p.attention.to_dict(), "quantiser": _plain(p.quantiser)} for p in rows],
    }


def _plain(quantiser: Quantiser | None) -> dict[str, Any] | None:
    return None if quantiser is None else dataclasses.asdict(quantiser)


def _load(message: Mapping[str, Any]) -> Measured:
    if not message["file"]:
        return Measured(None, None, message["reason"])
    path = Path(message["file"])
    with np.load(path) as saved:
        out = saved["out"].view(DTYPES[message["dtype"]])
        lse = saved["lse"] if "lse" in saved.files else None
    path.unlink()
    return Measured(out, lse)


# the worker ---------------------------------------------------------------------------------------------------------------


def serve(request: Mapping[str, Any], channel: guard.Channel) -> None:
    """The worker: a task of the guard."""
    channel.doing("the driver starts", PREPARE_SECONDS)
    device = driver.current_device()
    info = driver.device_info(device)
    torch, missing = _torch()
    versions = {} if torch is None else {"torch": str(torch.__version__), **peers.versions(torch, (PEER,))}
    channel.send("gpu", gpu=info.name, driver=driver_text(info), versions=versions)
    for i, order in enumerate(request["trials"]):
        channel.doing("tensors are made", PREPARE_SECONDS)
        q, k, v = in_half(_source(order["source"]))
        for n, recipe in enumerate(order["recipes"]):
            if recipe is None:
                continue
            built = load_built(request["folder"], recipe["name"])
            channel.send("kernel", name=recipe["name"])
            out, lse = _ours(built, recipe, q, k, v, channel, request["timeout"])
            file = Path(request["folder"]) / f"{i}-{n}.npz"
            np.savez(file, out=_bits(out), lse=lse)
            dtype = built.plan.attention.output_dtype
            what = f"{recipe['name']} {recipe['label']}"
            channel.send("row", trial=i, of="recipes", row=n, file=str(file), dtype=dtype, reason="", what=what)
        channel.send("kernel", name="")
        for n, order_ in enumerate(order["peers"]):
            file, reason = Path(request["folder"]) / f"{i}-peer-{n}.npz", missing
            attention = Attention.from_dict(order_["attention"])
            channel.doing(f"peer {PEER} {order_['label']}", PREPARE_SECONDS)
            if torch is not None:
                try:
                    np.savez(file, out=_bits(_peer(torch, attention, order_["quantiser"], q, k, v)))
                except peers.PeerAbsent as e:
                    reason = str(e)
            message = {"trial": i, "of": "peers", "row": n, "file": "" if reason else str(file), "reason": reason}
            channel.send("row", **message, dtype=attention.output_dtype, what=f"{PEER} {order_['label']}")


def _source(fields: Mapping[str, Any]) -> Source:
    values = dict(fields)
    if values.pop("kind") == "FileSource":
        return FileSource(**values)
    return RandomSource(**{**values, "problem": Problem(**values["problem"])})


def _ours(
    built: Built, recipe: Mapping[str, Any], q: Array, k: Array, v: Array, channel: guard.Channel, timeout: float
) -> tuple[Array, Array]:
    what = f"{recipe['name']} {recipe['label']}"
    channel.doing(f"inputs of {what} are quantised", PREPARE_SECONDS)
    attention = built.plan.attention
    quantiser = None if recipe["quantiser"] is None else Quantiser(**recipe["quantiser"])
    inputs = given(quantiser, attention, q, k, v)
    kernel = Kernel(built.plan, built.source.text, built.cubin, built.report)
    # NaN where nothing is written
    out = np.full((*q.shape[:3], attention.dv), np.nan, DTYPES[attention.output_dtype])
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32)
    launch = f"launch of {what}"
    channel.doing(launch, timeout)
    try:
        kernel(inputs.q, inputs.k, inputs.v, out=out, lse=lse, **inputs.descales)
    except driver.DriverError as e:
        raise guard.GuardError("fault", launch, str(e)) from e
    kernel.unload()
    return out, lse if inputs.shift is None else lse + inputs.shift


def _torch() -> tuple[Any, str]:
    """torch, or why it is not there: peers are called through it."""
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as e:
        return None, f"peers are called through torch, which cannot be imported: {e}"
    return (torch, "") if torch.cuda.is_available() else (None, f"torch {torch.__version__} sees no GPU")


def _peer(torch: Any, attention: Attention, quantiser: Mapping[str, Any] | None, q: Array, k: Array, v: Array) -> Array:
    """The peer's output, as the arrays of fagen."""
    inputs = given(None if quantiser is None else Quantiser(**quantiser), attention, q, k, v)
    tq, tk, tv = (_to_torch(torch, x) for x in (inputs.q, inputs.k, inputs.v))
    shape = (k.shape[0], k.shape[2])
    descales = {
        name: torch.from_numpy(np.ascontiguousarray(np.broadcast_to(np.asarray(x, np.float32), shape))).cuda()
        for name, x in inputs.descales.items()
    }
    _, out = peers.prepare(PEER, torch, attention, tq, tk, tv, descales)
    bits: Array = out.contiguous().view(torch.int16).cpu().numpy()
    return bits.view(DTYPES[attention.output_dtype])


def _to_torch(torch: Any, x: Array) -> Any:
    types = {DTYPES[n]: (getattr(torch, t), bits) for n, t, bits in _TORCH}
    kind, bits = types[x.dtype]
    return torch.from_numpy(np.ascontiguousarray(x).view(bits)).cuda().view(kind)


_TORCH = (("fp16", "float16", np.int16), ("bf16", "bfloat16", np.int16), ("e4m3", "float8_e4m3fn", np.uint8))


def _bits(x: Array) -> Array:
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))
