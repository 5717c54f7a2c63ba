"""Second layer: every field by itself."""

from __future__ import annotations

from collections.abc import Iterator

from ...attention import Attention
from ...errors import Violation
from ...schedule import Schedule
from .. import registers, scales
from .common import is_int, is_number, nearest_int, shown
from .knobs import CHOICES, HEAD_DIMS, MAX_STAGES, MAX_TILE_KV, NOT_YET, NOT_YET_SET, SCALES


def values(attention: Attention, schedule: Schedule) -> Iterator[Violation]:
    """Every field by itself."""
    for value in (attention, schedule):
        for name in value.field_names():
            yield from _choice(name, getattr(value, name))
    a = attention
    if not is_int(a.head_dim) or a.head_dim not in HEAD_DIMS:
        yield nearest_int("head-dim", "head_dim", a.head_dim, HEAD_DIMS, "is not supported")
    elif a.head_dim_v is not None and (not is_int(a.head_dim_v) or a.head_dim_v != a.head_dim):
        message = f"{shown(a.head_dim_v)} differs from head_dim {a.head_dim}; V must have as many columns as Q and K"
        yield Violation("head-dim-v", "head_dim_v", message, (None, a.head_dim))
    if a.v_dtype is not None and a.dtype != "int8":
        message = (
            f"{shown(a.v_dtype)} given, but v is of q's and k's type {shown(a.dtype)}; only with dtype 'int8' does it have its own"
        )
        yield Violation("v-dtype", "v_dtype", message, (None,))
    if a.scale is not None and not (is_number(a.scale) and SCALES[0] <= a.scale <= SCALES[1]):
        yield Violation(
            "scale",
            "scale",
            f"{shown(a.scale)} is not a positive finite number from {SCALES[0]:g} to {SCALES[1]:g}",
            (
                *((min(max(a.scale, SCALES[0]), SCALES[1]),) if is_number(a.scale) and a.scale > 0 else ()),
                None,
                a.head_dim**-0.5 if is_int(a.head_dim) and a.head_dim in HEAD_DIMS else 1.0,
            ),
        )
    s = schedule
    for name, step in (("tile_q", 16), ("tile_kv", 16)):
        size = getattr(s, name)
        if not is_int(size) or size <= 0 or size % step or size > MAX_TILE_KV:
            legal = tuple(range(step, MAX_TILE_KV + 1, step))
            yield nearest_int(
                name.replace("_", "-"), name, size, legal, f"is not a multiple of {step} between {step} and {MAX_TILE_KV}"
            )
    stages = s.stages if isinstance(s.stages, tuple) else (s.stages, s.stages)
    if len(stages) != 2 or not all(is_int(x) and 1 <= x <= MAX_STAGES for x in stages):
        message = f"{shown(s.stages)} is neither a number from 1 to {MAX_STAGES} nor a (K, V) pair of such numbers"
        yield Violation("stages", "stages", message, tuple(range(1, MAX_STAGES + 1)))
    if s.stages_q is not None and not (is_int(s.stages_q) and s.stages_q in (1, 2)):
        yield Violation("stages-q", "stages_q", f"{shown(s.stages_q)} is not a number of slots for Q", (None, 1, 2))
    if s.registers is not None and (
        not isinstance(s.registers, tuple)
        or len(s.registers) != 2
        or not all(is_int(r) and 24 <= r <= 256 and r % 8 == 0 for r in s.registers)
    ):
        message = f"{shown(s.registers)} is not a (producer, consumer) pair of multiples of 8 from 24 to 256"
        yield Violation("registers", "registers", message, (*registers.PAIRS, None))
    if s.promote_every is not None and not (is_int(s.promote_every) and 1 <= s.promote_every <= scales.MAX_PROMOTE_EVERY):
        near = min(max(s.promote_every, 1), scales.MAX_PROMOTE_EVERY) if is_int(s.promote_every) else 1
        message = f"{shown(s.promote_every)} is neither None nor a number of key blocks from 1 to {scales.MAX_PROMOTE_EVERY}"
        yield Violation("promote-every", "promote_every", message, (near, None))


def _choice(name: str, value: object) -> Iterator[Violation]:
    code = name.replace("_", "-")
    if name in NOT_YET_SET and value is not None:
        yield Violation("not-yet", name, f"{shown(value)} is part of the design, but no kernel honours it yet", (None,))
    if name not in CHOICES:
        return
    ready = tuple(c for c in CHOICES[name] if c not in NOT_YET.get(name, ()))
    if not any(value == c and type(value) is type(c) for c in CHOICES[name]):
        yield Violation(code, name, f"{shown(value)} is not one of {', '.join(repr(c) for c in CHOICES[name])}", ready)
    elif value not in ready:
        yield Violation("not-yet", name, f"{shown(value)} is part of the design, but no kernel honours it yet", ready)
