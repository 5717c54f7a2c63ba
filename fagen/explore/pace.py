"""How many clocks a step keeps a warp, and the units of an SM, busy: rates of one Hopper SM, and what each kind of step asks of them.

Amounts are of one warp (of a warpgroup's four, which do the same on the SM's four partitions). Rates were measured on an H200 with loops of
one instruction, one SM, 512 threads (results a clock and SM: ex2 16, max 62, cvt to bf16x2 62 instructions, fma 110, shuffle 32); the
constants marked *fitted* are set so that the times of benchmarks/results come out (benchmarks/README.md, "The model").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InternalError
from ..plan.counts import K_BYTES, MAX_N, MMA_SYNC_N
from ..plan.kernel import KernelPlan
from ..plan.steps import DTYPE_BYTES, Frag, Mma, Role, Step

LANES = 32
PARTITIONS = 4

# clocks of a partition for one warp's instruction
FMA = 1.16  # 110 of 128 a clock and SM, measured
SLOW = 2.06  # maximum, conversion to two 16-bit values: 62 a clock and SM, measured
SHUFFLE = 4.0  # 32 a clock and SM, measured
EX2 = 8.0 / 0.7  # 16 a clock and SM, measured; a stretch of them with its arguments and sums reaches 70 %, *fitted*
MOVE = 1.0

# clocks until a result can be used, and of hand-shakes
ROW_MAX_LATENCY = 165.0  # two shuffles and the dependent tails of two maxima: 350 in stall samples at 128 keys, less 64 maxima
SOFTMAX_LATENCY = 120.0  # the first exponential's way in, the last sum's way out; *fitted*
VOTE_LATENCY = 55.0  # stall samples
BARRIER_LATENCY = 100.0  # an mbarrier or named barrier: 40 for a test that finds it done, more to be woken; *fitted*
CTA_BARRIER_LATENCY = 60.0
WGMMA_LATENCY = 75.0  # from the last k-step in the tensor core to the accumulator behind the wait; *fitted*
HGMMA_ISSUE = 26.0  # "HGMMA issue 390" clocks for 16 of them in stall samples
HMMA_LATENCY = 35.0
LOAD_LATENCY = 450.0  # TMA, cp.async, or one load of a register tile from L2; *fitted*
GATHER_LATENCY = 620.0  # a batch of loads through registers, with its addresses and the stores that follow; *fitted*
ATOMIC_LATENCY = 700.0
SMALL = 30.0  # a step of a few instructions

# bytes a clock
SMEM_BYTES = 128.0  # shared memory of an SM
LINK_BYTES = 44.0  # L2 to an SM: at least 32, which head_dim 128 draws at 98.7 % of the tensor cores' rate

MMA_SYNC_CLOCKS = 4.0 / 0.62
"""m16n8k16 on a partition: 4 clocks at the data sheet's rate, of which mma.sync reaches 62 % (Luo et al. 2024)."""
CP_ASYNC = 10.0  # clocks of a warp for one cp.async of 16 bytes a lane, with its address
STORE = 5.5  # clocks of a warp for a lane's element of an epilogue: pack, exchange in the quad, store; *fitted*
COPY_BYTES = 16
STORE_BATCH = 4


@dataclass(frozen=True)
class Pace:
    """What one warp asks for: `alu` clocks of its partition's ordinary pipes, `mufu` of its exponential unit, bytes through shared memory, and
    clocks in which it waits for itself. A warpgroup's four warps each ask for as much."""

    alu: float = 0.0
    mufu: float = 0.0
    smem: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Product:
    """A `Mma` step: `count` k-steps, each `clocks` of the tensor core(s), `smem` bytes of operands read beside (mma.sync), and the
    instance's clocks to issue it."""

    count: int
    clocks: float
    smem: float
    issue: float


def product(kernel: KernelPlan, role: Role, step: Mma) -> Product:
    """Of one instance of the role."""
    d, b = _frag(role, step.d), kernel.smem_of(step.b.smem)
    in_registers = isinstance(step.a, str)
    depth = _frag(role, step.a).cols if isinstance(step.a, str) else kernel.smem_of(step.a.smem).cols
    k_steps = depth * DTYPE_BYTES[b.dtype] // K_BYTES
    if step.unit == "wgmma":
        pieces = -(-d.cols // MAX_N)
        n = d.cols / pieces
        # 4096 operations a clock (twice for 8 bits, whose k-step is twice as deep), if shared memory delivers the operands in time
        operands = n * K_BYTES + (0 if in_registers else d.unit_rows * K_BYTES)
        clocks = max(n / 2, operands / SMEM_BYTES)
        return Product(d.blocks * pieces * k_steps, clocks, 0.0, HGMMA_ISSUE * d.blocks * pieces * k_steps)
    per_k = d.blocks * -(-d.cols // MMA_SYNC_N)
    return Product(k_steps, per_k * MMA_SYNC_CLOCKS, d.cols * K_BYTES + (0 if in_registers else d.rows * K_BYTES), 0.0)


def pace(kernel: KernelPlan, role: Role, step: Step) -> Pace:
    """Of every kind that is neither control, synchronisation, product nor a transfer of global memory. InternalError for one that has no entry."""
    rule = PACES.get(step.kind)
    if rule is None:
        raise InternalError(f"{step.id}: nobody has said how long a {step.kind} takes; it needs an entry in fagen/explore/pace.py")
    return rule(kernel, role, step)


def each(frag: Frag, role: Role) -> float:
    """Elements of a frag that a thread holds."""
    if frag.layout.startswith(("row", "uniform")):
        return float(frag.registers)
    warps = 4 if "64" in frag.layout else 1
    return frag.rows * frag.cols / (warps * LANES)


def _frag(role: Role, name: str) -> Frag:
    return next(f for f in role.frags if f.name == name)


def _rows(frag: Frag) -> int:
    """Rows of a tile in which a thread has elements."""
    return 2 * frag.blocks


def _online(kernel: KernelPlan, role: Role, step: Any) -> Pace:
    s = _frag(role, step.s)
    n, rows = each(s, role), _rows(s)
    alu, latency = n * (SLOW + 2 * FMA) + rows * 2 * SHUFFLE, ROW_MAX_LATENCY + SOFTMAX_LATENCY + SLOW * n
    if step.lift:  # the whole row sum, its exponent, and what that changes
        alu, latency = alu + rows * (2 * SHUFFLE + 8 * FMA) + (n * FMA if step.first else 0), latency + 4 * SMALL
    return Pace(alu, n * EX2 + (0 if step.first else rows * EX2), latency=latency)


def _stale(kernel: KernelPlan, role: Role, step: Any) -> Pace:
    n = each(_frag(role, step.s), role)
    return Pace(n * (2 * FMA + SLOW / 2), n * EX2, latency=SOFTMAX_LATENCY + VOTE_LATENCY)


def _each(per_element: float, name: str, latency: float = 0.0) -> Callable[[KernelPlan, Role, Any], Pace]:
    """A rule for steps that go through the elements of one frag (the field `name`)."""
    return lambda kernel, role, step: Pace(each(_frag(role, getattr(step, name)), role) * per_element, latency=latency)


def _merge_stats(kernel: KernelPlan, role: Role, step: Any) -> Pace:
    rows = each(_frag(role, step.m), role)
    return Pace(rows * 8 * role.count, rows * EX2 * (2 + role.count), smem=256.0 * role.count, latency=200.0)


def _load_frag(kernel: KernelPlan, role: Role, step: Any) -> Pace:
    d = _frag(role, step.dst)
    return Pace(smem=float(d.rows * d.cols * DTYPE_BYTES[d.dtype]), latency=SMALL)


def _store_frag(kernel: KernelPlan, role: Role, step: Any) -> Pace:
    s = _frag(role, step.src)
    return Pace(each(s, role), smem=float(s.rows * s.cols * DTYPE_BYTES[s.dtype]), latency=SMALL)


def _add_parts(kernel: KernelPlan, role: Role, step: Any) -> Pace:
    d = _frag(role, step.dst)
    return Pace(each(d, role) * role.count * 2, smem=float(d.rows * d.cols * 4 * role.count), latency=60.0)


def _transpose(kernel: KernelPlan, role: Role, step: Any) -> Pace:
    """Eight instructions (ldmatrix, prmt, stmatrix) a block of 32 keys and 16 columns; every byte in and out of shared memory."""
    tile = kernel.smem_of(step.src.smem)
    blocks = tile.rows * tile.cols / (32 * 16) / role.count
    return Pace(blocks * 8 * SLOW, smem=2 * tile.tile_bytes / role.count, latency=100.0)


PACES: Mapping[str, Callable[[KernelPlan, Role, Any], Pace]] = {
    "Fill": _each(MOVE, "dst"),
    "Limits": _each(4.0, "dst"),
    "Mask": _each(2 * SLOW, "s"),
    "IntToFloat": _each(SLOW + FMA, "dst"),
    "OnlineSoftmax": _online,
    "StaleSoftmax": _stale,
    "Calm": lambda kernel, role, step: Pace(latency=SMALL if step.alpha or step.limits else 0.0),
    "AddSums": _each(FMA, "l"),
    "Hold": lambda kernel, role, step: Pace(latency=10.0),
    "CopyRow": _each(MOVE, "dst"),
    "Move": _each(MOVE / 2, "dst"),
    "Pack": _each(SLOW / 2, "p", 10.0),
    "Rescale": _each(FMA, "o", 10.0),
    "Promote": _each(FMA, "o", 10.0),
    "ScaleShift": lambda kernel, role, step: Pace(4 * FMA, EX2, latency=SMALL),
    "Prefill": lambda kernel, role, step: Pace(latency=SMALL),
    "Opaque": lambda kernel, role, step: Pace(),
    "SumRow": lambda kernel, role, step: Pace(each(_frag(role, step.dst), role) * 2 * SHUFFLE, latency=2 * SMALL),
    "MulRow": _each(FMA, "dst"),
    "Reciprocal": _each(2 * EX2, "dst", SMALL),
    "LogSumExp": _each(2 * EX2, "lse", SMALL),
    "StoreStats": lambda kernel, role, step: Pace(smem=256.0, latency=SMALL),
    "MergeStats": _merge_stats,
    "StoreFrag": _store_frag,
    "AddParts": _add_parts,
    "LoadFrag": _load_frag,
    "TransposeV": _transpose,
    "ProxyFence": lambda kernel, role, step: Pace(latency=SMALL),
    "GetTile": lambda kernel, role, step: Pace(latency=2 * SMALL),
    "ResetCounter": lambda kernel, role, step: Pace(latency=SMALL),
}
"""Kind of step → what it asks for."""
