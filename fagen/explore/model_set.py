"""The schedules on which the model is judged: every generation, head_dim, mask and type, tiles, stages, overlaps and references, short and
long sequences; good ones and bad ones. All are timed within a minute or so on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..attention import Attention
from ..library import chain, load
from ..plan.kernel import Problem
from ..schedule import Schedule

Changes = dict[str, Any]

WITHIN, STALE = {"overlap": "within"}, {"reference": "stale"}
LEAN: Changes = {"stages": 1, "overlap": "none"}
"""Nothing overlaps with anything of the same warpgroup, and there is one slot."""
NARROW: Changes = {"tile_q": 64, "consumers": 1, "overlap": "none"}
SMALL_CTA: Changes = {"tile_q": 64, "warps": 4}

LADDER = ("standard", "fa1", "fa2", "fa3")
CHAIN = (*chain("fa1", "fa2")[1:-1], *chain("fa2", "fa3")[1:-1])

SETS: tuple[tuple[Changes, Problem, tuple[tuple[str, Changes], ...]], ...] = (
    (
        {"head_dim": 128},
        Problem(4, 4096, 4096, 16, 16),
        (
            *((name, {}) for name in (*LADDER, *CHAIN)),
            ("fa2", SMALL_CTA),
            ("fa2", {"stages": 1}),
            ("fa2", {"tile_kv": 32}),
            ("fa3", {"tile_kv": 64, **LEAN}),
            ("fa3", {"tile_kv": 128, "stages": 1}),
            ("fa3", {"tile_kv": 96, **WITHIN}),
            ("fa3", {"tile_kv": 128, **NARROW}),
            ("fa3", {"tile_kv": 128, **STALE}),
            ("fa3", {"tile_kv": 144, **STALE}),
            ("fa3", {"tile_kv": 96, "stages": 3, **WITHIN, **STALE}),
            ("fa3", {"tile_kv": 128, "parallelism": "query_tiles", **STALE}),
            ("fa3", {"tile_kv": 80, "overlap": "pingpong"}),
            ("fa3", {"tile_q": 192, "consumers": 3, "tile_kv": 64, **WITHIN, **STALE}),
        ),
    ),
    (
        {"head_dim": 128, "mask": "causal"},
        Problem(1, 16384, 16384, 16, 16),
        (
            ("fa2", {}),
            ("fa3", {}),
            ("fa3", {"tile_kv": 128, **STALE}),
            ("fa3", {"tile_kv": 128, "parallelism": "persistent_static", **STALE}),
            ("fa3", {"tile_kv": 128, "parallelism": "query_tiles", **STALE}),
            ("fa3", {"tile_kv": 64, **LEAN}),
        ),
    ),
    (
        {"head_dim": 128},
        Problem(32, 512, 512, 16, 16),
        (
            ("fa2", {}),
            ("fa3", {}),
            ("fa3", {"tile_kv": 128, "parallelism": "persistent_static", **STALE}),
            ("fa3", {"tile_kv": 128, "fuse_tiles": True, **WITHIN, **STALE}),
            ("fa3", {"tile_kv": 128, "parallelism": "query_tiles"}),
        ),
    ),
    (
        {"head_dim": 64},
        Problem(1, 16384, 16384, 32, 32),
        (
            ("fa2", {}),
            ("fa3", {}),
            ("fa3", {"tile_kv": 64, **LEAN}),
            ("fa3", {"tile_kv": 96, "stages": 4, **WITHIN, **STALE}),
            ("fa3", {"tile_kv": 96, "stages": 4, "fuse_tiles": True, **WITHIN, **STALE}),
            ("fa3", {"tile_kv": 64, "stages": 3, **WITHIN, **STALE}),
            ("fa3", {"tile_q": 128, "consumers": 2, "tile_kv": 128, **WITHIN}),
            ("fa3", {"tile_q": 256, "consumers": 4, "tile_kv": 48, "stages": 4, **WITHIN, **STALE}),
        ),
    ),
    (
        {"head_dim": 64, "mask": "causal"},
        Problem(32, 512, 512, 32, 32),
        (
            ("fa2", {}),
            ("fa3", {}),
            ("fa3", {"tile_kv": 96, "stages": 4, **WITHIN, **STALE}),
            ("fa3", {"tile_q": 128, "consumers": 2, "tile_kv": 128, "stages": 4, "fuse_tiles": True, **WITHIN, **STALE}),
        ),
    ),
    (
        {"head_dim": 256},
        Problem(1, 16384, 16384, 8, 8),
        (
            ("fa2", {}),
            ("fa3", {}),
            ("fa3", {"tile_kv": 64, **LEAN}),
            ("fa3", {**STALE}),
            ("fa3", {"tile_kv": 64, **WITHIN, **STALE}),
            ("fa3", {"tile_kv": 32, **STALE}),
        ),
    ),
    (
        {"head_dim": 256, "mask": "causal"},
        Problem(16, 1024, 1024, 8, 8),
        (("fa3", {}), ("fa3", {"tile_kv": 64, **STALE}), ("fa3", {"tile_kv": 48, **WITHIN}), ("fa3", {"tile_kv": 64, **LEAN})),
    ),
    (
        {"head_dim": 128},
        Problem(4, 4096, 4096, 16, 16),
        (
            ("fa3_fp8", {}),
            ("chain/fa3_to_fa3_fp8_1_e4m3", {}),
            ("chain/fa3_to_fa3_fp8_1_e4m3", {"tile_kv": 128}),
            ("fa3_fp8", {"tile_q": 192, "consumers": 3, "tile_kv": 96, "stages": 3, **WITHIN, **STALE}),
        ),
    ),
)


@dataclass(frozen=True)
class Entry:
    """One schedule on one problem. `label`: its file and what is changed of it."""

    label: str
    attention: Attention
    schedule: Schedule
    problem: Problem


def entries() -> tuple[Entry, ...]:
    """The whole set."""
    found = []
    for attention, problem, schedules in SETS:
        for name, changes in schedules:
            a, s = load(name, **attention, **changes)
            about = ", ".join(f"{k}={v}" for k, v in changes.items())
            found.append(Entry(f"{name.removeprefix('chain/')} {about}".strip(), a, s, problem))
    return tuple(found)
