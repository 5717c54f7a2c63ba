"""A call bound to shapes, strides and a device: the argument buffers of its kernels, of which a launch rewrites the pointers only.

The arguments of a kernel, in order: a CUtensorMap (128 bytes, aligned to 64) per recipe in `KernelPlan.maps`, then one struct
Params by value: 8-byte pointers in the order of `KernelPlan.pointers`, then the scalars (i64 before i32), naturally aligned.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from operator import itemgetter

from . import driver
from .attention import Attention
from .errors import InputError, InternalError
from .interop.arrays import check_pointers, output_shapes
from .plan.kernel import KernelLaunch, KernelPlan, Launch, Plan
from .workspace import Request, Workspaces

TENSORS = ("q", "k", "v", "out", "lse")
MAX_ENCODED = 256
"""Sets of tensor maps a bound call remembers, by address; then the least recently used go."""

_FORMATS = {"i64": "q", "i32": "i"}


class KernelArguments:
    """The argument buffer of one kernel. `names` are those of the pointer values that `write_pointers` will get, in order."""

    def __init__(self, kernel: KernelPlan, launch: KernelLaunch, names: tuple[str, ...]):
        kinds = [p.ctype for p in kernel.params]
        if kinds != sorted(kinds, reverse=True):
            raise InternalError(f"kernel {kernel.name}: i64 parameters must stand before i32 ones, got {kinds}")
        missing = [n for n in kernel.pointers if n not in names]
        if missing:
            raise InternalError(f"kernel {kernel.name}: no value for the pointers {missing}; known: {names}")
        pointers = struct.Struct(f"={len(kernel.pointers)}Q")
        scalars = struct.Struct("=" + "".join(_FORMATS[c] for c in kinds))
        maps_bytes = len(kernel.maps) * driver.TENSOR_MAP_BYTES
        params_bytes = -(-(pointers.size + scalars.size) // 8) * 8  # C pads the struct to its alignment
        raw = ctypes.create_string_buffer(maps_bytes + params_bytes + 64)
        start = -ctypes.addressof(raw) % 64
        self._memory = memoryview(raw).cast("B")[start:]
        base = ctypes.addressof(raw) + start
        addresses = [base + i * driver.TENSOR_MAP_BYTES for i in range(len(kernel.maps))] + [base + maps_bytes]
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self.params = ctypes.addressof(self._addresses)
        """Address of the array of argument addresses, as the driver's launch takes it."""
        self.grid, self.block, self.smem_bytes = launch.grid, launch.block, launch.smem_bytes
        self.maps_bytes = maps_bytes
        self._offset, self._pack = maps_bytes, pointers.pack_into
        self._pick = picker([names.index(n) for n in kernel.pointers])
        scalars.pack_into(self._memory, maps_bytes + pointers.size, *launch.scalars)

    def write_maps(self, encoded: bytes) -> None:
        """All CUtensorMaps, one after another."""
        self._memory[: self.maps_bytes] = encoded

    def write_pointers(self, values: tuple[int, ...]) -> None:
        self._pack(self._memory, self._offset, *self._pick(values))


def picker(indices: list[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """A function that picks these items of a tuple, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)


class BoundCall:
    """A plan bound to sizes and strides on one device; `run` launches it for given addresses. Safe to use from many threads.

    `functions`: handles of the plan's kernels, in order. `debug`: device address of the debug record, 0 without one.
    """

    def __init__(
        self, plan: Plan, launch: Launch, device: int, functions: tuple[int, ...], pool: Workspaces | None, debug: int = 0
    ):
        attention: Attention = plan.attention
        self.device = device
        self.launch = launch
        self.out_shape, self.lse_shape = output_shapes(attention, launch.problem).values()
        self._context = driver.primary_context(device)
        self._pool = pool
        self._requests: tuple[Request, ...] = tuple(w for w in launch.workspaces if w[0] != "debug")
        self._debug = (debug,) if debug else ()
        self._no_keys = launch.problem.sk == 0
        names = TENSORS + tuple(w[0] for w in self._requests) + (("debug",) if debug else ())
        self._kernels = [
            (function, KernelArguments(kernel, bound, names))
            for function, kernel, bound in zip(functions, plan.kernels, launch.kernels)
        ]
        self._encoders = [
            [(m.tensor, TENSORS.index(m.tensor), driver.TensorMapEncoder(m.dtype, m.dims, m.strides, m.box)) for m in bound.maps]
            for bound in launch.kernels
        ]
        self._map_key = picker(sorted({index for kernel in self._encoders for _, index, _ in kernel}))
        self._encoded: OrderedDict[tuple[int, ...], list[bytes]] = OrderedDict()
        self._written: tuple[int, ...] = ()
        self._strides = {m.tensor: m.strides for bound in launch.kernels for m in bound.maps}
        self._lock = threading.Lock()  # the argument buffers are shared by all callers

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        """Launch on a stream of this device. `addresses` in device memory of q, k, v, out, lse; of k and v any without keys.

        InputError: an address is misaligned, or the driver cannot describe a tensor to TMA.
        """
        q, k, v, out, lse = addresses
        if (q | k | v | out) & 15 or lse & 3:
            check_pointers(q=q, k=k, v=v, out=out, lse=lse)
        if self._no_keys:
            addresses = (q, out, out, out, lse)  # k and v are never read, but TMA descriptors need a valid address
        if driver.current_context() == self._context:
            self._run(addresses, stream)
            return
        driver.push_context(self._context)
        try:
            self._run(addresses, stream)
        finally:
            driver.pop_context()

    def _run(self, values: tuple[int, ...], stream: int) -> None:
        if self._pool is not None:
            values += self._pool.pointers(self._requests, stream)
        values += self._debug
        with self._lock:
            addresses = self._map_key(values)
            if addresses != self._written:
                self._write_maps(values, addresses)
            for function, a in self._kernels:
                a.write_pointers(values)
                driver.launch(function, a.grid, a.block, a.smem_bytes, stream, a.params)

    def _write_maps(self, values: tuple[int, ...], addresses: tuple[int, ...]) -> None:
        encoded = self._encoded.get(addresses)
        if encoded is None:
            encoded = [b"".join(self._encode(*e, values) for e in kernel) for kernel in self._encoders]
            self._encoded[addresses] = encoded
            if len(self._encoded) > MAX_ENCODED:
                self._encoded.popitem(last=False)
        else:
            self._encoded.move_to_end(addresses)
        for (_, arguments), maps in zip(self._kernels, encoded):
            arguments.write_maps(maps)
        self._written = addresses

    def _encode(self, tensor: str, index: int, encoder: driver.TensorMapEncoder, values: tuple[int, ...]) -> bytes:
        try:
            return encoder.encode(values[index])
        except driver.DriverError as e:
            strides = self._strides[tensor]
            raise InputError(tensor, f"TMA cannot address it: strides {strides} bytes, address {values[index]:#x} ({e})") from None
