"""`plan()`: the only door. Checks the rules, builds the kernels, proves their synchronisation."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..attention import Attention
from ..errors import InputError, InternalError
from ..schedule import Schedule
from ..target import Target, target
from . import barriers, ladder, memory, quantised, registers, rules, scales
from .expr import Expr, as_expr, maximum, sym
from .kernel import (
    TRACE_CTAS,
    TRACE_HEADER_WORDS,
    TRACE_NOTE,
    TRACE_WORDS,
    KernelPlan,
    Param,
    Plan,
    TensorMapRecipe,
    Workspace,
    trace_buffer,
)
from .precision import attended
from .proof import prove
from .roles.mma_sync import MmaSync
from .roles.wgmma import Wgmma
from .steps import DTYPE_BYTES, Gmem, MBar, NBar, Role, Smem, number
from .tiles import BATCH, HKV, HQ, SK, SQ, TILE_STAGES, Tiles


def plan(attention: Attention, schedule: Schedule, *, debug: bool = False, trace: bool = False) -> Plan:
    """The plan of a legal pair; a ScheduleError names what is illegal. `debug`: waits are bounded and name what hung (`--debug`).
    `trace`: role instances note when they come from one step to the next (`fagen trace`). InputError where both are asked for, or `trace` of a
    schedule that quantises.

    A legal plan whose synchronisation cannot be proven is a fault of ours: InternalError with the interleaving that fails.
    """
    rules.check(attention, schedule)  # before the cache, which takes True for 1 and cannot hash a list
    return _proven(attention, schedule, debug, trace)


@lru_cache(maxsize=512)
def _proven(attention: Attention, schedule: Schedule, debug: bool, trace: bool) -> Plan:
    p = assemble(attention, schedule, debug=debug, trace=trace)
    for kernel in p.kernels:
        result = prove(kernel, attention, schedule)
        if not result.ok:
            raise InternalError(f"{kernel.name} is not synchronised: {result.failures[0]}")
    return p


def assemble(attention: Attention, schedule: Schedule, *, debug: bool = False, trace: bool = False) -> Plan:
    """The plan without its proof: for the proof itself, its mutants, and tests that break it on purpose."""
    rules.check(attention, schedule)
    if debug and trace:
        raise InputError("trace", "given beside debug, whose delays would be what one sees; one of them is enough")
    if trace and schedule.precision is not None:
        inner = attended(attention, schedule)[0]
        alone = f"dtype={inner.dtype}" + (f" and v_dtype={inner.v_dtype}" if inner.v_dtype else "")
        message = f"given beside precision {schedule.precision!r}, whose quantising kernels take no marks; trace the attention alone, {alone}"
        raise InputError("trace", message)
    t = target(schedule.arch)
    tiles = Tiles(*attended(attention, schedule), t)
    spaces = tiles.workspaces()
    if schedule.precision is not None:
        kernels, more = quantised.quantise_and_attend(Tiles(attention, schedule, t), _wgmma(tiles, t))
        spaces = (*spaces, *more)
    elif schedule.softmax != "fused":
        kernels, spaces = ladder.standard(tiles)
    elif schedule.loop_order == "kv_outer":
        kernels, spaces = ladder.kv_outer(tiles)
    else:
        kernels = (_wgmma(tiles, t) if schedule.mma == "wgmma" else _mma_sync(tiles),)
    if debug:
        kernels = tuple(_with_debug(kernel) for kernel in kernels)
        spaces = (*spaces, DEBUG_RECORD)
    if trace:
        spaces = (*spaces, *(Workspace(trace_buffer(k.name), "i32", as_expr(_trace_words(k)), zeroed=False) for k in kernels))
        kernels = tuple(map(_with_trace, kernels))
    return Plan(attention, schedule, t, kernels, spaces, debug, trace)


def quantise_plan(attention: Attention, schedule: Schedule) -> Plan:
    """The plan of the kernels alone that quantise, as a schedule with `precision` says; they leave tensors, descales and shifts as outputs.
    Of the schedule only precision, scale_granularity, hadamard, smooth_k and the tile sizes matter; nothing else is checked."""
    t = target(schedule.arch)
    kernels, spaces, outputs = quantised.quantise_only(Tiles(attention, schedule, t))
    for kernel in kernels:
        result = prove(kernel, attention, schedule)
        if not result.ok:
            raise InternalError(f"{kernel.name} is not synchronised: {result.failures[0]}")
    return Plan(attention, schedule, t, kernels, spaces, outputs=outputs)


def _wgmma(tiles: Tiles, t: Target) -> KernelPlan:
    s = tiles.schedule
    assert s.consumers is not None
    with_producer = s.roles == "producer"
    regs = registers.role_registers(tiles.attention, s) if with_producer else None
    build = Wgmma(tiles, regs)
    turn = registers.transposes(tiles.attention, s)
    transposer = (build.transposer(),) if turn else ()
    roles = (build.producer(), *transposer, build.consumer()) if with_producer else (build.uniform(),)
    rings = [("q", s.slots_q), ("k", s.stages_k), ("v", s.stages_v)]
    rings += [("raw", s.stages_k)] if turn else []
    rings += [("tile", TILE_STAGES)] if tiles.dynamic else []
    bars = tuple(MBar(f"{name}_{state}", stages) for name, stages in rings for state in ("full", "empty"))
    order = (NBar("order", 1, s.consumers, 256),) if s.overlap in ("pingpong", "both") else ()
    v_map = _map_transposed(tiles) if s.v_transposed else _map(tiles, "v", "V_raw" if turn else "V", SK, HKV)
    maps = (_map(tiles, "q", "Q", SQ, HQ), _map(tiles, "k", "K", SK, HKV), v_map)
    return _kernel(tiles, roles, bars, order, maps)


def _mma_sync(tiles: Tiles) -> KernelPlan:
    q_in_registers = registers.q_fits_registers(tiles.attention, tiles.schedule)
    return _kernel(tiles, (MmaSync(tiles, q_in_registers).role(),), (), (), ())


def _kernel(
    tiles: Tiles, roles: tuple[Role, ...], bars: tuple[MBar, ...], order: tuple[NBar, ...], maps: tuple[TensorMapRecipe, ...]
) -> KernelPlan:
    """Put the parts together: numbered steps, memory map, derived barrier counts, parameters."""
    a, s = tiles.attention, tiles.schedule
    roles = tuple(replace(r, body=number(r.body, r.name)) for r in roles)
    ring = (memory.tile_ring(),) if tiles.dynamic else ()
    smem, placed, total = memory.memory_map((*memory.tiles_of(a, s), *memory.parts_of(a, s), *ring), bars)
    dims = ("batch", "seq", "heads", "head_dim")
    v_dims = ("batch", "heads", "head_dim", "seq") if s.v_transposed else dims
    inputs = tuple(Gmem(n, a.dtype_of(n), v_dims if n == "v" else dims, "in") for n in ("q", "k", "v"))
    outputs = (Gmem("out", a.output_dtype, dims, "out"), Gmem("lse", "fp32", ("batch", "heads", "seq"), "out"))
    counter = (Gmem("counter", "i32", ("2",), "workspace"),) if tiles.dynamic else ()
    descales = scales.tensors(a, s)
    by_pointer = (*(() if maps else inputs), *outputs, *descales, *counter)
    strided = [g.name for g in by_pointer if g.dims == dims]
    strides = tuple(Param(f"{n}_{x}", "i64", sym(f"{n}_{x}")) for n in strided for x in ("sb", "ss", "sh"))
    return KernelPlan(
        name="attention",
        threads=sum(r.threads for r in roles),
        min_ctas=1,
        gmem=(*inputs, *outputs, *descales, *counter),
        pointers=tuple(g.name for g in by_pointer),
        params=(*strides, *scales.params(a, s), *tiles.params()),
        maps=maps,
        smem=smem,
        mbars=barriers.derive(placed, roles, smem),
        nbars=order,
        smem_bytes=total,
        roles=roles,
        grid=tiles.grid(),
    )


def _map(tiles: Tiles, tensor: str, tile: str, rows: Expr, heads: Expr) -> TensorMapRecipe:
    """Tensor map of q, k or v: one box is one tile in shared memory."""
    a = tiles.attention
    smem = next(t for t in memory.tiles_of(a, tiles.schedule) if t.name == tile)
    size = DTYPE_BYTES[smem.dtype]
    chunk, chunks = smem.chunk_bytes // size, smem.chunks
    at_least_one = [maximum(x, 1) for x in (rows, heads, BATCH)]  # an empty tensor is never loaded, but its map must encode
    stride = {x: sym(f"{tensor}_{x}") * size for x in ("ss", "sh", "sb")}
    return TensorMapRecipe(
        tensor,
        smem.dtype,
        dims=(as_expr(chunk), at_least_one[0], as_expr(chunks), at_least_one[1], at_least_one[2]),
        strides=(stride["ss"], as_expr(smem.chunk_bytes), stride["sh"], stride["sb"]),
        box=(chunk, smem.rows, chunks, 1, 1),
    )


def _map_transposed(tiles: Tiles) -> TensorMapRecipe:
    """Tensor map of a V given as (batch, heads, head_dim, seq), 8-bit: one box is 128 keys of every column of the head."""
    v = next(t for t in memory.tiles_of(tiles.attention, tiles.schedule) if t.name == "V")
    dims = (maximum(SK, 1), as_expr(v.rows), as_expr(1), maximum(HKV, 1), maximum(BATCH, 1))
    strides = (sym("v_ss"), as_expr(v.chunk_bytes), sym("v_sh"), sym("v_sb"))
    return TensorMapRecipe("v", v.dtype, dims, strides, (v.chunk_bytes, v.rows, 1, 1, 1))


DEBUG_WORDS = 64
DEBUG_RECORD = Workspace("debug", "i32", as_expr(DEBUG_WORDS), zeroed=False)
"""Host-mapped: the first wait that runs out of time writes here what every role instance was doing (see debug.py)."""


def _with_debug(kernel: KernelPlan) -> KernelPlan:
    """Room for the debug record, the seed of the delays, and (where waits can be bounded) a note of progress for each role instance."""
    if kernel.mbars:
        instances = sum(r.count for r in kernel.roles)
        notes = Smem("progress", 1, instances, "i32", 1, swizzle="none", offset=kernel.smem_bytes)
        kernel = replace(kernel, smem=(*kernel.smem, notes), smem_bytes=kernel.smem_bytes + notes.tile_bytes)
    return replace(
        kernel,
        gmem=(*kernel.gmem, Gmem("debug", "i32", (str(DEBUG_WORDS),), "workspace")),
        pointers=(*kernel.pointers, "debug"),
        params=(*kernel.params, Param("seed", "i32", sym("seed"))),
    )


def _trace_words(kernel: KernelPlan) -> int:
    """Of a trace buffer: what all lanes noted, then a few words of each lane (see `fagen.trace`)."""
    return TRACE_CTAS * sum(r.count for r in kernel.roles) * (TRACE_WORDS + TRACE_HEADER_WORDS)


def _with_trace(kernel: KernelPlan) -> KernelPlan:
    """The trace buffer, the first CTA to record, and (where a single thread is a role) a place in shared memory for what it has no
    registers for."""
    if any(r.elect for r in kernel.roles):
        note = Smem(TRACE_NOTE, 1, 1, "i32", 1, swizzle="none", offset=-(-kernel.smem_bytes // 16) * 16)
        kernel = replace(kernel, smem=(*kernel.smem, note), smem_bytes=note.offset + note.tile_bytes)
    name = trace_buffer(kernel.name)
    return replace(
        kernel,
        gmem=(*kernel.gmem, Gmem(name, "i32", (str(_trace_words(kernel)),), "workspace")),
        pointers=(*kernel.pointers, name),
        params=(*kernel.params, Param("trace_first", "i32", sym("trace_first")), Param("trace_count", "i32", sym("trace_count"))),
    )
