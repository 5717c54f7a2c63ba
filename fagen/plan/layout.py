"""Which element of a tile a register or a shared-memory byte holds.

Register layouts are pairs of `Expr`s over the symbols `lane` (0 to 31), `warp` (of the warpgroup or of the owning warp's
block, 0 to 3) and `i` (the register's element index), each split into a part of the thread and a part of the register:
coordinate = thread part + register part. The emitter prints the same expressions that the tests evaluate, so a mask in the
CUDA and the table in a test cannot disagree.

Sources: PTX ISA 9.7.14 (mma.m16n8k16 fragments) and 9.7.15 (wgmma register fragments, shared-memory matrix layouts).
"""

from __future__ import annotations

from dataclasses import dataclass

from .expr import Expr, as_expr, sym

LANE, WARP, I = sym("lane"), sym("warp"), sym("i")


@dataclass(frozen=True)
class Layout:
    """A register tile's map (thread, element) → (row, column); see the module's head for the four parts."""

    name: str
    row_thread: Expr
    row_element: Expr
    col_thread: Expr
    col_element: Expr

    def coord(self, thread: int, i: int) -> tuple[int, int]:
        """(row, column) of element `i` of `thread` (0 to 127 in a warpgroup, 0 to 31 in a warp)."""
        env = {"lane": thread % 32, "warp": thread // 32, "i": i}
        return (
            self.row_thread.eval(env) + self.row_element.eval(env),
            self.col_thread.eval(env) + self.col_element.eval(env),
        )


# The accumulator of mma.m16n8k16, n8 tiles side by side: one warp, 16 rows. Each thread holds rows g and g + 8 (g = lane / 4)
# and of every 8 columns the pair 2q, 2q + 1 (q = lane % 4); elements 4j, 4j + 1 are row g, 4j + 2, 4j + 3 row g + 8.
ACC16 = Layout("acc16", LANE // 4, (I // 2) % 2 * 8, LANE % 4 * 2, I // 4 * 8 + I % 2)

# The accumulator of wgmma.m64nN: the same in each warp, warps stacked in rows of 16.
ACC64 = Layout("acc64", WARP * 16 + LANE // 4, (I // 2) % 2 * 8, LANE % 4 * 2, I // 4 * 8 + I % 2)

# The A operand in registers, two 16-bit values each; element i counts values, not registers. For every 16 columns a thread holds
# (g, 2q..2q+1), (g+8, 2q..), (g, 2q+8..), (g+8, 2q+8..): the accumulator's order, which is why P needs no data motion.
A16 = Layout("a16", LANE // 4, (I // 2) % 2 * 8, LANE % 4 * 2, I // 8 * 16 + (I // 4) % 2 * 8 + I % 2)
A64 = Layout("a64", WARP * 16 + LANE // 4, (I // 2) % 2 * 8, LANE % 4 * 2, I // 8 * 16 + (I // 4) % 2 * 8 + I % 2)

# 8-bit A operands, four values a register. For every 32 columns a thread holds (g, 4q..4q+3), (g+8, 4q..), (g, 4q+16..), (g+8, 4q+16..).
A64_E4M3 = Layout("a64_e4m3", WARP * 16 + LANE // 4, (I // 4) % 2 * 8, LANE % 4 * 4, I // 16 * 32 + (I // 8) % 2 * 16 + I % 4)

# The same registers filled from the accumulator without an exchange: of every 16 columns a thread has 2q, 2q+1, 2q+8, 2q+9, which the
# tensor core takes for 4q..4q+3. The product is the same if the other operand has its keys in that order too.
A64_E4M3PERM = Layout("a64_e4m3perm", WARP * 16 + LANE // 4, (I // 4) % 2 * 8, LANE % 4 * 2, I // 8 * 16 + (I // 2) % 2 * 8 + I % 2)
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Of each 16 keys, the one that stands at position 0, 1, … of the reduction under a64_e4m3perm."""

# One value per row held by the thread: rows g and g + 8, the same in the four lanes of a quad.
ROW16 = Layout("row16", LANE // 4, I * 8, as_expr(0), as_expr(0))
ROW64 = Layout("row64", WARP * 16 + LANE // 4, I * 8, as_expr(0), as_expr(0))

# One value of one row, the same in all lanes of the warp.
UNIFORM = Layout("uniform", as_expr(0), as_expr(0), as_expr(0), as_expr(0))

LAYOUTS = {x.name: x for x in (ACC16, ACC64, A16, A64, A64_E4M3, A64_E4M3PERM, ROW16, ROW64, UNIFORM)}


def swizzle(row: int, byte: int, rows: int, width: int = 128) -> int:
    """Byte offset of (row, byte of the row) in a tile of `rows` rows kept as chunks of `width` bytes under the swizzle of that width.

    A tile of R rows and C bytes a row is ⌈C / 128⌉ chunks of [R][128 B]; inside a chunk, 16-byte unit u of row r stands at
    u ^ (r % 8). This is what TMA writes with SWIZZLE_128B and what a WGMMA descriptor of that mode reads (PTX ISA 9.7.15.5.1);
    eight rows of one column of units fall in eight different bank groups, so ldmatrix has no bank conflict. With width 64 the unit
    stands at u ^ (r / 2 % 4).
    """
    chunk, within = divmod(byte, width)
    unit, rest = divmod(within, 16)
    place = unit ^ (row % 8 if width == 128 else row // 2 % 4)
    return chunk * rows * width + row * width + place * 16 + rest
