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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter

from . import driver
from .errors import InputError, InternalError
from .interop.arrays import check_pointers, output_shapes
from .plan.expr import division
from .plan.kernel import DESCALES, KernelLaunch, KernelPlan, Launch, Plan, TensorMap
from .workspace import Request, Use, Workspaces

TENSORS = ("q", "k", "v", "out", "lse")
MAX_ENCODED = 256
"""Encoded tensor maps that each place in an argument buffer remembers; then the least recently used goes."""

ONES: tuple[float, ...] = (1.0, 1.0, 1.0)
"""DESCALES that were not given, or are arrays."""

_FORMATS = {"i64": "q", "i32": "i", "f32": "f", "divisor": "II"}
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

    def share(self, other: MapSlot) -> None:
        """Take over the encoded maps of another place for the same map, from here on in common."""
        self._encoded = other._encoded

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
        scalars.pack_into(memory, first, *_members(kinds, launch.scalars))
        self._numbers = ONES
        """What the DESCALES in the buffer are."""
        self._number_places = [
            (first + struct.calcsize("=" + "".join(_FORMATS[c] for c in kinds[:i])), DESCALES.index(p.name.removesuffix("_value")))
            for i, p in enumerate(kernel.params)
            if p.ctype == "f32"
        ]

    def share_maps(self, other: KernelArguments) -> None:
        """Keep encoded tensor maps in common with another buffer for the same kernel and sizes."""
        for mine, its in zip(self._maps, other._maps):
            mine.share(its)

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


def _members(kinds: list[str], scalars: tuple[int | float, ...]) -> Iterator[int | float]:
    """What stands in the struct for each scalar."""
    for kind, value in zip(kinds, scalars):
        if kind == "divisor":
            yield from division(int(value))
        else:
            yield value


def picker(indices: list[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """A function that picks these items of a tuple, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)


class Buffers:
    """Argument buffers of all kernels of a plan, the launches that read them, and what they hold."""

    __slots__ = ("arguments", "launches", "numbers", "stream", "values")

    def __init__(self, arguments: list[KernelArguments], functions: tuple[int, ...]):
        self.arguments = arguments
        self.launches = [driver.KernelLaunch(f, a.grid, a.block, a.smem_bytes, a.params) for f, a in zip(functions, arguments)]
        self.stream = -1
        """Of the launches; -1: of none yet."""
        self.values: tuple[int, ...] | None = None
        """The addresses that the buffers hold; None: not all of any."""
        self.numbers = ONES


class BoundCall:
    """A plan bound to sizes and strides on one device; `run` launches it for given addresses. Safe to use from many threads.

    `functions`: handles of the plan's kernels, in order. `pool`: None if no workspace comes from it. `own`: device addresses of the
    workspaces that do not, by name. `user`: the kernel's number in the pool.

    There are two sets of argument buffers, used in turn: a loop that keeps its last output while it allocates the next one alternates
    between two addresses, and then nothing needs to be written.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Launch,
        device: int,
        functions: tuple[int, ...],
        pool: Workspaces | None,
        own: Mapping[str, int] | None = None,
        user: int = 0,
    ):
        self.device = device
        self.launch = launch
        self.retired = False
        """Whether the kernel forgot it, since its module may be gone: not to be run any more."""
        self.out_shape, self.lse_shape = output_shapes(plan.attention, launch.problem).values()
        self.out_dtype = plan.attention.output_dtype
        self._context = driver.primary_context(device)
        self._context_object = driver.api().CUcontext(self._context)
        self._get_current = driver.api().cuCtxGetCurrent
        own = own or {}
        requests: tuple[Request, ...] = tuple(w for w in launch.workspaces if w[0] not in own)
        self._pool, self._use = pool, Use(user, requests)
        self._own = tuple(own.values())
        self._no_keys = launch.problem.sk == 0
        self._scaled = plan.attention.has_descales
        scales = DESCALES if self._scaled else ()
        names = TENSORS + scales + tuple(w[0] for w in requests) + tuple(own)
        empty = {name for name, size, *_ in requests if size == 0 and name in DESCALES}
        self._empty = frozenset(i for i, n in enumerate(names) if n in empty)
        """Which of the pointers are of scales that have no elements, there being no keys: a joined tile still reads one."""
        self._make = partial(_buffers, plan, launch, functions, names)
        self._latest = self._make()
        self._other: Buffers | None = None
        """Made when first needed."""
        self._lock = threading.Lock() if pool is None else pool.lock  # all callers share the argument buffers

    def run(
        self, addresses: tuple[int, ...], stream: int, scales: tuple[int, ...] = (0, 0, 0), numbers: tuple[float, ...] = ONES
    ) -> None:
        """Launch on a stream of this device. `addresses` in device memory of q, k, v, out, lse; of k and v any without keys. For 8-bit tensors
        `scales`: addresses of the DESCALES that are arrays, 0 of the others, which are `numbers`.

        InputError: an address is misaligned, or the driver cannot describe a tensor to TMA.
        """
        if self._scaled:
            addresses += (scales[0], 0, 0) if self._no_keys else scales  # those of k's and v's blocks then have no elements
        elsewhere = self._get_current()[1] != self._context_object  # also after an error, which the next call then raises
        if elsewhere:
            driver.push_context(self._context)
        try:
            with self._lock:
                if self._pool is not None:
                    addresses += self._pool.pointers(self._use, stream)
                buffers = self._latest
                if addresses != buffers.values or numbers != buffers.numbers:
                    buffers = self._filled(addresses, numbers)
                if stream != buffers.stream:
                    for launch in buffers.launches:
                        launch.set_stream(stream)
                    buffers.stream = stream
                for launch in buffers.launches:
                    (status,) = launch.queue()
                    if status != 0:
                        raise launch.failure(status)
        finally:
            if elsewhere:
                driver.pop_context()

    def _filled(self, values: tuple[int, ...], numbers: tuple[float, ...]) -> Buffers:
        """Buffers that hold these, from now on the latest: not those that were. The caller holds the lock."""
        if self._latest.values is not None:
            if self._other is None:
                self._other = self._make()
                for mine, its in zip(self._other.arguments, self._latest.arguments):
                    mine.share_maps(its)
            self._latest, self._other = self._other, self._latest
        buffers = self._latest
        if values != buffers.values or numbers != buffers.numbers:
            self._write(buffers, values, numbers)
        return buffers

    def _write(self, buffers: Buffers, values: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        buffers.values = None  # should this fail halfway
        if (values[0] | values[1] | values[2] | values[3]) & 15 or values[4] & 3:
            check_pointers(**dict(zip(TENSORS, values)))
        used = values + self._own
        if self._scaled:
            check_pointers(**dict(zip(DESCALES, values[len(TENSORS) :])))
        if self._no_keys:
            used = (used[0], used[3], used[3], *used[3:])  # k and v are never read, but TMA descriptors need a valid address
            used = tuple(0 if i in self._empty else x for i, x in enumerate(used))
        for arguments in buffers.arguments:
            arguments.write(used, numbers)
        buffers.values, buffers.numbers = values, numbers


def _buffers(plan: Plan, launch: Launch, functions: tuple[int, ...], names: tuple[str, ...]) -> Buffers:
    return Buffers([KernelArguments(kernel, bound, names) for kernel, bound in zip(plan.kernels, launch.kernels)], functions)
