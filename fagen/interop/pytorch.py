"""torch tensors, without importing torch: the module is the one that the caller's tensors come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InputError
from .arrays import DTYPE_NAMES, FRAMEWORK_NAMES, Array


class Torch:
    """Implements `Framework`."""

    name = "torch"

    def __init__(self, torch: Any):
        self._torch = torch

    def device(self, name: str, obj: Any) -> int:
        if obj.device.type != "cuda":
            raise InputError(name, f"is a torch tensor on {obj.device}; move it to a GPU (.cuda()) or pass a NumPy array")
        if obj.layout != self._torch.strided:
            raise InputError(name, f"has layout {obj.layout}; only strided tensors have the rows that a kernel reads")
        return int(obj.get_device())

    def stream(self, device: int) -> int:
        return raw_stream(self._torch)(device)

    def describe(self, name: str, obj: Any, stream: int) -> tuple[Array, Any]:
        dtype = str(obj.dtype).removeprefix("torch.")
        return Array(
            name, int(obj.get_device()), DTYPE_NAMES.get(dtype, dtype), tuple(obj.shape), tuple(obj.stride()), obj.data_ptr()
        ), obj

    def empty(self, name: str, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, FRAMEWORK_NAMES[dtype]), device=like.device)

    def check_output(self, name: str, obj: Any) -> None:
        """torch tensors are writable."""

    def finish(self, stream: int) -> None:
        """torch orders its work after its own stream."""


def raw_stream(torch: Any) -> Callable[[int], int]:
    """A function: device ordinal → handle of torch's current stream there."""
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what torch's own code generators call; saves a Stream object
    if fast is not None:
        return fast  # type: ignore[no-any-return]
    return lambda device: int(torch.cuda.current_stream(device).cuda_stream)


def strided_allocator(torch: Any) -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
    """A function: shape, strides, dtype → a new tensor on torch's current CUDA device."""
    fast = _guard(torch, "_empty_strided_cuda")  # what torch's own code generators call; skips the dispatcher
    if fast is not None:
        return fast  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def matcher(torch: Any, tensors: tuple[Any, ...]) -> Callable[..., bool]:
    """A function that is True only of as many tensors of the same types, shapes, strides, dtypes, devices and layouts. It may be False
    of such tensors too, and is always without torch's own check of many tensors in one call."""
    guards = _guard(torch, "TensorGuards")
    if guards is None:
        return _never
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]


def _never(*tensors: Any) -> bool:
    return False


def _guard(torch: Any, name: str) -> Any:
    return getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), name, None)
