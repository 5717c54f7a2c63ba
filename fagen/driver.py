"""Every raw call of the CUDA driver API that fagen makes, each checked.

Importing this module touches no GPU: `cuda.bindings.driver` is imported and `cuInit` called on the first call of a function here,
so `import fagen` works without a driver and stays safe before a fork. Handles (contexts, streams, functions …) and device
pointers are plain ints. A call that fails raises `DriverError` with the call's name and the driver's own words.

Measured against an empty driver library, `cuLaunchKernelEx` with objects made before costs the host 0.25 µs, through the bindings as
through ctypes; `cuLaunchKernel` with its 11 arguments 0.5 through the bindings and 1.4 through ctypes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from .errors import InternalError, LaunchError

LEGACY_STREAM = 1
"""CU_STREAM_LEGACY; handle 0 means the same stream."""
PER_THREAD_STREAM = 2
"""CU_STREAM_PER_THREAD: another stream in every thread."""


class DriverError(LaunchError):
    """A driver call failed. `call` is its name, `code` the driver's name of the error (CUDA_ERROR_…)."""

    def __init__(self, call: str, code: str, text: str = ""):
        self.call, self.code, self.text = call, code, text
        super().__init__(f"{call} failed: {code}" + (f" ({text})" if text else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return (DriverError, (self.call, self.code, self.text))


@cache
def api() -> Any:
    """The module cuda.bindings.driver, initialised. A LaunchError beginning with "no GPU:" says what is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise LaunchError(f"no GPU: the package cuda-bindings cannot be imported ({e})") from None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as e:  # the bindings open libcuda on the first call, and say at length that it is not there
        missing = type(e).__name__ == "DynamicLibNotFoundError"
        reason = "is not installed; it comes with the NVIDIA driver" if missing else f"cannot be used: {_first_line(e)}"
        raise LaunchError(f"no GPU: the CUDA driver library (libcuda) {reason}") from None
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise LaunchError(f"no GPU: the CUDA driver sees no device{hint}")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"no GPU: {_error(driver, 'cuInit', status)}")
    return driver


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _error(driver: Any, call: str, status: Any) -> DriverError:
    name, text = driver.cuGetErrorName(status)[1], driver.cuGetErrorString(status)[1]
    return DriverError(call, name.decode() if name else f"error {int(status)}", text.decode() if text else "")


def _call(call: str, *args: Any) -> Any:
    """Run one driver function; its result without the status (None, a value, or a list of several)."""
    driver = api()
    status, *values = getattr(driver, call)(*args)
    if status != 0:
        raise _error(driver, call, status)
    return values[0] if len(values) == 1 else values or None


# devices and contexts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceInfo:
    """What fagen asks of a device. Bytes are bytes; `smem_bytes` is the opt-in limit of one CTA."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    smem_bytes: int
    l2_bytes: int
    memory_bytes: int
    driver_version: tuple[int, int]
    """Newest CUDA version the driver supports."""

    def __str__(self) -> str:
        return f"cuda:{self.index} ({self.name}, compute capability {self.compute_capability[0]}.{self.compute_capability[1]})"


def device_count() -> int:
    """Number of visible devices, at least 1; a LaunchError ("no GPU: …") where there is none."""
    count = int(_call("cuDeviceGetCount"))
    if count == 0:
        raise LaunchError("no GPU: the CUDA driver sees no device")
    return count


@cache
def device_info(index: int) -> DeviceInfo:
    """Of the device with that ordinal; creates no context."""
    if not 0 <= index < device_count():
        raise LaunchError(f"there is no device cuda:{index}; {device_count()} visible")
    device = _call("cuDeviceGet", index)

    def attribute(name: str) -> int:
        return int(_call("cuDeviceGetAttribute", getattr(api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    version = int(_call("cuDriverGetVersion"))
    return DeviceInfo(
        index=index,
        name=_call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(),
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        smem_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_bytes=int(_call("cuDeviceTotalMem", device)),
        driver_version=(version // 1000, version % 1000 // 10),
    )


@cache
def primary_context(index: int) -> int:
    """The device's primary context, the one that torch, CuPy and JAX use. Retained for the life of the process."""
    device_info(index)
    return int(_call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", index)))


def current_context() -> int:
    """The calling thread's context, 0 if it has none."""
    driver = api()
    status, context = driver.cuCtxGetCurrent()
    if status != 0:
        raise _error(driver, "cuCtxGetCurrent", status)
    return int(context)


def current_device() -> int:
    """Ordinal of the calling thread's device; 0 if the thread has no context."""
    return int(_call("cuCtxGetDevice")) if current_context() else 0


def push_context(context: int) -> None:
    _call("cuCtxPushCurrent", context)


def pop_context() -> None:
    _call("cuCtxPopCurrent")


@contextmanager
def use_device(index: int) -> Iterator[None]:
    """Make the device's primary context current, and the caller's again afterwards."""
    push_context(primary_context(index))
    try:
        yield
    finally:
        pop_context()


def synchronize() -> None:
    """Wait for everything on the current context. Raises the error of a kernel that failed."""
    _call("cuCtxSynchronize")


def pointer_device(ptr: int) -> int:
    """Ordinal of the device that owns the memory at `ptr`."""
    return int(_call("cuPointerGetAttribute", api().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr))


# memory ------------------------------------------------------------------------------------------------------------------


def mem_alloc(nbytes: int) -> int:
    """Device memory of the current context, aligned to 256 bytes at least."""
    return int(_call("cuMemAlloc", nbytes))


def mem_free(ptr: int) -> None:
    _call("cuMemFree", ptr)


def memset(ptr: int, byte: int, nbytes: int, stream: int) -> None:
    """Fill with a byte, in the order of the stream."""
    _call("cuMemsetD8Async", ptr, byte, nbytes, stream)


def memcpy_to_device(ptr: int, host: int, nbytes: int, stream: int) -> None:
    """From host memory, in the order of the stream; the host memory must live until the stream got there."""
    _call("cuMemcpyHtoDAsync", ptr, host, nbytes, stream)


def memcpy_to_host(host: int, ptr: int, nbytes: int, stream: int) -> None:
    """To host memory, in the order of the stream: read it after `stream_synchronize`."""
    _call("cuMemcpyDtoHAsync", host, ptr, nbytes, stream)


def host_alloc(nbytes: int) -> tuple[int, int]:
    """Pinned host memory mapped into every context: (host pointer, device pointer). Readable even after a kernel trapped."""
    driver = api()
    host = int(_call("cuMemHostAlloc", nbytes, driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP))
    return host, int(_call("cuMemHostGetDevicePointer", host, 0))


# streams, graphs ---------------------------------------------------------------------------------------------------------


def stream_create() -> int:
    """A stream of the current context that does not wait for the legacy stream."""
    return int(_call("cuStreamCreate", api().CUstream_flags.CU_STREAM_NON_BLOCKING))


@cache
def own_stream(index: int) -> int:
    """fagen's own stream on a device, made at first use: for its set-up work, and for callers that have no stream (NumPy, JAX)."""
    with use_device(index):
        return stream_create()


def stream_synchronize(stream: int) -> None:
    _call("cuStreamSynchronize", stream)


def is_capturing(stream: int) -> bool:
    """Whether launches on this stream go into a CUDA graph."""
    return bool(_call("cuStreamIsCapturing", stream) != 0)


def capture_id(stream: int) -> int:
    """Number of the capture that the stream takes part in, unique in the process; 0 if it does not capture."""
    status, number, *_ = _call("cuStreamGetCaptureInfo", stream)
    return int(number) if status != 0 else 0


def event_create() -> int:
    """An event of the current context that takes the time."""
    return int(_call("cuEventCreate", api().CUevent_flags.CU_EVENT_DEFAULT))


def event_record(event: int, stream: int) -> None:
    """Note the time when the stream gets here."""
    _call("cuEventRecord", event, stream)


def event_milliseconds(start: int, end: int) -> float:
    """Between two events, after waiting for the second."""
    _call("cuEventSynchronize", end)
    return float(_call("cuEventElapsedTime", start, end))


def event_destroy(event: int) -> None:
    _call("cuEventDestroy", event)


# modules, functions, launches --------------------------------------------------------------------------------------------


def module_load(image: bytes) -> int:
    """Load a cubin into the current context."""
    return int(_call("cuModuleLoadData", image))


def module_unload(module: int) -> None:
    _call("cuModuleUnload", module)


def module_function(module: int, name: str) -> int:
    """The kernel of that (extern "C") name."""
    return int(_call("cuModuleGetFunction", module, name.encode()))


def set_dynamic_smem(function: int, nbytes: int) -> None:
    """Opt in to that much dynamic shared memory; needed above 48 KiB, per context."""
    attribute = api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _call("cuFuncSetAttribute", function, attribute, nbytes)


class KernelLaunch:
    """A launch of a kernel on a 1-D grid of 1-D CTAs, made ready for repetition. `params`: address of an array of pointers to the
    kernel's arguments, which are read before a launch returns. `queue()` launches on the stream set last and returns (status,);
    other than 0 it is one that `failure` makes an error of. Not safe to use from several threads at once."""

    __slots__ = ("_config", "_driver", "queue")

    def __init__(self, function: int, grid: int, block: int, smem_bytes: int, params: int):
        driver = self._driver = api()
        config = self._config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = smem_bytes
        self.queue = partial(driver.cuLaunchKernelEx, config, driver.CUfunction(function), params, 0)

    def set_stream(self, stream: int) -> None:
        self._config.hStream = self._driver.CUstream(stream)

    def failure(self, status: Any) -> DriverError:
        return _error(self._driver, "cuLaunchKernelEx", status)


TENSOR_MAP_BYTES = 128
_TENSOR_MAP_TYPES = {"bf16": ("BFLOAT16", 2), "fp16": ("FLOAT16", 2), "e4m3": ("UINT8", 1), "int8": ("UINT8", 1)}
"""CUtensorMapDataType and bytes; e4m3 and int8 have no type of their own: the bits move unchanged."""


class TensorMapEncoder:
    """Encodes CUtensorMaps that differ in the address only. `dims` in elements, innermost first; `strides` in bytes, of all dims
    but the innermost; `box` in elements, its rows 64 or 128 bytes long, with the swizzle of that width. 256-byte L2 promotion;
    out-of-bounds elements read as 0."""

    def __init__(self, dtype: str, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]):
        d = api()
        u64, u32 = d.cuuint64_t, d.cuuint32_t
        kind, size = _TENSOR_MAP_TYPES[dtype]
        width = box[0] * size
        if width not in (64, 128):
            raise InternalError(f"a tensor map's box has rows of {width} bytes; the tiles in shared memory have 64 or 128")
        self._before = (getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"), len(dims))
        self._after = (
            [u64(x) for x in dims],
            [u64(x) for x in strides],
            [u32(x) for x in box],
            [u32(1)] * len(dims),
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(d.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{width}B"),
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def encode(self, ptr: int) -> bytes:
        """The 128 bytes of the map for the tensor at `ptr`."""
        encoded = _call("cuTensorMapEncodeTiled", *self._before, ptr, *self._after)
        return ctypes.string_at(int(encoded.getPtr()), TENSOR_MAP_BYTES)
