"""Inputs of a bench, made on the GPU through torch: random ones, and two kinds that are unkind to an online softmax.

normal   N(0, 1), with a very large softmax scale less of q and k (`oracle.inputs.narrowing`)
sink     the first four keys score about 8 above the rest (natural units), as the first tokens of a language model do
growing  scores grow by about 30 powers of two every block of keys in the order in which kernels walk them, from the last key to the first:
         every block moves every row's maximum, and a stale maximum takes its exact path each time
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..attention import Attention
from ..errors import InputError
from ..interop.arrays import FRAMEWORK_NAMES
from ..oracle.inputs import PATTERN_Q, PATTERNS, int8_units, largest_of_k, narrowing, per_unit
from ..oracle.numeric import INT8_MAX
from ..plan.kernel import Problem

KINDS = {
    "normal": "random normal",
    "sink": "random normal, the first four keys about 8 above the rest",
    "growing": "random normal plus scores that grow towards the first key by 30 powers of two every block of the shortest schedule",
}
"""Name → what it is, in words."""

GROWTH = 30.0
"""Powers of two a block: twice what the check of a stale maximum lets through."""
SINK_KEYS = 4


def check_inputs(kind: str, attention: Attention, problem: Problem, block: int | None = None) -> None:
    """InputError for a kind that does not exist, or that the type has no room for (growing scores: known once the `block` of
    keys is)."""
    if kind not in KINDS:
        raise InputError("--inputs", f"no inputs {kind!r}; there are {', '.join(KINDS)}")
    sink = PATTERNS["sink"] * per_unit(attention)
    if kind == "sink" and sink > largest_of_k(attention):
        what = f"a sink with scale {attention.softmax_scale:g} needs {sink:.3g} in k"
        raise InputError("--inputs", f"{what}, beyond the range of {attention.dtype}")
    if kind == "growing":
        if attention.has_descales:
            raise InputError("--inputs", f"growing scores need more range than {attention.dtype} has; there are normal and sink")
        largest = 0.0 if block is None else per_unit(attention) * math.log(2) * GROWTH / block * problem.sk / 2
        if largest > largest_of_k(attention):
            raise InputError("--inputs", f"growing scores over {problem.sk} keys exceed the range of {attention.dtype}; use bf16")


def make_inputs(torch: Any, attention: Attention, problem: Problem, kind: str, seed: int, block: int) -> tuple[Any, Any, Any]:
    """q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, …) of the attention's dtype, the same for the same seed
    on one GPU. `block`: keys over which growing scores gain `GROWTH` powers of two."""
    check_inputs(kind, attention, problem, block)
    p, a = problem, attention
    shapes = ((p.batch, p.sq, p.hq, a.head_dim), (p.batch, p.sk, p.hkv, a.head_dim), (p.batch, p.sk, p.hkv, a.dv))
    exact = "fp32" if a.dtype == "int8" else a.dtype
    q, k, v = (normal(torch, shape, t, seed + i) for i, (shape, t) in enumerate(zip(shapes, (exact, exact, a.value_dtype))))
    narrow = narrowing(a)
    if narrow != 1.0:
        q, k = ((x.float() * narrow).to(x.dtype) for x in (q, k))
    for column, values in _pattern(torch, attention, problem, kind, block, k):
        q[..., column] = PATTERN_Q * narrow
        k[..., column] = values[:, None].to(k.dtype)
    if a.dtype != "int8":
        return q, k, v
    units = int8_units(attention, "sink" if kind == "sink" else "normal")
    return *((x / unit).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8) for x, unit in zip((q, k), units)), v


def descales(attention: Attention, kind: str) -> dict[str, float]:
    """What a call gives beside `make_inputs`; nothing for types whose values stand for themselves."""
    if attention.dtype != "int8":
        return {}
    q, k = int8_units(attention, "sink" if kind == "sink" else "normal")
    return {"q_descale": q, "k_descale": k}


def normal(torch: Any, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """A tensor N(0, 1) on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, FRAMEWORK_NAMES[dtype]))


def _pattern(torch: Any, attention: Attention, problem: Problem, kind: str, block: int, like: Any) -> Iterator[tuple[int, Any]]:
    """(column, its values in k by key, float32) of the pattern. Growing scores take two columns: the second holds what the first one
    rounded away, so that they grow evenly. They are centred at 0 and stand last, where fewest additions follow: scores of thousands are
    rounded where they are summed."""
    if kind == "normal":
        return
    keys = torch.arange(problem.sk, device=like.device, dtype=torch.float32)
    if kind == "sink":
        yield 0, (keys < SINK_KEYS) * (PATTERNS["sink"] * per_unit(attention))
        return
    powers = ((problem.sk - 1) / 2 - keys) * (GROWTH / block)
    values = powers * (math.log(2) * per_unit(attention))
    coarse = values.to(like.dtype).float()
    yield attention.head_dim - 2, coarse
    yield attention.head_dim - 1, values - coarse
