"""Tensors of other libraries as kernel arguments: what they are (`Array`), whether they fit (`check`), whose they are (`Framework`).

pytorch   CUDA tensors, by duck typing: torch is never imported
dlpack    CuPy, JAX and every other exporter of DLPack or __cuda_array_interface__: the one module that uses StridedMemoryView
host      NumPy arrays, copied to the device and back: the only path that copies
"""

from __future__ import annotations

from .arrays import Array, Framework, check, check_pointers, output_shapes
from .select import common_device, common_framework, framework_of, stream_handle

__all__ = [
    "Array",
    "Framework",
    "check",
    "check_pointers",
    "common_device",
    "common_framework",
    "framework_of",
    "output_shapes",
    "stream_handle",
]
