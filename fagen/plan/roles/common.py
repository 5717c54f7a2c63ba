"""What every computing role does at a tile's two ends."""

from __future__ import annotations

from .. import scales
from ..expr import sym
from ..steps import Body, Fill, Let, Limits, LogSumExp, Reciprocal, Rescale, Set, StoreOut, StoreRow, SumRow, Var
from ..tiles import N_TILE, SQ, B, H, M, N, Tiles, W

ROW0 = sym("row0")
"""First query row of the role instance."""
HEAD_KV = sym("h_kv")
"""KV head of query head h: the query heads of a group share one."""


def p_offset(tiles: Tiles) -> int:
    """P is multiplied by 2 to this: 2^8 = 256 leaves e4m3 (up to 448) the most of its range below the reference. Scores may exceed a stale
    one: 2^7 = 128 leaves 1.8 powers of two before P saturates, on top of what the reference is above the maximum (`lift`). The price is at
    the other end: weights below 2^−17 of the reference round to 0, so below 2^−14 to 2^−17 of the maximum, instead of 2^−18."""
    if tiles.attention.value_dtype != "e4m3":
        return 0
    return 7 if tiles.schedule.reference == "stale" else 8


def lift(tiles: Tiles) -> int:
    """Powers of two by which a reference may be above the maximum (see OnlineSoftmax), in a type whose range ends just above it. A row of
    many keys of about the same weight, as that of normal scores is, then has 4.8 before P saturates, one that a key has for itself 1.8."""
    return 3 if tiles.schedule.reference == "stale" and tiles.attention.value_dtype == "e4m3" else 0


def sums(tiles: Tiles) -> tuple[str, ...]:
    """The accumulators of P·V that last from block to block; the last one has the result in the end. With a copy in float32: the copy, and
    the tensor core's own one unless every block starts it anew."""
    every = tiles.schedule.promote_every
    return ("O",) if every is None else ("O_sum",) if every == 1 else ("O", "O_sum")


def clear(tiles: Tiles) -> Body:
    return tuple(Fill(dst=o, value=0.0) for o in sums(tiles))


def setup(tiles: Tiles, rows: int, step: type[Let] | type[Var] | type[Set] = Let) -> Body:
    """Decode the tile, limits of the mask, O = 0, m = −∞, l = 0. An instance owns `rows` query rows."""
    return (
        *locate(tiles, rows, step),
        *clear(tiles),
        Fill(dst="m_ref", value=float("-inf")),
        Fill(dst="l_sum", value=0.0),
    )


def locate(tiles: Tiles, rows: int, step: type[Let] | type[Var] | type[Set] = Let) -> Body:
    """Where the tile is, and what its rows see."""
    own: Body = ()
    if tiles.schedule.skip_masked:
        own = (step(var="n", value=tiles.blocks_of_warpgroup(ROW0), why="of those, the ones that a row of this instance sees"),)
    return (
        *tiles.decode(step, N_TILE if tiles.schedule.skip_masked else N),
        *scales.of_tile(tiles, H, HEAD_KV, B, M, step),
        step(var="row0", value=M * tiles.schedule.tile_q + W * rows, why="first query row of this instance"),
        *own,
        Limits(dst="last_key", first_row=ROW0, limit=tiles.key_limit()),
    )


def totals(tiles: Tiles, old: bool = False) -> Body:
    """Row sums, what O is to be multiplied by, and lse: all that the epilogue needs but O, so that it can run under the last product.
    `old`: of the tile before the one that the variables h and b speak of."""
    h_kv, b = (sym(f"old_{n}") if old else sym(n) for n in ("h_kv", "b"))
    m_ref, l_sum = ("m_old", "l_old") if old else ("m_ref", "l_sum")
    load = scales.of_output(tiles, h_kv, b)
    return (
        *load,
        SumRow(dst=l_sum, src=l_sum),
        Reciprocal(dst="inverse", src=l_sum, scale="out_scale" if load else None),
        LogSumExp(lse="lse", m=m_ref, l=l_sum, offset=p_offset(tiles)),
    )


def nothing_seen() -> Body:
    """Instead of `totals`, where no row of the tile sees a key: out 0, lse −∞."""
    return Fill(dst="inverse", value=0.0), Fill(dst="lse", value=float("-inf"))


def epilogue(tiles: Tiles, old: bool = False) -> Body:
    """Normalise and write out and lse. `old`: of the tile before the one that the variables h and b speak of."""
    row0, h, b = (sym(f"old_{n}") if old else sym(n) for n in ("row0", "h", "b"))
    o = sums(tiles)[-1]
    return (
        Rescale(o=o, alpha="inverse"),
        StoreOut(src=o, dst="out", first_row=row0, limit=SQ, head=h, batch=b),
        StoreRow(src="lse", dst="lse", first_row=row0, limit=SQ, head=h, batch=b),
    )
