"""Registers: how many each role gets, and whether a schedule's tiles can fit them."""

from __future__ import annotations

from ..attention import Attention
from ..schedule import Schedule
from .steps import DTYPE_BYTES, FEW_COPIES

# setmaxnreg of (producer, consumer) by number of consumer warpgroups. The kernel is launched with 65536 / threads registers a thread
# (rounded down to 8), and what the producer gives back is what the consumers may take.
WARPGROUP_REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160), 4: (24, 112)}

# For a producer that needs more than 24 (see `producer_needs`).
ROOMIER_REGISTERS = WARPGROUP_REGISTERS | {2: (40, 232), 4: (32, 112)}

# With V transposed in the kernel, the other three warps of the producer's warpgroup hold a strip of V in registers.
TRANSPOSER_REGISTERS = {1: (56, 240), 2: (40, 232), 3: (32, 160), 4: (32, 104)}

# Every pair that some kernel gets by itself.
PAIRS = tuple(dict.fromkeys(p for t in (WARPGROUP_REGISTERS, ROOMIER_REGISTERS, TRANSPOSER_REGISTERS) for p in t.values()))


def transposer_needs(schedule: Schedule) -> int:
    """Registers of warps that transpose, at least. Beside a ring of tile numbers they spilled at 24."""
    return 32 if schedule.parallelism == "persistent_dynamic" else 24


def transposed_at_once(attention: Attention, schedule: Schedule) -> int:
    """Units of 32 keys and 16 columns that a transposing warp has on their way, four registers each: the more, the less it waits for
    shared memory. As found by compiling; less beside a ring of tile numbers whose decode is long."""
    units, have = schedule.tile_kv // 32, role_registers(attention, schedule)[0]
    decodes = attention.causal and schedule.parallelism == "persistent_dynamic"
    most = 4 if have >= 40 else 3 if have >= 32 and not decodes else 1
    if units <= most:
        return units
    # Two rings' positions beside a ring of tile numbers: with three of six units the warps spilled at head_dim 64.
    crowded = attention.dv == 64 and schedule.parallelism == "persistent_dynamic" and schedule.stages_k != schedule.stages_v
    return max((n for n in range(2, (2 if crowded else most) + 1) if units % n == 0), default=2) if have >= 40 else 1


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
        if (s.loop_order, s.partition, s.normalise, s.movement) != ("q_outer", "split_q", "once", "cp_async"):
            return 56 + _ladder_overhead(attention, s)
        return 60 + 2 * copies // blocks + 18 * (blocks - 1) + 32 * (s.parallelism == "batch_heads") + 8 * _one_slot(s) + 24 * deep
    if attention.products == "int8_qk":
        return _int8_qk_more(attention, s) + overhead(attention.replace(dtype=attention.value_dtype, v_dtype=None), s)
    beside_product = s.overlap in ("within", "both")  # the softmax runs while P·V still holds P and O
    wide = (attention.dv - 64) // 16
    if s.roles == "uniform":
        return (32 + 28 * _one_slot(s) if beside_product else 24) + 2 * wide
    if s.q_operand == "registers":
        return _q_in_registers(attention, s)
    if s.stages_q == 2:
        return _second_q(attention, s) + overhead(attention, s.replace(stages_q=None))
    if attention.value_dtype == "e4m3":
        return _e4m3_overhead(attention, s)
    if s.reference == "stale":
        joined_in_order = attention.causal and s.fuse_tiles and s.parallelism == "persistent_static"
        if s.consumers == 4 and attention.dv == 64 and s.overlap == "within" and not joined_in_order:
            return 16
        wide_causal = attention.causal and attention.dv > 128
        in_order = attention.dv > 128 and s.overlap == "both" and s.parallelism == "persistent_static"
        return 24 + 10 * (wide_causal or in_order) + 16 * (wide_causal and s.fuse_tiles and _one_slot(s))
    if s.overlap == "pingpong" and attention.dv > 128:
        beside_product = True
    base = 32 if beside_product else 28 if s.overlap == "pingpong" else 16
    uneven = _one_slot(s) and s.stages_k != s.stages_v
    return base + (0 if s.parallelism == "persistent_dynamic" else wide) + 16 * (attention.dv > 128 and uneven)


def _q_in_registers(attention: Attention, s: Schedule) -> int:
    """With Q in registers: wide 8-bit heads with a stale reference keep no address of Q's slot and need less, others as much or more."""
    eight = attention.value_dtype == "e4m3"
    if eight and attention.dv > 128 and s.reference == "stale":
        return 32 if s.overlap == "within" and not attention.causal and not s.fuse_tiles else 24
    more = not eight or s.consumers == 4 or s.scale_granularity == "block"
    crowded = 48 * (s.tile_kv > 160) + 24 * (s.overlap == "both" and s.consumers == 3) if eight else 0
    return 8 * more + crowded + overhead(attention, s.replace(q_operand=None))


def _int8_qk_more(attention: Attention, s: Schedule) -> int:
    """What int8 scores take more than 16-bit ones, P and V being the same: nothing but in these corners."""
    if attention.causal and s.stages_q == 2:
        if s.consumers == 2 and s.reference == "running" and s.overlap in ("pingpong", "both"):
            return 16 if attention.dv == 64 else 8
        if s.consumers == 4 and s.reference == "stale" and s.overlap == "both" and attention.dv == 64:
            return 16
    many = attention.causal and s.reference == "stale" and s.consumers == 4
    return 8 if s.scale_granularity == "block" and (many or s.roles == "uniform" and s.overlap == "none") else 0


def _second_q(attention: Attention, s: Schedule) -> int:
    """What a second slot for Q takes: two consumers keep more of its address than three or four, who have no room for it."""
    half = attention.value_dtype != "e4m3"
    wide = 44 * (half and attention.dv > 128)
    if s.consumers != 2:
        return wide
    return wide + (60 if attention.dv == 64 else 40 if half and s.reference == "running" else 20)


def _e4m3_overhead(attention: Attention, s: Schedule) -> int:
    """With a producer: 24, and more for what ptxas handled worse when it was compiled."""
    stale, by_block = s.reference == "stale", s.scale_granularity == "block"
    if s.tile_kv > 192 and attention.dv == 64:
        return 64
    if s.stages_k != s.stages_v:  # a ring of V that is longer than the one it is loaded into
        return 8 + 24 * _one_slot(s) + _e4m3_overhead(attention, s.replace(stages=s.stages_k))
    if s.fuse_tiles:
        roomy = s.consumers == 4 if not attention.causal else attention.dtype != "int8"
        return 24 if roomy and attention.dv <= 128 else 32 + 8 * (by_block and _one_slot(s))
    if stale and attention.causal and attention.dv > 128:
        worse = "persistent_static" if s.overlap == "both" else "persistent_dynamic"
        return 34 if by_block or s.parallelism == worse else 24
    if stale and not attention.causal and s.overlap == "both" and s.consumers == 2:
        return 32
    if not stale and attention.dv > 128 and s.overlap != "none":
        return 28 if s.overlap == "within" else 34
    if by_block and s.overlap == "pingpong":
        return 32
    claims = attention.causal and s.parallelism == "persistent_dynamic"
    if attention.dtype == "int8" and claims and not stale and s.consumers == 2 and s.overlap in ("within", "both"):
        return 32
    return 28 if s.promote_every == 1 else 24


def _ladder_overhead(attention: Attention, s: Schedule) -> int:
    """What the other mma.sync kernels need more: a warp has statistics of its rows, under split_kv of all rows, its own and the merged
    ones; one that copies blocks alone has many addresses; copies through registers have some on their way; kv_outer has a second loop and
    the workspace's addresses; normalising each step keeps two more factors a row."""
    assert s.warps is not None
    more = 12 * (s.tile_q // 16) if s.partition == "split_kv" else 18 * (s.tile_q // s.warps // 16 - 1)
    if s.warps == 1:
        more += 40
    if s.movement == "ld_st":
        more += 4 * copies_in_flight(s.tile_kv * attention.head_dim * DTYPE_BYTES[attention.dtype], 32 * s.warps, FEW_COPIES)
    if s.loop_order == "kv_outer":
        more += 12 if s.partition == "split_kv" else 48
    elif s.normalise == "each_step" and s.partition == "split_q":
        more += 48
    return more


PART_COLUMNS = 64
"""Columns of its partial O that a split_kv warp holds at once: a 128-byte chunk of V."""


def copies_in_flight(tile_bytes: int, threads: int, most: int) -> int:
    """Loads of a thread in one turn of a copy's loop: up to `most`, so that the loop's length is a multiple of them."""
    copies = tile_bytes // (16 * threads)
    return max((n for n in range(1, most + 1) if copies % n == 0), default=1)


def launch_registers(threads: int, registers_per_sm: int = 65536) -> int:
    """What ptxas may give every thread at launch, with one CTA an SM."""
    return min(registers_per_sm // threads // 8 * 8, 255)


def tile_registers(attention: Attention, schedule: Schedule) -> dict[str, int]:
    """Registers a computing thread holds for tiles where it holds most, by name: S, P and O (and Q if there is room)."""
    size = DTYPE_BYTES[attention.value_dtype]
    if schedule.mma == "wgmma":
        rows, lanes = 64, 128
    else:
        assert schedule.warps is not None
        rows, lanes = schedule.tile_q // schedule.warps, 32
    scores, out = rows * schedule.tile_kv // lanes, rows * attention.dv // lanes
    if schedule.softmax != "fused":  # S in one kernel, O in another
        return {"S": scores} if scores >= out else {"O": out}
    if schedule.partition == "split_kv":
        return _split_kv_registers(attention, schedule)
    early = {"E": scores * size // 4} if schedule.reference == "stale" else {}  # P of the next block, while this one's is in use
    copy = {"O_sum": out} if schedule.promote_every is not None else {}
    q = {"Q": q_registers(attention, schedule)} if schedule.q_operand == "registers" else {}
    return {**q, "S": scores, "P": scores * size // 4, **early, "O": out, **copy}


def _split_kv_registers(attention: Attention, schedule: Schedule) -> dict[str, int]:
    """A warp has all rows of its keys, and its columns of O; S is gone before there is a product."""
    assert schedule.warps is not None
    scores = schedule.tile_q * schedule.tile_kv // schedule.warps // 32
    part, p = schedule.tile_q * PART_COLUMNS // 32, scores * DTYPE_BYTES[attention.dtype] // 4
    out = schedule.tile_q * attention.dv // schedule.warps // 32
    return {"S": scores, "P": p, "O": out} if scores >= part else {"P": p, "O_part": part, "O": out}


def q_registers(attention: Attention, schedule: Schedule) -> int:
    """Registers for the warp's rows of Q as an A operand."""
    if schedule.mma == "wgmma":
        return 16 * attention.head_dim * DTYPE_BYTES[attention.dtype] // (32 * 4)
    assert schedule.warps is not None
    return schedule.tile_q // schedule.warps * attention.head_dim * DTYPE_BYTES[attention.dtype] // (32 * 4)


def q_fits_registers(attention: Attention, schedule: Schedule) -> bool:
    """Whether Q's fragments can stay in registers for the whole tile beside S, P and O."""
    assert schedule.warps is not None
    if schedule.partition == "split_kv":  # every warp would hold all rows
        return False
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


JOINED_PRODUCER_SPILLS = 96
"""Keys of a block with which the producer of joined tiles spills where it has 32 registers, shares them with warps that transpose, and
claims tiles of a full mask; with 32, 64 and 128 keys it does not."""


def joined_producer_spills(attention: Attention, schedule: Schedule) -> bool:
    s = schedule
    joins = s.fuse_tiles and s.parallelism == "persistent_dynamic" and not attention.causal and transposes(attention, s)
    few = joins and s.consumers == 3 and role_registers(attention, s)[0] <= transposer_needs(schedule)
    return few and s.tile_kv == JOINED_PRODUCER_SPILLS


def keeps_hints(attention: Attention, schedule: Schedule) -> bool:
    """Whether the producer keeps its cache policies in registers, two each. Not where it has few, shares them with warps that transpose,
    and its decode is long, of a causal mask or joined tiles: there it spilled (but not beside the plainest consumers)."""
    s = schedule
    long = attention.causal or s.fuse_tiles
    plain = s.reference == "running" and s.promote_every is None and s.scale_granularity == "head"
    return not (transposes(attention, s) and long and not plain and role_registers(attention, s)[0] <= 32)


def _one_slot(schedule: Schedule) -> bool:
    """A ring has a single slot, whose addresses never change: ptxas keeps them in registers."""
    return 1 in (schedule.stages_k, schedule.stages_v)


def transposes(attention: Attention, schedule: Schedule) -> bool:
    """V is transposed in the kernel."""
    return attention.value_dtype == "e4m3" and not schedule.v_transposed


def compute_registers(attention: Attention, schedule: Schedule) -> int:
    """Registers a computing thread may use."""
    if schedule.mma == "mma_sync":
        assert schedule.warps is not None
        return launch_registers(schedule.warps * 32)
    assert schedule.consumers is not None
    if schedule.roles == "producer":
        return role_registers(attention, schedule)[1]
    return launch_registers(schedule.consumers * 128)
