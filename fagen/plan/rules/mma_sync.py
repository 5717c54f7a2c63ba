"""Third layer: fields together, of kernels that multiply by mma.sync."""

from __future__ import annotations

from collections.abc import Iterator

from ...attention import Attention
from ...errors import Violation
from ...schedule import Schedule
from .common import nearest_int
from .knobs import MAX_TILE_KV


def mma_sync(a: Attention, s: Schedule) -> Iterator[Violation]:
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
        yield from _split_kv(a, s, s.warps)
    elif s.tile_q % (16 * s.warps):
        step = 16 * s.warps
        yield nearest_int(
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


def _split_kv(a: Attention, s: Schedule, warps: int) -> Iterator[Violation]:
    """Every warp has its own keys and all rows."""
    if s.tile_kv % (16 * warps):
        step = 16 * warps
        message = f"is not a multiple of 16 keys for each of {warps} warps"
        yield nearest_int("tile-kv", "tile_kv", s.tile_kv, tuple(range(step, MAX_TILE_KV + 1, step)), message)
    elif _uneven(a, s.tile_kv, warps):
        yield _copies(a, s, "tile_kv", 16 * warps)
    if _uneven(a, s.tile_q, warps):
        yield _copies(a, s, "tile_q", 16)


def materialised(s: Schedule) -> Iterator[Violation]:
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
        yield nearest_int("tile-kv", "tile_kv", s.tile_kv, legal_sizes, "is not a multiple of 64, the keys in 128 bytes of P")


def _uneven(a: Attention, rows: int, warps: int) -> bool:
    """Whether threads cannot share the 16-byte copies of so many rows evenly."""
    return bool(rows * a.head_dim // 8 % (32 * warps))


def _copies(a: Attention, s: Schedule, field: str, step: int) -> Violation:
    assert s.warps is not None
    size, warps = getattr(s, field), s.warps
    what = "block" if field == "tile_kv" else "tile"
    message = f"gives {size * a.head_dim // 8} copies of 16 bytes a {what}, which {32 * warps} threads cannot share evenly"
    legal = tuple(x for x in range(step, MAX_TILE_KV + 1, step) if not _uneven(a, x, warps))
    return nearest_int(field.replace("_", "-"), field, size, legal, message)
