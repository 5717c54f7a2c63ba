"""The storage types as NumPy knows them: rounding as the GPU does it, and the size of a rounding step."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "fp32": np.dtype(np.float32),
}
"""fagen's name of a tensor's type → the NumPy dtype that holds it."""

E4M3_MAX = 448.0
INT8_MAX = 127.0
"""The range is symmetric: −128 is not used."""
LARGEST = {"e4m3": E4M3_MAX, "int8": INT8_MAX}
"""What the largest value under a scale becomes."""
E4M3_P_SCALE = 256.0
"""Probabilities are at most 1; times 2^8 they fill e4m3's range (largest value 448) before they are rounded to it."""

_MANTISSA_AND_LEAST_EXPONENT = {"bf16": (7, -126), "fp16": (10, -14), "e4m3": (3, -6), "fp32": (23, -126)}


def half_step(dtype: str) -> float:
    """Half the distance from 1 to the next number of a type: what rounding changes a number by at most, relatively."""
    return 2.0 ** -(_MANTISSA_AND_LEAST_EXPONENT[dtype][0] + 1)


def cast(x: Array, dtype: str) -> Array:
    """`x` rounded to nearest even and stored as `dtype`. e4m3 saturates at ±448 (cvt.rn.satfinite), int8 at ±127; NaN stays NaN, and is −1
    in int8, which has none: what the kernels leave, under a scale that says so."""
    if dtype in LARGEST:
        x = np.clip(x, -LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        x = np.rint(np.where(np.isnan(x), np.float32(-1), x))
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[dtype])


def rounded(x: F32, dtype: str) -> F32:
    """The float32 values that `cast(x, dtype)` holds."""
    return x if dtype == "fp32" else cast(x, dtype).astype(np.float32)


def ulp(x: npt.ArrayLike, dtype: str) -> F64:
    """Distance between neighbouring values of `dtype` at the magnitude of `x` (below the normal range: of its subnormals)."""
    mantissa, least = _MANTISSA_AND_LEAST_EXPONENT[dtype]
    exponent = np.frexp(np.asarray(x, np.float64))[1] - 1  # |x| = f · 2^(exponent + 1) with f in [0.5, 1)
    exponent = np.where(np.asarray(x) == 0, least, np.maximum(exponent, least))
    return np.asarray(np.ldexp(1.0, exponent - mantissa), np.float64)


ONE_THREAD = 1 << 18
"""Multiplications below which OpenBLAS keeps a product on the calling thread."""
ALL_THREADS = 1 << 28
"""Multiplications above which waking the others surely pays."""


E4M3_DEPTH = 32
"""Depth of one e4m3 product of the tensor core."""
E4M3_SUM_BITS = 13
"""Bits behind the leading one of the largest term that Hopper's tensor core keeps when it adds up e4m3 products and what it has so far;
smaller bits of every term are cut off. Its documents leave it open; measured on an H200: the score of one pair of rows of 128 normal
values is off by about 2^-13 of itself, and by much more where a few products are far larger than the rest."""


def tensor_core(a: Array, b: Array, dtype: str, *, terms: bool = False, start: Array | None = None) -> Array:
    """start + a · b of float32 matrices that hold values of `dtype`, summed as precisely as the tensor core does. `start`: what the
    accumulator holds, None: 0. int8: exact, since float32 holds every integer that a sum may come to (see `rules.INT8_DEPTH`).

    e4m3: after every product of depth 32 the sum is cut; with `terms` each of its 33 terms (the sum so far is one) is cut where the largest
    of them has its last bit: the exact model, some times slower. The difference tells where many small products join a large sum."""
    if dtype != "e4m3":
        product: Array = matmul(a, b)
        return product if start is None else np.add(start, product, out=product)
    total = np.zeros((a.shape[0], b.shape[1]), np.float32) if start is None else start.astype(np.float32)
    for k in range(0, a.shape[1], E4M3_DEPTH):
        rows, columns = a[:, k : k + E4M3_DEPTH], b[k : k + E4M3_DEPTH]
        if terms:
            _add_cut_terms(total, rows, columns)
        else:
            total += matmul(rows, columns)
            _cut(total, last_bit(np.abs(total)))
    return total


def _add_cut_terms(total: F32, a: Array, b: Array) -> None:
    term, largest = np.empty_like(total), np.abs(total)
    for x, y in zip(np.abs(a.T)[:, :, None], np.abs(b)):
        np.maximum(largest, np.multiply(x, y, out=term), out=largest)
    step = last_bit(largest)
    per_step = 1 / step  # a power of two
    np.trunc(np.multiply(total, per_step, out=total), out=total)
    for x, y in zip(a.T[:, :, None], b):
        np.multiply(np.multiply(x, y, out=term), per_step, out=term)
        total += np.trunc(term, out=term)  # whole numbers below 2^20: exact
    total *= step


def last_bit(largest: F32 | np.float32) -> F32:
    """The last bit kept beside a largest term. (Of sums rescaled to almost nothing: one whose reciprocal is a number.)"""
    _, exponent = np.frexp(largest)
    step: F32 = np.ldexp(np.float32(1), np.maximum(exponent, -100) - 1 - E4M3_SUM_BITS)
    return step


def _cut(x: F32, step: F32) -> F32:
    """x cut towards 0 to multiples of `step`, in place."""
    x /= step
    np.trunc(x, out=x)
    x *= step
    return x


def matmul(a: Array, b: Array) -> Array:
    """a · b of two matrices; tiles in strips small enough for one thread. Waking others for a tile costs more than the tile itself,
    and many times more on a machine whose cores are busy."""
    (m, k), n = a.shape, b.shape[1]
    if m * n * k >= ALL_THREADS:
        big: Array = a @ b
        return big
    d = np.empty((m, n), np.result_type(a, b))
    for row in range(0, m, 64):
        rows = a[row : row + 64]
        strip = max(8, ONE_THREAD // max(1, rows.size) // 8 * 8)
        for column in range(0, n, strip):
            np.matmul(rows, b[:, column : column + strip], out=d[row : row + 64, column : column + strip])
    return d
