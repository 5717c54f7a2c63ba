"""`fagen.oracle.quantise` on the GPU through torch: what a plan with `precision` works on, as float32 tensors. A yardstick for outputs that
are too long for NumPy; the kernels are not asked."""

from __future__ import annotations

from typing import Any

from ..attention import Attention
from ..oracle.numeric import LARGEST
from ..oracle.quantise import LEAST_AMAX, Quantiser
from ..plan.rotation import butterfly_strides, signs


def dequantised(torch: Any, attention: Attention, quantiser: Quantiser, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, Any]:
    """Float32 tensors (batch, seq, heads, dim) of what q, k and v become, and the shift (batch, heads, seqlen_q) that lse gets back, or
    None without smoothing."""
    of_q, of_k, of_v = (x.float() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    shift = None
    if quantiser.smooth_k:
        mean = of_k.double().mean(dim=1).float()
        of_k = of_k - mean[:, None]
        shift = torch.einsum("bshd,bhd->bhs", of_q, mean.repeat_interleave(group, dim=1)) * attention.softmax_scale
    if quantiser.hadamard:
        of_q, of_k = (rotate(torch, x) * attention.head_dim**-0.5 for x in (of_q, of_k))
    return (
        _rounded(torch, of_q, quantiser, quantiser.tile_q, group, quantiser.dtype),
        _rounded(torch, of_k, quantiser, quantiser.tile_kv, 1, quantiser.dtype),
        of_v if quantiser.v_dtype is None else _rounded(torch, of_v, quantiser, quantiser.tile_kv, 1, quantiser.v_dtype),
        shift,
    )


def rotate(torch: Any, x: Any) -> Any:
    """As `oracle.quantise.rotate`."""
    d = x.shape[-1]
    y = x * torch.tensor(signs(d), dtype=x.dtype, device=x.device)
    for stride in butterfly_strides(d):
        a, b = y.reshape(*x.shape[:-1], d // (2 * stride), 2, stride).unbind(dim=-2)
        y = torch.stack([a + b, a - b], dim=-2).reshape(x.shape)
    return y


def _rounded(torch: Any, x: Any, quantiser: Quantiser, rows: int | None, group: int, dtype: str) -> Any:
    """x (batch, seq, heads, dim), finite, rounded to `dtype` times its scale, and back."""
    b, s, h, _ = x.shape
    size = x.abs()
    size = torch.where(torch.isfinite(size), size, torch.zeros_like(size)).amax(dim=3)  # (batch, seq, heads)
    if quantiser.granularity == "tensor":
        amax = size.amax().expand(b, s, h)
    elif quantiser.granularity == "head":
        amax = size.amax(dim=1).reshape(b, h // group, group).amax(dim=2).repeat_interleave(group, dim=1)[:, None].expand(b, s, h)
    else:
        assert rows is not None
        padded = torch.nn.functional.pad(size, (0, 0, 0, -s % rows))
        amax = padded.reshape(b, -1, rows, h).amax(dim=2).repeat_interleave(rows, dim=1)[:, :s]
    amax = amax.clamp(min=LEAST_AMAX)[..., None]
    top = LARGEST[dtype]
    if dtype == "int8":
        return (x.double() * (top / amax)).round().float() * (amax / top)
    codes = (x * (top / amax)).clamp(-top, top).to(torch.float8_e4m3fn).float()
    return codes * (amax / top)
