"""How many machine instructions of each kind a kernel's program implies, as printed: the numbers that the SASS must show exactly.

Every printed step counts once, however often it runs (program loops are not unrolled), and both sides of a branch count. A number
that differs means that the compiler added, dropped or duplicated something the program does not say: an injected wait, a
serialised batch, an unrolled loop.
"""

from __future__ import annotations

from ..errors import InternalError
from .kernel import KernelPlan
from .quantise_steps import LoadColumns, LoadRows, StageRows
from .registers import copies_in_flight
from .steps import (
    DTYPE_BYTES,
    MANY_COPIES,
    AddParts,
    Copy,
    CpAsync,
    CtaSync,
    LoadAcc,
    Mma,
    MmaWait,
    MulRow,
    NArrive,
    Role,
    RowPass,
    Slot,
    Smem,
    Step,
    Sync,
    TmaLoad,
    walk,
)

WARPGROUP = 128  # threads
MAX_N = 256  # columns of one wgmma (PTX ISA 9.7.15.2)
K_BYTES = 32  # depth of one wgmma or mma.sync in bytes of the operand: k16 in 16-bit types, k32 in 8-bit ones
MMA_SYNC_N = 8  # mma.m16n8k16
WGMMA_SASS = {"bf16": "HGMMA", "fp16": "HGMMA", "e4m3": "QGMMA", "int8": "IGMMA"}
"""Operands' type → wgmma's name in the machine code."""


def expected_counts(kernel: KernelPlan) -> dict[str, int]:
    """Instruction counts that the SASS of `kernel` must have; names as in `fagen.sass.COUNTED`.

    HGMMA, QGMMA, IGMMA, HMMA from the Mma steps; WARPGROUP.ARRIVE one per wgmma Mma (its fence); WARPGROUP.DEPBAR one per MmaWait;
    BAR.SYNC one per CtaSync and Sync, and one after the initialisation of mbarriers; BAR.ARV one per NArrive; UTMALDG one per TmaLoad;
    USETMAXREG one per role with registers; LDGSTS 16 bytes each (where registers are scarce, in a loop of several); LDG.E.128, in kernels that load through registers, as many as a step
    prints (copies and row passes in loops of several loads); no local memory.
    """
    names = (
        *dict.fromkeys(WGMMA_SASS.values()),
        "HMMA",
        "WARPGROUP.DEPBAR",
        "WARPGROUP.ARRIVE",
        "BAR",
        "BAR.SYNC",
        "BAR.ARV",
        "UTMALDG",
    )
    total = dict.fromkeys((*names, "USETMAXREG", "LDGSTS", "STL", "LDL"), 0)
    if kernel.mbars:
        total["BAR.SYNC"] += 1
    first = 0
    if any(isinstance(s, WIDE_LOADS) for role in kernel.roles for s in walk(role.body)):
        total["LDG.E.128"] = 0
    for role in kernel.roles:
        total["USETMAXREG"] += role.registers is not None and first % WARPGROUP == 0  # roles that share a warpgroup ask once
        for step in walk(role.body):
            for name, n in _step(kernel, role, step).items():
                total[name] += n
        first += role.threads
    total["BAR"] = total["BAR.SYNC"] + total["BAR.ARV"]
    return total


def wgmma_steps(kernel: KernelPlan) -> int:
    """How many wgmma batches the program prints."""
    return sum(isinstance(s, Mma) and s.unit == "wgmma" for r in kernel.roles for s in walk(r.body))


def _step(kernel: KernelPlan, role: Role, step: Step) -> dict[str, int]:
    if isinstance(step, Mma):
        return _mma(kernel, role, step)
    if isinstance(step, MmaWait):
        return {"WARPGROUP.DEPBAR": 1}
    if isinstance(step, (CtaSync, Sync)):
        return {"BAR.SYNC": 1}
    if isinstance(step, NArrive):
        return {"BAR.ARV": 1}
    if isinstance(step, TmaLoad):
        return {"UTMALDG": kernel.smem_of(step.dst.smem).chunks if step.transposed else 1}
    if isinstance(step, CpAsync):
        tile = kernel.smem_of(step.dst.smem)
        return {
            "LDGSTS": copy_loads(tile, role.threads, MANY_COPIES) if scarce(role) else _ceildiv(tile.tile_bytes, 16 * role.threads)
        }
    if isinstance(step, Copy):
        return {"LDG.E.128": copy_loads(kernel.smem_of(step.dst.smem), role.threads, step.most)}
    if isinstance(step, LoadAcc):
        return {"LDG.E.128": next(f for f in role.frags if f.name == step.dst).registers // 4}
    if isinstance(step, RowPass):
        return {"LDG.E.128": ROW_LOADS}
    if isinstance(step, StageRows):
        tile = kernel.smem_of(step.dst.smem)
        return {"LDGSTS": step.dst.rows * tile.cols * DTYPE_BYTES[tile.dtype] // (16 * 32)}
    if isinstance(step, (LoadRows, LoadColumns)):
        return {"LDG.E.128": next(f for f in role.frags if f.name == step.dst).registers // 4}
    return {}


WIDE_LOADS = (Copy, LoadAcc, RowPass, LoadRows, LoadColumns)
ROW_LOADS = 4
"""16-byte loads in flight in a pass over a row."""


def scarce(role: Role) -> bool:
    """Whether the role keeps more in registers than a block's tiles and sums (the warps' parts, what goes through a workspace, copies on
    their way, factors of every step): then addresses are computed when they are used, and long copies run in a loop."""
    return any(isinstance(s, (Copy, LoadAcc, AddParts, MulRow)) for s in walk(role.body))


def copy_loads(tile: Smem, threads: int, most: int) -> int:
    """Loads in the loop of a Copy: the most that its length is a multiple of."""
    return copies_in_flight(tile.tile_bytes, threads, most)


def _mma(kernel: KernelPlan, role: Role, step: Mma) -> dict[str, int]:
    """d (rows × n) over a depth of k: by 64-row blocks and up to 256 columns (wgmma), by 16 rows × 8 columns (mma.sync)."""
    frags = {f.name: f for f in role.frags}
    d = frags[step.d]
    a = kernel.smem_of(step.a.smem) if isinstance(step.a, Slot) else frags[step.a]
    b = kernel.smem_of(step.b.smem)
    k_steps, rest = divmod(a.cols * DTYPE_BYTES[b.dtype], K_BYTES)
    if rest:
        raise InternalError(f"{step.id}: a depth of {a.cols} {b.dtype} is not a whole number of k-steps")
    if step.unit == "mma_sync":
        return {"HMMA": d.blocks * _ceildiv(d.cols, MMA_SYNC_N) * k_steps}
    instructions = d.blocks * _ceildiv(d.cols, MAX_N) * k_steps
    return {WGMMA_SASS[b.dtype]: instructions, "WARPGROUP.ARRIVE": 1}


def _ceildiv(a: int, b: int) -> int:
    return -(-a // b)
