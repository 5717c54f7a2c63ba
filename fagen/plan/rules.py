"""Which pairs of attention and schedule are legal, and what to say of the others.

Four layers, each checked only if the one before it holds: *types* (Python's values or those of a library), *values* (every field by
itself), *structure* (fields together) and *resources* (shared memory, registers, barriers). `check` raises one ScheduleError with every
violation of the first failing layer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..attention import Attention
from ..errors import ScheduleError, Violation
from ..schedule import Schedule
from ..target import TARGETS, target
from . import registers, scales
from .memory import BARRIER_BYTES, tile_bytes
from .precision import attended

CHOICES: dict[str, tuple[object, ...]] = {
    # attention
    "dtype": ("bf16", "fp16", "e4m3", "int8"),
    "v_dtype": (None, "e4m3", "bf16", "fp16"),
    "out_dtype": (None, "bf16", "fp16"),
    "mask": ("full", "causal", "window"),
    "sink": (False, True),
    # schedule
    "arch": tuple(TARGETS),
    "loop_order": ("q_outer", "kv_outer"),
    "parallelism": ("batch_heads", "query_tiles", "persistent_static", "persistent_dynamic", "kv_splits"),
    "partition": ("split_q", "split_kv"),
    "roles": ("uniform", "producer"),
    "warps": (None, 1, 2, 4, 8),
    "consumers": (None, 1, 2, 3, 4),
    "movement": ("ld_st", "cp_async", "tma"),
    "mma": ("mma_sync", "wgmma"),
    "q_operand": (None, "registers"),
    "p_operand": ("registers", "shared"),
    "overlap": ("none", "within", "pingpong", "both"),
    "fuse_tiles": (False, True),
    "skip_masked": (False, True),
    "softmax": ("fused", "three_pass", "two_pass"),
    "normalise": ("once", "each_step"),
    "reference": ("running", "stale"),
    "scale_granularity": (None, "tensor", "head", "block"),
    "precision": (None, "e4m3", "int8", "int8_qk"),
    "hadamard": (False, True),
    "smooth_k": (False, True),
    "v_transposed": (False, True),
}
"""Fields that take one of a few values."""

NOT_YET: dict[str, tuple[object, ...]] = {
    "mask": ("window",),
    "sink": (True,),
    "parallelism": ("kv_splits",),
    "p_operand": ("shared",),
}
"""Values of the design that no kernel honours yet: rejected with code not-yet. The knob walk holds this list."""

NOT_YET_SET = ("window", "softcap")
"""Fields that must stay None until a kernel honours them."""

HEAD_DIMS = (64, 128, 256)
MAX_STAGES = 4
MAX_TILE_KV = 256
INT8_DEPTH = (1 << 24) // 127**2
"""Columns up to which a score of int8 values (±127) stays below 2^24, where float32 is exact."""
SCALES = (1e-30, 256.0)
"""Smallest and largest softmax scale: as far as kernels are checked. What needs a larger one has q and k of so little that e4m3 has few
numbers for them; their descales, or the tensors, are where such a factor belongs."""
OFFERED = 4
"""How many legal values an error names at most."""


def check(attention: Attention, schedule: Schedule) -> None:
    """Raise ScheduleError with all violations of the first layer that has any."""
    found = _first_layer(attention, schedule)
    if found:
        raise ScheduleError(replace(v, nearest=_ways_out(attention, schedule, v, alone=len(found) == 1)) for v in found)


def _first_layer(attention: Attention, schedule: Schedule) -> tuple[Violation, ...]:
    """All violations of the first layer that has any."""
    for layer in (types, values, structure, resources):
        found = tuple(layer(attention, schedule))
        if found:
            return found
    return ()


def _ways_out(attention: Attention, schedule: Schedule, v: Violation, alone: bool) -> tuple[object, ...]:
    """Of the violation's nearest values, nearest first, those that make the pair legal; if it is not the only mistake, or none of them
    does, those that mend this one."""
    if v.field == "head_dim":  # its tiles come with it where a schedule is loaded
        return v.nearest
    legal, mending = [], []
    for value in v.nearest:
        if isinstance(value, str) and "=" in value:  # another knob, found by trying
            return v.nearest
        part = {v.field: value}
        mine = v.field in Attention.field_names()
        left = _first_layer(attention.replace(**part) if mine else attention, schedule if mine else schedule.replace(**part))
        if (v.code, v.field) not in {(x.code, x.field) for x in left}:
            mending.append(value)
            legal += [value] * (not left)
    return tuple((alone and legal) or mending or v.nearest)[:OFFERED]


# types ------------------------------------------------------------------------------------------------------------------


def types(attention: Attention, schedule: Schedule) -> Iterator[Violation]:
    """Values of other libraries, as NumPy's int64, are not Python's: plans are compared, hashed and printed by their fields."""
    mine: dict[str, object] = {}
    found: dict[str, str] = {}
    for name, value in (*vars(attention).items(), *vars(schedule).items()):
        foreign = next((x for x in (value if isinstance(value, tuple) else (value,)) if _is_foreign(x)), None)
        if foreign is not None:
            mine[name] = tuple(map(_own, value)) if isinstance(value, tuple) else _own(value)
            found[name] = f"{value!r} holds a {type(foreign).__module__}.{type(foreign).__name__}; knobs are plain Python values"
    if not found:
        return
    of_a = {n: x for n, x in mine.items() if n in Attention.field_names()}
    of_s = {n: x for n, x in mine.items() if n not in of_a}
    wrong = {v.field: v.nearest for v in values(attention.replace(**of_a), schedule.replace(**of_s))}
    for name, message in found.items():
        yield Violation("python-value", name, message, wrong.get(name, (mine[name],)))


def _is_foreign(x: Any) -> bool:
    if isinstance(x, (int, float)):  # NumPy's float64 is one
        return False
    return isinstance(x, numbers.Real) or type(x).__module__ == "numpy" and getattr(x, "ndim", 1) == 0


def _own(x: Any) -> Any:
    if not _is_foreign(x):
        return x
    if isinstance(x, numbers.Real):
        return int(x) if isinstance(x, numbers.Integral) else float(x)
    return x.item()  # NumPy's bool, or text


# values -----------------------------------------------------------------------------------------------------------------


def values(attention: Attention, schedule: Schedule) -> Iterator[Violation]:
    """Every field by itself."""
    for value in (attention, schedule):
        for name in value.field_names():
            yield from _choice(name, getattr(value, name))
    a = attention
    if not _is_int(a.head_dim) or a.head_dim not in HEAD_DIMS:
        yield _nearest_int("head-dim", "head_dim", a.head_dim, HEAD_DIMS, "is not supported")
    elif a.head_dim_v is not None and (not _is_int(a.head_dim_v) or a.head_dim_v != a.head_dim):
        message = f"{a.head_dim_v!r} differs from head_dim {a.head_dim}; V must have as many columns as Q and K"
        yield Violation("head-dim-v", "head_dim_v", message, (None, a.head_dim))
    if a.v_dtype is not None and a.dtype != "int8":
        message = f"{a.v_dtype!r} given, but v is of q's and k's type {a.dtype}; only with dtype 'int8' does it have its own"
        yield Violation("v-dtype", "v_dtype", message, (None,))
    if a.scale is not None and not (_is_number(a.scale) and SCALES[0] <= a.scale <= SCALES[1]):
        yield Violation(
            "scale",
            "scale",
            f"{a.scale!r} is not a positive finite number from {SCALES[0]:g} to {SCALES[1]:g}",
            (
                *((min(max(a.scale, SCALES[0]), SCALES[1]),) if _is_number(a.scale) and a.scale > 0 else ()),
                None,
                a.head_dim**-0.5 if _is_int(a.head_dim) and a.head_dim > 0 else 1.0,
            ),
        )
    s = schedule
    for name, step in (("tile_q", 16), ("tile_kv", 16)):
        size = getattr(s, name)
        if not _is_int(size) or size <= 0 or size % step or size > MAX_TILE_KV:
            legal = tuple(range(step, MAX_TILE_KV + 1, step))
            yield _nearest_int(
                name.replace("_", "-"), name, size, legal, f"is not a multiple of {step} between {step} and {MAX_TILE_KV}"
            )
    stages = s.stages if isinstance(s.stages, tuple) else (s.stages, s.stages)
    if len(stages) != 2 or not all(_is_int(x) and 1 <= x <= MAX_STAGES for x in stages):
        message = f"{s.stages!r} is neither a number from 1 to {MAX_STAGES} nor a (K, V) pair of such numbers"
        yield Violation("stages", "stages", message, tuple(range(1, MAX_STAGES + 1)))
    if s.stages_q is not None and not (_is_int(s.stages_q) and s.stages_q in (1, 2)):
        yield Violation("stages-q", "stages_q", f"{s.stages_q!r} is not a number of slots for Q", (None, 1, 2))
    if s.registers is not None and (
        not isinstance(s.registers, tuple)
        or len(s.registers) != 2
        or not all(_is_int(r) and 24 <= r <= 256 and r % 8 == 0 for r in s.registers)
    ):
        message = f"{s.registers!r} is not a (producer, consumer) pair of multiples of 8 from 24 to 256"
        yield Violation("registers", "registers", message, (*registers.PAIRS, None))
    if s.promote_every is not None and not (_is_int(s.promote_every) and 1 <= s.promote_every <= scales.MAX_PROMOTE_EVERY):
        near = min(max(s.promote_every, 1), scales.MAX_PROMOTE_EVERY) if _is_int(s.promote_every) else 1
        message = f"{s.promote_every!r} is neither None nor a number of key blocks from 1 to {scales.MAX_PROMOTE_EVERY}"
        yield Violation("promote-every", "promote_every", message, (near, None))


def _choice(name: str, value: object) -> Iterator[Violation]:
    code = name.replace("_", "-")
    if name in NOT_YET_SET and value is not None:
        yield Violation("not-yet", name, f"{value!r} is part of the design, but no kernel honours it yet", (None,))
    if name not in CHOICES:
        return
    ready = tuple(c for c in CHOICES[name] if c not in NOT_YET.get(name, ()))
    if not any(value == c and type(value) is type(c) for c in CHOICES[name]):
        yield Violation(code, name, f"{value!r} is not one of {', '.join(repr(c) for c in CHOICES[name])}", ready)
    elif value not in ready:
        yield Violation("not-yet", name, f"{value!r} is part of the design, but no kernel honours it yet", ready)


# structure --------------------------------------------------------------------------------------------------------------


def structure(attention: Attention, schedule: Schedule) -> Iterator[Violation]:
    """Fields together: the matrix of legal combinations."""
    s, t = schedule, target(schedule.arch)
    if s.mma not in t.matrix_units:
        fits = tuple(x.arch for x in TARGETS.values() if s.mma in x.matrix_units)
        yield Violation("arch-mma", "arch", f"{s.arch} runs {' and '.join(t.matrix_units)} kernels, not {s.mma}", fits)
    movements = ("tma",) if s.mma == "wgmma" else ("ld_st", "cp_async")
    if s.movement not in movements:
        yield Violation(
            "mma-movement", "movement", f"{s.mma} takes its operands by {' or '.join(movements)}, not {s.movement}", movements
        )
    yield from _structure_stages_q(s)
    if s.softmax != "fused":
        yield from _structure_materialised(s)
    wrong = tuple(_structure_quantised(attention, s))
    yield from wrong
    inner, s = (attention, s) if wrong else attended(attention, s)
    if s.precision is None:  # else there is no such attention kernel
        yield from _structure_precision(inner, s)
        yield from scales.structure(inner, s)
    if s.mma == "wgmma":
        yield from _structure_wgmma(s)
    else:
        yield from _structure_mma_sync(inner, s)
    if s.skip_masked:
        yield from _structure_skip_masked(inner, s)


def _structure_quantised(a: Attention, s: Schedule) -> Iterator[Violation]:
    """Kernels that quantise stand before a WGMMA kernel for 8-bit tensors, which transposes an 8-bit V itself."""
    if s.precision is None:
        for field, what in (("hadamard", "rotates q and k"), ("smooth_k", "takes k's mean off")):
            if getattr(s, field):
                message = f"{what} before they are rounded to 8 bits, which needs precision 'e4m3', 'int8' or 'int8_qk' and 16-bit tensors"
                yield Violation(field.replace("_", "-"), field, message, (False,))
        return
    if a.has_descales:
        yield Violation("precision", "precision", f"given with {a.dtype} tensors, which are quantised already", (None,))
    elif s.mma != "wgmma":
        yield Violation("precision", "precision", f"{s.precision} has no fast path on {s.mma}", (None,))
    elif s.precision == "int8_qk":  # its V is not touched: what holds of a 16-bit V, holds of it
        return
    elif s.v_transposed:
        message = "is for an e4m3 V given so; one that the plan quantises is transposed in the attention kernel"
        yield Violation("v-transposed", "v_transposed", message, (False,))
    elif s.roles == "uniform":
        message = "'uniform' roles have no warps to transpose the V that the plan quantises"
        yield Violation("roles", "roles", message, ("producer",))


def _structure_precision(a: Attention, s: Schedule) -> Iterator[Violation]:
    if a.has_descales and s.mma != "wgmma":
        yield Violation("dtype", "dtype", f"{a.dtype} has no fast path on {s.mma}", ("bf16", "fp16"))
        return
    if a.dtype == "int8" and a.head_dim > INT8_DEPTH:
        message = f"scores of int8 values over {a.head_dim} columns may pass 2^24, from where float32 loses their last bits"
        yield Violation("head-dim", "head_dim", message, tuple(d for d in HEAD_DIMS if d <= INT8_DEPTH))
    if a.value_dtype != "e4m3":
        if s.v_transposed:
            yield Violation("v-transposed", "v_transposed", f"is for an e4m3 V; {a.value_dtype} V is read as it is", (False,))
        return
    if s.tile_kv % 32:
        legal = tuple(range(32, MAX_TILE_KV + 1, 32))
        yield _nearest_int("tile-kv", "tile_kv", s.tile_kv, legal, "is not a multiple of 32, the depth of one e4m3 product")
    if s.v_transposed and s.reference == "stale":
        yield Violation("reference", "reference", "'stale' with a V given transposed has no kernel", ("running",))
    if s.roles == "uniform" and not s.v_transposed:
        message = "uniform roles have no warps to transpose an e4m3 V in the kernel"
        yield Violation("v-transposed", "v_transposed", message, (True,))


def _structure_wgmma(s: Schedule) -> Iterator[Violation]:
    if s.warps is not None:
        yield Violation("warps", "warps", f"{s.warps} given, but a wgmma kernel is sized by `consumers`", (None,))
    if s.consumers is None:
        yield Violation("consumers", "consumers", "a wgmma kernel needs the number of warpgroups that compute", (1, 2, 3, 4))
    elif s.tile_q != 64 * s.consumers:
        message = f"{s.tile_q} is not 64 rows for each of {s.consumers} warpgroups"
        yield Violation("tile-q", "tile_q", message, (64 * s.consumers,))
    if s.roles == "uniform":
        if s.overlap not in ("none", "within"):
            yield Violation("overlap", "overlap", f"{s.overlap!r} needs roles 'producer'", ("none", "within"))
        if s.registers is not None:
            yield Violation(
                "registers", "registers", f"{s.registers} given, but uniform roles keep what they are launched with", (None,)
            )
    elif s.overlap in ("pingpong", "both") and s.consumers == 1:
        yield Violation(
            "overlap", "overlap", f"{s.overlap!r} takes turns between at least 2 consumers, there is 1", ("none", "within")
        )
    if s.reference == "stale" and s.overlap not in ("within", "both"):
        message = (
            f"a stale reference saves time where the softmax runs under the warpgroup's own product, not with overlap {s.overlap!r}"
        )
        yield Violation("reference", "reference", message, ("running",))
    if s.fuse_tiles:
        missing = _missing(s, parallelism="persistent_dynamic", roles="producer", reference="stale")
        if missing:
            message = f"joins one tile to the next, which needs {missing}"
            yield Violation("fuse-tiles", "fuse_tiles", message, (False,))
    if s.parallelism == "batch_heads":
        legal = ("query_tiles", "persistent_static", "persistent_dynamic")
        yield Violation("parallelism", "parallelism", "'batch_heads' is for mma_sync kernels", legal)
    for field, mine in (("loop_order", "q_outer"), ("partition", "split_q"), ("normalise", "once")):
        if getattr(s, field) != mine:
            yield Violation(field.replace("_", "-"), field, f"{getattr(s, field)!r} is for mma_sync kernels", (mine,))


def _structure_stages_q(s: Schedule) -> Iterator[Violation]:
    """A second slot for Q is for the next tile's."""
    if s.stages_q is not None and s.fuse_tiles and s.q_operand is None:
        yield Violation(
            "stages-q", "stages_q", f"{s.stages_q} given, but tiles that are joined have two slots by themselves", (None,)
        )
    elif s.stages_q == 2 and s.q_operand == "registers":
        message = "2 slots, but a Q that is taken into registers leaves its slot to the next tile's at once"
        yield Violation("stages-q", "stages_q", message, (None,))
    elif s.stages_q == 2:
        missing = _missing(s, mma="wgmma", roles="producer", parallelism="persistent_dynamic")
        if missing:
            message = f"2 slots, of which one is for the next tile's Q, need {missing}"
            yield Violation("stages-q", "stages_q", message, (None,))


def _structure_skip_masked(a: Attention, s: Schedule) -> Iterator[Violation]:
    """Warpgroups of one tile that compute different blocks."""
    needed = (
        ("mask 'causal'", a.causal),
        ("roles 'producer'", s.roles == "producer"),
        ("at least 2 consumers", s.consumers != 1),
        ("fuse_tiles False", not s.fuse_tiles),
    )
    missing = [what for what, holds in needed if not holds]
    if missing:
        message = f"lets the warpgroups of a tile compute different blocks, which needs {', '.join(missing)}"
        yield Violation("skip-masked", "skip_masked", message, (False,))


def _structure_materialised(s: Schedule) -> Iterator[Violation]:
    """S and P in memory: three kernels of one kind."""
    mine = (
        *(("mma", "mma_sync"), ("loop_order", "q_outer"), ("partition", "split_q"), ("normalise", "once")),
        *(("movement", "ld_st"), ("parallelism", "query_tiles")),
    )
    for field, legal in mine:
        if getattr(s, field) != legal:
            message = f"{s.softmax!r} writes S to memory between kernels with {field} {legal!r}, not {getattr(s, field)!r}"
            yield Violation("softmax", field, message, (legal,))
    if s.tile_kv % 64:
        legal_sizes = tuple(range(64, MAX_TILE_KV + 1, 64))
        yield _nearest_int("tile-kv", "tile_kv", s.tile_kv, legal_sizes, "is not a multiple of 64, the keys in 128 bytes of P")


def _structure_mma_sync(a: Attention, s: Schedule) -> Iterator[Violation]:
    if s.q_operand is not None:
        message = f"{s.q_operand!r} given, but an mma_sync kernel keeps Q in registers wherever it fits"
        yield Violation("q-operand", "q_operand", message, (None,))
    if s.consumers is not None:
        yield Violation("consumers", "consumers", f"{s.consumers} given, but an mma_sync kernel is sized by `warps`", (None,))
    if s.movement == "ld_st" and s.stages not in (1, (1, 1)):
        message = f"{s.stages} slots, but a copy by 'ld_st' is over before the next step: it has no use for a second slot"
        yield Violation("stages", "stages", message, (1,))
    if s.warps is None:
        yield Violation("warps", "warps", "an mma_sync kernel needs its number of warps", (1, 2, 4, 8))
    elif s.partition == "split_kv":
        yield from _structure_split_kv(a, s, s.warps)
    elif s.tile_q % (16 * s.warps):
        step = 16 * s.warps
        yield _nearest_int(
            "tile-q",
            "tile_q",
            s.tile_q,
            tuple(range(step, MAX_TILE_KV + 1, step)),
            f"is not a multiple of 16 rows for each of {s.warps} warps",
        )
    elif _uneven(a, s.tile_kv, s.warps):
        yield _copies(a, s, "tile_kv", 16)
    for field, legal in (("roles", "uniform"), ("overlap", "none"), ("reference", "running")):
        if getattr(s, field) != legal:
            yield Violation(field, field, f"{getattr(s, field)!r} needs wgmma; mma.sync is synchronous", (legal,))
    if s.fuse_tiles:
        yield Violation("fuse-tiles", "fuse_tiles", "needs wgmma and persistent tiles", (False,))
    if s.registers is not None:
        yield Violation("registers", "registers", f"{s.registers} given, but setmaxnreg needs wgmma and roles 'producer'", (None,))
    if s.parallelism.startswith("persistent"):
        yield Violation("parallelism", "parallelism", f"{s.parallelism!r} is for wgmma kernels", ("batch_heads", "query_tiles"))


def _structure_split_kv(a: Attention, s: Schedule, warps: int) -> Iterator[Violation]:
    """Every warp has its own keys and all rows."""
    if s.tile_kv % (16 * warps):
        step = 16 * warps
        message = f"is not a multiple of 16 keys for each of {warps} warps"
        yield _nearest_int("tile-kv", "tile_kv", s.tile_kv, tuple(range(step, MAX_TILE_KV + 1, step)), message)
    elif _uneven(a, s.tile_kv, warps):
        yield _copies(a, s, "tile_kv", 16 * warps)
    if _uneven(a, s.tile_q, warps):
        yield _copies(a, s, "tile_q", 16)


def _uneven(a: Attention, rows: int, warps: int) -> bool:
    """Whether threads cannot share the 16-byte copies of so many rows evenly."""
    return bool(rows * a.head_dim // 8 % (32 * warps))


def _copies(a: Attention, s: Schedule, field: str, step: int) -> Violation:
    assert s.warps is not None
    size, warps = getattr(s, field), s.warps
    what = "block" if field == "tile_kv" else "tile"
    message = f"gives {size * a.head_dim // 8} copies of 16 bytes a {what}, which {32 * warps} threads cannot share evenly"
    legal = tuple(x for x in range(step, MAX_TILE_KV + 1, step) if not _uneven(a, x, warps))
    return _nearest_int(field.replace("_", "-"), field, size, legal, message)


# resources --------------------------------------------------------------------------------------------------------------


def resources(attention: Attention, schedule: Schedule) -> Iterator[Violation]:
    """Shared memory and registers, of the attention kernel: those that quantise need less."""
    attention, s = attended(attention, schedule)
    for violation, fits in _resources_of(attention, s):
        yield replace(violation, nearest=_fitting(attention, s, fits)) if fits else violation


def _resources_of(attention: Attention, s: Schedule) -> Iterator[tuple[Violation, Callable[[Schedule], bool] | None]]:
    """What is wrong, and whether another schedule mends it, where changes are to be searched for."""
    t = target(s.arch)
    need = tile_bytes(attention, s) + BARRIER_BYTES
    if need > t.smem_bytes:
        raw = ", as many of V before it is transposed as of K" if registers.transposes(attention, s) else ""
        q = "Q" if s.slots_q == 1 else "2 Q"
        tiles = f"{q}, {s.stages_k} K and {s.stages_v} V tiles{raw} and barriers"
        message = f"{tiles} need {need} bytes of shared memory, {t.arch} has {t.smem_bytes}"
        yield Violation("smem", "tile_kv", message), lambda x: tile_bytes(attention, x) + BARRIER_BYTES <= t.smem_bytes
    yield from ((v, None) for v in _register_pool(attention, s, t.registers_per_sm))
    if registers.joined_producer_spills(attention, s):
        has = registers.role_registers(attention, s)[0]
        message = f"blocks of {s.tile_kv} keys make the producer of joined tiles spill, which has {has} registers"
        yield Violation("registers", "tile_kv", message), lambda x: not registers.joined_producer_spills(attention, x)
    parts = registers.tile_registers(attention, s)
    have, spare = registers.compute_registers(attention, s), registers.overhead(attention, s)
    if sum(parts.values()) + spare > have:
        sizes = " + ".join(f"{n} {r}" for n, r in parts.items())
        message = f"{sizes} registers and about {spare} more a thread exceed the {have} a computing thread has"

        def fits(x: Schedule) -> bool:
            needs = sum(registers.tile_registers(attention, x).values()) + registers.overhead(attention, x)
            return needs <= registers.compute_registers(attention, x)

        yield Violation("registers", "tile_kv", message), fits


def _register_pool(a: Attention, s: Schedule, pool: int) -> Iterator[Violation]:
    """setmaxnreg moves registers inside what the CTA was launched with; it waits for ever for more."""
    if s.roles != "producer" or s.registers is None:
        return
    assert s.consumers is not None
    threads = 128 * (s.consumers + 1)
    launched = registers.launch_registers(threads, pool) * threads if threads > 256 else 256 * threads
    producer, consumer = s.registers
    usual = registers.role_registers(a, s.replace(registers=None))
    need = 128 * (producer + s.consumers * consumer)
    if need > launched:
        best = (launched // 128 - producer) // s.consumers // 8 * 8
        message = f"128·({producer} + {s.consumers}·{consumer}) = {need} registers exceed the {launched} the CTA is launched with"
        yield Violation("register-pool", "registers", message, tuple(dict.fromkeys(((producer, best), usual))))
    if registers.transposes(a, s) and producer < registers.transposer_needs(s):
        message = f"{producer} for the producer's warpgroup, whose warps need {registers.transposer_needs(s)} to transpose V"
        yield Violation("registers", "registers", message, (usual,))
    elif producer < registers.producer_needs(a, s):
        least = registers.producer_needs(a, s)
        message = f"{producer} for a producer that claims tiles, with a ring of one slot, which needs {least}"
        yield Violation("registers", "registers", message, (usual,))
    if consumer < producer:
        yield Violation(
            "registers",
            "registers",
            f"the consumer gets {consumer}, less than the producer's {producer}",
            (usual,),
        )


# helpers ----------------------------------------------------------------------------------------------------------------


def _missing(s: Schedule, **needed: str) -> str:
    """What a schedule lacks of these fields; of the persistent tiles any will do."""
    persistent = s.parallelism.startswith("persistent")
    lacking = [f for f, v in needed.items() if not (persistent if f == "parallelism" else getattr(s, f) == v)]
    return ", ".join(f"{f}={needed[f]!r}" for f in lacking)


def _fitting(attention: Attention, s: Schedule, fits: Callable[[Schedule], bool]) -> tuple[str, ...]:
    """Changes of one knob that make `fits` true: the largest smaller tile_kv, fewer stages, one slot for Q, no copy of the accumulator, the
    usual registers.
    Those that make the schedule legal, if there are any."""
    smaller = ({"tile_kv": kv} for kv in range(s.tile_kv - 16, 0, -16))
    fewer = ({"stages": n} for n in range(max(s.stages_k, s.stages_v) - 1, 0, -1))
    knobs = (
        smaller,
        fewer,
        [{"stages_q": None}] * (s.stages_q == 2),
        [{"q_operand": None}] * (s.q_operand is not None),
        [{"promote_every": None}] * (s.promote_every is not None),
        [{"registers": None}] * (s.registers is not None),
    )
    mending: list[str] = []
    legal: list[str] = []
    for changes in knobs:
        found = [c for c in changes if fits(s.replace(**c)) and not tuple(structure(attention, s.replace(**c)))]
        whole = next((c for c in found if not tuple(_resources_of(attention, s.replace(**c)))), None)
        mending += [f"{k}={v}" for c in found[:1] for k, v in c.items()]
        legal += [f"{k}={v}" for k, v in (whole or {}).items()]
    return tuple(legal or mending)


def _nearest_int(code: str, field: str, value: object, legal: tuple[int, ...], what: str) -> Violation:
    """All of `legal`, nearest first: `check` offers the first that mend the schedule."""
    near = (
        sorted(legal, key=lambda x: abs(x - value))
        if isinstance(value, int) or isinstance(value, float) and math.isfinite(value)
        else legal
    )
    return Violation(code, field, f"{value!r} {what}", tuple(near))


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
