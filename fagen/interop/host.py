"""NumPy arrays (with ml_dtypes' types) as arguments: copied to the device and back. The only path of a call that copies."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import numpy as np

from .. import driver
from ..errors import InputError
from .arrays import ALIGNMENT, DTYPE_NAMES, Array, contiguous_strides


def describe(name: str, array: np.ndarray[Any, Any], device: int) -> Array:
    """The array as it will stand on the device: row-major, whatever its strides on the host are. Rows of q, k and v are padded to 16
    bytes: those of a V given transposed may have any length."""
    dtype = DTYPE_NAMES.get(array.dtype.name, array.dtype.name)
    return Array(name, device, dtype, array.shape, contiguous_strides(_padded(array) if name in "qkv" else array.shape), 0)


def _padded(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """The shape with the last dimension long enough for rows of a multiple of 16 bytes."""
    if array.ndim == 0:
        return ()
    step = max(1, ALIGNMENT // max(1, array.itemsize))
    return (*array.shape[:-1], -(-array.shape[-1] // step) * step)


def check_output(name: str, array: np.ndarray[Any, Any]) -> None:
    """An InputError if results cannot be copied into the array: read-only, or elements that share memory."""
    if not array.flags.writeable:
        raise InputError(name, "is read-only")
    if any(s == 0 and n > 1 for s, n in zip(array.strides, array.shape)):
        raise InputError(name, f"has elements that share memory: shape {array.shape}, strides {array.strides} bytes")


class Staging:
    """Device memory for the length of one call, filled and read in the order of `stream`. A context manager: leaving it waits for
    the stream and frees the memory. Needs a current context."""

    def __init__(self, stream: int):
        self._stream = stream
        self._buffers: list[int] = []
        self._sources: list[np.ndarray[Any, Any]] = []

    def __enter__(self) -> Staging:
        return self

    def alloc(self, nbytes: int) -> int:
        """Uninitialised device memory; an empty tensor gets a valid address too."""
        self._buffers.append(driver.mem_alloc(max(nbytes, 16)))
        return self._buffers[-1]

    def upload(self, array: np.ndarray[Any, Any], *, pad: bool = False) -> int:
        """Device memory with a row-major copy of the array; `pad`: its rows padded to 16 bytes, as `describe` says."""
        source = np.ascontiguousarray(array)
        if pad and _padded(array) != array.shape:
            source = np.zeros(_padded(array), array.dtype)
            source[..., : array.shape[-1]] = array
        ptr = self.alloc(source.nbytes)
        if source.nbytes:
            self._sources.append(source)  # alive until the stream has copied it
            driver.memcpy_to_device(ptr, source.ctypes.data, source.nbytes, self._stream)
        return ptr

    def download(self, ptr: int, array: np.ndarray[Any, Any]) -> None:
        """Wait for the stream, and write the row-major data at `ptr` into the array (of any strides)."""
        target = array if array.flags.c_contiguous else np.empty_like(array, order="C")
        if target.nbytes:
            driver.memcpy_to_host(target.ctypes.data, ptr, target.nbytes, self._stream)
        driver.stream_synchronize(self._stream)
        if target is not array:
            array[...] = target

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # after a failure the context may be dead: then freeing fails as well, and the first error is the one to report
        with contextlib.suppress(*(() if error is None else (driver.DriverError,))):
            driver.stream_synchronize(self._stream)
            for ptr in self._buffers:
                driver.mem_free(ptr)
