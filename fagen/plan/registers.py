"""Registers: how many each role gets, and whether a schedule's tiles can fit them."""

from __future__ import annotations

from ..attention import Attention
from ..schedule import Schedule
from .steps import DTYPE_BYTES

# setmaxnreg of (producer, consumer) by number of consumer warpgroups. The kernel is launched with 65536 / threads registers a thread
# (rounded down to 8), and what the producer gives back is what the consumers may take.
WARPGROUP_REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160), 4: (24, 112)}

# For a producer that needs more than 24 (see `producer_needs`).
ROOMIER_REGISTERS = WARPGROUP_REGISTERS | {2: (40, 232), 4: (32, 112)}

# With V transposed in the kernel, the other three warps of the producer's warpgroup hold a strip of V in registers.
TRANSPOSER_REGISTERS = {1: (56, 240), 2: (40, 232), 3: (32, 160), 4: (32, 104)}
TRANSPOSER_NEEDS = 32


def overhead(attention: Attention, schedule: Schedule) -> int:
    """Registers a computing thread needs beside its tiles: row statistics, addresses, cursors, loop state.

    What ptxas needs for this has no formula; the terms are the envelope of what spilled when the tile sizes at the border were compiled
    (tests/tools/sweep_spills.py), so a schedule that keeps to them compiles without a spill, and up to 16 to 32 keys more might do.
    """
    s = schedule
    if s.mma == "mma_sync":
        assert s.warps is not None
        copies = s.tile_kv * attention.head_dim * DTYPE_BYTES[attention.dtype] // (16 * 32 * s.warps)
        blocks = s.tile_q // (16 * s.warps)
        deep = max(s.stages_k, s.stages_v) > 2
        return 60 + 2 * copies // blocks + 18 * (blocks - 1) + 32 * (s.parallelism == "batch_heads") + 8 * _one_slot(s) + 24 * deep
    beside_product = s.overlap in ("within", "both")  # the softmax runs while P·V still holds P and O
    wide = (attention.dv - 64) // 16
    if s.roles == "uniform":
        return (32 + 28 * _one_slot(s) if beside_product else 24) + 2 * wide
    if attention.dtype == "e4m3" or s.reference == "stale":
        tight = attention.dtype == "e4m3" or attention.dv > 128
        decode = attention.causal and s.reference == "stale"
        return 24 + 8 * (s.fuse_tiles and attention.dtype == "e4m3") + 10 * (decode and tight)
    if s.overlap == "pingpong" and attention.dv > 128:
        beside_product = True
    base = 32 if beside_product else 28 if s.overlap == "pingpong" else 16
    return base + (0 if s.parallelism == "persistent_dynamic" else wide)


def launch_registers(threads: int, registers_per_sm: int = 65536) -> int:
    """What ptxas may give every thread at launch, with one CTA an SM."""
    return min(registers_per_sm // threads // 8 * 8, 255)


def tile_registers(attention: Attention, schedule: Schedule) -> dict[str, int]:
    """Registers a computing thread holds for S, P and O (and Q if there is room), by name."""
    size = DTYPE_BYTES[attention.dtype]
    if schedule.mma == "wgmma":
        rows, lanes = 64, 128
    else:
        assert schedule.warps is not None
        rows, lanes = schedule.tile_q // schedule.warps, 32
    scores = rows * schedule.tile_kv // lanes
    early = {"E": scores * size // 4} if schedule.reference == "stale" else {}  # P of the next block, while this one's is in use
    return {"S": scores, "P": scores * size // 4, **early, "O": rows * attention.dv // lanes}


def q_registers(attention: Attention, schedule: Schedule) -> int:
    """Registers for the warp's rows of Q as an A operand (mma_sync only)."""
    assert schedule.warps is not None
    return schedule.tile_q // schedule.warps * attention.head_dim * DTYPE_BYTES[attention.dtype] // (32 * 4)


def q_fits_registers(attention: Attention, schedule: Schedule) -> bool:
    """Whether Q's fragments can stay in registers for the whole tile beside S, P and O."""
    assert schedule.warps is not None
    need = sum(tile_registers(attention, schedule).values()) + q_registers(attention, schedule) + overhead(attention, schedule)
    return need <= launch_registers(schedule.warps * 32)


def role_registers(attention: Attention, schedule: Schedule) -> tuple[int, int]:
    """setmaxnreg of (producer's warpgroup, consumers)."""
    assert schedule.consumers is not None
    if schedule.registers is not None:
        return schedule.registers
    if transposes(attention, schedule):
        return TRANSPOSER_REGISTERS[schedule.consumers]
    split = WARPGROUP_REGISTERS[schedule.consumers]
    return split if split[0] >= producer_needs(attention, schedule) else ROOMIER_REGISTERS[schedule.consumers]


def producer_needs(attention: Attention, schedule: Schedule) -> int:
    """Registers of the thread that issues the loads, at least: as found by compiling, where a producer that claims tiles spilled at 24."""
    unequal = schedule.stages_k != schedule.stages_v
    wants_more = schedule.parallelism == "persistent_dynamic" and _one_slot(schedule) and (unequal or attention.dv > 128)
    joins = schedule.fuse_tiles and attention.causal  # the decode of a masked tile that has at least one block
    return 32 if wants_more or joins else 24


def _one_slot(schedule: Schedule) -> bool:
    """A ring has a single slot, whose addresses never change: ptxas keeps them in registers."""
    return 1 in (schedule.stages_k, schedule.stages_v)


def transposes(attention: Attention, schedule: Schedule) -> bool:
    """V is transposed in the kernel."""
    return attention.dtype == "e4m3" and not schedule.v_transposed


def compute_registers(attention: Attention, schedule: Schedule) -> int:
    """Registers a computing thread may use."""
    if schedule.mma == "mma_sync":
        assert schedule.warps is not None
        return launch_registers(schedule.warps * 32)
    assert schedule.consumers is not None
    if schedule.roles == "producer":
        return role_registers(attention, schedule)[1]
    return launch_registers(schedule.consumers * 128)
