"""The simulator: on toy programs whose mistakes are known, and on the plans of fa2 and fa3 with and without their synchronisation."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fagen import Attention, InputError, LaunchError, Schedule, ScheduleError
from fagen.library import load
from fagen.oracle import (
    SimulatedDeadlock,
    SimulatedFault,
    baseline,
    check,
    check_problems,
    compare,
    make_inputs,
    reference,
    simulate,
    simulate_sample,
    simulator,
)
from fagen.plan import assemble
from fagen.plan import steps as st
from fagen.plan.barriers import derive
from fagen.plan.expr import as_expr, sym
from fagen.plan.kernel import KernelPlan, Param, Plan, Problem, Workspace
from fagen.target import target

# toy programs -----------------------------------------------------------------------------------------------------------

DIMS = ("batch", "seq", "heads", "head_dim")
SQ, J, ZERO = sym("sq"), sym("j"), as_expr(0)
ROWS, COLS = 16, 32
TOY = Attention(head_dim=COLS)
OUT = {"dst": "out", "limit": SQ, "head": ZERO, "batch": ZERO}


def toy(*roles, smem=(), bars=(), nbars=(), workspaces=(), grid=1) -> Plan:
    """A plan of one hand-made kernel over q, k, v, out (and lse, which toys leave alone)."""
    roles = tuple(replace(r, body=st.number(r.body, r.name)) for r in roles)
    gmem = (*(st.Gmem(n, "bf16", DIMS, "in") for n in "qkv"), st.Gmem("out", "bf16", DIMS, "out"))
    kernel = KernelPlan(
        name="toy",
        threads=sum(r.threads for r in roles),
        min_ctas=1,
        gmem=gmem,
        pointers=(),
        params=(Param("sq", "i32", SQ),),
        maps=(),
        smem=smem,
        mbars=derive(bars, roles, smem),
        nbars=nbars,
        smem_bytes=0,
        roles=roles,
        grid=as_expr(grid),
    )
    return Plan(TOY, load("fa3").schedule, target("sm_90a"), (kernel,), workspaces)


def role(name, *body, count=1, warps=1, elect=False, frags=(), cursors=()):
    return st.Role(name, count, warps, elect, None, frags, cursors, body)


def run(p, sq=ROWS, seed=0, sk=ROWS):
    q, k, v = make_inputs(TOY, Problem(1, sq, sk, 1, 1), seed=9)
    out, _ = simulate(TOY, p.schedule, q, k, v, plan=p, seed=seed, num_sms=1)
    return (x[0, :, 0].astype(np.float32) for x in (out, q, k, v))


def tile(name, cursor=None, **kw):
    return st.Slot(name, cursor, **kw)


def loop(*body):
    return st.Loop(var="j", first=ZERO, last=(SQ // ROWS) - 1, step=1, body=body)


def tma(dst, full, src="q", seq=ZERO):
    return st.TmaLoad(src=src, dst=dst, full=full, seq=seq, head=ZERO, batch=ZERO, hint="evict_first")


LOAD = (st.Wait(bar="empty", cursor="w"), tma(tile("Q", "w"), "full", seq=J * ROWS), st.Advance(cursor="w"))
USE = (
    st.Wait(bar="full", cursor="r"),
    st.LoadFrag(dst="F", src=tile("Q", "r")),
    st.StoreOut(src="F", first_row=J * ROWS, **OUT),
    st.Arrive(bar="empty", cursor="r"),
    st.Advance(cursor="r"),
)
F = st.Frag("F", ROWS, COLS, "bf16", "a16")


def ring(load=LOAD, use=USE, stages=2):
    """A producer copies tiles of q into a ring, a consumer writes them to out."""
    return toy(
        role("producer", loop(*load), elect=True, cursors=(st.Cursor("w", stages, 1),)),
        role("consumer", loop(*use), frags=(F,), cursors=(st.Cursor("r", stages, 0),)),
        smem=(st.Smem("Q", ROWS, COLS, "bf16", stages),),
        bars=(st.MBar("full", stages), st.MBar("empty", stages)),
    )


def without(body, kind):
    return tuple(s for s in body if not isinstance(s, kind))


@pytest.mark.parametrize("seed", range(12))
def test_ring_copies(seed):
    out, q, *_ = run(ring(stages=1 + seed % 3), sq=10 * ROWS, seed=seed)
    assert np.array_equal(out, q)


@pytest.mark.parametrize(
    "broken",
    [
        ring(use=without(USE, st.Wait)),
        ring(load=without(LOAD, st.Wait)),
        ring(use=(USE[0], USE[3], USE[1], USE[2], USE[4])),
        ring(use=(USE[0], USE[1], USE[3], USE[2], USE[4])),
    ],
    ids=["no wait for full", "no wait for empty", "released before it is read", "released before what is read has arrived"],
)
def test_ring_without_a_wait_shows(broken):
    """Wrong numbers, or a barrier at its wits' end; on some seed, since it is a race."""
    caught = 0
    for seed in range(12):
        try:
            out, q, *_ = run(broken, sq=10 * ROWS, seed=seed)
            caught += not np.array_equal(out, q)
        except (SimulatedFault, SimulatedDeadlock):
            caught += 1
    assert caught >= 3


def test_deadlock_says_who_stands_where():
    k = ring().kernels[0]
    consumer = replace(k.roles[1], body=st.number((loop(*without(USE, st.Arrive)),), "consumer"))
    broken = replace(ring(), kernels=(replace(k, roles=(k.roles[0], consumer)),))
    with pytest.raises(SimulatedDeadlock) as e:
        run(broken, sq=10 * ROWS)
    text, fill, use = str(e.value), k.roles[0].body[0].body[0].id, consumer.body[0].body[0].id
    assert isinstance(e.value, LaunchError)
    missing = "still misses 1 of 1 arrivals and 0 bytes"
    assert f"producer[0] of CTA 0 at {fill}: waits for parity 0 of empty[0], whose phase 0 {missing}" in text
    assert f"consumer[0] of CTA 0 at {use}: waits for parity 1 of full[0], whose phase 1 {missing}" in text


def test_one_arrival_too_many():
    twice = (*LOAD[:2], st.Arrive(bar="full", cursor="w", who="thread"), LOAD[2])
    with pytest.raises(SimulatedFault, match=r"1 arrivals at full\[0\], whose phase 0 awaits 0"):
        for seed in range(12):
            run(ring(load=twice), sq=10 * ROWS, seed=seed)


def test_access_out_of_bounds():
    reads = st.CpAsync(src="q", dst=tile("Q"), seq=as_expr(8), limit=as_expr(24), head=ZERO, batch=ZERO)
    smem = (st.Smem("Q", ROWS, COLS, "bf16", 1),)
    with pytest.raises(SimulatedFault, match="reads rows 8 … 23 of head 0, batch 0 outside q"):
        run(toy(role("warps", reads), smem=smem))
    writes = (
        st.Fill(dst="F", value=0.0),
        st.StoreOut(src="F", dst="out", first_row=as_expr(8), limit=as_expr(24), head=ZERO, batch=ZERO),
    )
    with pytest.raises(SimulatedFault, match="writes rows 8 … 23"):
        run(toy(role("warps", *writes, frags=(F,))))


def test_tma_reads_zero_outside_the_tensor():
    body = (tma(tile("Q", "c"), "full", seq=as_expr(8)), st.Wait(bar="full", cursor="c"), st.LoadFrag(dst="F", src=tile("Q", "c")))
    p = toy(
        role("warp", *body, st.StoreOut(src="F", first_row=ZERO, **OUT), frags=(F,), cursors=(st.Cursor("c", 1, 0),)),
        smem=(st.Smem("Q", ROWS, COLS, "bf16", 1),),
        bars=(st.MBar("full", 1),),
    )
    out, q, *_ = run(p)
    assert np.array_equal(out[:8], q[8:]) and not out[8:].any()


# cp.async: two warps each copy half of a tile and read all of it.

COPY = st.CpAsync(src="q", dst=tile("Q"), seq=ZERO, limit=SQ, head=ZERO, batch=ZERO)
COPY_ALL = (COPY, st.CpCommit(), st.CpWait(pending=0), st.CtaSync(), st.LoadFrag(dst="F", src=tile("Q")))


def copied(body):
    store = st.StoreOut(src="F", first_row=sym("w") * ROWS, dst="out", limit=sym("w") * ROWS + ROWS, head=ZERO, batch=ZERO)
    end = (st.CpCommit(), st.CpWait(pending=0))
    p = toy(role("warps", *body, store, *end, count=2, frags=(F,)), smem=(st.Smem("Q", ROWS, COLS, "bf16", 1),))
    outs = []
    for seed in range(6):
        out, q, *_ = run(p, sq=2 * ROWS, seed=seed)
        outs.append(all(np.array_equal(half, q[:ROWS]) for half in (out[:ROWS], out[ROWS:])))
    return all(outs), np.isnan(out).any()


def test_cp_async_needs_its_wait_and_the_barrier():
    assert copied(COPY_ALL) == (True, False)
    assert copied(without(COPY_ALL, st.CpWait)) == (False, True)
    assert not copied(without(COPY_ALL, st.CtaSync))[0]
    assert copied(without(COPY_ALL, st.CpCommit)) == (False, True)
    assert copied((*COPY_ALL[:2], st.CpWait(pending=1), *COPY_ALL[3:])) == (False, True)


def test_cp_async_fills_rows_past_the_limit_with_zero():
    body = (replace(COPY, limit=as_expr(5)), *COPY_ALL[1:])
    p = toy(role("w", *body, st.StoreOut(src="F", first_row=ZERO, **OUT), frags=(F,)), smem=(st.Smem("Q", ROWS, COLS, "bf16", 1),))
    out, q, *_ = run(p)
    assert np.array_equal(out[:5], q[:5]) and not out[5:].any()


# wgmma: S = Q·Kᵀ, O = S·V with P in registers; 64 rows.

BIG = 64
LOADS = tuple(s for n in "qkv" for s in (tma(tile(n.upper(), n), f"{n}_full", src=n), st.Wait(bar=f"{n}_full", cursor=n)))
QK = st.Mma(d="S", a=tile("Q", "q"), b=tile("K", "k"), accumulate=False, trans_b=False, unit="wgmma")
PV = st.Mma(d="O", a="P", b=tile("V", "v"), accumulate=True, trans_b=True, unit="wgmma")
CHAIN = (
    *LOADS,
    st.Fill(dst="O", value=0.0),
    QK,
    st.MmaWait(pending=0, ready=("S",)),
    st.Pack(p="P", s="S"),
    PV,
    st.MmaWait(pending=0, ready=("O", "P")),
    st.StoreOut(src="O", first_row=ZERO, **OUT),
)


def chain(*body):
    frags = (
        st.Frag("S", BIG, ROWS, "fp32", "acc64"),
        st.Frag("P", BIG, ROWS, "bf16", "a64"),
        st.Frag("O", BIG, COLS, "fp32", "acc64"),
        st.Frag("r", BIG, 1, "fp32", "row64"),
    )
    smem = (st.Smem("Q", BIG, COLS, "bf16", 1), st.Smem("K", ROWS, COLS, "bf16", 1), st.Smem("V", ROWS, COLS, "bf16", 1))
    cursors = tuple(st.Cursor(n, 1, 0) for n in "qkv")
    return toy(
        role("wg", *body, warps=4, frags=frags, cursors=cursors), smem=smem, bars=tuple(st.MBar(f"{n}_full", 1) for n in "qkv")
    )


def swapped(body, i):
    return (*body[:i], body[i + 1], body[i], *body[i + 2 :])


def bf16(x):
    from fagen.oracle import cast

    return cast(x.astype(np.float32), "bf16").astype(np.float32)


def test_chain_of_products():
    out, q, k, v = run(chain(*CHAIN), sq=BIG)
    np.testing.assert_allclose(out, bf16(bf16(q @ k.T) @ v), rtol=2**-7)


def test_products_accumulate_in_flight():
    twice = (*CHAIN[:10], PV, PV, st.MmaWait(pending=1, ready=()), st.MmaWait(pending=0, ready=("O", "P")), CHAIN[-1])
    out, q, k, v = run(chain(*twice), sq=BIG)
    np.testing.assert_allclose(out, bf16(2 * bf16(q @ k.T) @ v), rtol=2**-7)


AT_QK, AT_PV = CHAIN.index(QK), CHAIN.index(PV)
BROKEN_CHAINS = {
    "no wait before Pack": CHAIN[: AT_QK + 1] + CHAIN[AT_QK + 2 :],
    "wait leaves one open": (*CHAIN[: AT_QK + 1], st.MmaWait(pending=1, ready=("S",)), *CHAIN[AT_QK + 2 :]),
    "wait does not name S": (*CHAIN[: AT_QK + 1], st.MmaWait(pending=0, ready=()), *CHAIN[AT_QK + 2 :]),
    "no wait before the store": (*CHAIN[: AT_PV + 1], CHAIN[-1]),
    "P overwritten in flight": (*CHAIN[: AT_PV + 1], st.Fill(dst="P", value=1.0), *CHAIN[AT_PV + 1 :]),
    "O rescaled in flight": (*CHAIN[: AT_PV + 1], st.Fill(dst="r", value=1.0), st.Rescale(o="O", alpha="r"), *CHAIN[AT_PV + 1 :]),
    "V reloaded in flight": (*CHAIN[: AT_PV + 1], LOADS[4], *CHAIN[AT_PV + 1 :], st.Advance(cursor="v"), LOADS[5]),
    "O never initialised": without(CHAIN, st.Fill),
    "V not waited for": (*CHAIN[:5], *CHAIN[6:], LOADS[5]),
}


@pytest.mark.parametrize("name", BROKEN_CHAINS)
def test_broken_chain_gives_nan(name):
    """Or a CTA that ends too early; unless V happens to be early."""
    bad = 0
    for seed in range(6):
        try:
            bad += bool(np.isnan(next(iter(run(chain(*BROKEN_CHAINS[name]), sq=BIG, seed=seed)))).all())
        except SimulatedFault as e:
            assert "ends with products in flight" in str(e)
            bad += 1
    assert bad >= 3 if name == "V not waited for" else bad == 6


def test_a_cta_must_wait_for_what_it_started():
    smem = (st.Smem("Q", ROWS, COLS, "bf16", 1),)
    with pytest.raises(SimulatedFault, match=r"warps\[\d\] of CTA 0 ends with copies in flight"):
        run(toy(role("warps", COPY, st.CpCommit(), count=2), smem=smem))
    p = toy(role("w", tma(tile("Q", "c"), "full"), cursors=(st.Cursor("c", 1, 0),)), smem=smem, bars=(st.MBar("full", 1),))
    with pytest.raises(SimulatedFault, match=r"CTA 0 ends while the load of w\.tma_load is in flight"):
        run(p)


def test_wgmma_sees_ordinary_writes_through_a_fence_only():
    by_cp_async = (replace(COPY, src="v", dst=tile("V", "v"), limit=as_expr(ROWS)), st.CpCommit(), st.CpWait(pending=0))
    body = (*CHAIN[:4], *by_cp_async, st.CtaSync(), *CHAIN[6:])
    assert np.isnan(next(iter(run(chain(*body), sq=BIG)))).all()
    fenced = (*CHAIN[:4], *by_cp_async, st.ProxyFence(), st.CtaSync(), *CHAIN[6:])
    out, q, k, v = run(chain(*fenced), sq=BIG)
    np.testing.assert_allclose(out, bf16(bf16(q @ k.T) @ v), rtol=2**-7)


def test_products_of_the_wrong_size():
    with pytest.raises(SimulatedFault, match="does not give"):
        run(chain(*CHAIN[:AT_QK], replace(QK, trans_b=True), *CHAIN[AT_QK + 1 :]), sq=BIG)


# named barriers and tiles claimed at run time


def test_named_barrier_is_a_rendezvous():
    """Two warps take turns: each adds its row only in its turn, so the last store to out wins as the turns say."""
    turn = (st.Sync(bar="order", index=sym("w")), st.StoreOut(src="F", first_row=ZERO, **OUT))
    start = st.If(cond=sym("w") > 0, then=(st.NArrive(bar="order", index=ZERO),))
    give = st.If(cond=sym("w") < 1, then=(st.NArrive(bar="order", index=as_expr(1)),))
    fill = (st.Fill(dst="F", value=1.0), st.If(cond=sym("w") > 0, then=(st.Fill(dst="F", value=2.0),)))
    p = toy(role("warps", start, *fill, *turn, give, count=2, frags=(F,)), nbars=(st.NBar("order", 1, 2, 64),))
    assert all((next(iter(run(p, seed=seed))) == 2).all() for seed in range(8))
    crowded = toy(role("warps", st.Sync(bar="order", index=ZERO), count=2), nbars=(st.NBar("order", 1, 1, 32),))
    run(crowded)  # two generations of one warp each
    too_small = toy(role("warps", st.Sync(bar="order", index=ZERO), count=1, warps=4), nbars=(st.NBar("order", 1, 1, 64),))
    with pytest.raises(SimulatedFault, match=r"128 threads at barrier order\[0\], which takes 64"):
        run(too_small)
    with pytest.raises(SimulatedFault, match=r"there is no barrier order\[3\]"):
        run(toy(role("warps", st.Sync(bar="order", index=as_expr(3))), nbars=(st.NBar("order", 1, 1, 32),)))


def test_counter_must_be_left_at_zero():
    claim = st.ClaimTile(var="t", counter="counter")
    space = (Workspace("counter", "i32", as_expr(2), zeroed=True),)
    with pytest.raises(SimulatedFault, match=r"counter is left at \[3, 0\]"):
        run(toy(role("warp", claim), workspaces=space, grid=3))
    run(toy(role("warp", claim, st.ResetCounter(counter="counter")), workspaces=space, grid=3))


def test_a_tile_number_that_is_not_there():
    get = st.GetTile(var="t", src=tile("ids"))
    with pytest.raises(SimulatedFault, match="reads a tile number that is not there"):
        run(toy(role("warp", get), smem=(st.Smem("ids", 1, 1, "i32", 1, swizzle="none"),)))


# the plans of fa2 and fa3 -----------------------------------------------------------------------------------------------

FA3_VARIANTS = {
    **{o: {"overlap": o, "tile_kv": 64} for o in ("none", "within", "pingpong", "both")},
    "dynamic": {"parallelism": "persistent_dynamic", "tile_kv": 64},
    "query tiles": {"parallelism": "query_tiles", "tile_kv": 64},
    "1 consumer": {"consumers": 1, "tile_q": 64, "overlap": "within", "tile_kv": 64},
    "3 consumers": {"consumers": 3, "tile_q": 192, "tile_kv": 64},
    "4 consumers": {"consumers": 4, "tile_q": 256, "tile_kv": 64, "parallelism": "persistent_dynamic"},
    "uniform none": {"roles": "uniform", "overlap": "none", "tile_kv": 64, "stages": 1},
    "uniform within": {"roles": "uniform", "overlap": "within", "tile_kv": 64},
    "uniform dynamic": {
        "roles": "uniform",
        "overlap": "within",
        "tile_kv": 64,
        "parallelism": "persistent_dynamic",
        "stages": (3, 2),
    },
    "stages 1": {"stages": 1, "tile_kv": 64},
    "stages 3, 4": {"stages": (3, 4), "tile_kv": 64, "overlap": "pingpong"},
}
FA2_VARIANTS = {
    "as built in": {},
    "4 warps": {"warps": 4, "tile_q": 64},
    "1 warp": {"warps": 1, "tile_q": 32},
    "heads": {"parallelism": "batch_heads"},
    "stages 1": {"stages": 1},
    "stages 3, 1": {"stages": (3, 1), "tile_kv": 32},
    "stages 2, 4": {"stages": (2, 4), "tile_kv": 32, "parallelism": "batch_heads"},
}
VARIANTS = [("fa3", n, c) for n, c in FA3_VARIANTS.items()] + [("fa2", n, c) for n, c in FA2_VARIANTS.items()]
SHAPES = [
    (1, 300, 331, 2, 1),
    (2, 70, 64, 3, 1),
    (1, 65, 1, 2, 2),
    (1, 257, 128, 2, 1),
    (1, 100, 0, 2, 1),
    (1, 1, 203, 4, 2),
    (3, 64, 300, 2, 1),
]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name, change", [(n, c) for n, _, c in VARIANTS], ids=[f"{n} {v}" for n, v, _ in VARIANTS])
def test_every_variant_is_right(name, change, mask):
    """On ragged lengths, more queries than keys, no key, one block; under a full mask on some of these."""
    a, s = load(name, head_dim=64, mask=mask, **{"tile_kv": 64, **change})
    p = assemble(a, s)
    for seed, shape in enumerate(SHAPES if mask == "causal" else SHAPES[::3]):
        q, k, v = make_inputs(a, Problem(*shape), seed=seed)
        out, lse = simulate(a, s, q, k, v, seed=seed, plan=p, num_sms=1 + seed % 3)
        verdict = check(a, q, k, v, out, lse)
        assert verdict.passed, f"{shape}: {verdict.reason}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_built_in_schedules_on_their_check_problems(name, head_dim, mask, dtype):
    """A part of the shapes that `fagen check` runs on a GPU, another part for every kernel."""
    a, s = load(name, head_dim=head_dim, mask=mask, dtype=dtype)
    problems = [p for p in check_problems(a, s) if p.batch * p.hq * p.sq * p.sk < 300_000]
    assert len(problems) > 40
    mine = random.Random(f"{name} {head_dim} {mask} {dtype}").sample(problems, 5)
    for seed, p in enumerate(mine):
        q, k, v = make_inputs(a, p, seed=seed, inputs=p.inputs, layout=p.layout)
        out, lse = simulate(a, s, q, k, v, seed=seed)
        verdict = check(a, q, k, v, out, lse)
        assert verdict.passed, f"{p}: {verdict.reason}"


@pytest.mark.parametrize("inputs", ["sink", "growing"])
@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_unkind_scores(name, inputs):
    a, s = load(name, head_dim=64, mask="causal")
    q, k, v = make_inputs(a, Problem(1, 500, 500, 2, 1), inputs=inputs)
    assert check(a, q, k, v, *simulate(a, s, q, k, v)).passed


@pytest.mark.parametrize("name, change", [("fa2", {}), ("fa3", {}), ("fa3", {"parallelism": "persistent_dynamic"})])
def test_every_interleaving_gives_the_same_bits(name, change):
    a, s = load(name, head_dim=64, mask="causal", **change)
    q, k, v = make_inputs(a, Problem(1, 500, 450, 3, 1))
    first = simulate(a, s, q, k, v, seed=0)
    for seed in range(1, 12):
        again = simulate(a, s, q, k, v, seed=seed, num_sms=1 + seed % 4)
        assert all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(first, again))


def test_random_legal_schedules():
    """300 of them, each on one small problem."""
    rng, done = random.Random(2), 0
    for _ in range(20_000):
        a, s = random_pair(rng)
        try:
            p = assemble(a, s)
        except ScheduleError:
            continue
        shape = Problem(
            rng.choice((1, 2)), rng.choice((1, 65, 130, 200)), rng.choice((0, 1, 63, 130, 333)), rng.choice((1, 2)) * 2, 2
        )
        q, k, v = make_inputs(a, shape, seed=done)
        verdict = check(a, q, k, v, *simulate(a, s, q, k, v, plan=p, seed=done, num_sms=rng.choice((1, 2, 3))))
        assert verdict.passed, f"{a} {s} on {shape}: {verdict.reason}"
        done += 1
        if done == 300:
            return
    pytest.fail(f"only {done} of the random schedules were legal")


def random_pair(rng: random.Random) -> tuple[Attention, Schedule]:
    """An attention and a schedule, legal one time in a few."""
    a = Attention(head_dim=rng.choice((64, 64, 128, 256)), dtype=rng.choice(("bf16", "fp16")), mask=rng.choice(("full", "causal")))
    stages = rng.choice((1, 2, 3, 4, (1, 2), (2, 1), (2, 3)))
    tile_kv = rng.randrange(16, 257, 16)
    if rng.random() < 0.4:
        warps = rng.choice((1, 2, 4, 8))
        parallelism = rng.choice(("batch_heads", "query_tiles"))
        tile_q = 16 * warps * rng.choice((1, 1, 2))
        arch = rng.choice(("sm_80", "sm_90"))
        return a, Schedule(arch=arch, tile_q=tile_q, tile_kv=tile_kv, warps=warps, parallelism=parallelism, stages=stages)
    consumers = rng.choice((1, 2, 3, 4))
    return a, Schedule(
        arch="sm_90a",
        tile_q=64 * consumers,
        tile_kv=tile_kv,
        consumers=consumers,
        stages=stages,
        movement="tma",
        mma="wgmma",
        roles=rng.choice(("uniform", "producer")),
        overlap=rng.choice(("none", "within", "pingpong", "both")),
        parallelism=rng.choice(("query_tiles", "persistent_static", "persistent_dynamic")),
    )


# plans without a step ---------------------------------------------------------------------------------------------------


def dropped(body, step_id):
    """`body` without the step of that id."""
    kept = (s for s in body if s.id != step_id)
    return tuple(replace(s, **{f: dropped(b, step_id) for f, b in st.bodies(s)}) for s in kept)


SYNCHRONISATION = (st.Wait, st.Arrive, st.Sync, st.NArrive, st.CtaSync, st.MmaWait, st.CpWait, st.CpCommit, st.Advance)
REDUNDANT = {
    # The ring of tile numbers is deeper than the distance that K's ring allows the producer to run ahead.
    "fa3": {"producer.tiles.wait_tile_empty", "producer.tiles.tile.wait_k_empty", "consumer.drain.sync_order"},
    "fa2": set(),
}
"""Steps whose loss cannot show in the numbers: with as many K as V stages, a V slot is free only after that of the K before it, and
the producer has waited for it; the last arrival at a named barrier that nobody takes does no harm to this launch."""


@pytest.mark.parametrize("name, change", [("fa2", {}), ("fa3", {"parallelism": "persistent_dynamic"})])
def test_every_synchronisation_step_is_needed(name, change):
    """Without any one of them the simulator finds NaN, wrong numbers, a deadlock or a fault, by some interleaving."""
    a, s = load(
        name, head_dim=64, mask="causal", **{"tile_q": 128, "tile_kv": 64, **change}, **({"consumers": 2} if name == "fa3" else {})
    )
    p = assemble(a, s)
    (kernel,) = p.kernels
    # The second: a tile with a single block, and one whose blocks are masked down to the first key.
    inputs = [make_inputs(a, problem, seed=1) for problem in (Problem(1, 300, 400, 4, 2), Problem(1, 300, 230, 4, 2))]
    truth = [{"reference": reference(a, *x), "baseline": baseline(a, *x), "dtype": a.output_dtype} for x in inputs]
    steps = [x.id for r in kernel.roles for x in st.walk(r.body) if isinstance(x, SYNCHRONISATION)]
    assert len(steps) == len(set(steps)) > 20

    def survives(step_id, seed):
        roles = tuple(replace(r, body=dropped(r.body, step_id)) for r in kernel.roles)
        mutant = replace(p, kernels=(replace(kernel, roles=roles),))
        try:
            return all(compare(*simulate(a, s, *x, plan=mutant, seed=seed), **t).passed for x, t in zip(inputs, truth))
        except (SimulatedDeadlock, SimulatedFault):
            return False

    assert survives("", seed=0), "nothing dropped"
    assert {x for x in steps if all(survives(x, seed) for seed in range(10))} == REDUNDANT[name]


# the functions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, change",
    [("fa2", {}), ("fa2", {"parallelism": "batch_heads"}), ("fa3", {}), ("fa3", {"parallelism": "persistent_dynamic"})],
)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_sample_of_a_long_sequence(name, change, mask):
    a, s = load(name, mask=mask, **change)
    q, k, v = make_inputs(a, Problem(1, 2500, 700, 2, 1))
    few = 1 if change.get("parallelism") == "batch_heads" else 3
    sample = simulate_sample(a, s, q, k, v, seed=5, ctas=few)
    rows = sample.rows
    tiles = {(h, r // s.tile_q) for _, h, r in np.argwhere(rows)}
    assert len(tiles) == (20 if change.get("parallelism") == "batch_heads" else 3)
    assert all(rows[0, h, m * s.tile_q : (m + 1) * s.tile_q].all() for h, m in tiles), "whole tiles"
    assert np.isnan(sample.lse[~rows]).all() and np.isnan(sample.out.astype(float)[0, ~rows[0, 0], 0]).all()
    assert check(a, q, k, v, sample.out, sample.lse, rows=rows).passed
    other = simulate_sample(a, s, q, k, v, seed=6, ctas=few)
    assert few == 1 or (other.rows != rows).any()


def test_sample_of_everything_is_everything():
    a, s = load("fa3", head_dim=64)
    q, k, v = make_inputs(a, Problem(1, 300, 200, 2, 1))
    sample = simulate_sample(a, s, q, k, v, ctas=100)
    out, lse = simulate(a, s, q, k, v)
    assert sample.rows.all() and np.array_equal(sample.out, out) and np.array_equal(sample.lse, lse)


@pytest.mark.parametrize("shape", [(0, 4, 4, 2, 1), (2, 0, 4, 2, 1)])
def test_empty_problems_have_the_right_shape(shape):
    a, s = load("fa2", head_dim=64)
    out, lse = simulate(a, s, *make_inputs(a, Problem(*shape)))
    assert out.shape == (shape[0], shape[1], 2, 64) and lse.shape == (shape[0], 2, shape[1])


def test_layouts_give_the_same_bits():
    a, s = load("fa3", head_dim=64)
    p = Problem(2, 100, 100, 4, 2)
    plain = simulate(a, s, *make_inputs(a, p))
    for layout in ("fused", "transposed", "strided_k"):
        assert all(np.array_equal(x, y) for x, y in zip(plain, simulate(a, s, *make_inputs(a, p, layout=layout))))


def test_bad_arguments_are_named():
    a, s = load("fa2", head_dim=64)
    q, k, v = make_inputs(a, Problem(1, 4, 4, 2, 1))
    with pytest.raises(InputError, match="k: is float16; the attention takes bf16"):
        simulate(a, s, q, k.astype(np.float16), v)
    with pytest.raises(InputError, match="num_sms: is 0"):
        simulate(a, s, q, k, v, num_sms=0)
    with pytest.raises(InputError, match="ctas: is 0"):
        simulate_sample(a, s, q, k, v, ctas=0)
    with pytest.raises(InputError, match="v: has head_dim 32"):
        simulate(a, s, q, k, v[..., :32])
    with pytest.raises(ScheduleError):
        simulate(a, s.replace(tile_q=7), q, k, v)


def test_no_more_ctas_are_resident_than_there_are(monkeypatch):
    """Each of them is started: a billion of them took minutes, in kernels that quantise."""
    engine, seen = simulator.Engine, []

    def noting(kernel, scalars, memory, ctas, *, resident, seed):
        seen.append((resident, len(ctas)))
        return engine(kernel, scalars, memory, ctas, resident=resident, seed=seed)

    monkeypatch.setattr(simulator, "Engine", noting)
    a, s = load("fa3_fp8", dtype="bf16", precision="e4m3")
    tensors = make_inputs(a, Problem(1, 70, 70, 2, 1), seed=1)
    simulate(a, s, *tensors)
    simulate_sample(a, s, *tensors, ctas=1)
    assert len(seen) >= 4 and all(0 < resident <= ctas for resident, ctas in seen)
