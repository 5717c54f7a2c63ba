"""Memory that a kernel keeps to itself for as long as it lives, and what it wrote there: the debug record, the trace buffers.

The debug record lies in host memory mapped into the context, so that it can be read after a trap; trace buffers lie in the device's
memory, poisoned when they are made, so that a lane that never ended can be told from one that did.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from . import driver
from .errors import InternalError, LaunchError
from .plan.kernel import Launch, Plan, trace_buffer

POISON = 0xFF
"""Every byte of a trace buffer before the first launch."""

_OWN = re.compile("debug|" + trace_buffer(".*"))


def is_own(workspace: str) -> bool:
    """Whether a kernel keeps the workspace of that name to itself (else it comes from the pool that kernels share)."""
    return _OWN.fullmatch(workspace) is not None


class Records:
    """Those of one kernel, by device. Needs the device's context to be current where memory is made, read or freed."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._debug: dict[int, tuple[int, int, int]] = {}  # device → host address, device address, bytes
        self._traces: dict[int, dict[str, tuple[int, int]]] = {}  # device → workspace → address, bytes

    def addresses(self, device: int, launch: Launch) -> dict[str, int]:
        """Device addresses of the launch's own workspaces by name; made at first use."""
        sizes = {name: size for name, size, _ in launch.workspaces if is_own(name)}
        return {n: self._debug_address(device, b) if n == "debug" else self._trace_address(device, n, b) for n, b in sizes.items()}

    def _debug_address(self, device: int, nbytes: int) -> int:
        if device not in self._debug:
            host, address = driver.host_alloc(nbytes)
            ctypes.memset(host, 0, nbytes)
            self._debug[device] = host, address, nbytes
        _, address, room = self._debug[device]
        return _fitting("debug", address, room, nbytes)

    def _trace_address(self, device: int, name: str, nbytes: int) -> int:
        mine = self._traces.setdefault(device, {})
        if name not in mine:
            mine[name] = driver.mem_alloc(nbytes), nbytes
            stream = driver.own_stream(device)
            driver.memset(mine[name][0], POISON, nbytes, stream)
            driver.stream_synchronize(stream)
        return _fitting(name, *mine[name], nbytes)

    def debug_words(self, device: int | None) -> tuple[int, ...]:
        """Of the record on `device` (None: the only one), 32 bits each. LaunchError: there is none."""
        host, _, nbytes = self._debug[_device("debug records", self._plan, self._debug, device)]
        return tuple((ctypes.c_uint32 * (nbytes // 4)).from_address(host))

    def trace_words(self, device: int | None) -> dict[str, npt.NDArray[np.uint32]]:
        """The trace buffers on `device` (None: the only one) by kernel, in the plan's order. LaunchError: there are none."""
        device = _device("traces", self._plan, self._traces, device)
        stream, words = driver.own_stream(device), {}
        for kernel in self._plan.kernels:
            address, nbytes = self._traces[device][trace_buffer(kernel.name)]
            words[kernel.name] = np.empty(nbytes // 4, np.uint32)
            driver.memcpy_to_host(words[kernel.name].ctypes.data, address, nbytes, stream)
        driver.stream_synchronize(stream)
        return words

    def free(self, device: int) -> None:
        """Give the device's memory back. The debug record stays, to be read."""
        for address, _ in self._traces.pop(device, {}).values():
            driver.mem_free(address)


def _fitting(name: str, address: int, room: int, nbytes: int) -> int:
    if room < nbytes:
        raise InternalError(f"{name} grew from {room} to {nbytes} bytes; its size must not depend on the call")
    return address


def _device(what: str, plan: Plan, kept: dict[int, Any], device: int | None) -> int:
    if device is None and len(kept) == 1:
        (device,) = kept
    if device is None or device not in kept:
        raise LaunchError(f"kernel {plan.id} has {what} of the devices {sorted(kept)}, not of {device}")
    return device
