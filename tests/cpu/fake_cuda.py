"""A CUDA driver and a torch made of host memory, so that a launch can be followed to the last byte without a GPU.

`FakeCuda` stands in for the module cuda.bindings.driver: device memory is host memory, streams run at once, and a launch calls
`kernel(fake, arguments)`, which sees exactly what a GPU would: the array of argument addresses.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from fagen import driver, workspace
from fagen.errors import FagenError
from fagen.guard import Channel
from fagen.interop.arrays import contiguous_strides
from fagen.oracle.numeric import DTYPES
from fagen.plan import KernelPlan, Plan

OK = real.CUresult.CUDA_SUCCESS
_MAP = struct.Struct("<Q5Q4Q5II")


@dataclass
class LaunchRecord:
    function: int
    grid: int
    block: int
    smem: int
    stream: int
    context: int
    ms: float = 1.0
    """What it takes, by events."""


@dataclass
class FakeCuda:
    devices: int = 1
    compute_capability: tuple[int, int] = (9, 0)
    kernel: Callable[[int], None] | None = None
    calls: list[str] = field(default_factory=list)
    launches: list[LaunchRecord] = field(default_factory=list)
    capturing: dict[int, int] = field(default_factory=dict)  # stream → capture id
    fail: dict[str, Any] = field(default_factory=dict)  # call → status
    local: threading.local = field(default_factory=threading.local)
    memory: dict[int, Any] = field(default_factory=dict)
    events: dict[int, int] = field(default_factory=dict)  # event → launches before it

    @property
    def contexts(self) -> list[int]:
        """The calling thread's stack of current contexts."""
        return self.local.__dict__.setdefault("contexts", [])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and name[2].isupper():
            handler = getattr(FakeCuda, f"do_{name}", None)
            if handler is None:
                raise AssertionError(f"the fake driver has no {name}")

            def call(*args: Any) -> Any:
                self.calls.append(name)
                if name in self.fail:
                    return (self.fail[name],)
                return handler(self, *args)

            return call
        return getattr(real, name)

    do_cuGetErrorName = staticmethod(lambda self, status: (OK, status.name.encode()))
    do_cuGetErrorString = staticmethod(lambda self, status: (OK, b"what the driver says"))
    do_cuDriverGetVersion = staticmethod(lambda self: (OK, 13000))
    do_cuDeviceGetCount = staticmethod(lambda self: (OK, self.devices))
    do_cuDeviceGet = staticmethod(lambda self, i: (OK, i))
    do_cuDeviceGetName = staticmethod(lambda self, n, d: (OK, b"Fake GPU\0\0"))
    do_cuDeviceTotalMem = staticmethod(lambda self, d: (OK, 1 << 30))
    do_cuDevicePrimaryCtxRetain = staticmethod(lambda self, d: (OK, 0xC0 + d))
    do_cuCtxGetCurrent = staticmethod(lambda self: (OK, real.CUcontext(self.contexts[-1] if self.contexts else 0)))
    do_cuCtxGetDevice = staticmethod(lambda self: (OK, self.contexts[-1] - 0xC0))
    do_cuCtxPushCurrent = staticmethod(lambda self, c: (self.contexts.append(c), (OK,))[1])
    do_cuCtxPopCurrent = staticmethod(lambda self: (OK, self.contexts.pop()))
    do_cuCtxSynchronize = staticmethod(lambda self: (OK,))
    do_cuStreamCreate = staticmethod(lambda self, flags: (OK, 0x5000 + len(self.calls)))
    do_cuStreamSynchronize = staticmethod(lambda self, s: (OK,))
    do_cuModuleLoadData = staticmethod(lambda self, image: (OK, 0x3000))
    do_cuModuleUnload = staticmethod(lambda self, module: (OK,))
    do_cuModuleGetFunction = staticmethod(lambda self, module, name: (OK, 0x4000))
    do_cuFuncSetAttribute = staticmethod(lambda self, f, a, v: (OK,))

    def do_cuDeviceGetAttribute(self, attribute: Any, device: int) -> Any:
        values = {"COMPUTE_CAPABILITY_MAJOR": self.compute_capability[0], "COMPUTE_CAPABILITY_MINOR": self.compute_capability[1]}
        return OK, values.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 132)

    def do_cuMemAlloc(self, nbytes: int) -> Any:
        raw = ctypes.create_string_buffer(b"\xab" * (nbytes + 256), nbytes + 256)  # poisoned, as fresh device memory may be
        address = (ctypes.addressof(raw) + 255) & ~255
        self.memory[address] = raw
        return OK, address

    def do_cuMemFree(self, ptr: int) -> Any:
        del self.memory[ptr]
        return (OK,)

    def do_cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        return self.do_cuMemAlloc(nbytes)

    do_cuMemHostGetDevicePointer = staticmethod(lambda self, host, flags: (OK, host))

    def do_cuMemsetD8Async(self, ptr: int, byte: int, nbytes: int, stream: int) -> Any:
        ctypes.memset(ptr, byte, nbytes)
        return (OK,)

    def do_cuMemcpyHtoDAsync(self, ptr: int, host: int, nbytes: int, stream: int) -> Any:
        ctypes.memmove(ptr, host, nbytes)
        return (OK,)

    def do_cuMemcpyDtoHAsync(self, host: int, ptr: int, nbytes: int, stream: int) -> Any:
        ctypes.memmove(host, ptr, nbytes)
        return (OK,)

    do_cuEventDestroy = staticmethod(lambda self, event: (self.events.pop(event), (OK,))[1])
    do_cuEventSynchronize = staticmethod(lambda self, event: (OK,))

    def do_cuEventCreate(self, flags: Any) -> Any:
        self.events[0x6000 + len(self.calls)] = 0
        return OK, 0x6000 + len(self.calls)

    def do_cuEventRecord(self, event: int, stream: int) -> Any:
        self.events[event] = len(self.launches)
        return (OK,)

    def do_cuEventElapsedTime(self, start: int, end: int) -> Any:
        return OK, sum(r.ms for r in self.launches[self.events[start] : self.events[end]])

    def do_cuStreamIsCapturing(self, stream: int) -> Any:
        return OK, real.CUstreamCaptureStatus(int(stream in self.capturing))

    def do_cuStreamGetCaptureInfo(self, stream: int) -> Any:
        return OK, real.CUstreamCaptureStatus(int(stream in self.capturing)), self.capturing.get(stream, 0), 0, [], [], 0

    def do_cuTensorMapEncodeTiled(self, dtype: Any, rank: int, address: int, dims: Any, strides: Any, box: Any, *rest: Any) -> Any:
        assert rank == 5 and address % 16 == 0 and address > 0 and all(int(s) % 16 == 0 for s in strides)
        _, _, swizzle, *_ = rest
        raw = ctypes.create_string_buffer(128)
        _MAP.pack_into(raw, 0, address, *(int(x) for x in (*dims, *strides, *box, swizzle)))
        return OK, types.SimpleNamespace(getPtr=lambda: ctypes.addressof(raw))

    def do_cuLaunchKernelEx(self, config: Any, f: Any, params: int, extra: int) -> Any:
        assert (config.gridDimY, config.gridDimZ, config.blockDimY, config.blockDimZ) == (1, 1, 1, 1)
        assert config.numAttrs == 0 and extra == 0
        record = LaunchRecord(
            int(f), config.gridDimX, config.blockDimX, config.sharedMemBytes, int(config.hStream), self.contexts[-1]
        )
        self.launches.append(record)
        if self.kernel is not None:
            self.kernel(params)
        return (OK,)


def install(monkeypatch: Any, **settings: Any) -> FakeCuda:
    """Make a FakeCuda the driver that fagen talks to, with empty caches before and after."""
    fake = FakeCuda(**settings)
    monkeypatch.setattr(driver, "api", lambda: fake)
    for name in ("device_info", "primary_context", "own_stream"):
        monkeypatch.setattr(driver, name, _fresh(getattr(driver, name)))
    fresh = _fresh(workspace.workspaces)
    monkeypatch.setattr(workspace, "workspaces", fresh)
    monkeypatch.setattr("fagen.launch.workspaces", fresh)
    monkeypatch.setattr(workspace, "_sinks", {})
    return fake


def _fresh(cached: Any) -> Any:
    return cache(cached.__wrapped__)


class InProcess:
    """Stands in for guard.Watched: runs the task here, on the fake driver."""

    def __init__(self, task: str, request: dict[str, Any]):
        module, _, function = task.partition(":")
        self.task, self.request = getattr(importlib.import_module(module), function), json.loads(json.dumps(request))

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def messages(self) -> Iterator[dict[str, Any]]:
        pipe = io.BytesIO()
        try:
            self.task(self.request, Channel(pipe))
        except FagenError as e:
            error: FagenError | None = e
        else:
            error = None
        for line in pipe.getvalue().splitlines():
            message = json.loads(line)
            if message["kind"] != "doing":
                yield message
        if error:
            raise error


def array_interface(name: str, obj: Any, stream: int) -> Any:
    """What cuda.core reads from the CUDA array interface, without asking a driver."""
    data = obj.__cuda_array_interface__
    dtype = np.dtype(data["typestr"])
    strides = tuple(s // dtype.itemsize for s in data["strides"])
    ptr, readonly = data["data"]
    return types.SimpleNamespace(shape=data["shape"], strides=strides, ptr=ptr, readonly=readonly, dtype=dtype)


class Divisor(ctypes.Structure):
    _fields_ = [("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32)]

    def quotient(self, n: int) -> int:
        return n * self.multiplier >> self.shift


def params_struct(kernel: KernelPlan) -> type[ctypes.Structure]:
    """struct Params of a kernel as a C compiler lays it out."""
    scalar = {"i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float, "divisor": Divisor}
    fields = [(n, ctypes.c_uint64) for n in kernel.pointers] + [(p.name, scalar[p.ctype]) for p in kernel.params]
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


def read_arguments(kernel: KernelPlan, params: int) -> tuple[dict[str, tuple[int, ...]], Any]:
    """What the kernel receives: its tensor maps by tensor, as (address, dims, strides, box, swizzle) in one tuple, and Params."""
    addresses = (ctypes.c_void_p * (len(kernel.maps) + 1)).from_address(params)
    maps = {}
    for recipe, address in zip(kernel.maps, addresses):
        assert address % 64 == 0
        maps[recipe.tensor] = _MAP.unpack(ctypes.string_at(address, _MAP.size))
    return maps, params_struct(kernel).from_address(addresses[len(kernel.maps)])


def device_array(address: int, shape: Any, byte_strides: Any, dtype: str) -> Any:
    """A view of (fake) device memory."""
    item = DTYPES[dtype]
    length = item.itemsize + sum((n - 1) * s for n, s in zip(shape, byte_strides))
    raw = np.frombuffer((ctypes.c_uint8 * length).from_address(address), np.uint8)
    return np.lib.stride_tricks.as_strided(raw[: item.itemsize].view(item), shape, byte_strides)


def attention_kernel(plan: Plan) -> Callable[[int], None]:
    """What the plan's kernel does (full mask), in NumPy, from its launch arguments alone."""
    kernel, attention, schedule = plan.kernels[0], plan.attention, plan.schedule

    def run(params: int) -> None:
        maps, p = read_arguments(kernel, params)
        hkv = p.hq // p.group

        def tensor(name: str) -> Any:
            size = DTYPES[attention.dtype_of(name)].itemsize
            if name in maps:
                address, chunk, rows, chunks, heads, batch, *rest = maps[name]
                ss, cs, sh, sb = rest[:4]
                if name == "v" and plan.schedule.v_transposed:  # what stands for a chunk of columns are the keys
                    return device_array(address, (batch, heads, rows, chunk), (sb, sh, ss, size), attention.value_dtype).transpose(
                        0, 3, 1, 2
                    )
                a = device_array(address, (batch, rows, heads, chunks, chunk), (sb, ss, sh, cs, size), attention.dtype_of(name))
                return a.reshape(batch, rows, heads, chunks * chunk)
            rows, heads = (p.sq, p.hq) if name in ("q", "out") else (p.sk, hkv)
            dtype = attention.dtype_of(name)
            sb, ss, sh = (size * getattr(p, f"{name}_{x}") for x in ("sb", "ss", "sh"))
            width = attention.dv if name in ("v", "out") else attention.head_dim
            return device_array(getattr(p, name), (batch_of(p), rows, heads, width), (sb, ss, sh, size), dtype)

        def descale(name: str) -> Any:
            """As (batch, 1 or rows, heads, 1)."""
            address = getattr(p, name, 0)
            if not address:
                return getattr(p, f"{name}_value", 1.0)
            if schedule.scale_granularity == "tensor":
                return device_array(address, (1,), (4,), "fp32")[0]
            strides = (4 * getattr(p, f"{name}_sb"), 4 * getattr(p, f"{name}_sh"))
            if schedule.scale_granularity == "head":
                return np.repeat(device_array(address, (batch_of(p), hkv), strides, "fp32"), p.group, 1)[:, None, :, None]
            mine = name == "q_descale"
            heads, rows, size = (p.hq, p.sq, schedule.tile_q) if mine else (hkv, p.sk, schedule.tile_kv)
            blocks = device_array(address, (batch_of(p), heads, -(-rows // size)), (*strides, 4), "fp32")
            by_row = np.repeat(blocks, size, axis=2)[:, :, :rows].transpose(0, 2, 1)[..., None]
            return by_row if mine else np.repeat(by_row, p.group, 2)

        def batch_of(p: Any) -> int:
            return maps["q"][5] if maps else p.total // (p.n_m * p.hq)

        q = tensor("q").astype(np.float64)
        out, lse = tensor("out"), device_array(p.lse, (q.shape[0], p.hq, p.sq), (4 * p.hq * p.sq, 4 * p.sq, 4), "fp32")
        if p.sk == 0:
            out[...], lse[...] = 0, -np.inf
            return
        k, v = (np.repeat(tensor(n).astype(np.float64), p.group, 2) * descale(f"{n}_descale") for n in "kv")
        q = q * descale("q_descale")
        s = np.einsum("bihd,bjhd->bhij", q, k) * attention.softmax_scale
        m = s.max(-1, keepdims=True)
        e = np.exp(s - m)
        out[...] = np.einsum("bhij,bjhd->bihd", e / e.sum(-1, keepdims=True), v).astype(out.dtype)
        lse[...] = (m + np.log(e.sum(-1, keepdims=True)))[..., 0]

    return run


# a torch ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    type: str
    index: int | None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass(frozen=True)
class Dtype:
    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


class Tensor:
    """The parts of torch.Tensor that fagen touches, over a NumPy array."""

    def __init__(self, array: Any, device: Device = Device("cuda", 0)):
        self.array, self.device, self.layout = array, device, "strided"
        self.shape, self.dtype = array.shape, Dtype(array.dtype.name)

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data) if self.array.size else 0

    def is_contiguous(self) -> bool:
        """As torch's: the strides of dimensions with one element do not matter, nor those of a tensor without elements."""
        strides = contiguous_strides(self.shape)
        return not self.array.size or all(n == 1 or s == c for n, s, c in zip(self.shape, self.stride(), strides))

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index


class TensorGuards:
    """As torch's: compares everything but the data, and is False of one tensor given twice."""

    def __init__(self, *tensors: Tensor, dynamic_dims_sizes: None, dynamic_dims_strides: None):
        self._kinds = [self._kind(t) for t in tensors]

    @staticmethod
    def _kind(t: Any) -> Any:
        return (t.shape, t.stride(), t.dtype, t.device, t.layout) if isinstance(t, Tensor) else None

    def check(self, *tensors: Any) -> bool:
        assert len(tensors) == len(self._kinds)
        return [self._kind(t) for t in tensors] == self._kinds and len(set(map(id, tensors))) == len(tensors)


def fake_torch(monkeypatch: Any, current_stream: int = 0x70) -> Any:
    """A module `torch` in sys.modules; `.allocated` counts torch.empty."""
    torch = types.ModuleType("torch")
    torch.Tensor, torch.strided, torch.allocated = Tensor, "strided", 0
    for name in ("bfloat16", "float16", "float32", "float8_e4m3fn"):
        setattr(torch, name, Dtype(name))
    theirs = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

    def empty(shape: Any, dtype: Dtype, device: Device | int) -> Tensor:
        torch.allocated += 1
        if not isinstance(device, Device):
            device = Device("cuda", device)
        return Tensor(np.full(shape, np.nan, DTYPES[theirs[dtype.name]]), device)

    def empty_strided_cuda(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Dtype) -> Tensor:
        assert type(shape) is tuple and strides == contiguous_strides(shape)
        return empty(shape, dtype, torch.current_device)

    torch.empty, torch.current_device = empty, 0
    guards = types.SimpleNamespace(_empty_strided_cuda=empty_strided_cuda, TensorGuards=TensorGuards)
    torch._C = types.SimpleNamespace(_dynamo=types.SimpleNamespace(guards=guards))
    torch.cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=current_stream + device))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


# exporters of DLPack --------------------------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_CODES = {"float16": (2, 16), "float32": (2, 32), "bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "int8": (0, 8)}  # of dlpack.h


class Exporter:
    """Exports a NumPy array by DLPack as if its memory were on a GPU. `streams` are those it was told of."""

    def __init__(self, array: Any, device: tuple[int, int] = (2, 0), code: tuple[int, int] | None = None):
        self.array, self._device, self._code = array, device, code or _CODES[array.dtype.name]
        self.streams: list[Any] = []
        self._alive: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        managed, n = _DLManagedTensor(), self.array.ndim
        shape = (ctypes.c_int64 * n)(*self.array.shape)
        strides = (ctypes.c_int64 * n)(*(s // self.array.itemsize for s in self.array.strides))
        t = managed.tensor
        t.data = self.array.ctypes.data if self.array.size else None
        t.device_type, t.device_id = self._device
        t.ndim, t.shape, t.strides = n, shape, strides
        t.code, t.bits, t.lanes = *self._code, 1
        managed.deleter = type(managed.deleter)(lambda pointer: None)
        self._alive.append((managed, shape, strides))
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)


def exporter_of(module: str) -> type[Exporter]:
    """A subclass that claims to be defined in that module, with the `dtype` attribute that its arrays have."""

    class ndarray(Exporter):
        dtype = property(lambda self: self.array.dtype)

    ndarray.__module__ = module
    return ndarray
