"""A call bound to shapes, strides and a device: the argument buffers of its kernels, of which a launch rewrites the pointers
and the descales that are numbers.

The arguments of a kernel, in order: a CUtensorMap (128 bytes, aligned to 64) per recipe in `KernelPlan.maps`, then one struct
Params by value: 8-byte pointers in the order of `KernelPlan.pointers`, then the scalars (i64 before 32-bit ones), naturally aligned.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from operator import itemgetter

from . import driver
from .errors import InputError, InternalError
from .interop.arrays import check_pointers, output_shapes
from .plan.kernel import DESCALES, KernelLaunch, KernelPlan, Launch, Plan, TensorMap
from .workspace import Request, Workspaces

TENSORS = ("q", "k", "v", "out", "lse")
MAX_ENCODED = 256
"""Encoded tensor maps that each place in an argument buffer remembers; then the least recently used goes."""

ONES: tuple[float, ...] = (1.0, 1.0, 1.0)
"""DESCALES that were not given, or are arrays."""

_FORMATS = {"i64": "q", "i32": "i", "f32": "f"}
_FLOAT = struct.Struct("=f")


class MapSlot:
    """The place of one CUtensorMap in an argument buffer, and the maps encoded so far, by the tensor's address."""

    def __init__(self, tensor_map: TensorMap, memory: memoryview, index: int):
        m = tensor_map
        self.index = index
        """Of the tensor among the pointer values of a launch."""
        self.address = -1
        """For which the place holds the map; -1: for none yet."""
        self._map, self._memory = m, memory
        self._encoder = driver.TensorMapEncoder(m.dtype, m.dims, m.strides, m.box)
        self._encoded: OrderedDict[int, bytes] = OrderedDict()

    def write(self, address: int) -> None:
        """Put the map of the tensor at `address` in its place. InputError: TMA cannot address such a tensor."""
        encoded = self._encoded.get(address)
        if encoded is None:
            encoded = self._encoded[address] = self._encode(address)
            if len(self._encoded) > MAX_ENCODED:
                self._encoded.popitem(last=False)
        else:
            self._encoded.move_to_end(address)
        self._memory[:] = encoded
        self.address = address

    def _encode(self, address: int) -> bytes:
        try:
            return self._encoder.encode(address)
        except driver.DriverError as e:
            m = self._map
            raise InputError(m.tensor, f"TMA cannot address it: strides {m.strides} bytes, address {address:#x} ({e})") from None


class KernelArguments:
    """The argument buffer of one kernel. `names` are those of the pointer values that `write` will get, in order."""

    def __init__(self, kernel: KernelPlan, launch: KernelLaunch, names: tuple[str, ...]):
        kinds = [p.ctype for p in kernel.params]
        if "i64" in kinds[kinds.count("i64") :]:
            raise InternalError(f"kernel {kernel.name}: i64 parameters must stand before 32-bit ones, got {kinds}")
        missing = [n for n in (*kernel.pointers, *(m.tensor for m in launch.maps)) if n not in names]
        if missing:
            raise InternalError(f"kernel {kernel.name}: no value for the pointers {missing}; known: {names}")
        pointers = struct.Struct(f"={len(kernel.pointers)}Q")
        scalars = struct.Struct("=" + "".join(_FORMATS[c] for c in kinds))
        size = driver.TENSOR_MAP_BYTES
        self._offset = len(launch.maps) * size
        params_bytes = -(-(pointers.size + scalars.size) // 8) * 8  # C pads the struct to its alignment
        raw = ctypes.create_string_buffer(self._offset + params_bytes + 64)
        start = -ctypes.addressof(raw) % 64
        memory = memoryview(raw).cast("B")[start:]
        places = [*range(0, self._offset, size), self._offset]
        self._addresses = (ctypes.c_void_p * len(places))(*(ctypes.addressof(raw) + start + i for i in places))
        self.params = ctypes.addressof(self._addresses)
        """Address of the array of argument addresses, as the driver's launch takes it."""
        self.grid, self.block, self.smem_bytes = launch.grid, launch.block, launch.smem_bytes
        self._memory, self._pack = memory, pointers.pack_into
        self._maps = [MapSlot(m, memory[i : i + size], names.index(m.tensor)) for m, i in zip(launch.maps, places)]
        self._pick = picker([names.index(n) for n in kernel.pointers])
        first = self._offset + pointers.size
        scalars.pack_into(memory, first, *launch.scalars)
        self._numbers = ONES
        """What the DESCALES in the buffer are."""
        self._number_places = [
            (first + struct.calcsize("=" + "".join(_FORMATS[c] for c in kinds[:i])), DESCALES.index(p.name.removesuffix("_value")))
            for i, p in enumerate(kernel.params)
            if p.ctype == "f32"
        ]

    def write(self, values: tuple[int, ...], numbers: tuple[float, ...] = ONES) -> None:
        """The pointers, the tensor maps of tensors that moved since the last time, and DESCALES given as other numbers than then."""
        for slot in self._maps:
            if values[slot.index] != slot.address:
                slot.write(values[slot.index])
        self._pack(self._memory, self._offset, *self._pick(values))
        if numbers != self._numbers:
            for place, index in self._number_places:
                _FLOAT.pack_into(self._memory, place, numbers[index])
            self._numbers = numbers


def picker(indices: list[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """A function that picks these items of a tuple, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)


class BoundCall:
    """A plan bound to sizes and strides on one device; `run` launches it for given addresses. Safe to use from many threads.

    `functions`: handles of the plan's kernels, in order. `pool`: None if the plan has no workspace. `debug`: device address of the
    debug record, 0 without one. `user`: the kernel's number in the pool.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Launch,
        device: int,
        functions: tuple[int, ...],
        pool: Workspaces | None,
        debug: int = 0,
        user: int = 0,
    ):
        self.device = device
        self.launch = launch
        self.out_shape, self.lse_shape = output_shapes(plan.attention, launch.problem).values()
        self._context = driver.primary_context(device)
        self._pool, self._user = pool, user
        self._requests: tuple[Request, ...] = tuple(w for w in launch.workspaces if w[0] != "debug")
        self._debug = (debug,) if debug else ()
        self._no_keys = launch.problem.sk == 0
        self._scaled = plan.attention.dtype == "e4m3"
        scales = DESCALES if self._scaled else ()
        names = TENSORS + scales + tuple(w[0] for w in self._requests) + (("debug",) if debug else ())
        arguments = [KernelArguments(kernel, bound, names) for kernel, bound in zip(plan.kernels, launch.kernels)]
        self._kernels = list(zip(functions, arguments))
        self._lock = threading.Lock()  # the argument buffers are shared by all callers

    def run(
        self, addresses: tuple[int, ...], stream: int, scales: tuple[int, ...] = (0, 0, 0), numbers: tuple[float, ...] = ONES
    ) -> None:
        """Launch on a stream of this device. `addresses` in device memory of q, k, v, out, lse; of k and v any without keys. For e4m3
        `scales`: addresses of the DESCALES that are arrays, 0 of the others, which are `numbers`.

        InputError: an address is misaligned, or the driver cannot describe a tensor to TMA.
        """
        q, k, v, out, lse = addresses
        if (q | k | v | out) & 15 or lse & 3:
            check_pointers(q=q, k=k, v=v, out=out, lse=lse)
        if self._no_keys:
            addresses = (q, out, out, out, lse)  # k and v are never read, but TMA descriptors need a valid address
        if self._scaled:
            check_pointers(**dict(zip(DESCALES, scales)))
            addresses += scales
        if driver.current_context() == self._context:
            self._run(addresses, numbers, stream)
            return
        driver.push_context(self._context)
        try:
            self._run(addresses, numbers, stream)
        finally:
            driver.pop_context()

    def _run(self, values: tuple[int, ...], numbers: tuple[float, ...], stream: int) -> None:
        if self._pool is None:
            self._launch(values, numbers, stream)
            return
        with self._pool.lock:
            self._launch(values + self._pool.pointers(self._requests, stream, self._user), numbers, stream)

    def _launch(self, values: tuple[int, ...], numbers: tuple[float, ...], stream: int) -> None:
        values += self._debug
        with self._lock:
            for function, a in self._kernels:
                a.write(values, numbers)
                driver.launch(function, a.grid, a.block, a.smem_bytes, stream, a.params)
