"""16-bit q, k, v → 8 bits and descales in NumPy: what the generated quantisers compute, stated without them.

In float32, in this order, so that a kernel can agree bit for bit:

1. x = the element. `smooth_k`: k's x −= the mean of its column over the sequence (the same for every key, so it moves all scores of
   a row by scale · q · mean: out stays, and lse gets the shift back).
2. `hadamard`: q's and k's rows are rotated: x · D, then butterflies (a, b) → (a + b, a − b) in the order of `plan.rotation`.
3. amax = largest finite |x| of the elements that share a scale, at least `LEAST_AMAX`.
4. code = e4m3(x · (448 / amax)): one division for each scale, one product for each element, to nearest even, saturating at ±448. In int8
   (q and k): x · (127 / amax) rounded once, to the nearest whole number, even ones between two.
5. descale = amax / 448, or amax / 127; of rotated q and k then · head_dim ** −0.5.

e4m3: NaN stays NaN (in a rotated row: all of it; in smoothed k: the column) and does not touch the scale. ±inf saturates to ±448, the
largest finite value beside it. int8 has neither: one NaN or ±inf among the elements of a scale (after rotation and smoothing) makes the
descale NaN, and so all scores that it takes part in. Zeros stay zeros under a finite scale. Only the mean depends on an order of summation: here it is
exact (float64) and rounded once; a kernel's may differ in its last bits, so it can be given.

Sources: FlashAttention-3 (arXiv 2407.08608, section 3.3: block scales, incoherent processing), SageAttention (arXiv 2410.02367:
smoothing of K).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..plan.rotation import butterfly_strides, signs
from .numeric import E4M3_MAX, F32, LARGEST, Array, cast

GRANULARITIES = ("tensor", "head", "block")

LEAST_AMAX = float(np.float32(E4M3_MAX * 2.0**-100))
"""No scale stands for less: 448 / amax, 127 / amax and descale stay normal float32 numbers when every element is 0."""


@dataclass(frozen=True, kw_only=True)
class Quantiser:
    """What is done before the cast."""

    granularity: str = "head"
    """What shares a scale: "tensor"; "head": a (batch, KV head), in q all query heads of its group; "block": `tile_q` rows of a
    (batch, head) of q, `tile_kv` rows of a (batch, KV head) of k and v, aligned at row 0."""
    hadamard: bool = False
    """Rotate q and k (head_dim a power of 2)."""
    smooth_k: bool = False
    """Subtract k's mean over the sequence."""
    tile_q: int | None = None
    """Rows; with granularity "block"."""
    tile_kv: int | None = None
    dtype: str = "e4m3"
    """Of q and k: "e4m3" or "int8"."""
    v_dtype: str | None = "e4m3"
    """Of v: "e4m3"; None: v stays as it is, and has no descale."""

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise InputError("granularity", f"is {self.granularity!r}; expected one of {', '.join(GRANULARITIES)}")
        if self.granularity == "block":
            for name in ("tile_q", "tile_kv"):
                rows = getattr(self, name)
                if not isinstance(rows, int) or rows < 1:
                    raise InputError(name, f"is {rows}; scales per block need its number of rows")


@dataclass(frozen=True)
class Quantised:
    """q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, …) in 8 bits, and the float32 numbers that their
    elements are multiples of.

    Shapes of the descales: "tensor" (1,); "head" (batch, kv_heads) for all three; "block" (batch, heads, ceil(seqlen_q / tile_q)) for
    q and (batch, kv_heads, ceil(seqlen_k / tile_kv)) for k and v.
    """

    quantiser: Quantiser
    q: Array
    k: Array
    v: Array
    q_descale: F32
    k_descale: F32
    v_descale: F32 | None
    """None where v stays as it is."""
    k_mean: F32 | None
    """(batch, kv_heads, head_dim), what was subtracted; None without `smooth_k`."""

    def dequantised(self) -> tuple[F32, F32, F32]:
        """The float32 tensors that the attention works on: q and k rotated and k smoothed, as the quantiser says."""
        group = max(1, self.q.shape[2] // max(1, self.k.shape[2]))
        tile_q, tile_kv = self.quantiser.tile_q or 1, self.quantiser.tile_kv or 1
        return (
            _times(self.q, self.q_descale, tile_q, group if self.quantiser.granularity == "head" else 1),
            _times(self.k, self.k_descale, tile_kv, 1),
            self.v.astype(np.float32) if self.v_descale is None else _times(self.v, self.v_descale, tile_kv, 1),
        )


def quantise(q: Array, k: Array, v: Array, quantiser: Quantiser, *, k_mean: F32 | None = None) -> Quantised:
    """Quantise q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads,
    head_dim_v): float32, or a 16-bit type. `k_mean` (batch, kv_heads, head_dim): subtract this instead of the exact mean.

    InputError: head_dim is no power of 2 where it is to be rotated; a `k_mean` that is not asked for.
    """
    if k_mean is not None and not quantiser.smooth_k:
        raise InputError("k_mean", "given without smooth_k")
    xq, xk, xv = (x.astype(np.float32) for x in (q, k, v))
    if quantiser.smooth_k:
        k_mean = mean_over_sequence(xk) if k_mean is None else k_mean
        with np.errstate(invalid="ignore"):
            xk = xk - k_mean[:, None]
    rotated = np.float32(1)
    if quantiser.hadamard:
        xq, xk = rotate(xq), rotate(xk)
        rotated = np.float32(q.shape[3] ** -0.5)
    group = max(1, q.shape[2] // max(1, k.shape[2]))
    of_q, scale_q = _scaled(xq, quantiser, quantiser.tile_q, group, quantiser.dtype)
    of_k, scale_k = _scaled(xk, quantiser, quantiser.tile_kv, 1, quantiser.dtype)
    of_v, scale_v = (v, None) if quantiser.v_dtype is None else _scaled(xv, quantiser, quantiser.tile_kv, 1, quantiser.v_dtype)
    return Quantised(quantiser, of_q, of_k, of_v, scale_q * rotated, scale_k * rotated, scale_v, k_mean)


def mean_over_sequence(k: Array) -> F32:
    """k (batch, seqlen_k, kv_heads, head_dim) → (batch, kv_heads, head_dim); no keys: 0."""
    with np.errstate(invalid="ignore"):
        total = k.astype(np.float64).sum(axis=1)
    mean: F32 = (total / max(1, k.shape[1])).astype(np.float32)
    return mean


def lse_shift(q: Array, k_mean: F32, softmax_scale: float) -> F32:
    """What smoothing took off every score of a row: softmax scale · q · mean(k), (batch, heads, seqlen_q), to be added to lse.
    q as it was before quantisation; query head h reads KV head h // group."""
    b, sq, hq, d = q.shape
    hkv = k_mean.shape[1]
    grouped = q.astype(np.float64).reshape(b, sq, hkv, hq // max(1, hkv), d)
    dots = np.einsum("bshgd,bhd->bhgs", grouped, k_mean.astype(np.float64))
    shift: F32 = (dots.reshape(b, hq, sq) * softmax_scale).astype(np.float32)
    return shift


def rotate(x: F32) -> F32:
    """x (…, head_dim) times D, then H unnormalised: float32 butterflies, nearest columns first."""
    d = x.shape[-1]
    if d & (d - 1):
        raise InputError("hadamard", f"rotates rows of a power of 2 columns; head_dim is {d}")
    y: F32 = x * np.asarray(signs(d), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for stride in butterfly_strides(d):
            pairs = y.reshape(*x.shape[:-1], d // (2 * stride), 2, stride)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            y = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
    return y


def codes_of(x: F32, scale: Array | np.float32, dtype: str) -> Array:
    """x · scale rounded to `dtype`: for e4m3 from a float32 product, for int8 from the exact one (float64 holds it)."""
    with np.errstate(invalid="ignore", over="ignore"):
        return cast(x.astype(np.float64 if dtype == "int8" else np.float32) * scale, dtype)


def _scaled(x: F32, quantiser: Quantiser, rows: int | None, group: int, dtype: str) -> tuple[Array, F32]:
    """Codes and descale (without the rotation's factor). `rows` a block, `group` heads that share a scale."""
    size, top = np.abs(x), np.float32(LARGEST[dtype])
    size[~np.isfinite(size)] = np.inf if dtype == "int8" else 0
    amax = np.maximum(_AMAX[quantiser.granularity](size, rows or 1, group), np.float32(LEAST_AMAX))
    codes = codes_of(x, _spread(top / amax, x, rows or 1, group), dtype)
    return codes, np.where(np.isinf(amax), np.float32(np.nan), amax / top)


def _amax_of_tensor(size: F32, rows: int, group: int) -> F32:
    return np.asarray(size.max(initial=0), np.float32).reshape(1)


def _amax_of_heads(size: F32, rows: int, group: int) -> F32:
    batch, heads = size.shape[0], size.shape[2]
    of_heads: F32 = size.max(axis=(1, 3), initial=0).reshape(batch, heads // group, group).max(axis=2, initial=0)
    return of_heads


def _amax_of_blocks(size: F32, rows: int, group: int) -> F32:
    b, s, h, d = size.shape
    blocks = -(-s // rows)
    padded = np.zeros((b, blocks * rows, h, d), np.float32)
    padded[:, :s] = size
    of_blocks: F32 = padded.reshape(b, blocks, rows, h, d).max(axis=(2, 4), initial=0).transpose(0, 2, 1)
    return np.ascontiguousarray(of_blocks)


_AMAX: dict[str, Callable[[F32, int, int], F32]] = {"tensor": _amax_of_tensor, "head": _amax_of_heads, "block": _amax_of_blocks}


def _times(x: Array, scale: npt.NDArray[np.float32], rows: int, group: int) -> F32:
    """x (batch, seq, heads, dim) times its scale in any of the three shapes."""
    product: F32 = x.astype(np.float32) * _spread(scale, x, rows, group)
    return product


def _spread(scale: npt.NDArray[np.float32], x: Array, rows: int, group: int) -> F32:
    """A scale in any of the three shapes as one that multiplies x (batch, seq, heads, dim)."""
    if scale.ndim == 2:  # (batch, kv_heads)
        scale = np.repeat(scale, group, axis=1)[:, None, :, None]
    elif scale.ndim == 3:  # (batch, heads, blocks)
        scale = np.repeat(scale, rows, axis=2)[:, :, : x.shape[1]].transpose(0, 2, 1)[..., None]
    return scale
