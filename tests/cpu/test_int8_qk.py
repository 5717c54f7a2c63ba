"""Scores of 8-bit integers beside P·V in 16 bits: types, rules, machine code, numbers, and a V that nobody touches."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import FakeCuda, Tensor, attention_kernel, fake_torch, install, read_arguments
from fp8_steps import STALE_FP8
from known_faults import unexpected_faults
from random_schedules import legal_pair
from simulated import simulated
from test_builtin import check as check_built
from test_quantise_kernels import NO_KEYS, RAGGED, WAYS, inputs, name_of

import fagen
from fagen import Attention, InputError, ScheduleError, npz, sass, tuned
from fagen.accuracy.recipes import PLAIN, recipes
from fagen.accuracy.run import predict
from fagen.accuracy.tensors import RandomSource, given, in_half
from fagen.cli import run as fagen_run
from fagen.compile import build
from fagen.emit import emit
from fagen.evidence import variant_id
from fagen.explore.model import predict_time
from fagen.explore.roofline import cost
from fagen.launch import Kernel
from fagen.oracle import CheckProblem, check, check_problems, make_case, make_inputs, simulate
from fagen.oracle.quantise import Quantiser, quantise
from fagen.plan import Plan, Problem, assemble, rules
from fagen.plan import steps as S
from fagen.plan.mutants import run_mutants
from fagen.plan.quantised import moved_bytes
from fagen.quantise import checked_options, plan_of, simulate_quantise

BF16 = ml_dtypes.bfloat16
RUNNING = {"reference": "running", "overlap": "both", "tile_q": 128, "consumers": 2, "tile_kv": 64, "stages": 2}
STALE = {**RUNNING, "reference": "stale", "overlap": "within"}
UNIFORM = {**RUNNING, "roles": "uniform", "overlap": "within", "stages": 1}


def of(**changes: Any) -> Any:
    return fagen.load(STALE_FP8, **{"dtype": "int8", "v_dtype": "bf16", "head_dim": 64, **changes})


def quantising(**changes: Any) -> Any:
    return fagen.load(STALE_FP8, **{"dtype": "bf16", "precision": "int8_qk", "head_dim": 64, **changes})


# the value ------------------------------------------------------------------------------------------------------------------


def test_what_v_is_and_what_follows_from_it() -> None:
    plain, bf16, fp16 = (Attention(head_dim=64, dtype="int8", v_dtype=v) for v in (None, "bf16", "fp16"))
    assert [a.value_dtype for a in (plain, bf16, fp16)] == ["e4m3", "bf16", "fp16"]
    assert [a.output_dtype for a in (plain, bf16, fp16)] == ["bf16", "bf16", "fp16"]
    assert [a.products for a in (plain, bf16, fp16)] == ["int8", "int8_qk", "int8_qk"]
    assert [a.descales for a in (plain, bf16)] == [("q_descale", "k_descale", "v_descale"), ("q_descale", "k_descale")]
    assert Attention(head_dim=64).descales == () and Attention(head_dim=64, dtype="fp16").value_dtype == "fp16"
    names = {variant_id(a) for a in (plain, bf16, fp16, bf16.replace(out_dtype="fp16"), plain.replace(v_dtype="e4m3"))}
    assert len(names) == 5 and variant_id(bf16) == "hd64-int8-v_bf16-full"
    assert (plain.label, bf16.label) == ("hd64 int8 full", "hd64 int8/bf16 full")


def test_older_values_keep_their_names() -> None:
    """A field at its default does not enter the id."""
    assert Attention(head_dim=128, dtype="int8").id == "f9dbf494" and Attention(head_dim=128).id == "3a129ec6"
    assert Attention.from_dict({"head_dim": 64, "dtype": "int8"}) == Attention(head_dim=64, dtype="int8")


# what the program says -----------------------------------------------------------------------------------------------------


def test_q_and_k_are_integers_and_v_goes_straight_to_the_products() -> None:
    plan = assemble(*of())
    (kernel,) = plan.kernels
    assert {g.name: g.dtype for g in kernel.gmem if g.name in "qkv"} == {"q": "int8", "k": "int8", "v": "bf16"}
    assert {t.name: t.dtype for t in kernel.smem if t.name[0] in "QKV"} == {"Q": "int8", "K": "int8", "V": "bf16"}
    assert {m.tensor: m.dtype for m in kernel.maps} == {"q": "int8", "k": "int8", "v": "bf16"}
    assert [r.name for r in kernel.roles] == ["producer", "consumer"], "nobody transposes"
    frags = {f.name: f for f in kernel.roles[-1].frags}
    assert [frags[n].dtype for n in ("S_int", "S", "P", "E")] == ["i32", "fp32", "bf16", "bf16"] and frags["P"].layout == "a64"
    assert not [g.name for g in kernel.gmem if g.name == "v_descale"] and "v_descale" not in str(kernel.params)
    products = {s.b.smem: s.trans_b for r in kernel.roles for s in S.walk(r.body) if isinstance(s, S.Mma)}
    assert products == {"K": False, "V": True}


PROGRAMS: list[dict[str, Any]] = [
    *({**RUNNING, "overlap": o, "mask": m} for o in ("none", "within", "pingpong", "both") for m in ("full", "causal")),
    *({**STALE, "mask": m, "v_dtype": v} for m, v in (("full", "bf16"), ("causal", "fp16"))),
    {**STALE, "fuse_tiles": True, "mask": "causal"},
    {**STALE, "fuse_tiles": True, "scale_granularity": "block"},
    {**STALE, "skip_masked": True, "mask": "causal", "stages_q": 2, "scale_granularity": "tensor"},
    {**RUNNING, "scale_granularity": "block", "out_dtype": "fp16", "stages": (3, 2)},
    UNIFORM,
    {**UNIFORM, "overlap": "none", "mask": "causal", "scale_granularity": "block"},
]


@pytest.mark.parametrize("changes", [{**RUNNING, "mask": "causal"}, STALE, {**STALE, "fuse_tiles": True}], ids=str)
def test_every_mutant_is_flagged_or_explained(changes: dict[str, Any]) -> None:
    plan = assemble(*of(**changes))
    report = run_mutants(plan.kernels[0], plan.attention, plan.schedule)
    assert not report.survivors, [m.description for m in report.survivors]


def test_scales_of_blocks_are_those_of_k_alone() -> None:
    """P keeps its own range: neither a shift nor a weight, and O needs no scale at the end."""
    for changes, factors in (
        ({"scale_granularity": "block"}, {("q_descale",), ("k_descale",)}),
        ({"scale_granularity": "head"}, {("q_descale", "k_descale")}),
    ):
        steps = [s for r in assemble(*of(**STALE, **changes)).kernels[0].roles for s in S.walk(r.body)]
        assert {s.factors for s in steps if isinstance(s, S.LoadScale)} == factors
        assert not [s for s in steps if isinstance(s, S.ScaleShift)]
        assert {s.scale for s in steps if isinstance(s, S.Reciprocal)} == {None}
        assert {s.offset for s in steps if isinstance(s, (S.OnlineSoftmax, S.StaleSoftmax))} == {0}


# rules --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base, changes, code, field",
    [
        ("fa3", {"v_dtype": "bf16"}, "v-dtype", "v_dtype"),
        ("fa3", {"v_dtype": "fp16"}, "v-dtype", "v_dtype"),
        (STALE_FP8, {"v_dtype": "bf16"}, "v-dtype", "v_dtype"),
        (STALE_FP8, {"dtype": "int8", "v_dtype": "int8"}, "v-dtype", "v_dtype"),
        (STALE_FP8, {"dtype": "int8", "v_dtype": "fp32"}, "v-dtype", "v_dtype"),
        ("fa2", {"dtype": "int8", "v_dtype": "bf16"}, "dtype", "dtype"),
        ("fa3", {"dtype": "int8", "v_dtype": "bf16", "tile_kv": 96}, "scale-granularity", "scale_granularity"),
        (STALE_FP8, {"dtype": "int8", "v_dtype": "bf16", "promote_every": 2}, "promote-every", "promote_every"),
        (STALE_FP8, {"dtype": "int8", "v_dtype": "bf16", **RUNNING, "v_transposed": True}, "v-transposed", "v_transposed"),
        (STALE_FP8, {"dtype": "int8", "v_dtype": "bf16", "precision": "int8_qk"}, "precision", "precision"),
        (STALE_FP8, {"dtype": "bf16", "precision": "int8_qk", **RUNNING, "v_transposed": True}, "v-transposed", "v_transposed"),
        (STALE_FP8, {"dtype": "bf16", "precision": "int8_qk", "promote_every": 2}, "promote-every", "promote_every"),
        ("fa2", {"precision": "int8_qk"}, "precision", "precision"),
        ("fa3", {"precision": "int8_qk", "tile_kv": 96}, "scale-granularity", "scale_granularity"),
    ],
    ids=str,
)
def test_what_is_refused(base: str, changes: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(ScheduleError) as e:
        fagen.plan(*fagen.load(base, **changes))
    (v,) = [v for v in e.value.violations if v.code == code]
    assert v.field == field and v.nearest


def test_uniform_roles_need_no_transposer() -> None:
    """Where an e4m3 V is refused, a 16-bit one is read as it stands; the plan's own quantising changes nothing in that."""
    for pair in (of(**UNIFORM), quantising(**UNIFORM)):
        assert [r.name for r in fagen.plan(*pair).kernels[-1].roles] == ["warpgroup"]
    with pytest.raises(ScheduleError):
        rules.check(*of(**UNIFORM, v_dtype=None))


def test_blocks_of_16_keys_are_enough() -> None:
    """An e4m3 product is 32 keys deep, a 16-bit one 16."""
    rules.check(*of(**{**RUNNING, "tile_kv": 80}))
    with pytest.raises(ScheduleError, match="multiple of 32"):
        rules.check(*of(**{**RUNNING, "tile_kv": 80}, v_dtype="e4m3"))


@pytest.mark.parametrize(
    "changes, tile_kv, nearest",
    [
        ({"tile_q": 256, "consumers": 4, "stages": 2, "mask": "causal", "scale_granularity": "block"}, 64, "tile_kv=48"),
        ({**RUNNING, "overlap": "pingpong", "stages_q": 2, "mask": "causal"}, 144, "tile_kv=128"),
        ({**RUNNING, "overlap": "both", "stages_q": 2, "mask": "causal"}, 144, "tile_kv=128"),
        ({"tile_q": 256, "consumers": 4, "stages": 2, "mask": "causal", "overlap": "both", "stages_q": 2}, 48, "tile_kv=32"),
        ({**UNIFORM, "overlap": "none", "scale_granularity": "block", "parallelism": "persistent_static"}, 256, "tile_kv=240"),
        ({**RUNNING, "overlap": "pingpong", "stages_q": 2, "mask": "causal", "head_dim": 128}, 144, "tile_kv=128"),
    ],
    ids=str,
)
def test_where_registers_run_out_earlier_than_in_16_bits(changes: dict[str, Any], tile_kv: int, nearest: str) -> None:
    """As found by compiling: these spilled, where bf16 scores just fit."""
    attention, schedule = of(**{**changes, "tile_kv": tile_kv})
    rules.check(Attention(head_dim=attention.head_dim, mask=attention.mask), schedule.replace(scale_granularity=None))
    with pytest.raises(ScheduleError) as e:
        rules.check(attention, schedule)
    assert e.value.codes == ("registers",) and nearest in str(e.value)


# the code -----------------------------------------------------------------------------------------------------------------


def test_the_ptx_of_the_products() -> None:
    """Scores: integers without signs or transpositions. P·V: P from registers, V transposed by the tensor core (PTX ISA 9.7.15.5.2)."""
    for v, name in (("bf16", "bf16"), ("fp16", "f16")):
        text = emit(assemble(*of(**RUNNING, v_dtype=v))).text
        (scores,) = re.findall(r'"wgmma\.mma_async\.sync\.aligned\.m64n64k32\.(\S+) "', text)
        (out,) = re.findall(r'"wgmma\.mma_async\.sync\.aligned\.m64n64k16\.(\S+) "', text)
        assert (scores, out) == ("s32.s8.s8", f"f32.{name}.{name}")
        assert re.findall(r"%\d+, p(.*?);", text) == ["", ", 1, 1, 1"]


BUILT_IN = [{"head_dim": d, "mask": m, "v_dtype": v} for d in (64, 128, 256) for m, v in (("full", "bf16"), ("causal", "fp16"))]
RELATIVES = [
    {"head_dim": 128, **RUNNING, "tile_kv": 160, "mask": "causal"},
    {"head_dim": 128, **STALE, "tile_kv": 144, "scale_granularity": "block"},
    {"head_dim": 256, **STALE, "fuse_tiles": True, "mask": "causal"},
    {"head_dim": 64, **UNIFORM},
]
needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm: {sass.INSTALL}")


@needs_nvdisasm
@pytest.mark.parametrize("changes", [*BUILT_IN, *RELATIVES], ids=str)
def test_the_machine_code_is_what_the_program_says(changes: dict[str, Any]) -> None:
    """IGMMA and HGMMA exactly, no spill, no serialised batch, one instruction to convert each score."""
    plan = fagen.plan(*of(**changes))
    kernel = build(plan, emit(plan))
    counts = check_built(kernel)
    attention, schedule = plan.attention, plan.schedule
    products = [s for r in plan.kernels[0].roles for s in S.walk(r.body) if isinstance(s, S.Mma)]
    scores = [s for s in products if s.b.smem == "K"]
    assert counts["IGMMA"] == len(scores) * attention.head_dim // 32
    assert counts["HGMMA"] == (len(products) - len(scores)) * schedule.tile_kv // 16 and counts["QGMMA"] == 0
    if changes not in BUILT_IN:
        return
    assert unexpected_faults(kernel) == []
    code = sass.disassemble(kernel.cubin)
    assert code is not None and sum(x.op.startswith("I2FP") for x in code["attention"]) == len(scores) * schedule.tile_kv // 2


@needs_nvdisasm
@pytest.mark.parametrize("changes", [{"hadamard": True}, {"scale_granularity": "block", "smooth_k": True}], ids=str)
def test_the_kernels_that_quantise_q_and_k_alone_compile(changes: dict[str, Any]) -> None:
    plan = fagen.plan(*quantising(**changes))
    built = build(plan, emit(plan))
    assert not built.report.broken() and {"quantise", "attention"} <= {k.name for k in built.report.kernels}


# numbers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", PROGRAMS, ids=str)
def test_the_simulated_kernel_is_as_exact_as_its_baseline(changes: dict[str, Any]) -> None:
    """Groups of heads, ragged lengths, descales, no keys, more rows than keys, scores that send a stale reference to its exact path."""
    attention, schedule = of(**changes)
    problems = [
        CheckProblem(1, 130, 203, 2, 1),
        CheckProblem(2, 65, 64, 4, 2, "descaled"),
        CheckProblem(1, 70, 300, 2, 1, "growing"),
        CheckProblem(1, 130, 300, 2, 1, "sink"),
        CheckProblem(1, 5, 0, 2, 1),
        CheckProblem(1, 200, 70, 2, 2),
        CheckProblem(2, 70, 70, 4, 2, "normal", "fused"),
    ]
    for problem in problems:
        c, verdict = simulated(attention, schedule, problem)
        assert c.q.dtype == c.k.dtype == np.int8 and "v_descale" not in c.descales
        assert verdict.passed, (problem, verdict)


@pytest.mark.parametrize("chunk", range(3))
def test_random_schedules_for_16_bits_compute_int8_qk(chunk: int) -> None:
    """What is legal for the one is so for the other, scales aside."""
    rng = random.Random(f"int8_qk {chunk}")
    pairs = (legal_pair(rng) for _ in itertools.count())
    half = (p for p in pairs if p[1].mma == "wgmma" and not p[0].has_descales and p[1].precision is None)
    for number, (a, s) in enumerate(itertools.islice(half, 8)):
        attention = a.replace(dtype="int8", v_dtype=a.dtype)
        schedule = s.replace(scale_granularity=rng.choice(("tensor", "head", "block")))
        plan = fagen.plan(attention, schedule)  # proven
        sk = rng.choice((0, 1, schedule.tile_kv - 1, schedule.tile_kv + 1, 3 * schedule.tile_kv))
        kind = rng.choice(("normal", "descaled", "growing", "sink"))
        problem = CheckProblem(1, rng.choice((1, schedule.tile_q + 1)), min(sk, 500), 2, 1, kind)
        _, verdict = simulated(attention, schedule, problem, number, seed=number, plan=plan, num_sms=2)
        assert verdict.passed, f"{attention}\n{schedule}\n{problem}: {verdict.reason}"


def test_the_check_grid_fits_the_types() -> None:
    attention, schedule = of(scale_granularity="block")
    problems = check_problems(attention, schedule)
    assert len(problems) >= 60 and "descaled" in {p.inputs for p in problems}
    assert "uneven" not in {p.inputs for p in problems}, "which is about scales of v"


def test_one_fused_tensor_holds_both_types() -> None:
    """Bytes side by side: heads of v are twice as wide, and every row begins at a multiple of 16 bytes."""
    attention, _ = of()
    problem = Problem(2, 33, 33, 4, 2)
    q, k, v = make_inputs(attention, problem, layout="fused")
    for x, plain in zip((q, k, v), make_inputs(attention, problem)):
        assert x.dtype == plain.dtype and np.array_equal(x, plain)
        assert x.strides[1] == 64 * (4 + 2 + 2 * 2) and all(s % 16 == 0 for s in x.strides[:-1])


def test_a_nan_in_v_stays_in_its_column() -> None:
    attention, schedule = quantising(hadamard=True)
    q, k, v = inputs(64, "bf16", RAGGED)
    v[0, 3, 1, 7] = np.nan
    out, lse = fagen.simulate(attention, schedule, q, k, v)
    lost = np.isnan(out.astype(np.float32))
    assert lost[0, :, 2:, 7].all() and lost.sum() == lost[0, :, 2:, 7].size and np.isfinite(lse).all()


# the experiment of the FlashAttention-3 paper --------------------------------------------------------------------------------


def test_a_twelfth_of_the_error_of_e4m3() -> None:
    """Two heads of 2048 keys with outliers, in the simulator: at most 0.20 of e4m3 with a scale for each tensor, which rotation makes possible,
    and less than half of int8's with an e4m3 V."""
    source = RandomSource(Problem(1, 256, 2048, 2, 2), 128, seed=0)
    q, k, v = in_half(source)
    want, _ = fagen.reference(Attention(head_dim=128), *source.tensors())
    rmse = {}
    wanted = (PLAIN.label, "int8 per head, Hadamard", "int8_qk per head", "int8_qk per head, Hadamard")
    for recipe in (r for r in recipes(*fagen.load(STALE_FP8), "fp16") if r.label in wanted):
        attention = recipe.attention
        assert not recipe.refused and (attention.value_dtype == "fp16") == recipe.label.startswith("int8_qk")
        each = []
        for h in range(2):
            head = slice(h, h + 1)
            made = given(recipe.quantiser, attention, q[:, :, head], k[:, :, head], v[:, :, head])
            assert ("v_descale" in made.descales) != (attention.value_dtype == "fp16")
            each.append(predict(recipe, made)[0] - want[0, :, h])
        rmse[recipe.label] = float(np.sqrt(np.mean(np.square(each))))
    plain, int8, coarse, fine = (rmse[n] for n in wanted)
    assert fine <= 0.20 * plain and fine < 0.5 * int8 and fine < 0.5 * coarse, rmse


# quantising ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [WAYS[n] for n in (0, 2, 6, 7, 8, 11)], ids=name_of)
def test_q_and_k_are_those_of_int8_and_v_is_handed_back(way: dict[str, Any]) -> None:
    for problem in (RAGGED, NO_KEYS):
        q, k, v = inputs(64, "bf16", problem)
        got, same = (simulate_quantise(q, k, v, precision=p, **way) for p in ("int8_qk", "int8"))
        assert got.v is v and got.v_descale is None
        for name in ("q", "k", "q_descale", "k_descale", "lse_shift"):
            a, b = getattr(got, name), getattr(same, name)
            assert (a is None and b is None) or np.array_equal(a, b, equal_nan=True), name
        mine = quantise(q, k, v, Quantiser(dtype="int8", v_dtype=None, **way))
        assert mine.v is v and mine.v_descale is None
        if not way["smooth_k"]:
            assert np.array_equal(mine.q, got.q) and np.array_equal(mine.k, got.k)


def test_no_kernel_reads_or_writes_v_but_the_attention_kernel() -> None:
    for changes in ({}, {"scale_granularity": "block", "smooth_k": True}, {"scale_granularity": "tensor", "hadamard": True}):
        plan = fagen.plan(*quantising(**changes))
        *before, attend = (k for k in plan.kernels if k.name != "lse_shift")
        for kernel in before:
            assert not [g.name for g in kernel.gmem if g.name.startswith("v")]
        assert not [w.name for w in plan.workspaces if w.name.startswith("v")]
        assert {m.tensor: m.dtype for m in attend.maps} == {"q_int8": "int8", "k_int8": "int8", "v": "bf16"}
        assert next(g for g in attend.gmem if g.name == "v").use == "in"


def test_the_bytes_that_quantising_moves() -> None:
    """q and k read twice in 16 bits and written once in 8; with blocks read once."""
    problem = Problem(2, 100, 300, 4, 2)
    q, k = 2 * 100 * 4 * 64, 2 * 300 * 2 * 64
    assert moved_bytes(fagen.plan(*quantising()), problem) == (q + k) * (2 * 2 + 1)
    assert moved_bytes(fagen.plan(*quantising(scale_granularity="block")), problem) == (q + k) * (2 + 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hadamard": True, "dtype": "fp16"},
        {"scale_granularity": "block", "hadamard": True},
        {"hadamard": True, "smooth_k": True, "mask": "causal"},
        {"scale_granularity": "tensor", **UNIFORM},
    ],
    ids=str,
)
def test_quantise_and_attend_is_as_exact_as_its_baseline(changes: dict[str, Any]) -> None:
    attention, schedule = quantising(**changes)
    for problem in (Problem(2, 130, 203, 4, 2), Problem(1, 65, 0, 2, 1), Problem(1, 70, 33, 2, 2)):
        q, k, v = inputs(64, attention.dtype, problem)
        out, lse = fagen.simulate(attention, schedule, q, k, v)
        assert out.dtype == (np.float16 if attention.output_dtype == "fp16" else BF16)
        verdict = check(attention, q, k, v, out, lse, schedule=schedule)
        assert verdict.passed, verdict


def test_the_plan_computes_what_its_two_halves_do() -> None:
    """`quantise`, then the direct call: the same bits."""
    attention, schedule = quantising(hadamard=True)
    q, k, v = inputs(64, "bf16", RAGGED)
    z = simulate_quantise(q, k, v, precision="int8_qk", hadamard=True)
    direct = of(mask=attention.mask)
    out, lse = simulate(*direct, z.q, z.k, z.v, q_descale=z.q_descale, k_descale=z.k_descale)
    whole, whole_lse = simulate(attention, schedule, q, k, v)
    assert np.array_equal(out.view(np.uint16), whole.view(np.uint16)) and np.array_equal(lse, whole_lse)


def test_a_plan_of_its_own_for_quantising() -> None:
    plan = plan_of(64, "bf16", checked_options("head", True, False, None, None, None, "int8_qk"))
    assert [w.name for w in plan.outputs] == ["q_int8", "k_int8", "q_descale", "k_descale"]


# calls --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def make(fake: FakeCuda, **changes: Any) -> Kernel:
    p = assemble(*of(**changes))
    fake.kernel = attention_kernel(p)
    return Kernel(p, "// text", b"cubin", None)


def judged(plan: Plan, out: Any, lse: Any, q: Any, k: Any, v: Any, **scales: Any) -> None:
    want, want_lse = fagen.reference(plan.attention, q, k, v, **scales)
    np.testing.assert_allclose(out.astype(float), want, rtol=2**-7, atol=2e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


SCALES = {"q_descale": 0.03, "k_descale": 0.02}


@pytest.mark.parametrize("v_dtype", ["bf16", "fp16"])
def test_calls_with_numpy_and_other_libraries(fake: FakeCuda, v_dtype: str) -> None:
    from fake_cuda import Exporter

    kernel = make(fake, v_dtype=v_dtype)
    q, k, v = make_inputs(kernel.plan.attention, Problem(2, 5, 7, 4, 2))
    out, lse = kernel(q, k, v, **SCALES)
    assert out.dtype == BF16, "as the schedule file says"
    judged(kernel.plan, out, lse, q, k, v, **SCALES)
    made, row_sums = np.zeros_like(out), np.zeros_like(lse)
    kernel(Exporter(q), Exporter(k), Exporter(v), out=Exporter(made), lse=Exporter(row_sums), **SCALES)
    assert np.array_equal(made, out) and np.array_equal(row_sums, lse)
    with pytest.raises(InputError, match=rf"^v_descale: given beside a {v_dtype} v; only e4m3 and int8 tensors have a descale"):
        kernel(q, k, v, v_descale=1.0, **SCALES)
    with pytest.raises(InputError, match=rf"^v: is e4m3; this kernel reads {v_dtype}"):
        kernel(q, k, v.astype(ml_dtypes.float8_e4m3fn), **SCALES)


def test_calls_with_torch_and_their_short_way(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and arrays; a v_descale is refused at the first call and at a later one of a kind met before."""
    fake_torch(monkeypatch)
    kernel = make(fake)
    q, k, v = make_inputs(kernel.plan.attention, Problem(2, 5, 7, 4, 2))
    tensors = tuple(Tensor(x) for x in (q, k, v))
    seen: list[Any] = []
    honest = fake.kernel
    assert honest is not None
    fake.kernel = lambda params: (seen.append(read_arguments(kernel.plan.kernels[0], params)[1]), honest(params))[1]
    array = np.full((2, 2), 0.02, np.float32)
    for scales in (SCALES, SCALES, {"q_descale": 0.03, "k_descale": Tensor(array)}):
        out, lse = kernel(*tensors, **scales)
        judged(kernel.plan, out.array, lse.array, q, k, v, **SCALES)
    assert [x.k_descale != 0 for x in seen] == [False, False, True] and not hasattr(seen[0], "v_descale")
    for _ in range(2):
        with pytest.raises(InputError, match=r"^v_descale: given beside a bf16 v"):
            kernel(*tensors, **SCALES, v_descale=2.0)
    assert len(seen) == 3


def test_simulate_and_files_refuse_a_descale_of_v(tmp_path: Path) -> None:
    attention, schedule = of()
    c = make_case(attention, schedule, CheckProblem(1, 40, 50, 2, 1, "descaled"))
    with pytest.raises(InputError, match=r"^v_descale: given beside a bf16 v"):
        fagen.simulate(attention, schedule, c.q, c.k, c.v, v_descale=1.0)
    path, out = tmp_path / "qkv.npz", tmp_path / "out.npz"
    npz.write(path, {"q": c.q, "k": c.k, "v": c.v, **c.descales})
    command = ["run", "fa3_fp8", "--set", "dtype=int8", "--set", "v_dtype=bf16", "--set", "head_dim=64", "--device", "cpu"]
    assert fagen_run([*command, "--input", str(path), "--output", str(out)]) == 0
    want, lse = simulate(attention, schedule, c.q, c.k, c.v, **c.descales)
    found = npz.read(out, ("out", "lse"))
    assert np.array_equal(found["out"].view(np.uint16), want.view(np.uint16)) and np.array_equal(found["lse"], lse)
    npz.write(path, {"q": c.q, "k": c.k, "v": c.v, **c.descales, "v_descale": np.ones((1, 1), np.float32)})
    with pytest.raises(InputError, match="has a v_descale, but the attention takes a bf16 v"):
        npz.read_descales(path, attention)


def test_what_the_tables_have_for_it() -> None:
    """No other type's entry serves it; its own does, and before there is one, the tiles of the built-in schedule."""
    problem = Problem(2, 4096, 4096, 16, 16)
    for head_dim, mask in itertools.product((64, 128, 256), ("full", "causal")):
        attention = Attention(head_dim=head_dim, dtype="int8", v_dtype="bf16", mask=mask)
        whole = Attention(head_dim=head_dim, mask=mask)
        empty = tuple(
            tuned.Table(t.arch, t.device, tuple(e for e in t.entries if e.dtype != "int8_qk")) for t in tuned.builtin_tables()
        )
        choice = tuned.choose(attention, problem, tables=empty)
        assert (
            choice.entry is None
            and choice.schedule == fagen.load("fa3_fp8", head_dim=head_dim, dtype="int8", v_dtype="bf16").schedule
        )
        asked = tuned.choose_quantised(whole, problem, tables=empty, precision="int8_qk")
        assert (
            asked.schedule == choice.schedule.replace(precision="int8_qk", **tuned.QUANTISED)
            and "q and k are quantised" in asked.why
        )
        rules.check(whole, asked.schedule)
    eight = next(e for t in tuned.builtin_tables() for e in t.entries if e.dtype == "e4m3")
    own = tuned.Entry.make(attention, choice.schedule, eight.bucket, "fa3_fp8", eight.measured)
    assert own.dtype == "int8_qk" and tuned.Entry.from_dict(own.to_dict()) == own
    table = empty[0].with_entries([own])
    assert tuned.choose(attention.replace(v_dtype="fp16"), problem, tables=[table]).entry == own, (
        "16-bit types stand in for each other"
    )
    assert tuned.choose(attention.replace(v_dtype=None), problem, tables=[table]).entry != own


# explore ------------------------------------------------------------------------------------------------------------------


def test_scores_count_at_the_rate_of_8_bits_and_the_other_product_at_that_of_16() -> None:
    attention, schedule = of(head_dim=128)
    plan, problem = fagen.plan(attention, schedule), Problem(1, 3840, 3840, 16, 16)
    found = cost(plan, problem).kernels[0]
    half = 2 * 3840 * 3840 * 128 * 16
    assert set(found.flops) == {"wgmma int8", "wgmma bf16"} and set(found.instructions) == {"IGMMA", "HGMMA"}
    assert list(found.flops.values()) == [half, half]
    bf16, e4m3 = (
        cost(fagen.plan(*fagen.load(n, **{**STALE, "tile_kv": 64})), problem).times_us["tensor"] for n in ("fa3", STALE_FP8)
    )
    assert found.times_us["tensor"] == pytest.approx((bf16 + e4m3) / 2, rel=0.03)
    assert found.sm_read["v"] == pytest.approx(2 * found.sm_read["k"], rel=1e-6)
    assert predict_time(plan, problem).time_us < predict_time(fagen.plan(*fagen.load("fa3", **STALE)), problem).time_us


@pytest.mark.parametrize(
    "command",
    [
        ["check", "fa3_fp8", "--device", "cpu", "--shape", "1,2,1,130,300", "--shape", "1,2,1,64,0"],
        ["explain", "fa3_fp8", "--shape", "1,2,1,512,512"],
        ["prove", "fa3_fp8"],
    ],
    ids=lambda c: c[0],
)
@pytest.mark.parametrize("settings", [["dtype=int8", "v_dtype=bf16"], ["dtype=bf16", "precision=int8_qk"]], ids=str)
def test_commands_take_int8_qk(command: list[str], settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [x for s in (*settings, "head_dim=64") for x in ("--set", s)]
    assert fagen_run([*command, *options]) == 0, capsys.readouterr()


def test_the_command_line_refuses_a_16_bit_v_of_e4m3(capsys: pytest.CaptureFixture[str]) -> None:
    assert fagen_run(["prove", "fa3_fp8", "--set", "v_dtype=bf16"]) == 2
    said = capsys.readouterr().err
    assert "v-dtype" in said and "only with dtype 'int8'" in said


@pytest.mark.parametrize("wrong", ["1", True, [[None, 1.0]]], ids=repr)
def test_a_descale_that_is_no_number_is_called_so(wrong: Any) -> None:
    attention, schedule = of(**RUNNING)
    x = np.zeros((1, 16, 2, 64), np.int8)
    with pytest.raises(InputError, match=rf"^q_descale: is a {type(wrong).__name__} that is no array of numbers"):
        fagen.simulate(attention, schedule, x, x, x.astype(BF16), q_descale=wrong, k_descale=1)


def test_a_file_with_a_v_of_another_type_is_told_vs_type(tmp_path: Path) -> None:
    x = np.zeros((1, 16, 2, 64), np.int8)
    np.savez(tmp_path / "x.npz", q=x, k=x, v=x.astype(np.float16))
    with pytest.raises(InputError, match=r"v is fp16, the attention takes bf16; --cast converts it"):
        npz.read_inputs(tmp_path / "x.npz", of(**RUNNING)[0])


def test_a_trace_beside_quantising_says_what_to_trace() -> None:
    with pytest.raises(
        InputError, match=r"^trace: given beside precision 'int8_qk'.*trace the attention alone, dtype=int8 and v_dtype=bf16$"
    ):
        assemble(*quantising(), trace=True)
