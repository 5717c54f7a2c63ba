"""Where do tiles stop fitting registers? Compiles schedules around the border that `fagen.plan.registers.OVERHEAD` draws.

    python -m tests.tools.sweep_spills [wgmma|mma_sync] [--csv FILE]

For every family (all knobs but tile_kv) it walks tile_kv from the border upwards while the compiler spills nothing, or downwards while
it does, and prints the registers left beside the tiles ("spare"): the most that still spills, the least that does not. OVERHEAD
must be at least the first wherever a legal schedule lies there. About 3 compiles a family, each 0.5 to 3 s; the cache keeps them.
Not a test: run it when the emitted code changes in a way that moves registers, and calibrate with what it prints.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from fagen import Attention, Schedule
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
        return registers.compute_registers(s) - held

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


def wgmma_families() -> Iterator[Family]:
    def family(head_dim: int, mask: str, consumers: int, **knobs: object) -> Family:
        knobs = {"parallelism": "persistent_dynamic", "overlap": "both", "roles": "producer", "stages": 1} | knobs
        s = Schedule(arch="sm_90a", tile_q=64 * consumers, tile_kv=16, consumers=consumers, movement="tma", mma="wgmma", **knobs)  # type: ignore[arg-type]
        return Family(Attention(head_dim=head_dim, mask=mask), s)

    for mask in ("causal", "full"):
        for consumers, head_dims in ((1, (64, 128, 256)), (2, (64, 128, 256)), (3, (64, 128)), (4, (64, 128))):
            for head_dim in head_dims:
                for overlap in ("none", "within", "pingpong", "both") if consumers > 1 else ("none", "within"):
                    for parallelism in ("persistent_dynamic", "query_tiles"):
                        yield family(head_dim, mask, consumers, overlap=overlap, parallelism=parallelism)
                for overlap in ("none", "within"):
                    for parallelism in ("persistent_dynamic", "query_tiles"):
                        yield family(head_dim, mask, consumers, overlap=overlap, parallelism=parallelism, roles="uniform", stages=2)
        for consumers, split in ((1, (56, 160)), (2, (40, 152)), (2, (24, 200)), (3, (24, 128))):
            for overlap in ("none", "within"):
                yield family(64, mask, consumers, overlap=overlap, registers=split)


def mma_sync_families() -> Iterator[Family]:
    for mask in ("causal", "full"):
        for head_dim in (64, 128, 256):
            for warps in (8, 4, 1):
                for blocks in (1, 2, 3):
                    if 16 * blocks * warps > rules.MAX_TILE_KV:
                        continue
                    for stages in (1, 2):
                        for q in (False, True):
                            s = Schedule(arch="sm_90", tile_q=16 * blocks * warps, tile_kv=16, warps=warps, stages=stages)
                            yield Family(Attention(head_dim=head_dim, mask=mask), s, q)
                    s = Schedule(arch="sm_90", tile_q=16 * blocks * warps, tile_kv=16, warps=warps, parallelism="batch_heads")
                    yield Family(Attention(head_dim=head_dim, mask=mask), s, False)


def spilled(family: Family, tile_kv: int) -> int:
    """Bytes of local memory a thread uses (0: fits)."""
    none = dict.fromkeys(registers.OVERHEAD, 0)
    with mock.patch.object(registers, "OVERHEAD", none), mock.patch.object(registers, "q_fits_registers", _constant(family)):
        p = assemble(family.attention, family.at(tile_kv))
    kernel = build(p, emit(p), enforce=False).report.kernels[0]
    return max(kernel.spill_stores, kernel.spill_loads, kernel.stack_bytes)


def _constant(family: Family) -> object:
    return lambda attention, schedule: family.q_in_registers


def border(family: Family, start: int) -> tuple[tuple[int, int, int] | None, tuple[int, int] | None]:
    """((tile_kv, spare, bytes) of the smallest tile that spills, (tile_kv, spare) of the largest one below it that does not)."""
    sizes = [kv for kv in range(16, rules.MAX_TILE_KV + 1, 16) if family.possible(kv)]
    if not sizes:
        return None, None
    i = min(range(len(sizes)), key=lambda n: abs(family.spare(sizes[n]) - start))
    bytes_ = spilled(family, sizes[i])
    fits, worst = None, None
    if bytes_:
        while bytes_:
            worst = (sizes[i], family.spare(sizes[i]), bytes_)
            i -= 1
            if i < 0:
                return worst, None
            bytes_ = spilled(family, sizes[i])
        fits = (sizes[i], family.spare(sizes[i]))
    else:
        while not bytes_:
            fits = (sizes[i], family.spare(sizes[i]))
            i += 1
            if i == len(sizes):
                return None, fits
            bytes_ = spilled(family, sizes[i])
        worst = (sizes[i], family.spare(sizes[i]), bytes_)
    return worst, fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unit", nargs="?", choices=("wgmma", "mma_sync"))
    parser.add_argument("--csv", help="write the rows to this file as well")
    options = parser.parse_args()
    families = {"wgmma": wgmma_families, "mma_sync": mma_sync_families}
    out = csv.writer(open(options.csv, "w", newline="")) if options.csv else None  # noqa: SIM115
    for unit in [options.unit] if options.unit else families:
        for family in families[unit]():
            worst, fits = border(family, registers.OVERHEAD[unit])
            print(f"{family.label:<95} spills at {worst}, fits at {fits}", flush=True)
            if out:
                out.writerow([unit, family.label, worst, fits])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
