"""Tracing on a GPU: a watched subprocess runs each kernel beside its trace build, times both, and brings the marks home.

All must give the same bits. Timing is interleaved (`timing.burst`), by events of the driver: the normal build, the trace build as it is
recorded, and the trace build with all its CTAs writing marks. The marks are those of a last launch, which follows one of the normal
build, so that the GPU is awake and the L2 cache warm.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import driver, guard
from ...check import first_device
from ...check.device import DeviceView, Poisoned, driver_text, upload
from ...compile import Built, load_built, write_built
from ...errors import InputError
from ...interop.host import Staging
from ...launch import Kernel
from ...oracle import CheckProblem, make_case
from ...plan.kernel import Problem
from ..roofline import contiguous
from ..timing import Interval, Sample, Task, burst, interval, launches_for
from .reader import KernelTrace, read

TASK = "fagen.explore.trace.run:serve"
PREPARE_SECONDS = 120.0
"""For what runs on the CPU between launches."""
ROUNDS = 10
HOST_SHARE = 0.67
"""Of a launch's time on the GPU that queueing it may take on the host, for its time to mean anything."""
EVERY_CTA = (1 << 31) - 1
"""So many CTAs write marks where it is timed what writing costs the CTA that writes."""
LAUNCHES = ("normal", "traced", "writing")
"""What is timed: the normal build, the trace build as it is recorded, and the trace build with all CTAs writing."""
MOST_OVERHEAD = 0.05
"""Of a trace build, above which its trace is of another kernel, as it were."""


@dataclass(frozen=True)
class Traced:
    """A kernel's trace and what tracing cost. `normal_ms`, `traced_ms`, `writing_ms`: of a launch of the normal build, of the trace build
    as it is recorded, where a few CTAs write marks, and of the trace build with all CTAs writing. `overhead`: median of traced over
    normal, −1, with its interval over the rounds; `cta_overhead`: the same of writing over normal, which is what tracing costs a recorded
    CTA. Both None where launches are too short to be timed (`why_not`). `same_bits`: of out and lse, in all three."""

    kernels: tuple[KernelTrace, ...]
    normal_ms: float
    traced_ms: float
    writing_ms: float
    overhead: Interval | None
    cta_overhead: Interval | None
    why_not: str
    same_bits: bool


@dataclass(frozen=True)
class Run:
    """What a run brought: of each pair, in order."""

    traced: tuple[Traced, ...]
    gpu: str
    driver: str


def trace_gpu(
    pairs: Sequence[tuple[Built, Built]],
    problem: Problem,
    *,
    cta: int = 0,
    seed: int = 0,
    timeout: float = 20.0,
    bundles: str | Path | None = "repro",
    on_step: Callable[[str], None] = lambda _: None,
) -> Run:
    """Run pairs of (normal build, trace build) on one problem with random normal inputs of `seed`, recording CTAs from `cta` on.

    InputError: `cta` is not in the grid, or the problem is empty or has more tiles than a mark can number. LaunchError: no GPU, or a
    kernel that hangs for `timeout` seconds or faults; it leaves a repro bundle under `bundles` (None: none).
    """
    device = first_device()
    sms = driver.device_info(device).num_sms
    launches = [_launches(traced, problem, sms, cta) for _, traced in pairs]
    brought: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fagen-trace-") as scratch:
        items = []
        for i, pair in enumerate(pairs):
            folder = Path(scratch) / str(i)
            for built in pair:
                write_built(built, folder, built.source.name)
            items.append({"folder": str(folder), "normal": pair[0].source.name, "traced": pair[1].source.name})
        sizes = {f: getattr(problem, f) for f in ("batch", "sq", "sk", "hq", "hkv")}
        request = {"device": device, "items": items, "problem": sizes, "cta": cta, "seed": seed, "timeout": timeout}
        about: dict[str, Any] = {}
        at = 0
        with guard.Watched(TASK, request) as worker:
            try:
                for message in worker.messages():
                    if message["kind"] == "gpu":
                        about = message
                    elif message["kind"] == "at":
                        at = message["item"]
                        on_step(items[at]["traced"])
                    else:
                        brought[message["item"]] = message
            except guard.GuardError as failure:
                case = {"problem": sizes, "seed": seed, "repeat": 1, "jitter": False}
                built = pairs[at][0]  # a bundle is for `fagen repro`, which checks results
                raise guard.explained(failure, built, {"case": case, "reason": failure.detail}, bundles) from failure
        traced = tuple(_traced(pairs[i][1], launches[i], brought[i]) for i in range(len(pairs)))
    return Run(traced, about["name"], about["driver"])


def _launches(built: Built, problem: Problem, sms: int, cta: int) -> tuple[Any, ...]:
    """The launches as the worker's kernel will bind them; refuses what a trace cannot show."""
    from ...trace import ARGUMENT_BITS

    if problem.empty or problem.sk == 0:
        raise InputError("--shape", f"{problem} has nothing to compute, so there is nothing to trace")
    plan = built.plan
    strides = contiguous(plan.attention, problem, plan.schedule.v_transposed)
    bound = plan.bind(problem, strides, sms, trace_first=cta).kernels
    grid = min(k.grid for k in bound)
    if not 0 <= cta < grid:
        raise InputError("--cta", f"{cta} is not among the {grid} CTAs of {built.source.name} on {problem}")
    tiles = problem.batch * problem.hq * -(-problem.sq // plan.schedule.tile_q)
    if max(tiles, problem.sk, problem.sq) >= 1 << ARGUMENT_BITS:
        raise InputError(
            "--shape", f"{problem} has {tiles} tiles; a trace numbers tiles, rows and keys up to {(1 << ARGUMENT_BITS) - 1}"
        )
    return bound


def _traced(built: Built, launches: Sequence[Any], message: Mapping[str, Any]) -> Traced:
    with np.load(message["file"]) as words:
        kernels = tuple(read(built.plan, launch, words[launch.name]) for launch in launches)
    normal, traced, writing = (message["ms"][n] for n in LAUNCHES)
    whole, cta = (interval([t / n - 1 for n, t in zip(normal, x)]) for x in (traced, writing))
    normal_ms, traced_ms, writing_ms = (statistics.median(x) for x in (normal, traced, writing))
    us, host_us = 1e3 * normal_ms, 1e3 * message["host_ms"]
    short = host_us > HOST_SHARE * us
    why = f"a launch takes {us:.0f} µs, queueing it {host_us:.0f} µs: too short to be timed, a larger --shape tells"
    return Traced(
        kernels=kernels,
        normal_ms=normal_ms,
        traced_ms=traced_ms,
        writing_ms=writing_ms,
        overhead=None if short else whole,
        cta_overhead=None if short else cta,
        why_not=why if short else "",
        same_bits=message["same_bits"],
    )


# ---------------------------------------------------------------------------------------------------------------- the worker


def serve(request: Mapping[str, Any], channel: guard.Channel) -> None:
    """The worker's part of `trace_gpu`: a task of the guard. Sends gpu {name, driver} once, and for each item at {item}, then item {item,
    file, ms {of each of LAUNCHES: a round's}, host_ms, same_bits}."""
    device, timeout = request["device"], request["timeout"]
    channel.doing("the driver starts", PREPARE_SECONDS)
    info = driver.device_info(device)
    channel.send("gpu", name=info.name, driver=driver_text(info))
    with driver.use_device(device):
        for i, item in enumerate(request["items"]):
            channel.send("at", item=i)
            channel.doing(f"inputs of {item['traced']}", PREPARE_SECONDS)
            found = _item(item, request, channel, device, timeout)
            channel.send("item", item=i, **found)


def _item(
    item: Mapping[str, Any], request: Mapping[str, Any], channel: guard.Channel, device: int, timeout: float
) -> dict[str, Any]:
    stream = driver.own_stream(device)
    names = [item[n] for n in ("normal", "traced", "traced")]  # of LAUNCHES
    kernels = [_kernel(item["folder"], name) for name in names]
    _, recorded, writing = kernels
    recorded.trace_first, writing.trace_count = request["cta"], EVERY_CTA
    plan, problem = kernels[0].plan, CheckProblem(**request["problem"])
    a = plan.attention
    case = make_case(a, plan.schedule, problem, seed=request["seed"])
    with Staging(stream) as staging:
        q, k, v = upload(staging, (case.q, case.k, case.given_v))
        outputs = [
            (
                Poisoned(staging, stream, (problem.batch, problem.sq, problem.hq, a.dv), a.output_dtype),
                Poisoned(staging, stream, (problem.batch, problem.hq, problem.sq), "fp32"),
            )
            for _ in kernels
        ]
        calls = [
            _call(kernel, problem, (q, k, v, out.view, lse.view), device, stream) for kernel, (out, lse) in zip(kernels, outputs)
        ]
        try:
            for name, call, (out, lse) in zip(names, calls, outputs):
                channel.doing(f"launch of {name}", timeout)
                out.poison()
                lse.poison()
                call()
                driver.stream_synchronize(stream)
            found = [[x.download().tobytes() for x in of] for of in outputs]
            samples, host = _timed(
                calls, stream, lambda: channel.doing(f"{item['traced']} and the normal build are timed", timeout)
            )
            channel.doing(f"launch of {item['traced']}", timeout)
            for call in calls[:2]:
                call()
            driver.stream_synchronize(stream)
        except driver.DriverError as e:
            raise guard.GuardError("fault", f"launch of {item['traced']} or its normal build", str(e)) from e
        channel.doing("marks are written", PREPARE_SECONDS)
        file = Path(item["folder"]) / "marks.npz"
        np.savez(file, **recorded.trace_words(device))
    for kernel in kernels:
        kernel.unload()
    times = {name: [s.ms for s in of] for name, of in zip(LAUNCHES, samples)}
    return {"file": str(file), "ms": times, "host_ms": host, "same_bits": found[0] == found[1] == found[2]}


def _kernel(folder: str, name: str) -> Kernel:
    built = load_built(folder, name)
    return Kernel(built.plan, built.source.text, built.cubin, built.report)


def _call(kernel: Kernel, problem: Problem, tensors: tuple[DeviceView, ...], device: int, stream: int) -> Callable[[], None]:
    """A launch on q, k, v, out and lse that costs the host a few microseconds."""
    facts: list[dict[str, Any]] = [x.__cuda_array_interface__ for x in tensors]
    strides = {}
    for name, x in zip("qkvo", facts):
        batch, second, third, _ = (s // np.dtype(x["typestr"]).itemsize for s in x["strides"])
        turned = name == "v" and kernel.plan.schedule.v_transposed  # (batch, heads, head_dim, seq): over batch, head_dim, head
        strides["out" if name == "o" else name] = (batch, third, second) if turned else (batch, second, third)
    sizes = Problem(problem.batch, problem.sq, problem.sk, problem.hq, problem.hkv)
    bound = kernel.bind(device, sizes, strides, {}, stream)
    addresses = tuple(int(x["data"][0]) for x in facts)
    return lambda: bound.run(addresses, stream)


def _timed(calls: Sequence[Callable[[], None]], stream: int, alive: Callable[[], None]) -> tuple[list[list[Sample]], float]:
    """Samples of each call, and what queueing a launch takes on the host, in ms."""
    clock = _EventClock(stream, alive)
    tasks = [_LaunchTask(str(i), call) for i, call in enumerate(calls)]
    for task in tasks:  # a first guess, then about GRAPH_MS of launches
        task.launches = launches_for(clock.measure(task, warm_replays=0, replays=1).ms, 1)
    clock.host_ms.clear()
    samples = burst(tasks, clock, ROUNDS)
    clock.close()
    return samples, statistics.median(clock.host_ms)


class _LaunchTask:
    """Launches one after another: a `timing.Task`."""

    def __init__(self, name: str, call: Callable[[], None]):
        self.name, self._call, self.launches = name, call, 1

    def once(self) -> None:
        self._call()

    def replay(self) -> None:
        for _ in range(self.launches):
            self._call()


class _EventClock:
    """The driver's events on a stream: a `timing.Clock`."""

    def __init__(self, stream: int, alive: Callable[[], None]):
        self._stream, self._alive = stream, alive
        self._events = [driver.event_create() for _ in range(2)]
        self.host_ms: list[float] = []

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def measure(self, task: Task, *, warm_replays: int, replays: int) -> Sample:
        self._alive()
        start, end = self._events
        for _ in range(warm_replays):
            task.replay()
        if not warm_replays:
            task.once()
        driver.event_record(start, self._stream)
        queued = time.perf_counter()
        for _ in range(replays):
            task.replay()
        launches = replays * task.launches
        self.host_ms.append(1e3 * (time.perf_counter() - queued) / launches)
        driver.event_record(end, self._stream)
        return Sample(driver.event_milliseconds(start, end) / launches)

    def close(self) -> None:
        for event in self._events:
            driver.event_destroy(event)
