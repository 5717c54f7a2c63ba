"""Which framework a tensor belongs to, and what a `stream=` argument means."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from .arrays import Framework


def framework_of(name: str, obj: Any) -> Framework | None:
    """The framework of a tensor; None for a NumPy array (which has to be copied). Anything else is an InputError.

    Only modules that are already loaded are looked at: a tensor of a library cannot exist before it.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor):
        from .pytorch import Torch

        return Torch(torch)
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return None
    if hasattr(obj, "__dlpack__") or hasattr(type(obj), "__cuda_array_interface__") or hasattr(obj, "__cuda_array_interface__"):
        from . import dlpack

        return dlpack.framework_of(obj)
    raise InputError(
        name,
        f"is a {type(obj).__name__}; expected a torch, CuPy or JAX tensor, another one with __dlpack__ or __cuda_array_interface__, "
        "or a NumPy array",
    )


def common_framework(given: Mapping[str, Any]) -> Framework | None:
    """The framework of all tensors of a call, by argument's name ("q" among them); InputError naming the one that is of another."""
    frameworks = {n: framework_of(n, t) for n, t in given.items()}
    framework = frameworks["q"]
    for name, other in frameworks.items():
        mine, its = (f.name if f else "NumPy" for f in (framework, other))
        if mine != its:
            raise InputError(name, f"is a {its} array, q a {mine} one; all must belong to one library")
    return framework


def common_device(framework: Framework, given: Mapping[str, Any]) -> int:
    """The CUDA ordinal of the device that has all of them; InputError naming the one that is elsewhere."""
    devices = {n: framework.device(n, t) for n, t in given.items()}
    device = devices["q"]
    for name, other in devices.items():
        if other != device:
            raise InputError(name, f"is on cuda:{other}, q on cuda:{device}")
    return device


def stream_handle(stream: Any) -> int:
    """The handle of a stream given by the caller: an int, or an object of torch, CuPy or cuda.core."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):  # protocol of cuda.core: (version, handle)
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    raise InputError(
        "stream", f"is a {type(stream).__name__}; expected a stream of torch, CuPy or cuda.core, or its handle as an int"
    )
