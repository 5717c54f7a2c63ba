"""Instruction counts implied by programs: small ones by hand, and a whole kernel of known machine code."""

from __future__ import annotations

import pytest

from fagen.errors import InternalError
from fagen.plan.counts import expected_counts, wgmma_steps
from fagen.plan.expr import as_expr
from fagen.plan.kernel import KernelPlan
from fagen.plan.steps import (
    Body,
    CpAsync,
    CtaSync,
    Elected,
    Forever,
    Frag,
    If,
    Loop,
    MBar,
    Mma,
    MmaWait,
    NArrive,
    Role,
    Slot,
    Smem,
    Sync,
    TmaLoad,
)

ZERO = as_expr(0)


def role(body: Body, name: str = "r", frags: tuple[Frag, ...] = (), warps: int = 4, registers: int | None = None) -> Role:
    return Role(name, 1, warps, False, registers, frags, (), body)


def kernel(*roles: Role, smem: tuple[Smem, ...] = (), mbars: tuple[MBar, ...] = ()) -> KernelPlan:
    return KernelPlan("attention", sum(r.threads for r in roles), 1, (), (), (), (), smem, mbars, (), 0, roles, ZERO)


def nonzero(k: KernelPlan) -> dict[str, int]:
    return {n: v for n, v in expected_counts(k).items() if v}


def frags(rows: int, cols: int, kv: int, dv: int, dtype: str, unit: int) -> tuple[Frag, ...]:
    acc, a = f"acc{unit}", f"a{unit}"
    return (
        Frag("S", rows, kv, "fp32", acc),
        Frag("O", rows, dv, "fp32", acc),
        Frag("P", rows, kv, dtype, a),
        Frag("Q_frag", rows, cols, dtype, a),
    )


def tiles(q: int, kv: int, d: int, dv: int, dtype: str) -> tuple[Smem, ...]:
    return Smem("Q", q, d, dtype, 1), Smem("K", kv, d, dtype, 2), Smem("V", kv, dv, dtype, 2), Smem("VT", dv, kv, dtype, 2)


def qk(unit: str, a: str | Slot) -> Mma:
    return Mma(d="S", a=a, b=Slot("K", "k"), accumulate=False, trans_b=False, unit=unit)  # type: ignore[arg-type]


def pv(unit: str, v: str = "V") -> Mma:
    return Mma(d="O", a="P", b=Slot(v, "v"), accumulate=True, trans_b=v == "V", unit=unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(("head_dim", "kv", "want"), [(64, 128, 4 + 8), (128, 128, 8 + 8), (128, 176, 8 + 11), (256, 80, 16 + 5)])
def test_wgmma_is_one_instruction_a_k_step(head_dim: int, kv: int, want: int) -> None:
    r = role((qk("wgmma", Slot("Q", None)), pv("wgmma")), frags=frags(64, head_dim, kv, head_dim, "bf16", 64))
    k = kernel(r, smem=tiles(128, kv, head_dim, head_dim, "bf16"))
    assert nonzero(k) == {"HGMMA": want, "WARPGROUP.ARRIVE": 2}
    assert wgmma_steps(k) == 2


def test_wgmma_of_two_row_blocks_and_of_wide_outputs() -> None:
    r = role((pv("wgmma"),), frags=frags(128, 128, 64, 512, "bf16", 64))
    assert nonzero(kernel(r, smem=tiles(128, 64, 128, 512, "bf16"))) == {"HGMMA": 2 * 2 * 4, "WARPGROUP.ARRIVE": 1}


def test_e4m3_counts_k32_steps_as_qgmma() -> None:
    r = role((qk("wgmma", Slot("Q", None)), pv("wgmma", "VT")), frags=frags(64, 128, 224, 128, "e4m3", 64))
    k = kernel(r, smem=tiles(128, 224, 128, 128, "e4m3"))
    assert nonzero(k) == {"QGMMA": 4 + 7, "WARPGROUP.ARRIVE": 2}


def test_mma_sync_tiles_the_warps_rows() -> None:
    r = role((qk("mma_sync", "Q_frag"), pv("mma_sync")), frags=frags(32, 128, 64, 128, "fp16", 16), warps=8)
    k = kernel(r, smem=tiles(256, 64, 128, 128, "fp16"))
    assert nonzero(k) == {"HMMA": 2 * (8 * 8 + 16 * 4)}  # two blocks of 16 rows: (64 / 8) · (128 / 16), (128 / 8) · (64 / 16)


def test_a_warp_that_owns_keys_multiplies_only_those() -> None:
    own = (Frag("S", 32, 64, "fp32", "acc16"), Frag("P", 32, 64, "bf16", "a16"), Frag("O", 32, 128, "fp32", "acc16"))
    r = role((qk("mma_sync", Slot("Q", None)), pv("mma_sync")), frags=own, warps=4)
    assert nonzero(kernel(r, smem=tiles(32, 256, 128, 128, "bf16"))) == {"HMMA": 2 * (8 * 8 + 16 * 4)}


def test_a_depth_that_is_no_whole_number_of_steps_is_our_fault() -> None:
    r = role((qk("wgmma", Slot("Q", None)),), frags=frags(64, 24, 64, 64, "bf16", 64))
    with pytest.raises(InternalError, match="24 bf16"):
        expected_counts(kernel(r, smem=tiles(64, 64, 24, 64, "bf16")))


def test_barriers_copies_and_branches() -> None:
    sync, arrive, wait = Sync(bar="order", index=ZERO), NArrive(bar="order", index=ZERO), MmaWait(pending=0, ready=("O",))
    load = TmaLoad(src="k", dst=Slot("K", "k"), full="k_full", seq=ZERO, head=ZERO, batch=ZERO, hint="evict_last")
    body = (
        Forever(body=(Loop(var="j", first=ZERO, last=ZERO, step=-1, body=(sync, wait, wait)),)),
        If(cond=ZERO, then=(arrive, load), orelse=(arrive, CtaSync())),
        Elected(body=(load,)),
    )
    want = {"BAR": 4, "BAR.SYNC": 2, "BAR.ARV": 2, "UTMALDG": 2, "WARPGROUP.DEPBAR": 2}
    smem = tiles(64, 64, 128, 128, "bf16")
    assert nonzero(kernel(role(body), smem=smem)) == want
    initialised = kernel(role(body, registers=240), role((), "p", registers=24), smem=smem, mbars=(MBar("k_full", 2),))
    assert nonzero(initialised) == {**want, "BAR": 5, "BAR.SYNC": 3, "USETMAXREG": 2}


@pytest.mark.parametrize(("warps", "want"), [(8, 4), (4, 8), (1, 32)])
def test_cp_async_is_16_bytes_a_thread(warps: int, want: int) -> None:
    copy = CpAsync(src="k", dst=Slot("K", "k"), seq=ZERO, limit=ZERO, head=ZERO, batch=ZERO)
    assert nonzero(kernel(role((copy,), warps=warps), smem=(Smem("K", 64, 128, "bf16", 2),))) == {"LDGSTS": want}


def test_a_whole_fa3_kernel() -> None:
    """Its machine code was counted once (head_dim 128, 128 × 128, two consumers, static tiles, NVRTC 13.5): the same numbers."""
    order, turn = Sync(bar="order", index=ZERO), NArrive(bar="order", index=ZERO)
    s, o = qk("wgmma", Slot("Q", None)), pv("wgmma")
    steady = (order, s, o, turn, MmaWait(pending=1, ready=("S",)), MmaWait(pending=0, ready=("O", "P")))
    loops = tuple(Loop(var="j", first=ZERO, last=ZERO, step=-1, body=steady, segment=x) for x in ("masked", "steady"))
    prologue = (order, s, turn, MmaWait(pending=0, ready=("S",)))
    consumer = role(
        (turn, Loop(var="t", first=ZERO, last=ZERO, step=1, body=(*prologue, *loops, o, MmaWait(pending=0, ready=("O",)))), order),
        "consumer",
        frags(64, 128, 128, 128, "bf16", 64),
        registers=240,
    )
    load = TmaLoad(src="k", dst=Slot("K", "k"), full="k_full", seq=ZERO, head=ZERO, batch=ZERO, hint="evict_last")
    producer = role((load, load, Loop(var="j", first=ZERO, last=ZERO, step=-1, body=(load, load)), load), "producer", registers=24)
    k = kernel(producer, consumer, smem=tiles(128, 128, 128, 128, "bf16"), mbars=(MBar("k_full", 2),))
    assert nonzero(k) == {
        "HGMMA": 48,
        "WARPGROUP.DEPBAR": 6,
        "WARPGROUP.ARRIVE": 6,
        "BAR": 9,
        "BAR.SYNC": 5,
        "BAR.ARV": 4,
        "UTMALDG": 5,
        "USETMAXREG": 2,
    }
    assert wgmma_steps(k) == 6
