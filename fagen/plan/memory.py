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
    q = _tile("Q", s.tile_q, a.head_dim, a.dtype, s.slots_q)
    k = _tile("K", s.tile_kv, a.head_dim, a.dtype, s.stages_k)
    if a.value_dtype != "e4m3":
        return q, k, _tile("V", s.tile_kv, a.dv, a.value_dtype, s.stages_v)
    # 8-bit tensor core operands are K-major: V must stand with its keys along the row, given so or transposed in the kernel.
    v = Smem("V", a.dv, s.tile_kv, a.value_dtype, s.stages_v)
    return (q, k, v) if s.v_transposed else (q, k, _tile("V_raw", s.tile_kv, a.dv, a.value_dtype, s.stages_k), v)


def parts_of(attention: Attention, schedule: Schedule) -> tuple[Smem, ...]:
    """Where the warps of a split_kv tile meet: row statistics (m of all rows, then l of all rows, for each warp) and their partial
    products of P·V, which stand as they lie in the warps' registers."""
    a, s = attention, schedule
    if s.partition != "split_kv":
        return ()
    assert s.warps is not None
    return (
        Smem("O_parts", s.warps * s.tile_q, a.dv, "fp32", 1, swizzle="none"),
        Smem("stats", s.warps, 2 * s.tile_q, "fp32", 1, swizzle="none"),
    )


def kernel_tiles(attention: Attention, schedule: Schedule) -> tuple[tuple[Smem, ...], ...]:
    """The tiles of each kernel of the plan, in order, without offsets."""
    a, s = attention, schedule
    if s.softmax == "fused":
        return ((*tiles_of(a, s), *parts_of(a, s)),)
    q, k, v = tiles_of(a, s)
    return (q, k), (), (_tile("P", s.tile_q, s.tile_kv, a.dtype, 1), v)


def _tile(name: str, rows: int, cols: int, dtype: str, stages: int) -> Smem:
    return Smem(name, rows, cols, dtype, stages, "64B" if cols * DTYPE_BYTES[dtype] == 64 else "128B")


def tile_bytes(attention: Attention, schedule: Schedule) -> int:
    """Shared memory of the tiles alone, in bytes: of the kernel that has most."""
    return max(sum(t.tile_bytes * t.stages for t in tiles) for tiles in kernel_tiles(attention, schedule))


def tile_ring() -> Smem:
    """Where the producer hands over claimed tile numbers."""
    return Smem("tile_id", 1, 1, "i32", TILE_STAGES, swizzle="none")


def memory_map(tiles: tuple[Smem, ...], bars: tuple[MBar, ...]) -> tuple[tuple[Smem, ...], tuple[MBar, ...], int]:
    """Give every tile and barrier its offset; returns them with the total in bytes. Barriers are 8 bytes a slot."""
    at = 0
    placed, barriers = [], []
    for t in tiles:
        at = -(-at // ALIGN) * ALIGN if t.swizzle != "none" else -(-at // 16) * 16
        placed.append(replace(t, offset=at))
        at += t.tile_bytes * t.stages
    at = -(-at // 8) * 8
    for b in bars:
        barriers.append(replace(b, offset=at))
        at += 8 * b.stages
    return tuple(placed), tuple(barriers), at


BARRIER_BYTES = 512
"""An upper bound for what stands behind the tiles, for rules that speak before the barriers are known."""

__all__ = ["BARRIER_BYTES", "DTYPE_BYTES", "kernel_tiles", "memory_map", "parts_of", "tile_bytes", "tile_ring", "tiles_of"]
