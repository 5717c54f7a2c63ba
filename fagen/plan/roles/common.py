"""What every computing role does at a tile's two ends."""

from __future__ import annotations

from ..expr import sym
from ..steps import Body, Fill, Finalise, Let, Limits, LoadScale, StoreOut, StoreRow
from ..tiles import SQ, B, H, M, Tiles, W

ROW0 = sym("row0")
"""First query row of the role instance."""
HEAD_KV = sym("h_kv")
"""KV head of query head h: the query heads of a group share one."""


def p_offset(tiles: Tiles) -> int:
    """P is multiplied by 2 to this: 2^8 = 256 leaves e4m3 (up to 448) the most of its range below the row's maximum. A stale reference
    may lie below the maximum; 2^6 = 64 leaves it 2.8 powers of two before values saturate."""
    if tiles.attention.dtype != "e4m3":
        return 0
    return 6 if tiles.schedule.reference == "stale" else 8


def setup(tiles: Tiles, rows: int) -> Body:
    """Decode the tile, limits of the mask, O = 0, m = −∞, l = 0. An instance owns `rows` query rows."""
    scales: Body = ()
    if tiles.attention.dtype == "e4m3":
        factors = ("q_descale", "k_descale")
        scales = (LoadScale(var="score_scale", constant=tiles.attention.scale_log2, factors=factors, head=HEAD_KV, batch=B),)
    return (
        *tiles.decode(),
        *scales,
        Let(var="row0", value=M * tiles.schedule.tile_q + W * rows, why="first query row of this instance"),
        Limits(dst="last_key", first_row=ROW0, limit=tiles.key_limit()),
        Fill(dst="O", value=0.0),
        Fill(dst="m_ref", value=float("-inf")),
        Fill(dst="l_sum", value=0.0),
    )


def epilogue(tiles: Tiles) -> Body:
    """Normalise and write out and lse. A row that saw no key has l = 0: out 0, lse −∞."""
    scale: str | None = None
    load: Body = ()
    if tiles.attention.dtype == "e4m3":
        scale = "out_scale"
        load = (LoadScale(var=scale, constant=1.0, factors=("v_descale",), head=HEAD_KV, batch=B),)
    return (
        *load,
        Finalise(o="O", m="m_ref", l="l_sum", lse="lse", scale=scale, offset=p_offset(tiles)),
        StoreOut(src="O", dst="out", first_row=ROW0, limit=SQ, head=H, batch=B),
        StoreRow(src="lse", dst="lse", first_row=ROW0, limit=SQ, head=H, batch=B),
    )
