"""Third layer: fields together, what holds whichever unit multiplies."""

from __future__ import annotations

from collections.abc import Iterator

from ...attention import Attention
from ...errors import Violation
from ...schedule import Schedule
from ...target import TARGETS, target
from .. import scales
from ..precision import attended
from .common import lacking, nearest_int
from .knobs import HEAD_DIMS, INT8_DEPTH, MAX_TILE_KV
from .mma_sync import materialised, mma_sync
from .wgmma import wgmma


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
    yield from _stages_q(s)
    if s.softmax != "fused":
        yield from materialised(s)
    wrong = tuple(_quantised(attention, s))
    yield from wrong
    inner, s = (attention, s) if wrong else attended(attention, s)
    if s.precision is None:  # else there is no such attention kernel
        yield from _precision(inner, s)
        yield from scales.structure(inner, s)
    if s.mma == "wgmma":
        yield from wgmma(s)
    else:
        yield from mma_sync(inner, s)
    if s.skip_masked:
        yield from _skip_masked(inner, s)


def _quantised(a: Attention, s: Schedule) -> Iterator[Violation]:
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


def _precision(a: Attention, s: Schedule) -> Iterator[Violation]:
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
        yield nearest_int("tile-kv", "tile_kv", s.tile_kv, legal, "is not a multiple of 32, the depth of one e4m3 product")
    if s.v_transposed and s.reference == "stale":
        yield Violation("reference", "reference", "'stale' with a V given transposed has no kernel", ("running",))
    if s.roles == "uniform" and not s.v_transposed:
        message = "uniform roles have no warps to transpose an e4m3 V in the kernel"
        yield Violation("v-transposed", "v_transposed", message, (True,))


def _stages_q(s: Schedule) -> Iterator[Violation]:
    """A second slot for Q is for the next tile's."""
    if s.stages_q is not None and s.fuse_tiles and s.q_operand is None:
        yield Violation(
            "stages-q", "stages_q", f"{s.stages_q} given, but tiles that are joined have two slots by themselves", (None,)
        )
    elif s.stages_q == 2 and s.q_operand == "registers":
        message = "2 slots, but a Q that is taken into registers leaves its slot to the next tile's at once"
        yield Violation("stages-q", "stages_q", message, (None,))
    elif s.stages_q == 2:
        missing = lacking(s, mma="wgmma", roles="producer", parallelism="persistent_dynamic")
        if missing:
            message = f"2 slots, of which one is for the next tile's Q, need {missing}"
            yield Violation("stages-q", "stages_q", message, (None,))


def _skip_masked(a: Attention, s: Schedule) -> Iterator[Violation]:
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
