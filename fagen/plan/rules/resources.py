"""Fourth layer: shared memory and registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...attention import Attention
from ...errors import Violation
from ...schedule import Schedule
from ...target import target
from .. import registers
from ..memory import BARRIER_BYTES, tile_bytes
from ..precision import attended
from .structure import structure


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
