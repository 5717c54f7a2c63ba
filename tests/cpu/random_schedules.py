"""Random (attention, schedule) pairs for the tests: legal ones by construction and rejection, and changes that mostly are not."""

from __future__ import annotations

import random
from typing import Any

from fagen import Attention, Schedule, ScheduleError
from fagen.plan import rules

Pair = tuple[Attention, Schedule]


def legal_pair(rng: random.Random) -> Pair:
    """Any legal pair; small tiles are likelier, so that simulations of it are quick."""
    while True:
        pair = _wgmma(rng) if rng.random() < 0.6 else _mma_sync(rng)
        if is_legal(pair):
            return pair


def is_legal(pair: Pair) -> bool:
    try:
        rules.check(*pair)
    except ScheduleError:
        return False
    return True


def largest_tile(pair: Pair) -> Pair:
    """The same pair with the largest tile_kv that is legal: where registers and shared memory are scarce."""
    attention, schedule = pair
    for tile_kv in range(rules.MAX_TILE_KV, 0, -16):
        grown = (attention, schedule.replace(tile_kv=tile_kv))
        if is_legal(grown):
            return grown
    raise AssertionError(f"{pair} is not legal")


def _attention(rng: random.Random) -> Attention:
    return Attention(
        head_dim=rng.choice((64, 64, 64, 64, 128, 128, 256)),
        dtype=rng.choice(("bf16", "fp16")),
        out_dtype=rng.choice((None, None, None, "bf16", "fp16")),
        mask=rng.choice(("full", "causal")),
        scale=rng.choice((None, None, 0.1, 1, 0.5)),
    )


def _stages(rng: random.Random) -> int | tuple[int, int]:
    return rng.choice((1, 2, 2, 3, 4, (rng.randint(1, 4), rng.randint(1, 4))))


def _tile_kv(rng: random.Random) -> int:
    return 16 * rng.choice((1, 2, 3, 4, 4, 5, 6, rng.randint(1, 16)))


def _wgmma(rng: random.Random) -> Pair:
    attention = _attention(rng)
    if rng.random() < 0.2:
        attention = attention.replace(dtype="e4m3")
    reference = rng.choice(("running", "running", "stale"))
    if reference == "stale":  # rounds a dominant weight, which a running maximum keeps at exactly 1: peaked rows may miss the bound
        attention = attention.replace(scale=None)
    consumers = rng.choice((1, 1, 2, 2, 3, 4))
    producer = rng.random() < 0.7
    overlaps = ("none", "within", *(("pingpong", "both", "both") if consumers > 1 else ())) if producer else ("none", "within")
    registers = None
    if producer and rng.random() < 0.3:
        registers = (8 * rng.randint(3, 8), 8 * rng.randint(12, 30))
    schedule = Schedule(
        arch="sm_90a",
        tile_q=64 * consumers,
        tile_kv=_tile_kv(rng),
        parallelism=rng.choice(("query_tiles", "persistent_static", "persistent_dynamic")),
        roles="producer" if producer else "uniform",
        consumers=consumers,
        registers=registers,
        movement="tma",
        mma="wgmma",
        stages=_stages(rng),
        stages_q=rng.choice((None, None, 2)),
        q_operand=rng.choice((None, None, "registers")),
        overlap=rng.choice(overlaps),
        reference=reference,
        fuse_tiles=rng.random() < 0.2,
        skip_masked=attention.causal and producer and consumers > 1 and rng.random() < 0.3,
        v_transposed=attention.dtype == "e4m3" and rng.random() < 0.3,
    )
    if attention.dtype == "e4m3":
        granularity, every = rng.choice(("tensor", "head", "block")), rng.choice((None, None, 1, 2, 3))
        schedule = schedule.replace(scale_granularity=granularity, promote_every=every)
    return attention, schedule


def _mma_sync(rng: random.Random) -> Pair:
    warps = rng.choice((1, 2, 4, 8))
    schedule = Schedule(
        arch=rng.choice(("sm_80", "sm_90", "sm_90")),
        tile_q=16 * warps * rng.choice((1, 1, 1, 2, 3)),
        tile_kv=_tile_kv(rng),
        parallelism=rng.choice(("batch_heads", "query_tiles")),
        warps=warps,
        stages=_stages(rng),
    )
    return _attention(rng), schedule


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 16, 24, 100, 128, 1000, 10**30, 64.0, 0.5, 1e-320, float("nan"), float("inf")),
    *(
        "",
        "full",
        "sm_90",
        "sm_90a",
        "wgmma",
        "mma_sync",
        "tma",
        "cp_async",
        "producer",
        "uniform",
        "both",
        "e4m3",
        "FULL",
        "causal ",
    ),
    *((), (1,), (1, 2), (24, 240), (1, 2, 3), ("a", "b"), (None, None), [1, 2], {}, b"full"),
)
"""Values that someone may write into any field."""


def damaged_pair(rng: random.Random) -> Pair:
    """A legal pair with one to three fields set to something else: rarely legal."""
    attention, schedule = legal_pair(rng)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.3:
            field = rng.choice(Attention.field_names())
            attention = attention.replace(**{field: rng.choice((*VALUES, *rules.CHOICES.get(field, ())))})
        else:
            field = rng.choice(Schedule.field_names())
            schedule = schedule.replace(**{field: rng.choice((*VALUES, *rules.CHOICES.get(field, ())))})
    return attention, schedule
