"""Quantisation scales of 8-bit tensors: what one covers, where it lies, and how a kernel applies it.

An 8-bit tensor stands for itself times its *descale*. q's and k's multiply the scores, v's the output (a 16-bit v has none);
`Schedule.scale_granularity` says what one number covers:

  tensor   q, k and v have one each
  head     (batch, KV heads) each, of any strides: the query heads of a group share q's
  block    q (batch, heads, query tiles), k and v (batch, KV heads, key blocks), contiguous, blocks aligned at row 0

A scale of a tensor or a head is the same for all keys of a tile: q's and k's go into the softmax scale, v's multiplies the output at the
end. Scales of blocks are applied where the block is. k's multiplies its scores; what scores are multiplied by in all is at least
`LEAST_SCORE_SCALE`. v's, call it v_j, becomes part of P, since the tensor core adds up all blocks alike: P of block j is 2^(x + log2 v_j − m + offset) for a score x in units of log2, and m is the running maximum of
x + log2 v_j, not of x. So in every row whatever contributes most to O fills e4m3's range, P overflows no earlier than without scales, and
the output needs no scale at the end. The row sum is that of 2^(x − m + offset): what P's values sum to, times 1 / v_j. `LEAST_V_SCALE`
stands for smaller scales of v (0 is that of an empty block), whose P is then 0 beside any other block, and whose row sum still counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..attention import Attention
from ..errors import Violation
from ..schedule import Schedule
from .expr import Expr, ceildiv, sym
from .kernel import Param, Problem
from .steps import Body, Gmem, Let, LoadScale, ScaleShift, Set, Var

if TYPE_CHECKING:
    from .tiles import Tiles

LEAST_SCORE_SCALE = 2.0**-100
"""What scores are multiplied by is at least this: where q and k are zeros, the product of their descales is 0 in float32, and 0 · −inf of a
masked score would be NaN. Scores times this vanish beside 1."""
LEAST_V_SCALE = 2.0**-64
"""Smaller block scales of v are taken as this: P and row sums then stay float32 numbers for scales up to 2^36, which is 2^100 larger; where
one block's scale is larger than another's by more than that, the row sum misses the other's small exponentials."""

MAX_PROMOTE_EVERY = 4096
"""Blocks; of 32 keys or more, so beyond any length at which the accumulator's error does not matter."""

DECLARED = {Let: "const float", Var: "float", Set: ""}
"""How a scalar is declared where a tile's other variables are declared so."""


def structure(a: Attention, s: Schedule) -> Iterator[Violation]:
    """Rules of `scale_granularity` and `promote_every` beside the other fields."""
    if a.has_descales:
        if s.scale_granularity is None and s.mma == "wgmma":  # 8-bit types on another unit are the mistake to speak of
            message = f"{a.dtype} tensors stand for multiples of scales; it must say what one covers"
            yield Violation("scale-granularity", "scale_granularity", message, ("head", "tensor", "block"))
    elif s.scale_granularity is not None:
        message = f"{s.scale_granularity!r} given, but {a.dtype} tensors have no scales; precision 'e4m3', 'int8' or 'int8_qk' would quantise them"
        yield Violation("scale-granularity", "scale_granularity", message, (None,))
    if s.promote_every is not None and a.value_dtype != "e4m3":
        message = f"{s.promote_every} given, but products of {a.value_dtype} are summed in float32"
        yield Violation("promote-every", "promote_every", message, (None,))


# for the host -----------------------------------------------------------------------------------------------------------


def shape(name: str, schedule: Schedule, problem: Problem) -> tuple[int, ...] | None:
    """Of a descale given as an array; None: any shape of one element."""
    p = problem
    if schedule.scale_granularity == "tensor":
        return None
    if schedule.scale_granularity == "head":
        return p.batch, p.hkv
    heads, length, rows = (p.hq, p.sq, schedule.tile_q) if name == "q_descale" else (p.hkv, p.sk, schedule.tile_kv)
    return p.batch, heads, -(-length // rows)


def dims(name: str, schedule: Schedule) -> tuple[str, ...]:
    """Names of an array's dimensions, for messages and the list of a kernel's tensors."""
    if schedule.scale_granularity == "tensor":
        return ("1",)
    if schedule.scale_granularity == "head":
        return "batch", "kv_heads"
    return ("batch", "heads", "query_tiles") if name == "q_descale" else ("batch", "kv_heads", "key_blocks")


def tensors(attention: Attention, schedule: Schedule) -> tuple[Gmem, ...]:
    return tuple(Gmem(n, "fp32", dims(n, schedule), "in") for n in attention.descales)


def params(attention: Attention, schedule: Schedule) -> tuple[Param, ...]:
    """Strides of the arrays, and the numbers given instead of arrays (whose pointer is null). A tensor's scale has no place to compute;
    the strides of blocks follow from the sizes."""
    strides: tuple[Param, ...] = ()
    if schedule.scale_granularity == "head":
        strides = tuple(Param(f"{n}_{x}", "i64", sym(f"{n}_{x}")) for n in attention.descales for x in ("sb", "sh"))
    elif schedule.scale_granularity == "block":
        for name in attention.descales:
            mine = name == "q_descale"
            blocks = ceildiv(sym("sq"), schedule.tile_q) if mine else ceildiv(sym("sk"), schedule.tile_kv)
            heads = sym("hq") if mine else sym("hkv")
            strides += (Param(f"{name}_sb", "i64", heads * blocks), Param(f"{name}_sh", "i64", blocks))
    return (*strides, *(Param(f"{n}_value", "f32", sym(f"{n}_value")) for n in attention.descales))


# steps --------------------------------------------------------------------------------------------------------------------


def by_block(tiles: Tiles) -> bool:
    return tiles.schedule.scale_granularity == "block"


def of_v(tiles: Tiles) -> bool:
    """Whether v has descales: a 16-bit one stands for itself."""
    return "v_descale" in tiles.attention.descales


def of_tile(tiles: Tiles, head: Expr, head_kv: Expr, batch: Expr, m: Expr, step: type[Let] | type[Var] | type[Set]) -> Body:
    """`score_scale` of a tile: the softmax scale with q's, and unless that changes from block to block with k's."""
    if not tiles.attention.has_descales:
        return ()
    load = LoadScale(
        var="score_scale",
        declare=DECLARED[step],
        constant=tiles.attention.scale_log2,
        factors=("q_descale", "k_descale"),
        least=LEAST_SCORE_SCALE,
    )
    if by_block(tiles):
        return (replace(load, factors=("q_descale",), least=None, head=head, batch=batch, block=m),)  # of the product with k's
    return (_shared(tiles, load, head_kv, batch),)


def of_block(tiles: Tiles, head_kv: Expr, batch: Expr, j: Expr, prefix: str = "") -> Body:
    """Scales of a block, asked for before its products are issued, so that they are there when the scores are. `prefix`: of the
    scalars' names, where a block outside the loops has its own."""
    if not by_block(tiles):
        return ()
    name = f"{prefix}block_scale"
    k = LoadScale(var=name, constant=1.0, times="score_scale", factors=("k_descale",), least=LEAST_SCORE_SCALE)
    v = LoadScale(var=f"{prefix}v_scale", constant=1.0, factors=("v_descale",))
    k, v = (replace(x, head=head_kv, batch=batch, block=j) for x in (k, v))
    if not of_v(tiles):
        return (k,)
    shift = ScaleShift(shift=f"{prefix}v_shift", weight=f"{prefix}v_weight", scale=f"{prefix}v_scale", least=LEAST_V_SCALE)
    return k, v, shift


def of_softmax(tiles: Tiles, prefix: str = "") -> dict[str, str]:
    """Which scalars a softmax step uses, with the prefix of its block."""
    if not tiles.attention.has_descales:
        return {}
    if not by_block(tiles):
        return {"scale": "score_scale"}
    of_p = {"shift": f"{prefix}v_shift", "weight": f"{prefix}v_weight"} if of_v(tiles) else {}
    return {"scale": f"{prefix}block_scale", **of_p}


def of_output(tiles: Tiles, head_kv: Expr, batch: Expr) -> Body:
    """`out_scale`; none where P has v's scales, or v has none."""
    if not of_v(tiles) or by_block(tiles):
        return ()
    return (_shared(tiles, LoadScale(var="out_scale", constant=1.0, factors=("v_descale",)), head_kv, batch),)


def _shared(tiles: Tiles, load: LoadScale, head_kv: Expr, batch: Expr) -> LoadScale:
    """Of the tile's head, or of the whole tensor."""
    return replace(load, head=head_kv, batch=batch) if tiles.schedule.scale_granularity == "head" else load
