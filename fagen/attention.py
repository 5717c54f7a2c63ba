"""What is computed: the `Attention` value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .value import Value

EIGHT_BIT_TYPES = ("e4m3", "int8")
"""Types whose tensors stand for multiples of descales."""


@dataclass(frozen=True, kw_only=True)
class Attention(Value):
    """softmax(scale · Q Kᵀ + mask) V.

    Shapes and strides are arguments of the call, not part of this value: q (batch, seqlen_q, heads, head_dim),
    k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads, head_dim_v); heads is a multiple of kv_heads.
    """

    head_dim: int
    """Columns of Q and K."""
    head_dim_v: int | None = None
    """Columns of V and of the output; None: as head_dim."""
    dtype: str = "bf16"
    """Of q, k and v: "bf16", "fp16" or "e4m3"; "int8": of q and k."""
    v_dtype: str | None = None
    """With dtype "int8": of v, "e4m3", "bf16" or "fp16"; None: e4m3. Other types have v's own, None."""
    out_dtype: str | None = None
    """Of the output; None: v's, bf16 where that is 8-bit."""
    mask: str = "full"
    """"full"; "causal": row i sees key j if j ≤ i + seqlen_k − seqlen_q (aligned bottom-right); "window"."""
    scale: float | None = None
    """Softmax scale, positive and finite; None: head_dim ** −0.5."""
    window: tuple[int, int] | None = None
    """With mask "window": keys seen to the (left, right) of the diagonal, inclusive."""
    softcap: float | None = None
    """Scores pass through softcap · tanh(score / softcap)."""
    sink: bool = False
    """A learnable logit per head joins the softmax's denominator."""

    @property
    def dv(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def scale_log2(self) -> float:
        """softmax scale · log2 e: scores in units in which the exponential is 2^x."""
        return self.softmax_scale * math.log2(math.e)

    @property
    def value_dtype(self) -> str:
        """Of v, and so of P, the other operand of their product."""
        return self.v_dtype or ("e4m3" if self.dtype == "int8" else self.dtype)

    @property
    def products(self) -> str:
        """The types of both products in a word, as `Schedule.precision` has it: "int8_qk" for int8 with a 16-bit v, else dtype."""
        return "int8_qk" if self.dtype == "int8" and self.value_dtype != "e4m3" else self.dtype

    @property
    def descales(self) -> tuple[str, ...]:
        """Which of "q_descale", "k_descale" and "v_descale" there are: tensors of 8-bit types stand for themselves times theirs."""
        return tuple(f"{t}_descale" for t in ("q", "k", "v") if self.dtype_of(t) in EIGHT_BIT_TYPES)

    @property
    def has_descales(self) -> bool:
        """Whether q and k (and v, unless it is 16-bit) stand for themselves times descales."""
        return self.dtype in EIGHT_BIT_TYPES

    def dtype_of(self, tensor: str) -> str:
        """Of "q", "k", "v" or "out"."""
        return {"v": self.value_dtype, "out": self.output_dtype}.get(tensor, self.dtype)

    @property
    def output_dtype(self) -> str:
        return self.out_dtype or ("bf16" if self.value_dtype in EIGHT_BIT_TYPES else self.value_dtype)

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def label(self) -> str:
        """Short text for tables: hd128 bf16 causal; hd128 int8/bf16 full."""
        dv = "" if self.dv == self.head_dim else f"/{self.dv}"
        v = f"/{self.value_dtype}" if self.products == "int8_qk" else ""
        return f"hd{self.head_dim}{dv} {self.dtype}{v} {self.mask}"
