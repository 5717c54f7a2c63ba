"""Reference, baseline and inputs of the oracle."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import fagen
from fagen import Attention, InputError, ScheduleError
from fagen.library import load
from fagen.oracle import (
    DTYPES,
    CheckProblem,
    baseline,
    baseline_rows,
    blocks,
    cast,
    check,
    check_problems,
    make_case,
    make_descales,
    make_inputs,
    reference,
    reference_rows,
    sample_rows,
    simulate,
    ulp,
)
from fagen.oracle.inputs import narrowing
from fagen.oracle.numeric import tensor_core
from fagen.plan.kernel import Problem


def one_row_at_a_time(attention, q, k, v):
    """The definition, as slowly as it reads."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    (b, sq, hq, _), sk, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out, lse = np.zeros((b, sq, hq, v.shape[3])), np.full((b, hq, sq), -np.inf)
    for i, h, r in np.ndindex(b, hq, sq):
        seen = min(sk, max(0, r + 1 + sk - sq)) if attention.causal else sk
        if seen:
            s = np.array([attention.softmax_scale * float(q[i, r, h] @ k[i, j, h // group]) for j in range(seen)])
            lse[i, h, r] = s.max() + math.log(np.exp(s - s.max()).sum())
            out[i, r, h] = np.exp(s - lse[i, h, r]) @ v[i, :seen, h // group]
    return out, lse


SHAPES = [(1, 5, 2, 4, 2), (2, 7, 13, 3, 1), (1, 13, 7, 2, 2), (3, 1, 9, 8, 1), (1, 4, 0, 2, 1), (1, 0, 4, 2, 1), (0, 4, 4, 2, 1)]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_definition(mask, shape):
    a = Attention(head_dim=16, mask=mask)
    q, k, v = make_inputs(a, Problem(*shape), seed=sum(shape))
    out, lse = reference(a, q, k, v)
    want_out, want_lse = one_row_at_a_time(a, q, k, v)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, want_out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_blocks_do_not_change_the_result(mask, monkeypatch):
    a = Attention(head_dim=32, mask=mask)
    q, k, v = make_inputs(a, Problem(2, 50, 37, 4, 2), seed=3)
    whole, base = reference(a, q, k, v), baseline(a, q, k, v)
    monkeypatch.setattr(blocks, "SCORES_PER_BLOCK", 300)  # four rows of a group of two
    for got, want in zip(reference(a, q, k, v), whole):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
    for got, want in zip(baseline(a, q, k, v), base):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_rows_are_a_part_of_the_whole(mask):
    a = Attention(head_dim=16, mask=mask)
    q, k, v = make_inputs(a, Problem(2, 40, 30, 4, 2), seed=5)
    rows = [0, 3, 9, 10, 11, 39]
    for part, whole in ((reference_rows, reference), (baseline_rows, baseline)):
        (out, lse), (all_out, all_lse) = part(a, q, k, v, rows), whole(a, q, k, v)
        np.testing.assert_allclose(out.astype(float), all_out[:, rows].astype(float), rtol=1e-2, atol=1e-6)
        np.testing.assert_allclose(lse, all_lse[:, :, rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_array_is_named(name):
    q, k, v = (np.zeros((1, 3, 2, 64), ml_dtypes.bfloat16) for _ in range(3))
    given = {"q": q, "k": k, "v": v}
    attention, schedule = load("fa1", head_dim=64)
    for function in (lambda **x: reference(attention, **x), lambda **x: simulate(attention, schedule, **x)):
        with pytest.raises(InputError, match=rf"^{name}: is a list; expected a NumPy array"):
            function(**given | {name: q.tolist()})
        with pytest.raises(InputError, match=rf"^{name}: has 1 dimensions"):
            function(**given | {name: q.reshape(-1)})


def test_reference_takes_head_dim_v_and_a_scale():
    a = Attention(head_dim=24, head_dim_v=8, scale=0.5)
    q, k, v = make_inputs(a, Problem(1, 6, 5, 2, 1), seed=1)
    np.testing.assert_allclose(reference(a, q, k, v)[0], one_row_at_a_time(a, q, k, v)[0], atol=1e-13)


def test_masked_nan_key_does_not_spread_but_a_seen_one_does():
    a = Attention(head_dim=16, mask="causal")
    q, k, v = make_inputs(a, Problem(1, 8, 8, 1, 1))
    k[0, 5] = np.nan
    out, lse = reference(a, q, k, v)
    assert np.isfinite(out[0, :5]).all() and np.isfinite(lse[0, 0, :5]).all()
    assert np.isnan(out[0, 5:]).all() and np.isnan(lse[0, 0, 5:]).all()


@pytest.mark.parametrize("layout", ["fused", "transposed", "strided_k"])
def test_views_give_the_same_as_copies(layout):
    a = Attention(head_dim=16, dtype="fp16")
    views = make_inputs(a, Problem(2, 9, 9, 4, 2), seed=2, layout=layout)
    assert not all(x.flags.c_contiguous for x in views) and all(x.strides[-1] == 2 for x in views)
    copies = make_inputs(a, Problem(2, 9, 9, 4, 2), seed=2)
    assert all(np.array_equal(x, y) for x, y in zip(views, copies))
    np.testing.assert_array_equal(reference(a, *views)[0], reference(a, *copies)[0])


@pytest.mark.parametrize("dtype, low, high", [("bf16", 1e-3, 2e-2), ("fp16", 1e-4, 2e-3), ("e4m3", 1e-2, 2e-1)])
def test_baseline_errs_as_its_types_round(dtype, low, high):
    a = Attention(head_dim=64, dtype=dtype)
    q, k, v = make_inputs(a, Problem(1, 64, 200, 2, 1), seed=7)
    (out, lse), (true_out, true_lse) = baseline(a, q, k, v), reference(a, q, k, v)
    assert out.dtype == DTYPES[a.output_dtype] and lse.dtype == np.float32
    error = np.abs(out.astype(float) - true_out).max() / np.abs(true_out).max()
    assert low / 10 < error < high
    lse_error = np.abs(lse - true_lse).max()
    assert 1e-5 < lse_error < 1e-3 if dtype == "e4m3" else lse_error < 1e-5, "e4m3 sums keep 13 bits"


def test_sums_of_e4m3_are_cut_after_every_product_of_the_tensor_core():
    a = np.ones((1, 64), np.float32)
    b = np.ones((64, 1), np.float32)
    a[0, 0], b[1], b[40] = 8192.0, 0.75, 0.75  # beside 8192 = 2^13 nothing below 1 is kept
    assert tensor_core(a, b, "bf16")[0, 0] == 8192 + 30 + 31 + 1.5
    assert tensor_core(a, b, "e4m3")[0, 0] == 8192 + 30 + 31, "of every sum"
    assert tensor_core(a, b, "e4m3", terms=True)[0, 0] == 8192 + 30 + 31, "of every term"
    b[2] = 0.75
    assert tensor_core(a, b, "e4m3")[0, 0] == 8192 + 30 + 31, "0.75 + 0.75 is added up before the sum is cut"
    assert tensor_core(a, b, "e4m3", terms=True)[0, 0] == 8192 + 29 + 31, "each 0.75 is cut"


def test_baseline_of_e4m3_scales_p_before_rounding():
    """One key in 1000 with weight 2^-10 each would vanish among e4m3's subnormals without the factor 2^8."""
    a = Attention(head_dim=16, dtype="e4m3", scale=1.0)
    q, k, v = make_inputs(a, Problem(1, 1, 1024, 1, 1))
    q[:], k[:], v[:] = 0, 0, 1
    q[..., 0] = 1
    k[0, 0, 0, 0] = 7  # e^7 is about 1100, so every other P is about 2^-10 of the largest
    out = baseline(a, q, k, v)[0].astype(float)
    assert abs(out[0, 0, 0, 0] - 1) < 0.04


@pytest.mark.parametrize(
    "tensor, shape, said",
    [
        ("q", (1, 4, 2), "3 dimensions"),
        ("q", (1, 4, 2, 32), "head_dim 32"),
        ("k", (2, 4, 2, 16), "batch 2"),
        ("v", (1, 5, 2, 16), "(5, 2)"),
        ("k", (1, 4, 3, 16), "not a multiple"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensor, shape, said):
    shapes = {"q": (1, 4, 2, 16), "k": (1, 4, 2, 16), "v": (1, 4, 2, 16), tensor: shape}
    if said == "not a multiple":
        shapes["v"] = shape
    with pytest.raises(InputError) as e:
        reference(Attention(head_dim=16), *(np.zeros(shapes[n]) for n in "qkv"))
    assert e.value.argument == tensor and said in str(e.value)


@pytest.mark.parametrize("change", [{"mask": "window", "window": (4, 4)}, {"softcap": 30.0}, {"sink": True}])
def test_variants_the_oracle_does_not_know_are_refused(change):
    with pytest.raises(ScheduleError, match="not-yet"):
        reference(Attention(head_dim=16, **change), *(np.zeros((1, 4, 2, 16)) for _ in range(3)))


# types ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
def test_ulp_is_the_distance_to_the_next_value(dtype):
    bits = {"bf16": np.uint16, "fp16": np.uint16, "e4m3": np.uint8}[dtype]
    finite = cast(np.array([1e30 if dtype == "bf16" else 400.0]), dtype).view(bits)[0]
    codes = np.arange(0, finite, dtype=bits)
    values, after = codes.view(DTYPES[dtype]).astype(float), (codes + bits(1)).view(DTYPES[dtype]).astype(float)
    np.testing.assert_array_equal(ulp(values, dtype), after - values)


def test_cast_saturates_e4m3_and_keeps_nan():
    got = cast(np.array([464.0, 500.0, -1e4, np.nan], np.float32), "e4m3").astype(float)
    np.testing.assert_array_equal(got, [448, 448, -448, np.nan])


# inputs -----------------------------------------------------------------------------------------------------------------


def test_inputs_depend_on_the_seed_only():
    a, p = Attention(head_dim=64), Problem(1, 5, 6, 2, 1)
    first, again, other = (make_inputs(a, p, seed=s) for s in (1, 1, 2))
    assert all(np.array_equal(x, y) for x, y in zip(first, again))
    assert not any(np.array_equal(x, y) for x, y in zip(first, other))
    assert np.abs(make_inputs(a, p, amplitude=5.0)[0].astype(float)).std() > 2


@pytest.mark.parametrize("scale", [256.0, 20.0, 0.5])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3", "int8"])
def test_scores_of_a_large_scale_can_be_told_apart(dtype, head_dim, scale):
    """q and k get smaller by a power of two, of int8 with what 1 stands for: else one key of a row were all that counts."""
    a, p = Attention(head_dim=head_dim, dtype=dtype, scale=scale), CheckProblem(1, 64, 300, 1, 1)
    c = make_case(a, load("fa3_fp8" if a.has_descales else "fa3", dtype=dtype, head_dim=head_dim).schedule, p)
    units = [float(np.max(c.descales.get(n, 1.0))) for n in ("q_descale", "k_descale")]
    q, k = (x[0, :, 0].astype(np.float64) * unit for x, unit in zip((c.q, c.k), units))
    spread = (q @ k.T * a.softmax_scale).std()
    assert 0.45 < spread < 2.1
    assert math.frexp(narrowing(a))[0] == 0.5 and (narrowing(a) == 1) == (scale * math.sqrt(head_dim) <= 2)
    assert narrowing(Attention(head_dim=head_dim, dtype=dtype)) == 1
    assert (q == 0).mean() < 0.08, "and numbers are left for them"


@pytest.mark.parametrize("scale", [256.0, 1e-4, 1e-30])
@pytest.mark.parametrize("inputs", ["normal", "sink", "growing"])
@pytest.mark.parametrize(
    "name, changes",
    [
        ("fa2", {"dtype": "fp16"}),
        ("fa3", {}),
        *(("fa3_fp8", {"dtype": d, "scale_granularity": g}) for d in ("e4m3", "int8") for g in ("head", "block")),
        ("fa3_fp8", {"dtype": "fp16", "precision": "e4m3", "scale_granularity": "block"}),
    ],
    ids=str,
)
def test_kernels_are_right_at_both_ends_of_the_scale(name, changes, inputs, scale):
    a, s = load(name, head_dim=64, scale=scale, **changes)
    c = make_case(a, s, CheckProblem(1, 130, 200, 2, 1, inputs), seed=3)
    out, lse = simulate(a, s, c.q, c.k, c.given_v, **c.descales)
    verdict = check(a, c.q, c.k, c.v, out, lse, schedule=s, **c.row_descales)
    assert verdict.passed, verdict.reason
    assert np.isfinite(out.astype(np.float32)).all() and np.isfinite(lse).all(), "the inputs are numbers of their type"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
def test_unkind_scores_are_what_they_say(dtype):
    a, p = Attention(head_dim=64, dtype=dtype), Problem(1, 4, 100, 1, 1)
    q, k, _ = (x.astype(float) for x in make_inputs(a, p, inputs="sink"))
    scores = a.softmax_scale * q[0, :, 0] @ k[0, :, 0].T
    assert 7 < (scores[:, :4].mean() - scores[:, 4:].mean()) < 9
    q, k, _ = (x.astype(float) for x in make_inputs(a, p, inputs="growing"))
    scores = a.softmax_scale * q[0, :, 0] @ k[0, :, 0].T
    assert 90 < scores[:, -1].mean() - scores[:, 0].mean() < 110


def test_fused_needs_one_length():
    with pytest.raises(InputError, match="fused"):
        make_inputs(Attention(head_dim=16), Problem(1, 4, 5, 2, 1), layout="fused")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["fa2", "fa3", "fa3_fp8"])
def test_check_problems_cover_what_can_go_wrong(name, head_dim):
    a, s = load(name, head_dim=head_dim)
    problems = check_problems(a, s)
    assert len(problems) >= 60 and len(set(problems)) == len(problems)
    assert all(isinstance(p, CheckProblem) for p in problems)
    lengths = {(p.sq, p.sk) for p in problems}
    tq, tk = s.tile_q, s.tile_kv
    assert {(x, y) for x in (tq - 1, tq, tq + 1) for y in (tk - 1, tk, tk + 1)} <= lengths
    assert {(1, 1), (63, 63), (64, 64), (65, 65), (113, 203), (300, 170)} <= lengths
    assert any(p.sk == 0 and p.sq for p in problems) and any(p.sq == 0 for p in problems) and any(p.batch == 0 for p in problems)
    assert {(8, 1), (28, 4)} <= {(p.hq, p.hkv) for p in problems} and any(p.batch == 3 for p in problems)
    assert {p.layout for p in problems} == {"contiguous", "fused", "transposed", "strided_k"}
    descaled = [p for p in problems if p.inputs == "descaled"]
    assert {p.inputs for p in problems} == {"normal", "sink", "growing", *(["descaled"] if name == "fa3_fp8" else [])}
    if descaled:
        assert {p.layout for p in descaled} == {p.layout for p in problems}
        assert any(p.batch > 1 and p.hkv > 1 and p.hq > p.hkv and p.sk > 2 * tk for p in descaled)
        assert any(p.batch * p.hq * -(-p.sq // tq) > 3 * 132 for p in descaled)
    tiles = max(p.batch * p.hq * -(-p.sq // tq) for p in problems)
    assert tiles > 3 * 132
    scores = sum(p.batch * p.hq * len(sample_rows(p.sq)) * p.sk for p in problems)
    assert scores < 1.3e8, "the float64 reference stays affordable"


@pytest.mark.parametrize("layout", ["contiguous", "fused", "transposed", "strided_k"])
def test_cases_bring_their_descales_and_v_as_the_kernel_takes_it(layout):
    a, p = Attention(head_dim=64, dtype="e4m3"), CheckProblem(3, 37, 37, 4, 2, "descaled", layout)
    schedule = fagen.load("fa3_fp8", head_dim=64).schedule
    c = make_case(a, schedule.replace(v_transposed=True), p, seed=5)
    again, other = (make_case(a, schedule, p, seed=s).descales for s in (5, 6))
    for n, x in c.descales.items():
        assert x.shape == (3, 2) and x.dtype == np.float32 and ((x >= 0.5) & (x <= 2)).all()
        assert np.array_equal(x, again[n]) and not np.array_equal(x, other[n])
    assert len({float(x[0, 0]) for x in c.descales.values()}) == 3
    strides = {n: tuple(s // 4 for s in x.strides) for n, x in c.descales.items()}
    expected = {
        "contiguous": [(2, 1)] * 3,
        "fused": [(6, 3)] * 3,
        "transposed": [(1, 3)] * 3,
        "strided_k": [(2, 0), (4, 2), (2, 1)],
    }
    assert list(strides.values()) == expected[layout]
    assert np.array_equal(c.given_v.transpose(0, 3, 1, 2), c.v) and c.given_v.shape == (3, 2, 64, 37)
    sb, sh, sd, one = c.given_v.strides
    assert one == 1 and sb % 16 == sh % 16 == sd % 16 == 0
    assert np.isnan(np.lib.stride_tricks.as_strided(c.given_v, (3, 2, 64, 48))[..., 37:].astype(float)).all(), "never to be read"
    assert make_case(a, schedule, CheckProblem(3, 37, 37, 4, 2)).descales == {}


def test_descales_multiply_in_float64():
    a, p = Attention(head_dim=32, dtype="e4m3", scale=1.0), Problem(2, 5, 9, 4, 2)
    q, k, v = make_inputs(a, p)
    scales = make_descales(p)
    of_q, of_k, of_v = (x.astype(np.float64)[:, None, :, None] for x in scales.values())
    exact = Attention(head_dim=32, dtype="bf16", scale=1.0)
    wide = [q.astype(float) * np.repeat(of_q, 2, axis=2), k.astype(float) * of_k, v.astype(float) * of_v]
    for mine, want in zip(reference(a, q, k, v, **scales), reference(exact, *wide)):
        np.testing.assert_allclose(mine, want, rtol=1e-13, atol=1e-13)
    out, lse = baseline(a, q, k, v, **scales)
    verdict = check(a, q, k, v, out, lse, **scales)
    assert verdict.passed and not check(a, q, k, v, out, lse).passed
