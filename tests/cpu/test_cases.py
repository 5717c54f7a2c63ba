"""Published bug reports about attention kernels, as tests on the reference and on the simulated fa2, fa3 and fa3_fp8.

Each says where the report is (FA: Dao-AILab/flash-attention), and has an answer known without running a kernel.
"""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from fp8_steps import PAPER_FP8

from fagen import Attention, ScheduleError
from fagen.library import load
from fagen.oracle import cast, check, reference, simulate, transpose_v
from fagen.plan import plan

KERNELS = ("standard", "fa1", "fa2", "fa3")


def normal(rng, dtype, *shape, shift=0.0):
    return cast((rng.standard_normal(shape) + shift).astype(np.float32), dtype)


# F01: causal with more queries than keys (FA 1778; flashinfer 4452; onnxruntime 28904). Rows before the first visible key came back
# as NaN, as the mean of V, or with a finite lse.

EMPTY_ROWS = [(5, 2), (300, 170), (128, 1), (257, 128)]


def f01_inputs(sq, sk, dtype):
    rng = np.random.default_rng(sq)
    return normal(rng, dtype, 1, sq, 4, 64), normal(rng, dtype, 1, sk, 2, 64), normal(rng, dtype, 1, sk, 2, 64, shift=3.0)


def assert_empty_rows(out, lse, v, sq, sk, dtype):
    empty = sq - sk
    bits = np.uint16 if out.dtype.itemsize == 2 else np.uint64
    assert (out[:, :empty].view(bits) == 0).all(), "exactly +0"
    assert np.isneginf(lse[:, :, :empty]).all() and np.isfinite(lse[:, :, empty:]).all()
    assert np.isfinite(out.astype(float)).all()
    first = np.repeat(v[0, 0], 2, axis=0).astype(float)
    np.testing.assert_allclose(out[0, empty].astype(float), first, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sq, sk", EMPTY_ROWS)
def test_f01_reference(sq, sk, dtype):
    q, k, v = f01_inputs(sq, sk, dtype)
    out, lse = reference(Attention(head_dim=64, dtype=dtype, mask="causal"), q, k, v)
    assert_empty_rows(out, lse, v, sq, sk, dtype)


@pytest.mark.parametrize("name, dtype", [*product(KERNELS, ("bf16", "fp16")), ("fa3_fp8", "e4m3")])
@pytest.mark.parametrize("sq, sk", EMPTY_ROWS)
def test_f01_kernels(name, sq, sk, dtype):
    q, k, v = f01_inputs(sq, sk, dtype)
    a, s = load(name, head_dim=64, dtype=dtype, mask="causal")
    out, lse = simulate(a, s, q, k, v, seed=sq)
    assert_empty_rows(np.ascontiguousarray(out), lse, v, sq, sk, dtype)
    assert check(a, q, k, v, out, lse).passed


# F02: causal alignment (pytorch 108108, 144858, 103082; onnx 8068; mlx 2835). A decode query saw key 0 only.

ALIGNED = [(3, 7), (113, 203), (1, 203), (64, 64)]


def f02_inputs(sq, sk):
    q, k = (np.zeros((1, n, 1, 64), ml_dtypes.bfloat16) for n in (sq, sk))
    return q, k, np.broadcast_to(np.arange(sk)[None, :, None, None], (1, sk, 1, 64)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", ["reference", *KERNELS])
@pytest.mark.parametrize("sq, sk", ALIGNED)
def test_f02(name, sq, sk):
    q, k, v = f02_inputs(sq, sk)
    seen = np.arange(sq) + 1 + sk - sq
    if name == "reference":
        out, lse = reference(Attention(head_dim=64, mask="causal"), q, k, v)
        np.testing.assert_allclose(out[0, :, 0], np.repeat(((seen - 1) / 2)[:, None], 64, axis=1), rtol=0, atol=1e-12)
        np.testing.assert_allclose(lse[0, 0], np.log(seen), rtol=0, atol=1e-12)
        return
    a, s = load(name, head_dim=64, mask="causal")
    out, lse = simulate(a, s, q, k, v)
    assert (out[0, :, 0].astype(float) == ((seen - 1) / 2)[:, None]).all(), "exact in bf16"
    np.testing.assert_allclose(lse[0, 0], np.log(seen), rtol=0, atol=2e-6)
    if sq == 1:
        full, _ = simulate(*load(name, head_dim=64), q, k, v)
        assert np.array_equal(full, out)


# F05: raw scores beyond fp16's range (mlc-llm 1638; ultralytics 24990; kvpress 268): NaN where scores are kept in fp16 before scaling.


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_f05(name):
    q = np.full((1, 1, 1, 128), 256, np.float16)
    k = np.full((1, 64, 1, 128), 256, np.float16)
    k[0, 32:] = 255.875
    v = np.zeros_like(k)
    v[0, :32] = 1
    change = {"dtype": "fp16", "scale": 2.0**-10}
    if name == "reference":
        out, lse = reference(Attention(head_dim=128, **change), q, k, v)
    else:
        out, lse = simulate(*load(name, **change), q, k, v)
    assert np.abs(out.astype(float) - 1 / (1 + np.exp(-4))).max() < 1e-3
    assert abs(float(lse[0, 0, 0]) - 8195.4839) < 2e-3
    if name == "fa3":
        stale, _ = simulate(*load(name, tile_kv=128, reference="stale", **change), q, k, v)
        assert np.array_equal(stale, out)
    assert float(np.finfo(np.float16).max) < 128 * 256 * 256, "the raw score does not fit fp16"


# F07: head dimensions off the menu (FA 28, 1347, 753, 1541; triton 621; flashinfer 528; cudnn-frontend 981): wrong channels, a scale
# taken from a padded width, or a run that should have been refused.

HEAD_DIMS = (40, 63, 64, 72, 80, 96, 104, 112, 128, 160, 192, 224, 256)


def f07_inputs(d, dv, dtype="bf16"):
    k = np.stack([np.full((1, d), 0.125), np.full((1, d), -0.125)])[None]
    v = np.stack([np.ones((1, dv)), np.zeros((1, dv))])[None]
    return tuple(cast(x.astype(np.float32), dtype) for x in (np.ones((1, 1, 1, d)), k, v))


@pytest.mark.parametrize("d, dv", [*((d, d) for d in HEAD_DIMS), (192, 128), (40, 64)])
def test_f07_reference(d, dv):
    out, _ = reference(Attention(head_dim=d, head_dim_v=dv), *f07_inputs(d, dv))
    assert out.shape[-1] == dv
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-0.25 * d / d**0.5)), rtol=0, atol=1e-12)
    if d in (40, 72, 160):
        padded = 1 << (d - 1).bit_length()
        assert abs(out[0, 0, 0, 0] - 1 / (1 + np.exp(-0.25 * d / padded**0.5))) > 0.03, "the defect would show"


@pytest.mark.parametrize("name", [*KERNELS, "fa3_fp8"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_f07_kernels(name, d):
    a, s = load(name, head_dim=d)
    q, k, v = f07_inputs(d, d, a.dtype)
    out, _ = simulate(a, s, q, k, v)
    np.testing.assert_allclose(out.astype(float), 1 / (1 + np.exp(-0.25 * d**0.5)), rtol=2**-7)


@pytest.mark.parametrize("name", [*KERNELS, "fa3_fp8"])
@pytest.mark.parametrize("d, dv", [*((d, None) for d in HEAD_DIMS if d not in (64, 128, 256)), (128, 64), (64, 40)])
def test_f07_refused(name, d, dv):
    """Before anything is compiled or run, naming the field and what is legal."""
    a, s = load(name)
    with pytest.raises(ScheduleError) as e:
        plan(a.replace(head_dim=d, head_dim_v=dv), s)
    (violation,) = e.value.violations
    assert violation.field == ("head_dim" if dv is None else "head_dim_v")
    legal = {64, 128, 256} if dv is None else {None, d}
    assert set(violation.nearest) == legal and str(d if dv is None else dv) in str(violation)


# F12: tolerance and comparison policy (FA 1071, 1138, 385, 37; pytorch 163588; sglang 35795; cubecl 1070): a low-precision path taken
# for the truth, and NaN positions that were skipped. The comparer's refusals are in test_compare.py.


@pytest.mark.parametrize("amplitude, kernel_error, naive_error", [(1, 0.0018, 0.0055), (5, 0.059, 1.46)])
def test_f12(amplitude, kernel_error, naive_error):
    def bf16(x):
        return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    rng = np.random.default_rng(12)
    q, k, v = (cast((amplitude * rng.standard_normal((1, 256, 1, 64))).astype(np.float32), "bf16") for _ in range(3))
    ref = reference(Attention(head_dim=64), q, k, v)[0][0, :, 0]
    a, b, c = (x[0, :, 0].astype(np.float32) for x in (q, k, v))
    s = bf16(bf16(a @ b.T) * np.float32(0.125))
    p = np.exp(s - s.max(axis=1, keepdims=True))
    naive = np.abs(bf16(bf16(p / p.sum(axis=1, keepdims=True)) @ c) - ref).max()
    assert naive_error / 2 < naive < naive_error * 2
    for name in KERNELS:
        attention, schedule = load(name, head_dim=64)
        out, lse = simulate(attention, schedule, q, k, v)
        error = np.abs(out[0, :, 0].astype(float) - ref).max()
        assert kernel_error / 2 < error < kernel_error * 2 and error < naive / 2
        assert check(attention, q, k, v, out, lse).passed


# Q01: P in e4m3 is clipped in the numerator but not in the row sum (FA 2577, 2716, 2131, 2717, 2694, 2731): with P times 2^8 and a maximum
# that may lag, P passes 448.


def q01_inputs():
    q = np.ones((1, 1, 6, 128))
    k, v = np.zeros((1, 256, 1, 128)), np.zeros((1, 256, 1, 128))
    k[0, 128:], v[0, 128:] = 2.5, 1.0
    return (cast(x.astype(np.float32), "e4m3") for x in (q, k, v))


@pytest.mark.parametrize("name", ["reference", PAPER_FP8])
@pytest.mark.parametrize("tile_kv", [64, 96, 128, 224])
def test_q01(name, tile_kv):
    """The maximum rises by 2.5 log2 e = 3.6 powers of two at key 128, in a later block than the first or in the same one."""
    q, k, v = q01_inputs()
    a, s = load(PAPER_FP8, scale=2.0**-7, tile_kv=tile_kv)
    out, lse = reference(a, q, k, v) if name == "reference" else simulate(a, s, q, k, v)
    np.testing.assert_allclose(out.astype(float), 1 / (1 + np.exp(-2.5)), rtol=1e-9 if name == "reference" else 2**-8)
    np.testing.assert_allclose(lse, 2.5 + np.log(128 * (1 + np.exp(-2.5))), rtol=1e-5)
    flipped = reference(a, q, k[:, ::-1], v[:, ::-1])[0]
    np.testing.assert_allclose(flipped, 0.9241, atol=1e-4)


STALE = [{"tile_kv": kv, "reference": "stale", "fuse_tiles": fused} for kv, fused in product((32, 64, 96, 128, 160), (False, True))]


@pytest.mark.parametrize(("name", "change"), [("fa3_fp8", {}), *((PAPER_FP8, change) for change in STALE)], ids=str)
def test_q01_under_a_stale_reference(name, change):
    """The report itself: P is a power of a maximum that lags. It must still fit e4m3."""
    q, k, v = q01_inputs()
    a, s = load(name, scale=2.0**-7, **change)
    out, lse = simulate(a, s, q, k, v)
    np.testing.assert_allclose(out.astype(float), 1 / (1 + np.exp(-2.5)), rtol=2**-8)
    np.testing.assert_allclose(lse, 2.5 + np.log(128 * (1 + np.exp(-2.5))), rtol=1e-5)


@pytest.mark.parametrize("std", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("name", "change"),
    [(PAPER_FP8, {}), (PAPER_FP8, {"reference": "stale", "tile_kv": 160, "fuse_tiles": True}), ("fa3_fp8", {})],
    ids=["running", "stale, fused tiles", "fa3_fp8"],
)
def test_q01_error_is_flat_in_the_length(std, name, change):
    """Relative to the output, which shrinks with the number of keys."""
    a, s = load(name, **change)
    rng = np.random.default_rng(0)
    errors = {}
    for keys in (1, 127, 128, 129, 223, 224, 225, 511, 512, 513, 1023, 8192):
        q, k = (cast((std**0.5 * rng.standard_normal((1, n, h, 128))).astype(np.float32), "e4m3") for n, h in ((1, 6), (keys, 1)))
        v = normal(rng, "e4m3", 1, keys, 1, 128)
        out, lse = simulate(a, s, q, k, v)
        want, _ = reference(a, q, k, v)
        errors[keys] = np.linalg.norm(out.astype(float) - want) / np.linalg.norm(want)
        assert (out.astype(float) * want).sum() / np.linalg.norm(out.astype(float)) / np.linalg.norm(want) > 0.998
        assert check(a, q, k, v, out, lse, schedule=s).passed
    assert errors[1] < 2**-8 and max(errors.values()) < 0.05, errors
    growth = 2 if s.reference == "stale" else 1.5  # a P below its largest value has fewer digits in e4m3
    assert errors[8192] < growth * errors[128], errors


# Q03: descales dropped, defaulted, or applied to the wrong head or tensor (vllm 51363, 23813; FlyDSL 711; TransformerEngine 1174; triton
# 11440). What is wrong with scalars, shapes, types and libraries is refused in test_fp8.py.


def q03_inputs():
    rng = np.random.default_rng(3)
    exact = [
        rng.choice([-2.0, -1.5, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.75, 3.0], (3, n, h, 128))
        for n, h in ((64, 4), (203, 2), (203, 2))
    ]
    pick = [(0.5, 2.0), (4.0, 0.25), (8.0, 0.125)]
    scales = [np.array([[rng.permutation(p)[0], rng.permutation(p)[0]] for _ in range(3)], np.float32) for p in pick]
    return [cast(x.astype(np.float32), "e4m3") for x in exact], dict(zip(("q_descale", "k_descale", "v_descale"), scales))


@pytest.mark.parametrize("v_transposed", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_q03(mask, v_transposed):
    """Powers of two are exact: the bits of a run without descales, under a softmax scale times q's and k's, out times v's."""
    (q, k, v), scales = q03_inputs()
    a, s = load(PAPER_FP8 if v_transposed else "fa3_fp8", mask=mask, v_transposed=v_transposed)

    def run(attention, part=slice(None), heads=slice(None), **descales):
        kv = slice(None) if heads == slice(None) else slice(heads.start // 2, heads.stop // 2)
        values = v[part, :, kv]
        given = transpose_v(values) if v_transposed else values
        return simulate(attention, s, q[part, :, heads], k[part, :, kv], given, **descales)

    out, lse = run(a, **scales)
    assert check(a, q, k, v, out, lse, **scales).passed
    assert len({tuple(scales[n][i] for n in scales) for i in np.ndindex(3, 2)}) > 3, "heads differ"
    for b, h in np.ndindex(3, 2):
        part, heads = slice(b, b + 1), slice(2 * h, 2 * h + 2)
        of_q, of_k, of_v = (float(x[b, h]) for x in scales.values())
        alone, alone_lse = run(a.replace(scale=a.softmax_scale * of_q * of_k), part, heads)
        assert np.array_equal(out[part, :, heads].astype(np.float32), alone.astype(np.float32) * np.float32(of_v))
        assert np.array_equal(lse[part, heads], alone_lse)
        numbers, numbers_lse = run(a, part, heads, q_descale=of_q, k_descale=of_k, v_descale=of_v)
        assert np.array_equal(out[part, :, heads], numbers) and np.array_equal(lse[part, heads], numbers_lse)
    missing, missing_lse = run(a)
    ones, ones_lse = run(a, q_descale=1.0, k_descale=1.0, v_descale=1.0)
    assert np.array_equal(missing, ones) and np.array_equal(missing_lse, ones_lse)


@pytest.mark.parametrize("lost", ["q_descale", "k_descale", "v_descale", "swapped heads", "swapped batches"])
def test_q03_the_defects_would_show(lost):
    (q, k, v), scales = q03_inputs()
    a, s = load("fa3_fp8")
    if lost == "swapped heads":
        wrong = {n: x[:, ::-1] for n, x in scales.items()}
    elif lost == "swapped batches":
        wrong = {n: np.roll(x, 1, axis=0) for n, x in scales.items()}
    else:
        wrong = {n: x for n, x in scales.items() if n != lost}
    out, lse = simulate(a, s, q, k, v, **wrong)
    assert not check(a, q, k, v, out, lse, **scales).passed
