"""Tensor-core addressing, by emulating ldmatrix, mma.sync and the WGMMA descriptor on tiles in swizzled shared memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from fagen.plan.expr import Expr, as_expr, sym
from fagen.plan.layout import A16, A64, A64_E4M3, ACC16, Layout, swizzle
from fagen.plan.matrix import k_depth, ldmatrix_a, ldmatrix_b, wgmma_operand
from fagen.plan.steps import DTYPE_BYTES, Smem

Array = npt.NDArray[np.int64]
SHAPES = [(16, 64), (64, 64), (32, 128), (80, 256), (176, 128)]


def in_smem(tile: Array) -> Array:
    """A tile of 16-bit values as it lies in shared memory: one entry for each value, at half its byte offset."""
    rows, cols = tile.shape
    memory = np.full(rows * cols, -1)
    for r in range(rows):
        for c in range(cols):
            memory[swizzle(r, 2 * c, rows) // 2] = tile[r, c]
    return memory


def numbered(rows: int, cols: int) -> Array:
    return np.arange(rows * cols).reshape(rows, cols)


def addresses(at: Expr, **env: int) -> list[int]:
    return [at.eval({**env, "lane": lane}) for lane in range(32)]


def ldmatrix(memory: Array, at: list[int], trans: bool = False) -> Array:
    """ldmatrix.x4 (PTX ISA 9.7.14.5.15): [thread][register][half]. Lane 8i + r names row r of matrix i; thread t gets row t / 4,
    columns 2 (t % 4) and the next, of each matrix, or of its transpose."""
    out = np.empty((32, 4, 2), np.int64)
    for i in range(4):
        matrix = np.array([memory[a // 2 : a // 2 + 8] for a in at[8 * i : 8 * i + 8]])
        matrix = matrix.T if trans else matrix
        for t in range(32):
            out[t, i] = matrix[t // 4, 2 * (t % 4) : 2 * (t % 4) + 2]
    return out


def b_coord(lane: int, register: int, half: int) -> tuple[int, int]:
    """(k, n) of the B operand of mma.m16n8k16 (PTX ISA 9.7.14)."""
    return 2 * (lane % 4) + half + 8 * register, lane // 4


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_ldmatrix_a_gives_the_a_operand(rows: int, cols: int) -> None:
    tile = Smem("Q", rows, cols, "bf16", 1)
    values = numbered(rows, cols)
    memory, at = in_smem(values), ldmatrix_a(tile, sym("i"))
    for block in range(rows // 16):
        for k in range(cols // 16):
            got = ldmatrix(memory, addresses(at, k=k, i=block, row=0)).reshape(32, 8)
            assert (got == ldmatrix(memory, addresses(at, k=k, i=0, row=16 * block)).reshape(32, 8)).all()
            for lane in range(32):
                for i in range(8):
                    r, c = A16.coord(lane, i)
                    assert got[lane, i] == values[16 * block + r, 16 * k + c]


@pytest.mark.parametrize(
    "rows, cols, dtype, layout",
    [(64, 128, "bf16", A64), (128, 64, "e4m3", A64_E4M3), (192, 256, "e4m3", A64_E4M3), (64, 128, "int8", A64_E4M3)],
)
def test_ldmatrix_gives_the_a_operand_of_a_warpgroup(rows: int, cols: int, dtype: str, layout: Layout) -> None:
    """Q in registers: byte by byte, of 8-bit tiles as well, whose rows of 64 bytes are swizzled differently; without a bank conflict."""
    size = DTYPE_BYTES[dtype]
    tile = Smem("Q", rows, cols, dtype, 1, "64B" if cols * size == 64 else "128B")
    width = tile.chunk_bytes
    at = ldmatrix_a(tile, as_expr(0))
    for first in range(0, rows, 64):
        for warp in range(4):
            for k in range(cols * size // 32):
                named = addresses(at, k=k, row=first + 16 * warp)
                for phase in range(4):
                    assert len({a // 16 % 8 for a in named[8 * phase : 8 * phase + 8]}) == 8
                for lane in range(32):
                    for i in range(16 // size):
                        r, c = layout.coord(32 * warp + lane, k * (16 // size) + i)
                        register, byte = divmod(i * size, 4)
                        got = named[8 * register + lane // 4] + 4 * (lane % 4) + byte
                        assert got == swizzle(first + r, c * size, rows, width)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_ldmatrix_b_gives_two_b_operands(rows: int, cols: int, trans: bool) -> None:
    """Registers 0 and 1 are the operand of the left n8 tile of the pair, 2 and 3 of the right one. trans: the tile is [k][n]."""
    tile = Smem("K", rows, cols, "bf16", 1)
    values = numbered(rows, cols)
    memory, at = in_smem(values), ldmatrix_b(tile, trans)
    k_steps, pairs = (rows // 16, cols // 16) if trans else (cols // 16, rows // 16)
    for k_step in range(k_steps):
        for pair in range(pairs):
            got = ldmatrix(memory, addresses(at, k=k_step, n=pair), trans)
            for lane in range(32):
                for register in range(4):
                    for half in range(2):
                        k, n = b_coord(lane, register % 2, half)
                        k, n = 16 * k_step + k, 16 * pair + 8 * (register // 2) + n
                        assert got[lane, register, half] == (values[k, n] if trans else values[n, k])


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_ldmatrix_has_no_bank_conflict_and_stays_in_the_tile(rows: int, cols: int) -> None:
    """Each quarter of an ldmatrix reads eight rows of 16 bytes: all 32 banks once."""
    tile = Smem("K", rows, cols, "bf16", 1)
    cases = [(ldmatrix_b(tile, False), cols // 16, rows // 16), (ldmatrix_b(tile, True), rows // 16, cols // 16)]
    loads = [addresses(at, k=k, n=n) for at, k_steps, pairs in cases for k in range(k_steps) for n in range(pairs)]
    loads += [addresses(ldmatrix_a(tile, sym("i")), k=k, i=i, row=0) for k in range(cols // 16) for i in range(rows // 16)]
    for at in loads:
        assert all(0 <= a <= tile.tile_bytes - 16 and a % 16 == 0 for a in at)
        for phase in range(4):
            assert len({a // 16 % 8 for a in at[8 * phase : 8 * phase + 8]}) == 8


def mma(a: Array, b: Array, trans: bool) -> Array:
    """a · bᵀ (trans: a · b) as the emitted mma.sync product does it: fragments by ldmatrix, results by the accumulator layout."""
    a_tile, b_tile = Smem("Q", *a.shape, "bf16", 1), Smem("K", *b.shape, "bf16", 1)
    a_memory, b_memory = in_smem(a), in_smem(b)
    n = b.shape[1] if trans else b.shape[0]
    d = np.zeros((a.shape[0], n), np.int64)
    for k in range(a.shape[1] // 16):
        left = np.zeros((16, 16), np.int64)
        regs = ldmatrix(a_memory, addresses(ldmatrix_a(a_tile, sym("i")), k=k, i=0, row=0)).reshape(32, 8)
        for lane in range(32):
            for i in range(8):
                left[A16.coord(lane, i)] = regs[lane, i]
        for pair in range(n // 16):
            regs = ldmatrix(b_memory, addresses(ldmatrix_b(b_tile, trans), k=k, n=pair), trans)
            for side in range(2):
                right = np.zeros((16, 8), np.int64)
                for lane in range(32):
                    for register in range(2):
                        for half in range(2):
                            right[b_coord(lane, register, half)] = regs[lane, 2 * side + register, half]
                product = left @ right
                for lane in range(32):
                    for i in range(4):
                        row, col = ACC16.coord(lane, 4 * (2 * pair + side) + i)  # d[8n + 4·side + i]
                        d[row, col] += product[row, col - 16 * pair - 8 * side]
    return d


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_whole_products(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    q, k, v = (rng.integers(-3, 4, (n, head_dim)) for n in (16, 48, 48))
    p = rng.integers(-3, 4, (16, 64))[:, :48]
    assert (mma(q, k, trans=False) == q @ k.T).all()
    wide = np.zeros((16, 64), np.int64)  # P comes from registers: any A operand will do
    wide[:, :48] = p
    v_rows = np.zeros((64, head_dim), np.int64)
    v_rows[:48] = v
    assert (mma(wide, v_rows, trans=True) == p @ v).all()


# wgmma --------------------------------------------------------------------------------------------------------------------


def hardware_128b(start: int, offset: int) -> int:
    """Where WGMMA looks: descriptor address plus offset, its bits 4 to 6 exclusive or with bits 7 to 9."""
    address = start + offset
    return address ^ ((address >> 7 & 7) << 4)


@pytest.mark.parametrize("rows, cols", [(64, 64), (128, 128), (80, 256), (176, 128)])
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_wgmma_k_major(rows: int, cols: int, slot: int) -> None:
    """Q, and K in Q·Kᵀ: 32 bytes of a row are one k-step; groups of 8 rows lie `stride` apart."""
    tile = Smem("K", rows, cols, "bf16", 4)
    operand = wgmma_operand(tile, trans=False)
    for k in range(cols // k_depth("bf16")):
        start = 16 * (operand.at_k.eval({"k": k}) + slot * operand.slot)
        for r in range(rows):
            for byte in (0, 2, 16, 30):
                at = hardware_128b(start, r // 8 * operand.stride + r % 8 * 128 + byte)
                assert at == slot * tile.tile_bytes + swizzle(r, 32 * k + byte, rows)


@pytest.mark.parametrize("rows, cols", [(64, 64), (128, 128), (80, 256), (176, 128)])
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_wgmma_mn_major(rows: int, cols: int, slot: int) -> None:
    """V in P·V: 16 keys are one k-step; 64 columns lie `leading` apart, groups of 8 keys `stride`."""
    tile = Smem("V", rows, cols, "bf16", 4)
    operand = wgmma_operand(tile, trans=True)
    for k in range(rows // k_depth("bf16")):
        start = 16 * (operand.at_k.eval({"k": k}) + slot * operand.slot)
        for key in range(16):
            for c in range(cols):
                at = hardware_128b(start, c // 64 * operand.leading + key // 8 * operand.stride + key % 8 * 128 + c % 64 * 2)
                assert at == slot * tile.tile_bytes + swizzle(16 * k + key, 2 * c, rows)


def test_wgmma_starts_at_a_warpgroups_rows() -> None:
    """The rows of warpgroup w begin `64 w` rows down each chunk, on a whole swizzle pattern."""
    tile = Smem("Q", 192, 128, "bf16", 1)
    operand = wgmma_operand(tile, trans=False)
    for w in range(3):
        first = 64 * w * operand.row_bytes
        assert first % 1024 == 0
        for k in range(8):
            start = first + 16 * operand.at_k.eval({"k": k})
            for r in range(64):
                at = hardware_128b(start, r // 8 * operand.stride + r % 8 * 128)
                assert at == swizzle(64 * w + r, 32 * k, 192)


@pytest.mark.parametrize("dtype, depth", [("bf16", 16), ("fp16", 16), ("e4m3", 32)])
def test_one_instruction_is_32_bytes_deep(dtype: str, depth: int) -> None:
    assert k_depth(dtype) == depth
