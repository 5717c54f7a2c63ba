"""Mutants of fa2 and fa3: every wrong kernel is flagged, or equivalent for a reason that a rule states."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import pytest

import fagen
from fagen import Attention, Schedule
from fagen.plan.build import assemble
from fagen.plan.kernel import KernelPlan
from fagen.plan.mutants import MutantReport, mutants, run_mutants
from fagen.plan.proof import prove

FA2, FA3 = fagen.load("fa2"), fagen.load("fa3")
SMALL = FA3.schedule.replace(tile_kv=64)  # room for more stages
VARIANTS: dict[str, tuple[Attention, Schedule]] = {
    "fa2": FA2,
    "fa2 causal, batch_heads": (
        FA2.attention.replace(mask="causal"),
        FA2.schedule.replace(parallelism="batch_heads", warps=4, tile_q=64),
    ),
    "fa2 (3, 2) stages": (FA2.attention, FA2.schedule.replace(stages=(3, 2), warps=4, tile_q=64)),
    "fa2 one stage": (FA2.attention, FA2.schedule.replace(stages=1, warps=2, tile_q=32)),
    "fa3": FA3,
    "fa3 causal, dynamic": (FA3.attention.replace(mask="causal"), FA3.schedule.replace(parallelism="persistent_dynamic")),
    "fa3 causal, masked blocks skipped": (
        FA3.attention.replace(mask="causal", head_dim=64),
        FA3.schedule.replace(skip_masked=True, tile_kv=32, tile_q=256, consumers=4),
    ),
    "fa3 query_tiles, none": (FA3.attention, FA3.schedule.replace(parallelism="query_tiles", overlap="none")),
    "fa3, Q in registers": (FA3.attention, FA3.schedule.replace(q_operand="registers", tile_kv=64, overlap="within")),
    "fa3, Q in registers, fused tiles": (
        FA3.attention.replace(head_dim=64),
        FA3.schedule.replace(
            q_operand="registers",
            tile_kv=64,
            overlap="within",
            reference="stale",
            fuse_tiles=True,
            parallelism="persistent_dynamic",
        ),
    ),
    "uniform, Q in registers": (
        FA3.attention,
        SMALL.replace(roles="uniform", overlap="within", parallelism="query_tiles", q_operand="registers"),
    ),
    "fa3 within": (FA3.attention, FA3.schedule.replace(overlap="within")),
    "fa3 pingpong": (FA3.attention, FA3.schedule.replace(overlap="pingpong")),
    "fa3 three consumers, (3, 1) stages": (
        FA3.attention.replace(head_dim=64),
        FA3.schedule.replace(tile_q=192, consumers=3, tile_kv=128, stages=(3, 1)),
    ),
    "causal, a diagonal longer than the rings": (
        FA3.attention.replace(mask="causal", head_dim=64),
        FA3.schedule.replace(tile_kv=16, stages=1, overlap="none", parallelism="query_tiles"),
    ),
    "causal, uniform, a diagonal longer than the rings": (
        FA3.attention.replace(mask="causal", head_dim=64),
        SMALL.replace(roles="uniform", tile_kv=32, stages=3, overlap="none", parallelism="query_tiles"),
    ),
    "uniform within": (FA3.attention, SMALL.replace(roles="uniform", overlap="within", parallelism="query_tiles")),
    "uniform dynamic": (
        FA3.attention,
        SMALL.replace(roles="uniform", overlap="none", parallelism="persistent_dynamic", consumers=1, tile_q=64),
    ),
}


def kernel(attention: Attention, schedule: Schedule) -> KernelPlan:
    (only,) = assemble(attention, schedule).kernels
    return only


@lru_cache
def report(name: str) -> MutantReport:
    attention, schedule = VARIANTS[name]
    return run_mutants(kernel(attention, schedule), attention, schedule)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_mutant_is_flagged_or_explained(name: str) -> None:
    r = report(name)
    assert not r.survivors, "\n".join(m.description for m in r.survivors)
    assert r.total == r.flagged + len(r.equivalent)
    assert r.flagged > len(r.equivalent) or "one stage" in name  # most mistakes are mistakes


def test_the_two_built_in_schedules_make_at_least_150() -> None:
    r = report("fa2") + report("fa3")
    assert r.total >= 150
    assert str(r) == f"{r.total} mutants: {r.flagged} flagged, {len(r.equivalent)} equivalent"


def test_mutants_differ_from_the_original_and_cover_every_rule() -> None:
    rules: Counter[str] = Counter()
    for name in ("fa2", "fa3 causal, dynamic"):
        original = kernel(*VARIANTS[name])
        seen = set()
        for m in mutants(original):
            assert m.kernel != original, m.description
            assert m.kernel not in seen, f"twice: {m.description}"
            seen.add(m.kernel)
            rules[m.change.rule] += 1
    wanted = {
        "drop",
        "swap",
        "pending+1",
        "pending-1",
        "ready",
        "behind",
        "bar",
        "slot",
        "start_phase",
        "stages",
        "arrivals",
        "tx_bytes",
        "threads",
    }
    assert set(rules) == wanted


def test_each_kind_of_step_is_dropped() -> None:
    dropped = set()
    for name in ("fa2", "fa3 causal, dynamic"):
        dropped |= {m.change.steps[0].kind for m in mutants(kernel(*VARIANTS[name])) if m.change.rule == "drop"}
    assert {
        "Arrive",
        "Wait",
        "Advance",
        "Sync",
        "NArrive",
        "CtaSync",
        "MmaWait",
        "CpWait",
        "CpCommit",
        "TmaLoad",
        "CpAsync",
    } <= dropped


# Mutants that must be flagged, whatever the reasons for equivalents come to say: one of each classic mistake.
CLASSIC = [
    ("fa3", "without producer.tiles.tile.steady.wait_k_empty", "race"),
    ("fa3", "without consumer.tiles.tile.steady.wait_v_full", "race"),
    ("fa3", "without consumer.tiles.tile.steady.arrive_v_empty", "deadlock"),
    ("fa3", "without consumer.drain.sync_order", "left-over"),
    ("fa3", "without consumer.start.n_arrive_order", "deadlock"),
    ("fa3", "v_full with tx_bytes = {half}", "bytes"),
    ("fa2", "without warps.tile.steady.cta_sync", "race"),
    ("fa2", "without warps.tile.steady.cp_wait.2", "race"),
]


@pytest.mark.parametrize(("name", "text", "kind"), CLASSIC)
def test_classic_mistakes(name: str, text: str, kind: str) -> None:
    attention, schedule = VARIANTS[name]
    original = kernel(attention, schedule)
    if "{half}" in text:
        text = text.format(half=original.mbar_of("v_full").tx_bytes // 2)
    (found,) = [m for m in mutants(original) if m.description == text]
    result = prove(found.kernel, attention, schedule)
    assert not result.ok and kind in {f.kind for f in result.failures}, str(result)
