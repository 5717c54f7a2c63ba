"""Measuring beside one another: order of rounds, bursts and sustained load, medians with intervals, clocks and power.

The method, and why (identical code read 644 and 730 TFLOP/s when functions ran in a fixed order):
  * all functions of a case run in one process on the same inputs, round by round, in an order that rotates and reverses;
  * burst: a rest, one launch to wake the GPU, then a CUDA graph of some milliseconds of back-to-back launches between two events;
  * sustained: the function alone long enough that the power limit sets the clock, then the measured part, without a pause;
  * nothing is flushed: a launch finds in the L2 cache what the launch before it left there, for every function alike.
Nothing in this module needs a GPU until a `TorchClock`, a `GraphTask` or `open_sensors` is used.
"""

from __future__ import annotations

import importlib
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

CONFIDENCE = 0.95
REST_SECONDS = 0.015
GRAPH_MS = 4.0
"""Length of one burst measurement."""
MAX_LAUNCHES = 2000
"""In one graph: bounds the time that capturing takes for kernels of a few microseconds."""
SUSTAINED_WARM_SECONDS = 0.07
SUSTAINED_SECONDS = 0.13
SUSTAINED_ROUNDS = 6
"""At most so many rounds are sustained: each costs 0.2 s a function."""


# statistics ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A median with the confidence interval that the order statistics of the samples give: it assumes independent samples, and
    no shape of their distribution. `confidence` is the exact coverage: at least 0.95 from six samples on, less below."""

    median: float
    low: float
    high: float
    confidence: float

    def map(self, f: Callable[[float], float]) -> Interval:
        """The same through a monotone function; a falling one swaps the ends."""
        ends = sorted((f(self.low), f(self.high)))
        return Interval(f(self.median), ends[0], ends[1], self.confidence)


def interval(samples: Sequence[float]) -> Interval:
    """Median and its interval [x_k, x_(n+1-k)] for the largest k that keeps 95 % (binomial, exact); k = 1 where none does."""
    x, n = sorted(samples), len(samples)
    if n == 0:
        raise ValueError("no samples")
    k, outside = 1, 2 * 0.5**n  # the median lies below x_1, or above x_n, if all samples fall on one side of it
    while k < (n + 1) // 2:
        wider = outside + 2 * math.comb(n, k) * 0.5**n
        if wider > 1 - CONFIDENCE:
            break
        k, outside = k + 1, wider
    return Interval((x[(n - 1) // 2] + x[n // 2]) / 2, x[k - 1], x[n - k], 1 - outside)


# rounds -------------------------------------------------------------------------------------------------------------------


def order(functions: int, round_: int) -> list[int]:
    """The order of a round. Two rounds start at the same function, the second runs backwards; then the start moves on by one.

    So every function stands equally often at each place and at its mirror image, and none always follows the same other.
    """
    start = round_ // 2
    forward = [(start + i) % functions for i in range(functions)]
    return forward if round_ % 2 == 0 else forward[::-1]


@dataclass(frozen=True)
class Sample:
    """One measurement: milliseconds a launch, and the SM clock read at its end (under load if sustained), if it can be read."""

    ms: float
    sm_mhz: float | None = None


class Task(Protocol):
    """A function ready to be timed."""

    @property
    def name(self) -> str: ...

    @property
    def launches(self) -> int:
        """How many launches of the function one `replay` is."""

    def once(self) -> None:
        """Queue one launch, outside the graph."""

    def replay(self) -> None:
        """Queue the graph."""


class Clock(Protocol):
    """The device's side of a measurement."""

    def rest(self, seconds: float) -> None: ...

    def measure(self, task: Task, *, warm_replays: int, replays: int) -> Sample:
        """Time `replays` replays that follow, without a pause, `warm_replays` of them (or, if that is 0, one launch)."""


def burst(tasks: Sequence[Task], clock: Clock, rounds: int, rest: float = REST_SECONDS) -> list[list[Sample]]:
    """`rounds` samples of each task, each after a rest: boost clocks, as for a call between other work."""
    samples: list[list[Sample]] = [[] for _ in tasks]
    for r in range(rounds):
        for i in order(len(tasks), r):
            clock.rest(rest)
            samples[i].append(clock.measure(tasks[i], warm_replays=0, replays=1))
    return samples


def sustained(tasks: Sequence[Task], clock: Clock, rounds: int, ms: Sequence[float]) -> list[list[Sample]]:
    """`rounds` samples of each task under load: 0.07 s of warm-up and 0.13 s measured, clocks as the power limit leaves them.
    `ms`: about what a launch of each takes."""
    samples: list[list[Sample]] = [[] for _ in tasks]
    for r in range(rounds):
        for i in order(len(tasks), r):
            replay = ms[i] * tasks[i].launches / 1e3
            warm, measured = (max(1, math.ceil(seconds / replay)) for seconds in (SUSTAINED_WARM_SECONDS, SUSTAINED_SECONDS))
            samples[i].append(clock.measure(tasks[i], warm_replays=warm, replays=measured))
    return samples


def launches_for(measured_ms: float, launches: int, target_ms: float = GRAPH_MS) -> int:
    """Launches that make a graph of about `target_ms`, where one of `launches` took `measured_ms`."""
    return min(MAX_LAUNCHES, max(1, round(launches * target_ms / max(measured_ms, 1e-6))))


# on the device, through torch ---------------------------------------------------------------------------------------------


class GraphTask:
    """A function captured in a CUDA graph of about `GRAPH_MS` back-to-back launches. `call` queues one launch on torch's current
    stream and must have run once before (a first call loads the kernel, which cannot be captured). `release` frees what
    `call` keeps in memory for its streams and graphs, once a graph is gone; the next `call` makes it anew. `warm`: called in the place of
    `call` outside graphs, where that needs what `warm` leaves in its stream's memory."""

    def __init__(
        self,
        torch: Any,
        name: str,
        call: Callable[[], Any],
        clock: Clock,
        release: Callable[[], None] = lambda: None,
        warm: Callable[[], Any] | None = None,
    ):
        self._torch, self.name, self._call, self._release, self._warm = torch, name, call, release, warm or call
        self._graph: Any = None
        self.launches = 2
        for _ in range(3):  # the first guess includes the graph's own launch latency, which misleads for kernels of microseconds
            self._capture()
            clock.measure(self, warm_replays=0, replays=1)  # the first replay uploads the graph
            ms = clock.measure(self, warm_replays=0, replays=1).ms * self.launches
            wanted = launches_for(ms, self.launches)
            if wanted == self.launches or 0.7 * GRAPH_MS <= ms <= 1.5 * GRAPH_MS:
                break
            self.launches = wanted
        else:
            self._capture()

    def _capture(self) -> None:
        torch = self._torch
        if self._graph is not None:
            self.close()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._warm()  # leaves behind, on this stream, the workspace that a capture takes over
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            for _ in range(self.launches):
                self._call()

    def close(self) -> None:
        """Wait, then let the graph and the memory that its launches use go. The task cannot be replayed any more."""
        self._torch.cuda.synchronize()
        self._graph = None
        self._release()

    def once(self) -> None:
        self._warm()

    def replay(self) -> None:
        self._graph.replay()


class TorchClock:
    """CUDA events on torch's current stream. `announce` hears the name of each task about to be measured."""

    def __init__(self, torch: Any, sm_mhz: Callable[[], float | None], announce: Callable[[str], None]):
        self._torch, self._sm_mhz, self._announce = torch, sm_mhz, announce

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def measure(self, task: Task, *, warm_replays: int, replays: int) -> Sample:
        self._announce(task.name)
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        if warm_replays:
            for _ in range(warm_replays):
                task.replay()
        else:
            task.once()
        start.record()
        for _ in range(replays):
            task.replay()
        end.record()
        under_load = self._sm_mhz() if warm_replays else None  # queueing is far ahead of the GPU here
        end.synchronize()
        mhz = under_load if warm_replays else self._sm_mhz()
        return Sample(start.elapsed_time(end) / (replays * task.launches), mhz)


# clocks, power, temperature: only read ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """State of the GPU; None: cannot be read."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class Sensors:
    """Where readings come from. `source`: "NVML", "nvidia-smi", or "none (why)"."""

    source: str
    driver: str | None
    power_limit_watts: float | None
    max_sm_mhz: float | None
    read: Callable[[], Reading]
    sm_mhz: Callable[[], float | None]
    """Of this moment, if that can be told within about a millisecond."""


def open_sensors(uuid: str) -> Sensors:
    """Sensors of the GPU with that UUID ("GPU-…"): NVML through pynvml (package nvidia-ml-py) if installed, else nvidia-smi."""
    reasons = []
    for source in (_nvml, _nvidia_smi):
        try:
            return source(uuid)
        except _NoSensor as e:
            reasons.append(str(e))
    return Sensors(f"none ({'; '.join(reasons)})", None, None, None, Reading, lambda: None)


class _NoSensor(Exception):
    pass


def _nvml(uuid: str) -> Sensors:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise _NoSensor("pynvml is not installed") from None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as e:
        raise _NoSensor(f"NVML: {e}") from None

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(*args)
        except nvml.NVMLError:
            return None  # this GPU or this user cannot read it

    def sm_mhz() -> float | None:
        return _number(ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM))

    def read() -> Reading:
        return Reading(
            sm_mhz(),
            _number(ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM)),
            _number(ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            _number(ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    version = ask("nvmlSystemGetDriverVersion")
    return Sensors(
        "NVML",
        version.decode() if isinstance(version, bytes) else version,
        _number(ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
        _number(ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM)),
        read,
        sm_mhz,
    )


_SMI_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "power.limit", "clocks.max.sm", "driver_version")


def _nvidia_smi(uuid: str) -> Sensors:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise _NoSensor("no nvidia-smi")
    command = [program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits", f"--id={uuid}"]

    def query() -> dict[str, str]:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError) as e:
            raise _NoSensor(f"nvidia-smi: {e}") from None
        return dict(zip(_SMI_FIELDS, (field.strip() for field in done.stdout.strip().split(","))))

    def read() -> Reading:
        try:
            now = query()
        except _NoSensor:
            return Reading()
        return Reading(*(_number(now.get(name)) for name in _SMI_FIELDS[:4]))

    first = query()
    limit, fastest = _number(first.get("power.limit")), _number(first.get("clocks.max.sm"))
    return Sensors("nvidia-smi", first.get("driver_version"), limit, fastest, read, lambda: None)


def _number(value: Any, factor: float = 1.0) -> float | None:
    """What a sensor said, as a number; None for what is no number ("[N/A]")."""
    try:
        return round(float(value) * factor, 3)
    except (TypeError, ValueError):
        return None
