"""The kernels that go through memory: kv_outer (O, m and l in a workspace) and standard attention (S and P in workspaces).

A workspace is addressed as a tensor is: by strides over batch, heads and rows, which are scalars of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import memory, registers
from .expr import Expr, as_expr, ceildiv, maximum, sym
from .kernel import KernelPlan, Param, Workspace
from .roles.kv_outer import KvOuter
from .roles.standard import Standard
from .steps import Gmem, Role, Smem, number
from .tiles import BATCH, HQ, SK, SQ, Tiles

DIMS = ("batch", "seq", "heads", "head_dim")
Kernels = tuple[tuple[KernelPlan, ...], tuple[Workspace, ...]]


@dataclass(frozen=True)
class Space:
    """A workspace (batch, heads, rows, cols)."""

    name: str
    dtype: str
    rows: Expr
    cols: Expr
    batch: Expr = BATCH
    heads: Expr = HQ

    @property
    def gmem(self) -> Gmem:
        return Gmem(self.name, self.dtype, ("batch", "heads", "rows", "cols"), "workspace")

    @property
    def workspace(self) -> Workspace:
        shape = (self.batch, self.heads, self.rows, self.cols)
        return Workspace(self.name, self.dtype, self.batch * self.heads * self.rows * self.cols, zeroed=False, shape=shape)

    def params(self) -> tuple[Param, ...]:
        head = self.rows * self.cols
        strides = (("sb", self.heads * head), ("sh", head), ("ss", self.cols))
        return tuple(Param(f"{self.name}_{x}", "i64", value) for x, value in strides)


def kv_outer(tiles: Tiles) -> Kernels:
    """One kernel, and the state of every query tile; rows up to the end of the last tile."""
    a, s = tiles.attention, tiles.schedule
    rows = ceildiv(SQ, s.tile_q) * s.tile_q
    spaces = (
        Space("O_acc", "fp32", rows, as_expr(a.dv)),
        Space("m_acc", "fp32", rows, as_expr(1)),
        Space("l_acc", "fp32", rows, as_expr(1)),
    )
    (smem,) = memory.kernel_tiles(a, s)
    kernel = _kernel(tiles, "attention", KvOuter(tiles).role(), smem, ("q", "k", "v", "out", "lse"), spaces)
    return (kernel,), tuple(x.workspace for x in spaces)


def standard(tiles: Tiles) -> Kernels:
    """Three kernels. Rows of S and P are a whole number of key blocks long, at least one (an allocation is never empty)."""
    a, s = tiles.attention, tiles.schedule
    keys = maximum(ceildiv(SK, s.tile_kv), 1) * s.tile_kv
    scores, p = Space("S", "fp32", SQ, keys), Space("P", a.dtype, SQ, keys)
    sums = Space("l_row", "fp32", ceildiv(SQ, s.tile_q) * s.tile_q, as_expr(1))
    build = Standard(tiles, registers.q_fits_registers(a, s))
    smem = memory.kernel_tiles(a, s)
    kernels = (
        _kernel(tiles, "qk", build.qk(), smem[0], ("q", "k"), (scores,)),
        _kernel(tiles, "softmax", build.softmax(), smem[1], ("lse",), (scores, p, sums)),
        _kernel(tiles, "pv", build.pv(), smem[2], ("v", "out"), (p, sums)),
    )
    return kernels, (scores.workspace, p.workspace, sums.workspace)


def _kernel(
    tiles: Tiles, name: str, role: Role, smem: tuple[Smem, ...], tensors: tuple[str, ...], spaces: tuple[Space, ...]
) -> KernelPlan:
    """A kernel of one role over `tensors` and `spaces`, all passed as pointers with their strides."""
    a = tiles.attention
    placed, _, total = memory.memory_map(smem, ())
    known = {
        **{n: Gmem(n, a.dtype, DIMS, "in") for n in ("q", "k", "v")},
        "out": Gmem("out", a.output_dtype, DIMS, "out"),
        "lse": Gmem("lse", "fp32", ("batch", "heads", "seq"), "out"),
    }
    gmem = (*(known[n] for n in tensors), *(x.gmem for x in spaces))
    strides = tuple(Param(f"{g.name}_{x}", "i64", sym(f"{g.name}_{x}")) for g in gmem if g.dims == DIMS for x in ("sb", "ss", "sh"))
    return KernelPlan(
        name=name,
        threads=role.threads,
        min_ctas=1,
        gmem=gmem,
        pointers=tuple(g.name for g in gmem),
        params=(*strides, *(p for x in spaces for p in x.params()), *tiles.params()),
        maps=(),
        smem=placed,
        mbars=(),
        nbars=(),
        smem_bytes=total,
        roles=(replace(role, body=number(role.body, role.name)),),
        grid=tiles.grid(),
    )
