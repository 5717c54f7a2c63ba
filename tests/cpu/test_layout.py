"""Register layouts and the shared-memory swizzle, against PTX's own tables written out a second time."""

from __future__ import annotations

import numpy as np
import pytest

from fagen.plan.layout import A16, A64, ACC16, ACC64, LAYOUTS, ROW16, ROW64, Layout, swizzle
from fagen.plan.steps import Frag

TILES = [x for x in LAYOUTS.values() if not x.name.startswith(("row", "uniform"))]


def threads_of(layout: Layout) -> int:
    return 128 if "64" in layout.name else 32


def rows_of(layout: Layout) -> int:
    return 64 if "64" in layout.name else 16


@pytest.mark.parametrize("layout", TILES, ids=lambda x: x.name)
@pytest.mark.parametrize("cols", [32, 64, 96, 256])
def test_a_tile_is_held_exactly_once(layout: Layout, cols: int) -> None:
    """A bijection: every element of the tile in one register of one thread."""
    per_thread = rows_of(layout) * cols // threads_of(layout)
    held = [layout.coord(t, i) for t in range(threads_of(layout)) for i in range(per_thread)]
    assert len(held) == len(set(held)) == rows_of(layout) * cols
    assert set(held) == {(r, c) for r in range(rows_of(layout)) for c in range(cols)}


@pytest.mark.parametrize("layout", [ROW16, ROW64], ids=lambda x: x.name)
def test_a_row_value_is_held_by_the_quad_that_holds_the_row(layout: Layout) -> None:
    tile = ACC64 if layout is ROW64 else ACC16
    for t in range(threads_of(layout)):
        mine = {layout.coord(t, i)[0] for i in range(2)}
        assert mine == {tile.coord(t, i)[0] for i in range(32)}
    holders = [layout.coord(t, i)[0] for t in range(threads_of(layout)) for i in range(2)]
    assert all(holders.count(row) == 4 for row in range(rows_of(layout)))


@pytest.mark.parametrize("accumulator, operand", [(ACC16, A16), (ACC64, A64)])
def test_an_accumulator_is_an_operand_without_data_motion(accumulator: Layout, operand: Layout) -> None:
    for t in range(threads_of(accumulator)):
        for i in range(128):
            assert accumulator.coord(t, i) == operand.coord(t, i)


def ptx_c_fragment(lane: int, i: int) -> tuple[int, int]:
    """mma.m16n8k16, C and D (PTX ISA, figure of the accumulator fragment); n8 tiles side by side."""
    tile, c = divmod(i, 4)
    group, in_group = divmod(lane, 4)
    return (group if c < 2 else group + 8), 8 * tile + 2 * in_group + (c & 1)


def ptx_a_fragment(lane: int, i: int) -> tuple[int, int]:
    """mma.m16n8k16, A of 16-bit values; k16 tiles side by side."""
    tile, a = divmod(i, 8)
    group, in_group = divmod(lane, 4)
    row = group if a in (0, 1, 4, 5) else group + 8
    return row, 16 * tile + 2 * in_group + (a & 1) + (8 if a >= 4 else 0)


@pytest.mark.parametrize("i", range(24))
def test_fragments_are_those_of_ptx(i: int) -> None:
    for t in range(128):
        warp, lane = divmod(t, 32)
        row, col = ptx_c_fragment(lane, i)
        assert ACC64.coord(t, i) == (16 * warp + row, col)
        assert warp or ACC16.coord(t, i) == (row, col)
        row, col = ptx_a_fragment(lane, i)
        assert A64.coord(t, i) == (16 * warp + row, col)
        assert warp or A16.coord(t, i) == (row, col)


@pytest.mark.parametrize(
    "frag, registers",
    [
        (Frag("S", 64, 128, "fp32", "acc64"), 64),
        (Frag("P", 64, 128, "bf16", "a64"), 32),
        (Frag("S", 16, 64, "fp32", "acc16"), 32),
        (Frag("S", 32, 64, "fp32", "acc16"), 64),
        (Frag("Q", 32, 64, "fp16", "a16"), 32),
        (Frag("m", 64, 1, "fp32", "row64"), 2),
        (Frag("m", 32, 1, "fp32", "row16"), 4),
        (Frag("m", 1, 1, "fp32", "uniform"), 1),
    ],
)
def test_a_frag_knows_its_registers(frag: Frag, registers: int) -> None:
    assert frag.registers == registers
    assert frag.blocks * frag.unit_rows == frag.rows


# shared memory ------------------------------------------------------------------------------------------------------------


def tma_128b(address: int) -> int:
    """The 128-byte swizzle as TMA defines it: bits 4 to 6 of the address, exclusive or with bits 7 to 9."""
    return address ^ ((address >> 7 & 7) << 4)


@pytest.mark.parametrize("rows, row_bytes", [(64, 128), (16, 256), (176, 256), (80, 512)])
def test_the_swizzle_is_a_bijection_and_tmas(rows: int, row_bytes: int) -> None:
    """Row-major 128-byte chunks from a 1024-byte boundary, swizzled as TMA does; every byte of the tile once."""
    places = np.array([[swizzle(r, b, rows) for b in range(row_bytes)] for r in range(rows)])
    assert sorted(places.ravel()) == list(range(rows * row_bytes))
    for b in range(0, row_bytes, 16):
        for r in range(rows):
            assert places[r, b] == tma_128b(b // 128 * rows * 128 + r * 128 + b % 128)
            assert (np.diff(places[r, b : b + 16]) == 1).all()
