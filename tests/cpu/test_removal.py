"""Removals: what goes is gone from program and machine code, what stays is all there, and the rest is still synchronised."""

from __future__ import annotations

import numpy as np
import pytest
from fp8_steps import PAPER_FP8

from fagen import InputError
from fagen.attention import Attention
from fagen.cli import run
from fagen.compile import Built, build, load_built, write_built
from fagen.emit import emit
from fagen.library import load
from fagen.oracle.inputs import CheckProblem, make_case
from fagen.oracle.simulator import simulate
from fagen.plan import Plan, Problem, plan
from fagen.plan import steps as st
from fagen.plan.mutants import mutants
from fagen.plan.proof import prove
from fagen.plan.removal import REMOVALS, SOFTMAX, removable, without
from fagen.sass import disassemble, nvdisasm

STALE = {"reference": "stale", "tile_kv": 128}
SCHEDULES = {
    "standard": ("standard", {}),
    "fa1": ("fa1", {}),
    "fa1, once": ("chain/fa1_to_fa2_1_normalise_once", {}),
    "fa2": ("fa2", {}),
    "fa2 causal": ("fa2", {"mask": "causal", "parallelism": "batch_heads"}),
    "uniform wgmma": ("chain/fa2_to_fa3_1_wgmma", {}),
    "fa3": ("fa3", {}),
    "fa3 causal": ("fa3", {"mask": "causal"}),
    "ping-pong": ("fa3", {"overlap": "pingpong"}),
    "in order": ("fa3", {"overlap": "none"}),
    "stale": ("fa3", STALE),
    "fused tiles": ("fa3", {**STALE, "fuse_tiles": True}),
    PAPER_FP8: (PAPER_FP8, {}),
    "Q in registers": (PAPER_FP8, {**STALE, "tile_kv": 96, "q_operand": "registers"}),
    "int8_qk": (PAPER_FP8, {"dtype": "int8", "v_dtype": "bf16"}),
}


def of(name: str) -> Plan:
    source, changes = SCHEDULES[name]
    return plan(*load(source, **changes))


def kinds(p: Plan) -> list[type[st.Step]]:
    return [type(s) for k in p.kernels for r in k.roles for s in st.walk(r.body)]


def products(p: Plan) -> dict[str, int]:
    """Ring of the second operand → products printed."""
    found = [s.b.smem for k in p.kernels for r in k.roles for s in st.walk(r.body) if isinstance(s, st.Mma)]
    return {name: found.count(name) for name in found}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_goes_is_gone_and_the_rest_is_there(name: str) -> None:
    whole = of(name)
    assert removable(whole) == tuple(REMOVALS)
    left = {removed: without(whole, removed) for removed in REMOVALS}  # each is proven on the way

    soft = kinds(left["softmax"])
    assert not {*SOFTMAX, st.StaleSoftmax, st.Vote, st.RowPass} & set(soft)
    assert products(left["softmax"]) == products(whole)
    loads = (st.TmaLoad, st.CpAsync, st.Copy, st.LoadAcc)
    for load_kind in loads[:3]:
        assert soft.count(load_kind) == kinds(whole).count(load_kind)

    bare = kinds(left["loads"])
    assert not {*loads, st.LoadRow} & set(bare) and products(left["loads"]) == products(whole)
    for kept in (st.OnlineSoftmax, st.StaleSoftmax, st.Wait, st.CtaSync, st.Advance, st.MergeStats):
        assert bare.count(kept) == kinds(whole).count(kept)

    single = kinds(left["pv"])
    assert products(left["pv"]) == {"K": products(whole)["K"]}
    for kept in (st.OnlineSoftmax, st.StaleSoftmax, st.Pack, st.TmaLoad, st.CpAsync, st.Copy, st.Wait, st.Arrive):
        assert single.count(kept) == kinds(whole).count(kept)

    assert kinds(left["idle"]) == kinds(whole)
    assert len({p.id for p in (whole, *left.values())}) == 5 and left["pv"].id == f"{whole.id}-without-pv"


@pytest.mark.parametrize("name", ["fa1", "fa2", "uniform wgmma", "fa3", "stale", "fused tiles", PAPER_FP8, "standard"])
@pytest.mark.parametrize("removed", list(REMOVALS))
def test_the_simulator_runs_what_is_left(name: str, removed: str) -> None:
    """It ends, and every number is one: nothing reads what a removed step would have written."""
    whole = of(name)
    case = make_case(whole.attention, whole.schedule, CheckProblem(1, 150, 420, 2, 1), seed=1)
    out, lse = simulate(whole.attention, whole.schedule, case.q, case.k, case.v, plan=without(whole, removed), seed=3)
    if (name, removed) != ("standard", "softmax"):  # whose P nobody writes
        assert np.isfinite(out.astype(np.float32)).all() and not np.isnan(lse).any()
    right, _ = simulate(whole.attention, whole.schedule, case.q, case.k, case.v)
    if removed != "idle":  # which changes nothing where there are as many CTAs as SMs
        assert not np.array_equal(out.astype(np.float32), right.astype(np.float32)), "what it computes is wrong"


def test_the_proof_of_what_is_left_is_no_formality() -> None:
    """Mutants of a kernel without loads are found out like others: a slot read before it is filled, a fence dropped."""
    left = without(of("in order"), "loads")
    (kernel,) = left.kernels
    dropped = [m for m in mutants(kernel) if m.change.rule == "drop" and isinstance(m.change.steps[0], (st.ProxyFence, st.Sync))]
    assert len(dropped) == 2
    for m in dropped:
        assert not prove(m.kernel, left.attention, left.schedule).ok, m.description


def test_idle_sms_share_the_work() -> None:
    """Each CTA does the part of its blocks that an SM's even share would be, rounded up."""
    whole = of("fa1")
    problem = Problem(1, 16384, 16384, 16, 16)
    from fagen.explore.explain import predict

    all_, part = predict(whole, problem), predict(without(whole, "idle"), problem)
    assert all_.flops / part.flops == pytest.approx(64 / 8)  # of 64 blocks of keys, ⌈64 · 16 / 132⌉
    assert all_.binds == "parallelism" and part.times_us["parallelism"] < all_.times_us["tensor"] * 1.1


def test_what_cannot_be_removed() -> None:
    whole = of("fa2")
    with pytest.raises(InputError, match="without: no removal 'qk'; removals: softmax, loads, pv, idle"):
        without(whole, "qk")
    with pytest.raises(InputError, match="from a whole plan only, not from one without pv"):
        without(without(whole, "pv"), "loads")
    with pytest.raises(InputError, match="from a whole plan only, not from one of a debug build"):
        without(plan(whole.attention, whole.schedule, debug=True), "pv")
    with pytest.raises(InputError, match="from a whole plan only, not from one of a trace build"):
        without(plan(whole.attention, whole.schedule, trace=True), "pv")
    left = without(whole, "pv")
    assert removable(left) == ("softmax", "loads", "idle")


# machine code -------------------------------------------------------------------------------------------------------------

# What is left of the products, exponentials, multiplications (by scale and alpha) and loads; None: not all.
LEFT = {"softmax": (1, 0, None, 1), "loads": (1, 1, 1, 0), "pv": (None, 1, 1, 1), "idle": (1, 1, 1, 1)}


def built(p: Plan) -> Built:
    return build(p, emit(p))  # keeps all promises: no spill, exact counts


@pytest.mark.parametrize("name", ["fa1", "fa2", "fa3", "stale"])
def test_the_machine_code_has_what_is_left(name: str) -> None:
    """ptxas drops nothing more than was removed: products, exponentials, loads and the packing of P."""
    if nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    whole = of(name)
    all_ = _counts(built(whole))
    for removed, parts in LEFT.items():
        left = without(whole, removed)
        found = _counts(built(left))
        for kind, part in zip(("products", "exponentials", "multiplications", "loads"), parts):
            if part is None:
                assert found[kind] < all_[kind] and (found[kind] or kind != "products"), (removed, kind)
            else:
                assert found[kind] == part * all_[kind], (removed, kind)
        assert all_["packs"] - found["packs"] == packs(whole) - packs(left), removed


def packs(p: Plan) -> int:
    """Conversions of two numbers to 16 bits that the program implies: P, and O at the end of a tile."""
    (kernel,) = p.kernels
    found = 0
    for role in kernel.roles:
        registers = {f.name: f.registers for f in role.frags}
        for s in st.walk(role.body):
            if isinstance(s, (st.Pack, st.StaleSoftmax)):
                found += registers[s.p if isinstance(s, st.Pack) else s.e]
            elif isinstance(s, st.StoreOut):
                found += registers[s.src] // 2
    return found


def _counts(b: Built) -> dict[str, int]:
    sass = b.report.kernels[0].sass
    code = disassemble(b.cubin)
    assert sass is not None and code is not None
    return {
        "products": sum(sass[n] for n in ("HGMMA", "QGMMA", "HMMA")),
        "exponentials": sass["MUFU.EX2"],
        "loads": sum(sass[n] for n in ("UTMALDG", "LDGSTS", "LDG.E.128")),
        "packs": sum(i.op.startswith("F2FP") for k in code.values() for i in k),
        "multiplications": sum(i.op.startswith("FMUL") for k in code.values() for i in k),
    }


def test_it_is_nothing_that_a_schedule_names(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """On disk it says what it lacks; whoever wants the whole kernel does not get it."""
    whole = of("fa2")
    write_built(built(without(whole, "softmax")), tmp_path, "fa2")
    with pytest.raises(InputError, match=r"fa2.json: was built without softmax; as a whole kernel is needed"):
        load_built(tmp_path, "fa2")
    assert load_built(tmp_path, "fa2", "softmax").plan == without(whole, "softmax")
    with pytest.raises(InputError, match="was built without softmax; without pv is needed"):
        load_built(tmp_path, "fa2", "pv")
    assert run(["check", "fa2", "--from", str(tmp_path), "--device", "gpu"]) in (1, 2)
    assert "// Without softmax: what it writes is wrong." in (tmp_path / "fa2.cu").read_text()
    write_built(built(whole), tmp_path, "fa2")
    assert load_built(tmp_path, "fa2").plan == whole, "a whole kernel in its place is one"


def test_build_writes_them_beside_the_whole_kernel(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "fa2", "--set", "head_dim=64", "--removals", "-o", str(tmp_path)]) == 0
    names = {p.name.removesuffix(".json") for p in tmp_path.glob("*.json")}
    assert names == {"fa2.hd64-bf16-full", *(f"fa2.hd64-bf16-full.without-{r}" for r in REMOVALS)}
    assert run(["build", "fa2", "--removals", "--debug", "-o", str(tmp_path)]) == 2
    assert "--removals: given beside --debug" in capsys.readouterr().err


def test_attention_is_not_touched() -> None:
    whole = of("fa3")
    assert without(whole, "pv").attention == whole.attention == Attention(head_dim=128)
