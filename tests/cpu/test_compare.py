"""The comparison policy: what must fail, fails."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from fagen import Attention, load, simulate
from fagen.oracle import DTYPES, Verdict, baseline, check, compare, make_inputs, reference, sample_rows, ulp, yardstick
from fagen.oracle.baseline import farthest, largest_weights, score_step
from fagen.oracle.inputs import CheckProblem, check_problems, make_case
from fagen.plan.kernel import Problem


def judge(got, ref, base=None, lse=(0.0,), ref_lse=(0.0,), dtype="bf16"):
    """`compare` on flat lists: one batch and head, a row per lse entry; too few for what is said of many."""
    rows = len(ref_lse)
    o, r, b = (np.array(x, float).reshape(1, rows, 1, -1) for x in (got, ref, ref if base is None else base))
    s, t = (np.array(x, float).reshape(1, 1, rows) for x in (lse, ref_lse))
    return compare(o, s, reference=(r, t), baseline=(b, t), dtype=dtype, whole=None)


@pytest.mark.parametrize(
    "got, ref",
    [
        ([0, 1], [np.nan, 1]),
        ([np.nan, 1], [0, 1]),
        ([-5e4, 1], [-np.inf, 1]),
        ([np.inf, 1], [-np.inf, 1]),
        ([np.inf, 1], [3e38, 1]),
    ],
)
def test_positions_of_nan_and_inf_come_first(got, ref):
    verdict = judge(got, ref)
    assert not verdict.passed and verdict.error_ratio == np.inf
    assert "out[0, 0, 0, 0]" in verdict.reason and "reference has" in verdict.reason
    assert judge(ref, ref).passed


@pytest.mark.parametrize("got, ref", [((-5e4,), (-np.inf,)), ((np.nan,), (-np.inf,)), ((0.0,), (np.nan,)), ((1.001,), (1.0,))])
def test_lse_is_judged_as_well(got, ref):
    assert not judge([1], [1], lse=got, ref_lse=ref).passed
    assert "lse" in judge([1], [1], lse=got, ref_lse=ref).reason
    assert judge([1], [1], lse=ref, ref_lse=ref).passed


def test_all_zero_output_against_a_small_reference_fails():
    ref = np.full(64, 1e-2)
    assert not judge(np.zeros(64), ref, base=ref * (1 + 2**-9)).passed
    assert not judge(np.zeros(64), np.full(64, 1e-30), base=np.full(64, 1e-30)).passed


def test_bound_is_twice_the_baseline_and_one_ulp():
    ref, base = np.array([1.0, 0.25]), np.array([1.0, 0.26])
    at_one = 2 * 0.01 + float(ulp(1.0, "bf16"))
    below, above = judge([1 + at_one * 0.999, 0.25], ref, base), judge([1 + at_one * 1.001, 0.25], ref, base)
    assert below.passed and not above.passed
    assert below.bound == pytest.approx(at_one) and below.error_ratio == pytest.approx(0.999)
    at_quarter = 2 * 0.01 + float(ulp(0.25, "bf16"))
    assert judge([1, 0.25 + at_quarter * 0.999], ref, base).passed and not judge([1, 0.25 + at_quarter * 1.001], ref, base).passed


def test_an_exact_baseline_leaves_one_ulp_of_the_output_type():
    assert judge([1 + 2**-7], [1], dtype="bf16").passed
    assert not judge([1 + 2**-7], [1], dtype="fp16").passed


def test_verdict_is_frozen_and_complete():
    verdict = judge([1.0], [1.0])
    assert verdict == Verdict(True, 0.0, verdict.bound, 0.0, "")
    with pytest.raises(FrozenInstanceError):
        verdict.passed = False  # type: ignore[misc]


def test_a_wrong_shape_is_said():
    x = np.zeros((1, 2, 1, 4))
    verdict = compare(x[:, :1], x[:, 0], reference=(x, x[:, 0]), baseline=(x, x[:, 0]), dtype="bf16")
    assert not verdict.passed and "shape (1, 1, 1, 4) instead of (1, 2, 1, 4)" in verdict.reason


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_baseline_passes_and_a_disturbed_one_fails(mask, dtype):
    a = Attention(head_dim=64, mask=mask, dtype=dtype)
    q, k, v = make_inputs(a, Problem(2, 70, 50, 4, 2), seed=4)
    out, lse = baseline(a, q, k, v)
    verdict = check(a, q, k, v, out, lse)
    assert verdict.passed and 0 < verdict.error_ratio <= 0.5
    for row, head, batch in ((69, 0, 0), (30, 3, 1)):
        bad = out.copy()
        bad[batch, row, head, 17] += 1
        failed = check(a, q, k, v, bad, lse)
        assert not failed.passed and f"out[{batch}, {row}, {head}, 17]" in failed.reason
    swapped = out[:, :, [1, 0, 2, 3]]
    assert not check(a, q, k, v, swapped, lse).passed


def test_rows_outside_the_mask_are_not_judged():
    a = Attention(head_dim=16)
    q, k, v = make_inputs(a, Problem(1, 8, 8, 2, 1))
    out, lse = baseline(a, q, k, v)
    rows = np.ones((1, 2, 8), bool)
    rows[0, 1, 3] = False
    out[0, 3, 1], lse[0, 1, 3] = np.nan, np.nan
    assert check(a, q, k, v, out, lse, rows=rows).passed
    assert not check(a, q, k, v, out, lse).passed
    out[0, 3, 0] = np.nan  # the same row of the other head is judged
    assert not check(a, q, k, v, out, lse, rows=rows).passed


def test_long_sequences_are_sampled():
    assert len(sample_rows(2048)) == 2048
    rows = sample_rows(5000, seed=1)
    assert len(set(rows.tolist())) == 256 and {0, 7, 4992, 4999} <= set(rows.tolist()) and (np.diff(rows) > 0).all()
    assert sample_rows(5000, seed=2).tolist() != rows.tolist()
    a = Attention(head_dim=16)
    q, k, v = make_inputs(a, Problem(1, 3000, 20, 1, 1))
    out, lse = baseline(a, q, k, v)
    assert check(a, q, k, v, out, lse).passed
    out[0, 2999] = 0
    assert not check(a, q, k, v, out, lse).passed
    assert check(a, q, k, v, out, lse, rows=np.arange(100)).passed


def test_yardstick_comes_from_float64_not_from_the_baseline():
    """Judged against the reference: a result equal to a poor baseline passes, one three times as far off does not."""
    a = Attention(head_dim=64)
    q, k, v = make_inputs(a, Problem(1, 64, 256, 1, 1), amplitude=5.0, seed=2)
    ref, base = reference(a, q, k, v), baseline(a, q, k, v)
    poor = base[0].astype(float) + 0.1
    assert compare(poor, base[1], reference=ref, baseline=(poor, base[1]), dtype="bf16").passed
    assert not compare(ref[0] + 0.5, base[1], reference=ref, baseline=(poor, base[1]), dtype="bf16").passed


def test_scores_of_e4m3_may_lose_what_the_tensor_core_cuts():
    """One key: lse is the score itself, and the baseline's own error may be 0. Two last bits for head_dim 64, and no more."""
    a = Attention(head_dim=64, dtype="e4m3", out_dtype="bf16")
    q, k = (np.zeros((1, 1, 1, 64), DTYPES["e4m3"]) for _ in range(2))
    q[..., 0] = k[..., 0] = 3.0
    step = score_step(a, q, k, k_descale=np.array([[2.0]], np.float32))
    assert step == 2 * 2.0 ** (3 - 13) * 2.0 * a.softmax_scale
    assert score_step(a.replace(dtype="bf16"), q, k) == 0.0
    one = np.ones((1, 1, 1, 64))
    for error, passed in ((0.9 * step, True), (2 * step, False)):
        lse = np.array([[[1.125]]])
        given = {"reference": (one, lse), "baseline": (one, lse), "dtype": "bf16"}
        assert compare(one, lse + error, **given, score_step=step).passed == passed
        assert not compare(one, lse + error, **given).passed


@pytest.mark.parametrize("place", [("fused", "normal"), ("fused", "descaled")], ids="-".join)
def test_a_stale_reference_rounds_a_dominant_weight_and_the_bound_knows(place):
    """Tensors on which an H200 and the simulator both err by more than twice a baseline whose largest weight is a power of two."""
    a, s = load("fa3_fp8", tile_kv=128, stages=3, overlap="within", reference="stale", stages_q=2)
    layout, inputs = place
    (i, p), *_ = [
        (i, p) for i, p in enumerate(check_problems(a, s)) if (p.batch, p.sq, p.layout, p.inputs) == (2, 203, layout, inputs)
    ]
    c = make_case(a, s, p, seed=1785067283 + i)
    out, lse = simulate(a, s, c.q, c.k, c.given_v, **c.descales)
    assert not check(a, c.q, c.k, c.v, out, lse, **c.descales).passed
    assert check(a, c.q, c.k, c.v, out, lse, schedule=s, **c.descales).error_ratio < 0.7
    running = s.replace(reference="running", overlap="within")
    assert largest_weights(a, running) == largest_weights(a, None) == (256,) and largest_weights(a, s) == (264, 280)


def test_a_stale_reference_rounds_a_dominant_weight_up_too(monkeypatch):
    """Tensors on which a kernel errs by more than twice a baseline whose largest weight is rounded down, since that happens to cancel what is
    lost of the values."""
    changes = {"dtype": "fp16", "precision": "int8", "hadamard": True, "head_dim": 64, "mask": "causal"}
    a, s = load("fa3_fp8", **changes)
    (i, p), *_ = [(i, p) for i, p in enumerate(check_problems(a, s)) if str(p) == "1,2,1,257,576"]
    c = make_case(a, s, p, seed=2488 + i)
    out, lse = simulate(a, s, c.q, c.k, c.given_v, **c.descales)
    monkeypatch.setattr(yardstick, "weight_step", lambda *_: 0.0)
    assert check(a, c.q, c.k, c.v, out, lse, schedule=s, **c.descales).error_ratio < 0.8
    monkeypatch.setattr(yardstick, "largest_weights", lambda a, s: largest_weights(a, s)[:1])
    assert not check(a, c.q, c.k, c.v, out, lse, schedule=s, **c.descales).passed


def test_a_stale_reference_may_round_a_dominant_weight_by_all_that_rounding_can():
    """Tensors on which an H200 and the simulator err by 5.8 % of an element that one key makes. The baselines lose half of that, and a little
    less by what other roundings happen to cancel: twice their error is not enough."""
    a, s = load("fa3_fp8", tile_q=192, tile_kv=64, consumers=3)
    c = make_case(a, s, CheckProblem(1, 384, 128, 2, 1), seed=246208659)
    out, lse = simulate(a, s, c.q, c.k, c.given_v, **c.descales)
    want = yardstick.yardstick(a, c.q, c.k, c.v, range(384), s)
    found = compare(out, lse, **want._asdict(), dtype="bf16")
    assert found.passed and found.error_ratio < 0.75
    assert not compare(out, lse, **want._replace(weight_step=0.0)._asdict(), dtype="bf16").passed


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("changes", [{}, {"dtype": "int8"}, {"scale_granularity": "block"}], ids=str)
def test_what_the_largest_weight_makes_of_an_element(changes, causal):
    """Beside float64 (the baseline cuts sums of scores off), with grouped heads, random descales and rows that see no key."""
    a, s = load("fa3_fp8", head_dim=64, mask="causal" if causal else "full", **changes)
    c = make_case(a, s, CheckProblem(2, 70, 50, 4, 2, inputs="descaled"), seed=3)
    d = c.row_descales
    found = yardstick.yardstick(a, c.q, c.k, c.v, range(70), s, **d).weight_step
    full = {n: np.ones((2, 2, 1)) for n in ("k_descale", "v_descale")} | {"q_descale": np.ones((2, 4, 1))}
    for n, x in d.items():  # by tensor, (batch, heads) or row
        x = np.asarray(x, np.float64)
        x = np.broadcast_to(x, (2, 2)) if x.ndim < 2 else x
        x = np.repeat(x, 2, axis=1) if n == "q_descale" and x.shape[1] == 2 else x
        full[n] = x if x.ndim == 3 else x[..., None]
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (c.q, c.k, c.v))
    q, k, v = q * full["q_descale"][..., None], k * full["k_descale"][..., None], v * full["v_descale"][..., None]
    k, v, share = (np.repeat(x, 2, axis=1) for x in (k, v, np.broadcast_to(full["v_descale"], (2, 2, 50))))
    scores = q @ k.transpose(0, 1, 3, 2) * a.softmax_scale
    if causal:
        scores[:, :, np.arange(50) > np.arange(70)[:, None] - 20] = -np.inf
    p = np.exp(scores)
    first = (p * share[:, :, None]).argmax(-1)
    weight = np.take_along_axis(p, first[..., None], -1) / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    wanted = weight * np.abs(np.take_along_axis(v, first[..., None], 2)) / 16
    np.testing.assert_allclose(found, wanted.transpose(0, 2, 1, 3), rtol=1e-2, atol=1e-7)


def test_beside_a_stale_reference_a_missing_key_is_seen():
    """One of 1024, in P·V alone: what rounding a dominant weight may change is room for those elements, not for all. (49 of 50 keys were seen.)"""
    a, s = load("fa3_fp8")
    c = make_case(a, s, CheckProblem(1, 128, 1024, 2, 1), seed=4)
    out, lse = simulate(a, s, c.q, c.k, c.given_v)
    want = yardstick.yardstick(a, c.q, c.k, c.v, range(128), s)
    q, k, v = (x.astype(np.float64) for x in (c.q, c.k, c.v))
    p = np.exp(np.einsum("bqhd,bkd->bqhk", q, k[:, :, 0]) * a.softmax_scale)
    p /= p.sum(axis=-1, keepdims=True)

    def without(key):
        return (out.astype(np.float64) - p[..., key, None] * v[:, None, key]).astype(out.dtype)

    assert compare(out, lse, **want._asdict(), dtype="bf16").passed
    seen = [not compare(without(key), lse, **want._asdict(), dtype="bf16").passed for key in range(0, 800, 16)]
    assert sum(seen) >= 45


def test_of_several_baselines_the_farthest_counts():
    outs = np.array([[1.0, 5.0, np.nan, np.inf, np.nan], [1.5, 4.0, 2.0, 3.0, np.nan]])
    np.testing.assert_array_equal(farthest(outs, np.array([1.0, 3.0, 1.0, 1.0, 1.0])), [1.5, 5.0, 2.0, 3.0, np.nan])


@pytest.mark.parametrize(
    ("changes", "scale"), [({}, 1.005), ({"dtype": "fp16"}, 1.0005), ({"precision": "int8_qk", "dtype": "bf16"}, 1.03)], ids=str
)
def test_what_is_a_little_wrong_everywhere_is_seen(changes, scale):
    """A head whose values are all too large, by less than any single element tells."""
    a, s = load("fa3_fp8" if "precision" in changes else "fa3", head_dim=64, **changes)
    c = make_case(a, s, CheckProblem(1, 128, 256, 4, 2), seed=3)
    out, lse = simulate(a, s, c.q, c.k, c.given_v, **c.descales)
    assert check(a, c.q, c.k, c.v, out, lse, schedule=s, **c.row_descales).passed
    wrong = out.copy()
    wrong[:, :, 2] = (out[:, :, 2].astype(np.float64) * scale).astype(out.dtype)
    found = check(a, c.q, c.k, c.v, wrong, lse, schedule=s, **c.row_descales)
    assert found.error_ratio < 1 and not found.passed
    assert found.reason.startswith("out[0, :, 2]: the root mean square of its errors, ")


@pytest.mark.parametrize("off", [1, -1])
@pytest.mark.parametrize(
    "changes, by",
    [({}, 0.03), ({"dtype": "int8", "mask": "causal"}, 0.03), ({"dtype": "bf16", "precision": "e4m3", "hadamard": True}, 0.06)],
    ids=str,
)
def test_a_scale_of_eight_bits_that_is_a_little_off_is_seen(changes, by, off):
    """By less than what P's three bits change an element by."""
    a, s = load("fa3_fp8", head_dim=64, **changes)
    c = make_case(a, s, CheckProblem(1, 256, 300, 4, 2), seed=3)
    out, lse = simulate(a, s, c.q, c.k, c.given_v, **c.descales)
    assert check(a, c.q, c.k, c.v, out, lse, schedule=s, **c.row_descales).passed
    wrong = out.copy()
    wrong[:, :, 2] = (out[:, :, 2].astype(np.float64) * (1 + off * by)).astype(out.dtype)
    found = check(a, c.q, c.k, c.v, wrong, lse, schedule=s, **c.row_descales)
    assert found.error_ratio < 1 and not found.passed
    assert re.match(r"out\[0, :, 2\] is [+-]\S+ % off as a whole, beyond the bound of \S+ %", found.reason), found.reason


def test_rows_without_keys_and_zeros_have_no_scale():
    zero = np.zeros((1, 8, 2, 64)), np.full((1, 2, 8), -np.inf)
    assert compare(*zero, reference=zero, baseline=zero, dtype="bf16", whole="scale").passed
    one = np.zeros((1, 8, 2, 64)), np.zeros((1, 2, 8))
    one[0][0, 3, 1] = np.linspace(1, 2, 64)
    off = one[0] * 1.03, one[1]
    given = {"reference": one, "baseline": (one[0] + 0.03, one[1]), "dtype": "bf16", "whole": "scale"}
    assert compare(*off, **given).passed
    assert "out[0, :, 1] is +20 % off as a whole" in compare(one[0] * 1.2, one[1], **given).reason


def test_others_functions_are_judged_by_their_elements_alone():
    want = np.linspace(1, 2, 4096).reshape(1, 64, 1, 64)
    base, got, lse = want.copy(), want + 0.004, np.zeros((1, 1, 64))
    base[0, 5, 0, 7] += 0.01
    given = {"reference": (want, lse), "baseline": (base, lse), "dtype": "bf16"}
    assert not compare(got, lse, **given).passed and compare(got, lse, **given, whole=None).passed
    one = want.copy()
    one[0, 3, 0, 3] += 0.004
    assert compare(one, lse, **given | {"baseline": (want, lse)}).passed, "one element may be an ulp off"
