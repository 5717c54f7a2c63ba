"""The shared-memory map: tiles first (each on a 1024-byte boundary, as the 128-byte swizzle wants), then the tile ring, then barriers."""

from __future__ import annotations

from dataclasses import replace

from ..attention import Attention
from ..schedule import Schedule
from .steps import DTYPE_BYTES, MBar, Smem
from .tiles import TILE_STAGES

ALIGN = 1024


def tiles_of(attention: Attention, schedule: Schedule) -> tuple[Smem, ...]:
    """Q and the K and V rings, without offsets."""
    a, s = attention, schedule
    q = _tile("Q", s.tile_q, a.head_dim, a.dtype, s.stages_q)
    k = _tile("K", s.tile_kv, a.head_dim, a.dtype, s.stages_k)
    if a.dtype != "e4m3":
        return q, k, _tile("V", s.tile_kv, a.dv, a.dtype, s.stages_v)
    # 8-bit tensor core operands are K-major: V must stand with its keys along the row, given so or transposed in the kernel.
    v = Smem("V", a.dv, s.tile_kv, a.dtype, s.stages_v)
    return (q, k, v) if s.v_transposed else (q, k, _tile("V_raw", s.tile_kv, a.dv, a.dtype, s.stages_v), v)


def _tile(name: str, rows: int, cols: int, dtype: str, stages: int) -> Smem:
    return Smem(name, rows, cols, dtype, stages, "64B" if cols * DTYPE_BYTES[dtype] == 64 else "128B")


def tile_bytes(attention: Attention, schedule: Schedule) -> int:
    """Shared memory of the tiles alone, in bytes."""
    return sum(t.tile_bytes * t.stages for t in tiles_of(attention, schedule))


def tile_ring() -> Smem:
    """Where the producer hands over claimed tile numbers."""
    return Smem("tile_id", 1, 1, "i32", TILE_STAGES, swizzle="none")


def memory_map(tiles: tuple[Smem, ...], bars: tuple[MBar, ...]) -> tuple[tuple[Smem, ...], tuple[MBar, ...], int]:
    """Give every tile and barrier its offset; returns them with the total in bytes. Barriers are 8 bytes a slot."""
    at = 0
    placed, barriers = [], []
    for t in tiles:
        at = -(-at // ALIGN) * ALIGN if t.swizzle != "none" else -(-at // 8) * 8
        placed.append(replace(t, offset=at))
        at += t.tile_bytes * t.stages
    at = -(-at // 8) * 8
    for b in bars:
        barriers.append(replace(b, offset=at))
        at += 8 * b.stages
    return tuple(placed), tuple(barriers), at


BARRIER_BYTES = 512
"""An upper bound for what stands behind the tiles, for rules that speak before the barriers are known."""

__all__ = ["BARRIER_BYTES", "DTYPE_BYTES", "memory_map", "tile_bytes", "tile_ring", "tiles_of"]
