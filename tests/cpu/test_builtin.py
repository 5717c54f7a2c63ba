"""The built-in schedules and their relatives, compiled: nothing spilled, and in the machine code exactly what the program says."""

from __future__ import annotations

from typing import Any

import pytest
from known_faults import unexpected_faults

import fagen
from fagen import sass
from fagen.compile import Built, build
from fagen.emit import emit
from fagen.plan.counts import expected_counts

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")
pytestmark = needs_nvdisasm

BUILT_IN = [
    (name, {"head_dim": head_dim, "dtype": dtype, "mask": mask})
    for name in ("fa2", "fa3")
    for head_dim in (64, 128, 256)
    for dtype in ("bf16", "fp16")
    for mask in ("full", "causal")
]
BUILT_IN += [("fa3_fp8", {"head_dim": d, "mask": m}) for d, m in ((64, "full"), (128, "causal"), (256, "full"))]

UNIFORM = {"roles": "uniform", "stages": 1}


def consumers(n: int, **more: Any) -> dict[str, Any]:
    return {"head_dim": 64, "consumers": n, "tile_q": 64 * n, "tile_kv": 64, "mask": "causal"} | more


RELATIVES: list[dict[str, Any]] = [
    {"overlap": "none", "mask": "causal"},
    {"overlap": "within", "parallelism": "persistent_static"},
    {"overlap": "pingpong", "parallelism": "query_tiles", "mask": "causal"},
    {"overlap": "both", "parallelism": "persistent_static", "stages": (1, 2), "mask": "causal"},
    {"overlap": "pingpong", "head_dim": 256},
    {"overlap": "pingpong", "head_dim": 256, "stages": 1, "mask": "causal"},
    {"reference": "stale", "tile_kv": 144, "mask": "causal"},
    consumers(1, overlap="within"),
    consumers(2, overlap="both", parallelism="persistent_static"),
    consumers(3, overlap="pingpong", parallelism="query_tiles"),
    consumers(4, overlap="both"),
    consumers(4, overlap="none", parallelism="query_tiles", stages=4),
    {**UNIFORM, "overlap": "none", "tile_kv": 128, "mask": "causal"},
    {**UNIFORM, "overlap": "within", "tile_kv": 96, "parallelism": "query_tiles"},
    {**UNIFORM, "overlap": "within", "tile_kv": 64, "parallelism": "persistent_static", "stages": (2, 1), "dtype": "fp16"},
]


def built(name: str, changes: dict[str, Any]) -> Built:
    """Compiled with every promise enforced: a broken one raises CompileError."""
    p = fagen.plan(*fagen.load(name, **changes))
    return build(p, emit(p))


def label(case: Any) -> str:
    return "-".join(str(v) for v in case.values()) if isinstance(case, dict) else str(case)


def check(b: Built) -> dict[str, int]:
    """What every kernel owes; returns its instruction counts."""
    (kernel,) = b.report.kernels
    assert not b.report.broken() and not kernel.differing
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack_bytes == 0
    assert kernel.serialised is False
    counts = kernel.sass
    assert counts is not None and counts["STL"] == counts["LDL"] == 0
    expected = expected_counts(b.plan.kernels[0])
    assert {n: counts[n] for n in expected} == expected
    assert counts["MUFU.EX2"] > 0
    by_role = kernel.registers_by_role
    assert by_role is not None and len(by_role) == max(1, counts["USETMAXREG"])
    for role in (r for r in b.plan.kernels[0].roles if r.name in by_role):
        assert 0 < by_role[role.name] <= (role.registers or 255)
    return counts


@pytest.mark.parametrize("name, changes", BUILT_IN, ids=label)
def test_built_in(name: str, changes: dict[str, Any]) -> None:
    kernel = built(name, changes)
    counts = check(kernel)
    assert unexpected_faults(kernel) == []
    if name == "fa2":
        assert counts["HMMA"] and counts["LDGSTS"] and counts["LDSM"]
        assert counts["HGMMA"] == counts["QGMMA"] == counts["UTMALDG"] == counts["USETMAXREG"] == counts["WARPGROUP.DEPBAR"] == 0
    else:
        mma, other = ("HGMMA", "QGMMA") if name == "fa3" else ("QGMMA", "HGMMA")
        assert counts[mma] and counts["UTMALDG"] and counts["USETMAXREG"] == 2
        assert counts[other] == counts["LDGSTS"] == counts["HMMA"] == 0


@pytest.mark.parametrize("changes", RELATIVES, ids=label)
def test_relative_of_fa3(changes: dict[str, Any]) -> None:
    counts = check(built("fa3", changes))
    assert counts["HGMMA"] and counts["UTMALDG"] and not counts["LDGSTS"]
    assert counts["USETMAXREG"] == (0 if changes.get("roles") == "uniform" else 2)
    turns = changes.get("overlap", "both") in ("pingpong", "both")
    assert (counts["BAR.ARV"] > 0) == turns


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_sm_80_has_its_own_machine_code(mask: str) -> None:
    """A legal target beside the Hopper ones; smaller tiles, since it has less shared memory."""
    counts = check(built("fa2", {"arch": "sm_80", "mask": mask, "tile_q": 64, "warps": 4, "tile_kv": 64}))
    assert counts["HMMA"] and counts["LDGSTS"] and not counts["HGMMA"]


def test_masked_blocks_alone_pay_for_the_mask() -> None:
    """A causal fa3 has a masked and a clean loop: as many more products as the second loop has, in one kernel."""
    full, causal = (built("fa3", {"mask": m}).report.kernels[0].sass for m in ("full", "causal"))
    assert full and causal and causal["HGMMA"] > full["HGMMA"]
