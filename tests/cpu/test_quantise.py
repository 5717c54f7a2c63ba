"""The quantisation oracle: its rounding bit by bit, rotation and smoothing that change nothing, scales of every granularity, and the
published bug reports Q01, Q03 and Q04 from 16-bit tensors on (their e4m3 sides stand in test_cases.py)."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fp8_steps import PAPER_FP8

from fagen import Attention, InputError
from fagen.library import load
from fagen.oracle import cast, reference, simulate
from fagen.oracle.quantise import GRANULARITIES, LEAST_AMAX, Quantised, Quantiser, lse_shift, mean_over_sequence, quantise, rotate
from fagen.plan.rotation import butterfly_strides, signs

ALL = [
    Quantiser(granularity=g, hadamard=h, smooth_k=s, tile_q=192, tile_kv=96)
    for g, h, s in itertools.product(GRANULARITIES, (False, True), (False, True))
]


def name_of(quantiser: Quantiser) -> str:
    return quantiser.granularity + "+hadamard" * quantiser.hadamard + "+smooth" * quantiser.smooth_k


def tensors(seed: int = 0, sq: int = 130, sk: int = 203, d: int = 64, dtype: str = "bf16") -> list[Any]:
    rng = np.random.default_rng(seed)
    shapes = ((3, sq, 4, d), (3, sk, 2, d), (3, sk, 2, d))
    return [cast((rng.standard_normal(s) * 2 + 0.5).astype(np.float32), dtype) for s in shapes]


def simulated(z: Quantised, **changes: Any) -> tuple[Any, Any]:
    """Attention on what a quantiser made, by the simulated fa3_fp8."""
    granularity = z.quantiser.granularity
    tiles = {"tile_q": z.quantiser.tile_q, "tile_kv": z.quantiser.tile_kv} if granularity == "block" else {}
    attention, schedule = load(PAPER_FP8, head_dim=z.q.shape[3], scale_granularity=granularity, **{**tiles, **changes})
    return simulate(attention, schedule, z.q, z.k, z.v, q_descale=z.q_descale, k_descale=z.k_descale, v_descale=z.v_descale)


# the cast -----------------------------------------------------------------------------------------------------------------


def e4m3_value(code: int) -> float:
    """By the definition of the type: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def test_q04_all_256_codes_are_exact_both_ways() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = np.array([e4m3_value(c) for c in range(256)], np.float32)
    np.testing.assert_array_equal(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32), values)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(cast(values[finite], "e4m3").view(np.uint8), codes[finite])
    assert np.isnan(cast(np.float32([np.nan, -np.nan]), "e4m3").astype(np.float32)).all()


def test_q04_ties_go_to_even_and_the_rest_to_the_nearest() -> None:
    codes = np.arange(0x7E, dtype=np.uint8)  # 0 to 416, each with the next one
    low, high = (np.array([e4m3_value(int(c) + i) for c in codes], np.float32) for i in (0, 1))
    middle = (low + high) / 2
    even = np.where(codes % 2 == 0, low, high)
    for sign in (1, -1):
        assert (cast(sign * middle, "e4m3").astype(np.float32) == sign * even).all()
        assert (cast(sign * np.nextafter(middle, np.float32(0)), "e4m3").astype(np.float32) == sign * low).all()
        assert (cast(sign * np.nextafter(middle, np.float32(1e9)), "e4m3").astype(np.float32) == sign * high).all()


def test_q04_the_cast_saturates() -> None:
    x = np.float32([448, 449, 463.9, 464, 465, 500, 1e4, 3e38, np.inf])
    assert (cast(x, "e4m3").astype(np.float32) == 448).all() and (cast(-x, "e4m3").astype(np.float32) == -448).all()


# edge values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantiser", ALL, ids=name_of)
def test_q04_zeros_stay_zeros_and_zero_k_gives_the_mean_of_v(quantiser: Quantiser) -> None:
    q, k, v = tensors()
    k = np.zeros_like(k)
    z = quantise(q, k, v, quantiser)
    assert not z.k.astype(np.float32).any()
    for scale in (z.q_descale, z.k_descale, z.v_descale):
        assert np.isfinite(scale).all() and (scale > 0).all()
    out, lse = simulated(z)
    mean = np.repeat(z.dequantised()[2].astype(float).mean(axis=1), 2, axis=1)
    step = 2**-4 if quantiser.granularity == "block" else 2**-8  # P carries the scales of v's blocks, which e4m3 rounds
    np.testing.assert_allclose(out.astype(float), np.broadcast_to(mean[:, None], out.shape), rtol=step, atol=2**-9)
    np.testing.assert_allclose(lse, np.log(203), rtol=1e-5)


def test_q04_a_block_of_zeros_has_a_scale_of_its_own() -> None:
    q, k, v = tensors()
    v[:, 96:192] = 0
    z = quantise(q, k, v, Quantiser(granularity="block", tile_q=192, tile_kv=96))
    assert (z.v_descale[:, :, 1] == np.float32(LEAST_AMAX / 448)).all() and (z.v_descale[:, :, [0, 2]] > 1e-3).all()
    assert not z.v[:, 96:192].astype(np.float32).any()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_q04_tiny_values_keep_their_digits(granularity: str) -> None:
    q, k, v = (x.astype(np.float32) * np.float32(1e-30) for x in tensors())
    z = quantise(q, k, v, Quantiser(granularity=granularity, tile_q=192, tile_kv=96))
    for x, y in zip((q, k, v), z.dequantised()):
        big = np.abs(x) > np.abs(x).max() / 64
        assert (np.abs(y - x)[big] <= 2**-4 * np.abs(x)[big]).all()


def test_q04_one_outlier_spoils_its_own_scale_only() -> None:
    """1e4 in KV head 0 of batch 0, and in query head 1, which reads it: e4m3 then steps by 22 in that head, below 2^-6 of a step."""
    q, k, v = tensors(dtype="fp16")
    for x in (q, k, v):
        x *= np.float16(0.01)
        x[0, 5, 0, 7] = 1e4
    q[0, 5, 0, 7], q[0, 5, 1, 7] = 0, 1e4
    tensor, head = (quantise(q, k, v, Quantiser(granularity=g)).dequantised() for g in ("tensor", "head"))
    for x, by_tensor, by_head, spoiled in zip((q, k, v), tensor, head, (2, 1, 1)):
        x = x.astype(np.float32)
        others = np.ones(x.shape, bool)
        others[0, :, :spoiled] = False
        normal = others & (np.abs(x) > 2.0**-6 * np.abs(x[others]).max() / 448)
        assert (np.abs(by_head - x)[normal] <= 2**-4 * np.abs(x)[normal]).all()
        assert np.abs(by_head)[0, :, :spoiled].max() == np.abs(by_tensor).max() == pytest.approx(1e4)
        lost = (by_tensor == 0) & (x != 0) & others
        assert lost.mean() > 0.5, "with one scale the others become 0"


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_q04_nan_stays_and_leaves_the_scale_alone(granularity: str) -> None:
    q, k, v = tensors()
    quantiser = Quantiser(granularity=granularity, tile_q=192, tile_kv=96)
    clean = quantise(q, k, v, quantiser)
    q[1, 3, 2, 5] = k[0, 9, 1, 0] = v[2, 200, 0, 63] = np.nan
    z = quantise(q, k, v, quantiser)
    for mine, its in zip((z.q, z.k, z.v), (q, k, v)):
        np.testing.assert_array_equal(np.isnan(mine.astype(np.float32)), np.isnan(its.astype(np.float32)))
    for a, b in ((z.q_descale, clean.q_descale), (z.k_descale, clean.k_descale), (z.v_descale, clean.v_descale)):
        np.testing.assert_array_equal(a, b)
    out, _ = simulated(z)
    lost = np.isnan(out.astype(np.float32))
    assert lost[1, 3, 2].all() and lost[0, :, 2:].all() and lost[2, :, :2, 63].all(), "visible"
    assert not lost[1, :3].any() and not lost[0, :, :2].any() and not lost[2, :, :2, :63].any()


def test_q04_nan_in_a_rotated_row_is_the_whole_row() -> None:
    q, k, v = tensors()
    q[1, 3, 2, 5] = np.nan
    z = quantise(q, k, v, Quantiser(hadamard=True))
    lost = np.isnan(z.q.astype(np.float32))
    assert lost[1, 3, 2].all() and lost.sum() == 64


@pytest.mark.parametrize("sign", [1, -1])
def test_q04_infinity_saturates_with_its_sign(sign: int) -> None:
    q, k, v = tensors()
    clean = quantise(q, k, v, Quantiser())
    k[0, 9, 1, 0] = sign * np.inf
    z = quantise(q, k, v, Quantiser())
    assert z.k[0, 9, 1, 0] == sign * 448
    np.testing.assert_allclose(z.k_descale, clean.k_descale, rtol=0.2)
    assert np.isfinite(simulated(z)[0].astype(np.float32)).all()


# scales -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantiser", ALL, ids=name_of)
def test_shapes_of_scales_and_no_element_beyond_half_a_step(quantiser: Quantiser) -> None:
    q, k, v = tensors()
    z = quantise(q, k, v, quantiser)
    shapes = {"tensor": [(1,)] * 3, "head": [(3, 2)] * 3, "block": [(3, 4, 1), (3, 2, 3), (3, 2, 3)]}
    assert [z.q_descale.shape, z.k_descale.shape, z.v_descale.shape] == shapes[quantiser.granularity]
    xq, xk, xv = (x.astype(np.float32) for x in (q, k, v))
    if quantiser.smooth_k:
        assert z.k_mean is not None
        xk = xk - z.k_mean[:, None]
    if quantiser.hadamard:
        xq, xk = (rotate(x) * np.float32(64**-0.5) for x in (xq, xk))
    for x, y in zip((xq, xk, xv), z.dequantised()):
        assert (np.abs(y - x) <= 2**-4 * np.abs(x) * (1 + 1e-5) + np.abs(x).max() * 2**-18).all()


def test_every_scale_is_of_its_own_elements() -> None:
    """Each head, group and block is a power of two above the one before it, and the scales say so."""
    q, k, v = (np.ones(s, np.float32) for s in ((2, 130, 4, 64), (2, 203, 2, 64), (2, 203, 2, 64)))
    for b, h in np.ndindex(2, 4):
        q[b, :, h] = 2.0 ** (4 * b + h)
    for b, h, n in np.ndindex(2, 2, 3):
        k[b, 96 * n : 96 * n + 96, h] = 2.0 ** (10 * b + 5 * h + n)
    z = quantise(q, k, v, Quantiser(granularity="head"))
    np.testing.assert_array_equal(z.q_descale * 448, [[2, 8], [32, 128]])
    np.testing.assert_array_equal(z.k_descale * 448, [[4, 128], [4096, 131072]])
    z = quantise(q, k, v, Quantiser(granularity="block", tile_q=192, tile_kv=96))
    np.testing.assert_array_equal(z.q_descale * 448, [[[2.0 ** (4 * b + h)] for h in range(4)] for b in range(2)])
    wanted = [[[2.0 ** (10 * b + 5 * h + n) for n in range(3)] for h in range(2)] for b in range(2)]
    np.testing.assert_array_equal(z.k_descale * 448, wanted)
    assert (z.k.astype(np.float32) == 448).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_q03_what_is_exact_in_e4m3_comes_back_bit_by_bit(granularity: str) -> None:
    """Powers of two over values of e4m3 that reach 448 in every block: codes and descales are recovered, each with its own head."""
    rng = np.random.default_rng(3)
    codes = [
        rng.choice(np.float32([-448, -1.5, -0.5, 0, 0.25, 1.75, 3, 448]), (3, n, h, 64)) for n, h in ((128, 4), (192, 2), (192, 2))
    ]
    for x in codes:
        x[:, ::64, :, 0] = 448
    if granularity == "tensor":
        scales = [np.exp2(rng.integers(-3, 3, (1,))).astype(np.float32) for _ in range(3)]
        spread = scales
    else:
        scales = [np.exp2(rng.integers(-3, 3, (3, 2))).astype(np.float32) for _ in range(3)]
        spread = [np.repeat(s, x.shape[2] // 2, axis=1)[:, None, :, None] for s, x in zip(scales, codes)]
    z = quantise(*(x * s for x, s in zip(codes, spread)), Quantiser(granularity=granularity, tile_q=64, tile_kv=64))
    for x, mine in zip(codes, (z.q, z.k, z.v)):
        np.testing.assert_array_equal(mine.astype(np.float32), x)
    for s, mine, heads in zip(scales, (z.q_descale, z.k_descale, z.v_descale), (4, 2, 2)):
        wide = np.repeat(s, heads // 2, axis=1)[:, :, None] if granularity == "block" else s
        np.testing.assert_array_equal(mine, np.broadcast_to(wide, mine.shape))


@pytest.mark.parametrize("quantiser", ALL, ids=name_of)
def test_q01_from_16_bits_on(quantiser: Quantiser) -> None:
    """A maximum that rises from one block to the next: out is 0.9241 whatever the scales."""
    q, k, v = np.ones((1, 1, 6, 64), np.float32), np.zeros((1, 256, 1, 64), np.float32), np.zeros((1, 256, 1, 64), np.float32)
    k[0, 128:], v[0, 128:] = 2.5, 1.0
    z = quantise(q, k, v, quantiser)
    out, lse = simulated(z, scale=2.0**-6)
    a, b, _ = z.dequantised()
    scores = 2.0**-6 * np.einsum("bqhd,bkd->bhqk", a.astype(float), b[:, :, 0].astype(float))
    p = np.exp(scores - scores.max())
    want = p[..., 128:].sum(axis=-1) / p.sum(axis=-1)
    np.testing.assert_allclose(out.astype(float)[0, 0, :, 0], want[0, :, 0], rtol=2**-6)
    np.testing.assert_allclose(want, 0.9241, atol=0.02 if quantiser.hadamard or quantiser.smooth_k else 1e-4)
    if z.k_mean is not None:
        lse = lse + lse_shift(q, z.k_mean, 2.0**-6)
    np.testing.assert_allclose(
        lse, 2.5 + np.log(128 * (1 + np.exp(-2.5))), atol=0.2 if quantiser.hadamard or quantiser.smooth_k else 1e-4
    )


# rotation and smoothing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_rotation_is_hadamard_times_signs(head_dim: int) -> None:
    dense = np.ones((1, 1))
    while len(dense) < head_dim:
        dense = np.block([[dense, dense], [dense, -dense]])
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (5, head_dim)).astype(np.float32)  # sums are exact
    np.testing.assert_array_equal(rotate(x), x @ (dense * np.array(signs(head_dim))).T)
    assert butterfly_strides(head_dim) == tuple(2**i for i in range(len(butterfly_strides(head_dim))))
    assert 2 * butterfly_strides(head_dim)[-1] == head_dim


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_signs_are_a_fixed_irregular_pattern(head_dim: int) -> None:
    """No row of H correlates with them, so no regular row of Q or K becomes one large value."""
    s = np.array(signs(head_dim), np.float32)
    assert set(s) == {1.0, -1.0} and signs(head_dim) == signs(head_dim)
    spectrum = np.abs(rotate(np.ones((1, head_dim), np.float32)))
    assert spectrum.max() < 4 * head_dim**0.5
    assert signs(64) != signs(128)[:64]


def test_the_rotation_keeps_scores_in_float32() -> None:
    q, k, _ = (x.astype(np.float32) for x in tensors(d=128))
    rotated = np.einsum("bqd,bkd->bqk", rotate(q)[:, :, 0], rotate(k)[:, :, 0]) / 128
    np.testing.assert_allclose(rotated, np.einsum("bqd,bkd->bqk", q[:, :, 0], k[:, :, 0]), atol=1e-3)


def test_smoothing_changes_lse_by_the_shift_and_out_not_at_all() -> None:
    q, k, v = (x.astype(np.float64) for x in tensors())
    k += 5 * np.random.default_rng(1).standard_normal((3, 1, 2, 64))
    mean = mean_over_sequence(k)
    attention = Attention(head_dim=64)
    out, lse = reference(attention, q, k, v)
    smooth, smooth_lse = reference(attention, q, k - mean[:, None].astype(np.float64), v)
    np.testing.assert_allclose(smooth, out, atol=1e-12)
    np.testing.assert_allclose(smooth_lse + lse_shift(q, mean, attention.softmax_scale), lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_smoothing_helps_where_k_has_a_mean(granularity: str) -> None:
    """A bias of K's columns, as trained models have it, takes most of the range of e4m3."""
    q, k, v = tensors()
    k = cast(k.astype(np.float32) + 20 * np.random.default_rng(1).standard_normal((3, 1, 2, 64)).astype(np.float32), "bf16")
    want, want_lse = reference(Attention(head_dim=64), q, k, v)
    errors = []
    for smooth in (False, True):
        z = quantise(q, k, v, Quantiser(granularity=granularity, smooth_k=smooth, tile_q=192, tile_kv=96))
        out, lse = simulated(z)
        if z.k_mean is not None:
            lse = lse + lse_shift(q, z.k_mean, 64**-0.5)
        errors.append([np.sqrt(np.mean((a.astype(float) - b) ** 2)) for a, b in ((out, want), (lse, want_lse))])
    assert errors[1][0] < 0.5 * errors[0][0] and errors[1][1] < 0.5 * errors[0][1], errors


def test_a_given_mean_is_subtracted_instead() -> None:
    q, k, v = tensors()
    mean = np.full((3, 2, 64), 0.25, np.float32)
    z = quantise(q, k, v, Quantiser(smooth_k=True), k_mean=mean)
    assert z.k_mean is mean
    np.testing.assert_allclose(z.dequantised()[1], k.astype(np.float32) - 0.25, atol=0.6)
    with pytest.raises(InputError, match="k_mean: given without smooth_k"):
        quantise(q, k, v, Quantiser(), k_mean=mean)


@pytest.mark.parametrize("sq, sk", [(0, 5), (5, 0), (1, 1)])
@pytest.mark.parametrize("quantiser", ALL, ids=name_of)
def test_empty_and_single_rows(quantiser: Quantiser, sq: int, sk: int) -> None:
    q, k, v = tensors(sq=sq, sk=sk)
    z = quantise(q, k, v, quantiser)
    assert z.q.shape == q.shape and z.k.shape == k.shape
    for scale in (z.q_descale, z.k_descale, z.v_descale):
        assert np.isfinite(scale).all() and (scale > 0).all()


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="granularity: is 'row'"):
        Quantiser(granularity="row")
    with pytest.raises(InputError, match="tile_kv: is None"):
        Quantiser(granularity="block", tile_q=64)
    q, k, v = (np.ones((1, 4, 1, 48), np.float32) for _ in range(3))
    with pytest.raises(InputError, match="head_dim is 48"):
        quantise(q, k, v, Quantiser(hadamard=True))
