"""How the tensor cores address a tile in shared memory: descriptor fields and steps along the reduction, in bytes and 16-byte units.

Source: PTX ISA 9.7.15.5 (wgmma shared-memory layouts and descriptors, 128-byte swizzle). A tile is kept as 128-byte chunks of
[rows][128 B], see `layout.swizzle`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .expr import Expr, sym
from .steps import DTYPE_BYTES, Smem

K = sym("k")
UNIT = 16  # bytes that one step of a descriptor's address field stands for
CHUNK = 128
STEP = 32  # bytes of depth of one instruction


@dataclass(frozen=True)
class WgmmaOperand:
    """A tile as A or B of wgmma: descriptor offsets in bytes; the address's advance at k-step `k` and per slot in 16-byte units."""

    swizzle: int
    """Width in bytes: 128 or 64."""
    leading: int
    stride: int
    at_k: Expr
    slot: int
    row_bytes: int
    """Bytes from one row to the next inside a chunk, to start at another row."""


def k_depth(dtype: str) -> int:
    """Depth of one wgmma or mma.sync instruction: 32 bytes."""
    return 32 // DTYPE_BYTES[dtype]


def wgmma_operand(tile: Smem, trans: bool) -> WgmmaOperand:
    """`trans` False: the reduction runs along the columns (Q, and K in Q·Kᵀ: K-major). True: along the rows (V in P·V: MN-major)."""
    width = tile.chunk_bytes
    chunk = tile.rows * width
    slot = tile.tile_bytes // UNIT
    if trans:  # one k-step is 16 rows further; the leading offset goes from 64 columns to the next 64
        return WgmmaOperand(width, chunk, 8 * width, K * (k_depth(tile.dtype) * width // UNIT), slot, width)
    steps = width // STEP  # k-steps within a chunk
    at_k = K * (STEP // UNIT)
    if tile.chunks > 1:
        at_k = K // steps * (chunk // UNIT) + K % steps * (STEP // UNIT)
    return WgmmaOperand(width, UNIT, 8 * width, at_k, slot, width)


def ldmatrix_b(tile: Smem, trans: bool) -> Expr:
    """Byte offset in the tile that a lane names for the B operand of k-step `k` and the pair `n` of 8-column tiles (ldmatrix.x4).

    trans False: K[n][k]: lanes 0-7 and 8-15 name the left and right half of 16 columns for 8 keys, 16-31 the same for the next 8 keys.
    trans True: V[k][n]: lanes 0-15 name 16 keys of the left 8 columns, 16-31 of the right 8.
    """
    lane, n = sym("lane"), sym("n")
    chunk = tile.rows * CHUNK
    if trans:
        row, unit = K * 16 + lane % 16, n % 4 * 2 + lane // 16
        return _swizzled(n // 4 * chunk, row, unit)
    row, unit = n * 16 + lane // 16 * 8 + lane % 8, K % 4 * 2 + lane // 8 % 2
    return _swizzled(K // 4 * chunk, row, unit)


def ldmatrix_a(tile: Smem, block: Expr) -> Expr:
    """Byte offset that a lane names for the A operand of k-step `k`, `block` of 16 rows from row `row`. An 8-bit A has 32 columns a step
    in the same bytes."""
    lane, width = sym("lane"), tile.chunk_bytes
    steps = width // STEP
    row = sym("row") + block * 16 + lane % 16
    return _swizzled(K // steps * (tile.rows * width), row, K % steps * 2 + lane // 16, width)


def _swizzled(chunk: Expr, row: Expr, unit: Expr, width: int = CHUNK) -> Expr:
    """Rows start at multiples of 8 in every use, so row % 8 is lane % 8, which the compiler keeps in one register."""
    turn = sym("lane") % 8 if width == CHUNK else sym("lane") // 2 % 4
    return chunk + row * width + (unit ^ turn) * UNIT
