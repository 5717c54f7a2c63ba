"""The GPU's side of a check: a task of the guard. Runs every case and saves what the judges compare."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import driver
from ..compile import load_built
from ..guard import Channel, GuardError
from ..interop.host import Staging
from ..launch import Kernel
from ..oracle import CheckProblem, make_case, sample_rows
from ..oracle.numeric import DTYPES, Array
from .judge import save_outputs

GUARD_BYTES = 4096
"""On both sides of an output: a store out of bounds lands there."""
POISON = 0xFF
"""Every byte of an output before a launch: NaN in bf16, fp16, fp32 and e4m3."""
PREPARE_SECONDS = 120.0
"""For what runs on the CPU between launches (inputs of a case, reading a kernel) while the judges keep all cores busy."""


def run(request: Mapping[str, Any], channel: Channel) -> None:
    """request: device, timeout (seconds a launch may take), output (folder), and items: each with folder and name of a built kernel, runs,
    jitter, and cases: the fields of a CheckProblem and its seed.

    Sends gpu {name, driver} once, and for every case {item, case, file, reason}: `reason` tells what the outputs show by themselves.
    """
    device, timeout = request["device"], request["timeout"]
    channel.doing("the driver starts", PREPARE_SECONDS)
    info = driver.device_info(device)
    channel.send("gpu", name=info.name, driver=driver_text(info))
    with driver.use_device(device):
        stream = driver.own_stream(device)
        for n, item in enumerate(request["items"]):
            channel.doing(f"{item['name']} is loaded", PREPARE_SECONDS)
            built = load_built(item["folder"], item["name"])
            kernel = Kernel(built.plan, built.source.text, built.cubin, built.report)
            for i, case in enumerate(item["cases"]):
                what = f"{item['name']} on {CheckProblem(**case['problem'])}"
                channel.doing(f"inputs of {what}", PREPARE_SECONDS)
                file = Path(request["output"]) / f"{n}-{i}.npz"
                started = time.perf_counter()
                reason = _case(kernel, case, stream, device, item, file, channel, what, timeout)
                seconds = round(time.perf_counter() - started, 6)
                channel.send("case", item=n, case=i, file=str(file), reason=reason, seconds=seconds)
            kernel.unload()


def _case(
    kernel: Kernel,
    case: Mapping[str, Any],
    stream: int,
    device: int,
    item: Mapping[str, Any],
    file: Path,
    channel: Channel,
    what: str,
    timeout: float,
) -> str:
    attention = kernel.plan.attention
    problem, seed = CheckProblem(**case["problem"]), case["seed"]
    c = make_case(attention, kernel.plan.schedule, problem, seed=seed)
    reason = ""
    with Staging(stream) as staging:
        q, k, v, *scales = upload(staging, (c.q, c.k, c.given_v, *(x for x in c.descales.values() if isinstance(x, np.ndarray))))
        descales = dict(zip(c.descales, scales))
        out = Poisoned(staging, stream, (problem.batch, problem.sq, problem.hq, attention.dv), attention.output_dtype)
        lse = Poisoned(staging, stream, (problem.batch, problem.hq, problem.sq), "fp32")
        first: list[Array] = []
        for n in range(item["runs"]):
            which = f"launch of {what}" + (f", run {n + 1}" if item["runs"] > 1 else "")
            channel.doing(which, timeout)
            if item["jitter"]:
                kernel.seed = n + 1
            out.poison()
            lse.poison()
            try:
                kernel(q, k, v, out=out.view, lse=lse.view, stream=stream, **descales)
                driver.stream_synchronize(stream)
            except driver.DriverError as e:
                record = kernel.debug_record(device) if kernel.plan.debug else ()
                raise GuardError("fault", which, str(e), record=record) from e
            now = [out.download(), lse.download()]
            first = first or now
            if not reason:
                reason = _stray(out, now[0]) or _stray(lse, now[1])
            if not reason and not all(np.array_equal(a, b) for a, b in zip(first, now)):
                reason = f"run {n + 1} gives other bits than the first" + (f" (jitter seed {n + 1})" if item["jitter"] else "")
        channel.doing(f"outputs of {what}", PREPARE_SECONDS)
        o, row_sums = out.values(first[0]), lse.values(first[1])
    for name, x in (("out", o), ("lse", row_sums)):
        missing = int(
            np.count_nonzero(np.isnan(x.astype(np.float32)))
        )  # inputs are finite: NaN is what was never written, or wrong
        if missing and not reason:
            reason = f"{missing} of {x.size} elements of {name} are NaN"
    save_outputs(file, o, row_sums, sample_rows(problem.sq, seed=seed))
    return reason


def _stray(tensor: Poisoned, data: Array) -> str:
    n = tensor.stray(data)
    return f"{n} bytes beside {tensor.name} were overwritten" if n else ""


def driver_text(info: driver.DeviceInfo) -> str:
    """Version of the kernel driver, where the system tells it, and the newest CUDA it supports: "580.95.05, CUDA 13.0"."""
    cuda = "CUDA {}.{}".format(*info.driver_version)
    try:
        found = re.search(r"\b(\d{3,}\.\d[\d.]*)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return cuda
    return f"{found[1]}, {cuda}" if found else cuda


# ---------------------------------------------------------------------------------------------------------------- tensors


class DeviceView:
    """A tensor in device memory for `Kernel.__call__`, by the CUDA array interface (version 3). `strides` in bytes."""

    def __init__(self, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]):
        self.dtype = dtype.name
        """The interface has no code for bf16 and e4m3, which go as their bits; this name tells."""
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": f"<u{dtype.itemsize}" if dtype.itemsize > 1 else "|i1" if dtype.kind == "i" else "|u1",
            "data": (ptr, False),
            "version": 3,
            "stream": None,
        }


def upload(staging: Staging, arrays: tuple[Array, ...]) -> tuple[DeviceView, ...]:
    """The arrays on the device, as views with the strides they have here: each underlying buffer is copied once, gaps included."""
    buffers: dict[int, tuple[int, int]] = {}
    views = []
    for x in arrays:
        owner = x
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if id(owner) not in buffers:
            buffers[id(owner)] = (staging.upload(owner), owner.ctypes.data)
        there, here = buffers[id(owner)]
        views.append(DeviceView(there + (x.ctypes.data - here if x.size else 0), x.shape, x.strides, x.dtype))
    return tuple(views)


class Poisoned:
    """A contiguous output tensor on the device, filled with NaN, between two guard bands."""

    def __init__(self, staging: Staging, stream: int, shape: tuple[int, ...], dtype: str):
        self.name = "lse" if len(shape) == 3 else "out"
        self._shape, self._dtype, self._stream = shape, DTYPES[dtype], stream
        self._bytes = int(np.prod(shape)) * self._dtype.itemsize
        self._total = self._bytes + 2 * GUARD_BYTES
        self._staging = staging
        self._ptr = staging.alloc(self._total)
        strides, step = [], self._dtype.itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= max(n, 1)
        self.view = DeviceView(self._ptr + GUARD_BYTES, shape, tuple(reversed(strides)), self._dtype)

    def poison(self) -> None:
        driver.memset(self._ptr, POISON, self._total, self._stream)

    def download(self) -> Array:
        """All bytes, guard bands included."""
        data = np.empty(self._total, np.uint8)
        self._staging.download(self._ptr, data)
        return data

    def stray(self, data: Array) -> int:
        """Bytes of the guard bands that changed."""
        bands = np.concatenate([data[:GUARD_BYTES], data[GUARD_BYTES + self._bytes :]])
        return int(np.count_nonzero(bands != POISON))

    def values(self, data: Array) -> Array:
        return data[GUARD_BYTES : GUARD_BYTES + self._bytes].view(self._dtype).reshape(self._shape)
