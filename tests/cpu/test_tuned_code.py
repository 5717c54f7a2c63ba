"""The machine code of every tuned schedule: waits stand where the program has them, with the exponentials between them; nothing spilled,
no batch of products serialised, descriptors uniform."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_faults import unexpected_faults
from test_builtin import check

import fagen
from fagen import Attention, Schedule, sass, tuned
from fagen.compile import build
from fagen.emit import emit
from fagen.library import resource_dir

pytestmark = pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")

TABLE = {(e.attention, e.schedule): None for table in tuned.builtin_tables() for e in table.entries}
FUSED = [
    fagen.load("fa3", head_dim=head_dim, mask=mask, reference="stale", fuse_tiles=True, **tiles)
    for head_dim, tiles in (
        (64, {"tile_q": 128, "consumers": 2, "tile_kv": 128, "stages": 4, "overlap": "within"}),
        (128, {"tile_kv": 128}),
    )
    for mask in ("full", "causal")
]
"""Of the kind that short sequences want, whether the table has them or not."""
ALL = list(dict.fromkeys([*TABLE, *((a, s) for a, s in FUSED)]))


@pytest.mark.parametrize(("attention", "schedule"), ALL, ids=lambda x: x.label if isinstance(x, Attention) else x.id)
def test_no_fault_costs_speed(attention: Attention, schedule: Schedule) -> None:
    p = fagen.plan(attention, schedule)
    built = build(p, emit(p))
    check(built)  # spills, serialised batches, counts
    assert unexpected_faults(built) == []


def test_tables_are_where_they_are_looked_for() -> None:
    files = sorted((Path(resource_dir("schedules")) / "tuned").glob("*.json"))
    assert files and len(files) == len(tuned.builtin_tables()) and len(TABLE) >= 6
