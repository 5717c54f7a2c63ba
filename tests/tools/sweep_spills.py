"""Where do tiles stop fitting registers? Compiles schedules around the border that `fagen.plan.registers.overhead` draws.

    python -m tests.tools.sweep_spills [wgmma|mma_sync|int8_qk] [--part I/N] [--csv FILE]

For every family (all knobs but tile_kv) it walks tile_kv upwards from the border while the result is as planned, or downwards while it is
not, and prints the registers left beside the tiles ("spare"): the most with which it still goes wrong (a spill; WGMMAs serialised), the
least with which it goes right, and what `overhead` asks for there. About 3 compiles a family, each 0.5 to 3 s; the cache keeps them.
Not a test: run it when the emitted code changes in a way that moves registers, and calibrate with what it prints.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from fagen import Attention, Schedule
from fagen.attention import EIGHT_BIT_TYPES
from fagen.compile import build
from fagen.emit import emit
from fagen.plan import assemble, registers, rules
from fagen.plan.memory import BARRIER_BYTES, tile_bytes
from fagen.target import target


@dataclass(frozen=True)
class Family:
    """All knobs but tile_kv. `q_in_registers`: mma_sync only."""

    attention: Attention
    schedule: Schedule
    q_in_registers: bool = False

    def at(self, tile_kv: int) -> Schedule:
        return self.schedule.replace(tile_kv=tile_kv)

    def spare(self, tile_kv: int) -> int:
        """Registers a computing thread has beside its tiles."""
        s = self.at(tile_kv)
        held = sum(registers.tile_registers(self.attention, s).values())
        if self.q_in_registers:
            held += registers.q_registers(self.attention, s)
        return registers.compute_registers(self.attention, s) - held

    def possible(self, tile_kv: int) -> bool:
        """Legal but for its registers."""
        s = self.at(tile_kv)
        if tuple(rules.values(self.attention, s)) or tuple(rules.structure(self.attention, s)):
            return False
        return tile_bytes(self.attention, s) + BARRIER_BYTES <= target(s.arch).smem_bytes and self.spare(tile_kv) > 0

    @property
    def label(self) -> str:
        s = self.schedule
        who = f"{s.roles} {s.consumers} {s.registers or ''} {s.overlap}" if s.mma == "wgmma" else f"{s.warps} warps"
        q = " Q in registers" if self.q_in_registers else ""
        return f"{self.attention.label} tile_q {s.tile_q} {who} {s.parallelism} stages {s.stages}{q}"


def family(products: str, head_dim: int, mask: str, consumers: int, **knobs: object) -> Family:
    """A WGMMA one."""
    knobs = {"parallelism": "persistent_dynamic", "overlap": "both", "roles": "producer", "stages": 1} | knobs
    types = {"dtype": "int8", "v_dtype": "bf16"} if products == "int8_qk" else {"dtype": products}
    if products in (*EIGHT_BIT_TYPES, "int8_qk"):
        knobs = {"scale_granularity": "head"} | knobs
    s = Schedule(arch="sm_90a", tile_q=64 * consumers, tile_kv=16, consumers=consumers, movement="tma", mma="wgmma", **knobs)  # type: ignore[arg-type]
    return Family(Attention(head_dim=head_dim, mask=mask, **types), s)


def sizes() -> Iterator[tuple[int, int, str]]:
    """(consumers, head_dim, overlap) of a producer's consumers."""
    for consumers, head_dim in [(n, d) for d in (64, 128, 256) for n in (1, 2, 3, 4) if n <= 2 or d <= 128]:
        for overlap in ("none", "within", "pingpong", "both") if consumers > 1 else ("none", "within"):
            yield consumers, head_dim, overlap


def int8_qk_families() -> Iterator[Family]:
    for consumers, head_dim, overlap in sizes():
        for mask in ("causal", "full"):
            of: dict[str, object] = {"overlap": overlap}
            for parallelism in ("persistent_dynamic", "persistent_static", "query_tiles"):
                yield family("int8_qk", head_dim, mask, consumers, **of, parallelism=parallelism)
            for more in (
                {"stages": 2},
                {"stages": (2, 1)},
                {"stages": 2, "stages_q": 2},
                {"stages": 2, "scale_granularity": "block"},
            ):
                yield family("int8_qk", head_dim, mask, consumers, **of, **more)
            if overlap in ("within", "both"):
                of["reference"] = "stale"
                for parallelism, stages in itertools.product(("persistent_dynamic", "persistent_static"), (1, 2)):
                    yield family("int8_qk", head_dim, mask, consumers, **of, parallelism=parallelism, stages=stages)
                for fuse, by in ((True, "head"), (True, "block"), (False, "block")):
                    yield family("int8_qk", head_dim, mask, consumers, **of, stages=2, fuse_tiles=fuse, scale_granularity=by)
                yield family("int8_qk", head_dim, mask, consumers, **of, stages=2, stages_q=2)
            if overlap in ("none", "within"):
                yield family("int8_qk", head_dim, mask, consumers, overlap=overlap, roles="uniform")


def wgmma_families() -> Iterator[Family]:
    for consumers, head_dim in [(n, d) for d in (64, 128, 256) for n in (1, 2, 3, 4) if n <= 2 or d <= 128]:
        for overlap in ("none", "within", "pingpong", "both") if consumers > 1 else ("none", "within"):
            for parallelism in ("persistent_dynamic", "persistent_static", "query_tiles"):
                yield family("bf16", head_dim, "causal", consumers, overlap=overlap, parallelism=parallelism)
            yield family("bf16", head_dim, "causal", consumers, overlap=overlap, stages=2)
            yield family("bf16", head_dim, "full", consumers, overlap=overlap)
            for eight in EIGHT_BIT_TYPES:
                yield family(eight, head_dim, "causal", consumers, overlap=overlap)
            for mask, eight in itertools.product(("causal", "full"), EIGHT_BIT_TYPES):
                for scales in (
                    {"scale_granularity": "block"},
                    {"promote_every": 1},
                    {"scale_granularity": "block", "promote_every": 2},
                ):
                    yield family(eight, head_dim, mask, consumers, overlap=overlap, **scales)
                if overlap in ("within", "both"):
                    for fuse in (False, True):
                        yield family(eight, head_dim, mask, consumers, overlap=overlap, reference="stale", fuse_tiles=fuse)
        for overlap in ("none", "within"):
            for parallelism in ("persistent_dynamic", "query_tiles"):
                yield family("bf16", head_dim, "causal", consumers, overlap=overlap, parallelism=parallelism, roles="uniform")
    for consumers, split in ((1, (56, 160)), (2, (40, 152)), (3, (24, 128))):
        yield family("bf16", 64, "causal", consumers, overlap="within", registers=split)


def mma_sync_families() -> Iterator[Family]:
    variants = [
        ("causal", 1, "query_tiles"),
        ("causal", 2, "query_tiles"),
        ("causal", 3, "batch_heads"),
        ("full", 1, "query_tiles"),
    ]
    for head_dim in (64, 128, 256):
        for warps in (8, 4, 2, 1):
            for blocks in (1, 2):
                for mask, stages, parallelism in variants:
                    for q in (False, True):
                        s = Schedule(arch="sm_90", tile_q=16 * blocks * warps, tile_kv=16, warps=warps, stages=stages)
                        yield Family(Attention(head_dim=head_dim, mask=mask), s.replace(parallelism=parallelism), q)


def wrong(family: Family, tile_kv: int) -> bool:
    """Whether the compiled kernel breaks a promise: spills, or serialised WGMMAs."""
    with (
        mock.patch.object(registers, "overhead", lambda *_: 0),
        mock.patch.object(registers, "q_fits_registers", lambda *_: family.q_in_registers),
    ):
        p = assemble(family.attention, family.at(tile_kv))
    return bool(build(p, emit(p), enforce=False).report.broken())


def border(family: Family) -> tuple[int | None, int | None]:
    """tile_kv of the smallest tile that goes wrong, and of the largest one below it that does not (None: there is none)."""
    sizes = [kv for kv in range(16, rules.MAX_TILE_KV + 1, 16) if family.possible(kv)]
    if not sizes:
        return None, None
    i = min(
        range(len(sizes)), key=lambda n: abs(family.spare(sizes[n]) - registers.overhead(family.attention, family.at(sizes[n])))
    )
    if wrong(family, sizes[i]):
        while i > 0 and wrong(family, sizes[i - 1]):
            i -= 1
        return sizes[i], sizes[i - 1] if i else None
    while i + 1 < len(sizes) and not wrong(family, sizes[i + 1]):
        i += 1
    return sizes[i + 1] if i + 1 < len(sizes) else None, sizes[i]


def described(family: Family, tile_kv: int | None) -> str:
    if tile_kv is None:
        return "never"
    return f"tile_kv {tile_kv} (spare {family.spare(tile_kv)}, asked {registers.overhead(family.attention, family.at(tile_kv))})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unit", nargs="?", choices=("wgmma", "mma_sync", "int8_qk"))
    parser.add_argument("--part", default="0/1", help="I/N: every N-th family from the I-th on, to share the work")
    parser.add_argument("--csv", help="write the rows to this file as well")
    options = parser.parse_args()
    families = {"wgmma": wgmma_families, "mma_sync": mma_sync_families, "int8_qk": int8_qk_families}
    out = csv.writer(open(options.csv, "w", newline="")) if options.csv else None  # noqa: SIM115
    for unit in [options.unit] if options.unit else families:
        part, parts = map(int, options.part.split("/"))
        for family in list(families[unit]())[part::parts]:
            worst, fits = (described(family, kv) for kv in border(family))
            print(f"{family.label:<90} wrong at {worst}, right at {fits}", flush=True)
            if out:
                out.writerow([unit, family.label, worst, fits])


if __name__ == "__main__":
    main()
