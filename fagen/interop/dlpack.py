"""CuPy, JAX and every other exporter of DLPack or __cuda_array_interface__. The one module that uses `StridedMemoryView`.

How work is ordered
  CuPy    the kernel runs on CuPy's current stream, on which the arrays were made; nothing to exchange.
  JAX     has no stream a caller could name and never learns of ours. DLPack makes fagen's own stream wait for the inputs, the
          outputs are fresh JAX arrays, and the call waits for the kernel before it returns them.
  others  run on the legacy default stream unless `stream=` is given; DLPack (or the array interface) makes it wait for the
          tensors. fagen cannot allocate for them: `out` and `lse` must be given.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import driver
from ..errors import InputError
from ..oracle.numeric import DTYPES
from .arrays import DTYPE_NAMES, FRAMEWORK_NAMES, Array, contiguous_strides

_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_RAW_TYPES = {"|V2": "bf16", "<V2": "bf16", "|V1": "e4m3", "<V1": "e4m3"}
"""The array interface has no code for our narrow types; exporters write the size only, as ml_dtypes' `dtype.str` does."""


def framework_of(obj: Any) -> Exporter:
    root = type(obj).__module__.split(".")[0]
    return {"cupy": _cupy, "jax": _jax, "jaxlib": _jax}.get(root, Exporter)()


class Exporter:
    """Implements `Framework` for a library that fagen knows nothing about."""

    name = "array"
    exchange_stream: bool = True
    """Whether the exporter is told the stream on which the kernel will run."""

    def device(self, name: str, obj: Any) -> int:
        if hasattr(obj, "__dlpack_device__"):
            try:
                kind, index = obj.__dlpack_device__()
            except Exception as e:  # exporters raise what they like, such as for a sharded array
                raise InputError(name, f"cannot be exported by DLPack: {e}") from None
            if int(kind) not in _CUDA_DEVICES:
                raise InputError(
                    name, f"is not in GPU memory (DLPack device type {int(kind)}); move it there or pass a NumPy array"
                )
            return int(index)
        ptr = int(obj.__cuda_array_interface__["data"][0])
        return driver.pointer_device(ptr) if ptr else driver.current_device()

    def stream(self, device: int) -> int:
        return driver.LEGACY_STREAM

    def describe(self, name: str, obj: Any, stream: int) -> tuple[Array, Any]:
        view = _view(name, obj, (stream or driver.LEGACY_STREAM) if self.exchange_stream else -1)
        shape = tuple(int(n) for n in view.shape)
        strides = contiguous_strides(shape) if view.strides is None else tuple(int(s) for s in view.strides)
        array = Array(name, self.device(name, obj), _dtype(obj, view), shape, strides, int(view.ptr), bool(view.readonly))
        return array, view

    def empty(self, name: str, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        raise InputError(name, f"must be given: fagen cannot allocate a {type(like).__module__}.{type(like).__name__}")

    def check_output(self, name: str, obj: Any) -> None:
        """A read-only tensor is found by its description."""

    def finish(self, stream: int) -> None:
        """The caller orders its work after the stream."""


class CuPy(Exporter):
    """CuPy arrays; outputs come from CuPy's memory pool."""

    name = "CuPy"
    exchange_stream = False

    def __init__(self, cupy: Any):
        self._cupy = cupy

    def stream(self, device: int) -> int:
        with self._cupy.cuda.Device(device):
            return int(self._cupy.cuda.get_current_stream().ptr)

    def empty(self, name: str, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        with self._cupy.cuda.Device(self.device(name, like)):
            return self._cupy.empty(shape, dtype=DTYPES[dtype])


class Jax(Exporter):
    """JAX arrays; outputs are new JAX arrays, complete when the call returns."""

    name = "JAX"

    def __init__(self, jax: Any):
        self._jax = jax

    def stream(self, device: int) -> int:
        return driver.own_stream(device)

    def empty(self, name: str, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        (device,) = like.devices()
        with self._jax.default_device(device):
            return self._jax.numpy.empty(shape, dtype=FRAMEWORK_NAMES[dtype])

    def check_output(self, name: str, obj: Any) -> None:
        raise InputError(name, "JAX arrays are immutable; leave it away and take the arrays that the call returns")

    def finish(self, stream: int) -> None:
        driver.stream_synchronize(stream)


def _cupy() -> CuPy:
    return CuPy(sys.modules["cupy"])


def _jax() -> Jax:
    return Jax(sys.modules["jax"])


def _view(name: str, obj: Any, stream: int) -> Any:
    """A StridedMemoryView by DLPack, or by the array interface where DLPack is absent or fails."""
    from cuda.core.utils import StridedMemoryView

    errors = []
    for protocol, make in (
        ("__dlpack__", StridedMemoryView.from_dlpack),
        ("__cuda_array_interface__", StridedMemoryView.from_cuda_array_interface),
    ):
        if hasattr(obj, protocol):
            try:
                return make(obj, stream)
            except Exception as e:  # exporters raise what they like
                errors.append(f"{protocol}: {e}")
    raise InputError(name, f"cannot be exported ({'; '.join(errors)})")


def _dtype(obj: Any, view: Any) -> str:
    """Our name of the type. The exporter's own word first: not every view knows e4m3, and the array interface not even bf16."""
    own = str(getattr(obj, "dtype", "")).rsplit(".", 1)[-1]
    if own in DTYPE_NAMES:
        return DTYPE_NAMES[own]
    try:
        seen = view.dtype
    except (TypeError, NotImplementedError) as e:  # a DLPack type code that the view has no NumPy type for
        return own or f"of an unknown type ({e})"
    return _RAW_TYPES.get(seen.str) or DTYPE_NAMES.get(seen.name, seen.name) if seen is not None else own or "of an unknown type"
