"""The kernels that quantise: their numbers beside the oracle's, edge values, proofs, machine code, and how they are called."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import FakeCuda, Tensor, fake_torch, install, read_arguments
from fp8_steps import PAPER_FP8
from random_schedules import is_legal, legal_pair

import fagen
from fagen import InputError, LaunchError, sass
from fagen.compile import build
from fagen.emit import emit
from fagen.launch import Kernel
from fagen.oracle import DTYPES, check, make_inputs
from fagen.oracle.quantise import LEAST_AMAX, Quantiser, lse_shift
from fagen.oracle.quantise import quantise as oracle_quantise
from fagen.oracle.yardstick import quantiser_of
from fagen.plan import Plan, assemble
from fagen.plan import quantise_steps as qs
from fagen.plan.kernel import Problem
from fagen.plan.mutants import run_mutants
from fagen.plan.quantised import moved_bytes
from fagen.plan.rotation import signs
from fagen.plan.steps import CtaSync, walk
from fagen.quantise import Quantised, QuantiseKernel, checked_options, plan_of, simulate_quantise

BF16, E4M3 = DTYPES["bf16"], DTYPES["e4m3"]
MODULE = sys.modules["fagen.quantise"]
"""Its name in the package is that of the function."""
RAGGED = Problem(2, 150, 203, 4, 2)
NO_KEYS = Problem(1, 5, 0, 2, 1)
WAYS = [
    {"granularity": g, "hadamard": h, "smooth_k": s, **({"tile_q": 64, "tile_kv": 96} if g == "block" else {})}
    for g, h, s in itertools.product(("tensor", "head", "block"), (False, True), (False, True))
]


def name_of(way: dict[str, Any]) -> str:
    return "-".join([way["granularity"], *("hadamard" * way["hadamard"],), *("smooth" * way["smooth_k"],)]).strip("-")


each_way = pytest.mark.parametrize("way", WAYS, ids=name_of)


def inputs(head_dim: int, dtype: str, problem: Problem, seed: int = 1) -> tuple[np.ndarray, ...]:
    """Normal, with a mean in k that differs by head and column."""
    q, k, v = make_inputs(fagen.Attention(head_dim=head_dim, dtype=dtype), problem, seed=seed)
    mean = 3 * np.random.default_rng(2).standard_normal((1, 1, problem.hkv, head_dim), np.float32)
    return q, (k.astype(np.float32) + mean).astype(k.dtype), v


def codes_differ(a: np.ndarray, b: np.ndarray) -> float:
    return float((a.view(np.uint8) != b.view(np.uint8)).mean()) if a.size else 0.0


def pair(**changes: Any) -> Any:
    """fa3_fp8 on 16-bit tensors, quantised by the plan."""
    return fagen.load(PAPER_FP8, **{"dtype": "bf16", "precision": "e4m3", "head_dim": 64, **changes})


# numbers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way, head_dim, dtype",
    [*((w, 64, "fp16") for w in WAYS), *((w, 128, "bf16") for w in (WAYS[2], WAYS[7], WAYS[11])), (WAYS[10], 256, "bf16")],
    ids=lambda x: name_of(x) if isinstance(x, dict) else str(x),
)
def test_the_simulated_kernels_agree_with_the_oracle(way: dict[str, Any], head_dim: int, dtype: str) -> None:
    """To the last bit; but the mean is a sum in another order, so that a few codes may be the neighbours."""
    for problem in (RAGGED, NO_KEYS):
        q, k, v = inputs(head_dim, dtype, problem)
        got, want = simulate_quantise(q, k, v, **way), oracle_quantise(q, k, v, Quantiser(**way))
        for name in ("q", "k", "v"):
            mine, theirs = getattr(got, name), getattr(want, name)
            assert mine.shape == theirs.shape and mine.dtype == E4M3
            assert codes_differ(mine, theirs) <= (1e-3 if way["smooth_k"] and name == "k" else 0), name
            scale, theirs = getattr(got, f"{name}_descale"), getattr(want, f"{name}_descale")
            assert scale.shape == theirs.shape and scale.dtype == np.float32
            if way["smooth_k"] and name == "k":
                np.testing.assert_allclose(scale, theirs, rtol=1e-6)
            else:
                np.testing.assert_array_equal(scale, theirs)
        if way["smooth_k"]:
            shift = lse_shift(q, want.k_mean, head_dim**-0.5)
            np.testing.assert_allclose(got.lse_shift, shift, rtol=1e-4, atol=1e-4)
        else:
            assert got.lse_shift is None


@pytest.mark.parametrize("way", [WAYS[2], WAYS[7], WAYS[11]], ids=name_of)
def test_keys_without_queries(way: dict[str, Any]) -> None:
    """k and v are quantised all the same; where nothing has rows, scales of tensors and heads are finite."""
    for problem in (Problem(1, 0, 70, 2, 1), Problem(1, 0, 0, 2, 1)):
        q, k, v = make_inputs(fagen.Attention(head_dim=64), problem)
        got, want = simulate_quantise(q, k, v, **way), oracle_quantise(q, k, v, Quantiser(**way))
        for name in ("q", "v", "q_descale", "v_descale"):
            a, b = getattr(got, name), getattr(want, name)
            assert a.shape == b.shape and np.array_equal(a.astype(np.float32), b.astype(np.float32)), name
        assert codes_differ(got.k, want.k) < 1e-3 and np.isfinite(got.k_descale).all()


def test_every_interleaving_gives_the_same_bits() -> None:
    q, k, v = inputs(64, "bf16", RAGGED)
    first, *others = (simulate_quantise(q, k, v, hadamard=True, smooth_k=True, seed=seed) for seed in range(4))
    for other in others:
        for a, b in zip(first, other):
            assert np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize(
    "changes", [{}, {"hadamard": True}, {"smooth_k": True}, {"hadamard": True, "smooth_k": True, "mask": "causal"}], ids=str
)
def test_quantise_and_attend_is_as_exact_as_its_baseline(changes: dict[str, Any]) -> None:
    attention, schedule = pair(**changes)
    for problem in (Problem(2, 130, 203, 4, 2), Problem(1, 65, 0, 2, 1), Problem(1, 70, 33, 2, 2)):
        q, k, v = inputs(64, "bf16", problem)
        out, lse = fagen.simulate(attention, schedule, q, k, v)
        assert out.dtype == BF16
        verdict = check(attention, q, k, v, out, lse, schedule=schedule)
        assert verdict.passed, verdict.reason


def test_random_schedules_that_quantise() -> None:
    """Twelve legal ones for e4m3, on 16-bit tensors that the plan quantises, at the edges of their tiles."""
    done = 0
    for number in itertools.count():
        rng = random.Random(f"quantise/{number}")
        attention, schedule = legal_pair(rng)
        if attention.dtype != "e4m3" or attention.scale not in (None, 0.1):
            continue
        attention = attention.replace(dtype=rng.choice(("bf16", "fp16")))
        schedule = schedule.replace(precision="e4m3", hadamard=rng.random() < 0.5, smooth_k=rng.random() < 0.5)
        if not is_legal((attention, schedule)):
            continue
        problem = Problem(1, schedule.tile_q + rng.choice((-1, 0, 1)), min(2 * schedule.tile_kv + rng.choice((-1, 1)), 400), 2, 1)
        q, k, v = make_inputs(attention, problem, seed=number)
        out, lse = fagen.simulate(attention, schedule, q, k, v, seed=number)
        verdict = check(attention, q, k, v, out, lse, schedule=schedule)
        assert verdict.passed, f"{attention}\n{schedule}\n{problem}: {verdict.reason}"
        done += 1
        if done == 12:
            return


def test_the_plan_does_what_its_parts_do() -> None:
    """Quantising with `simulate_quantise` and attending to the e4m3 tensors gives the same bits."""
    attention, schedule = pair(hadamard=True)
    q, k, v = inputs(64, "bf16", RAGGED)
    out, lse = fagen.simulate(attention, schedule, q, k, v)
    kept = simulate_quantise(q, k, v, hadamard=True)
    inner = fagen.load(PAPER_FP8, head_dim=64)
    scales = {n: getattr(kept, n) for n in ("q_descale", "k_descale", "v_descale")}
    again, same = fagen.simulate(*inner, kept.q, kept.k, kept.v, **scales)
    assert np.array_equal(out.view(np.uint16), again.view(np.uint16)) and np.array_equal(lse, same)


def test_smoothing_is_exact_for_out_and_lse() -> None:
    """With a mean far larger than the rest, e4m3 without smoothing loses the scores; with it, out and lse stay near."""
    q, k, v = make_inputs(fagen.Attention(head_dim=64), Problem(1, 64, 128, 1, 1), seed=3)
    k = (k.astype(np.float32) * 0.25 + 40.0 * np.sign(np.arange(64) - 31.5)).astype(BF16)
    errors = []
    for smooth in (False, True):
        attention, schedule = pair(smooth_k=smooth)
        exact, exact_lse = fagen.reference(attention, q, k, v)
        out, lse = fagen.simulate(attention, schedule, q, k, v)
        errors.append((np.abs(out.astype(np.float64) - exact).max(), np.abs(lse - exact_lse).max()))
    (plain, plain_lse), (smoothed, smoothed_lse) = errors
    assert smoothed < plain / 4 and smoothed_lse < plain_lse / 4


def test_rotation_spreads_outliers() -> None:
    """A few large elements, as in the FlashAttention-3 paper's inputs."""
    rng = np.random.default_rng(0)
    shape = (1, 256, 2, 64)
    q, k, v = (rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001) for _ in range(3))
    q, k, v = (x.astype(BF16) for x in (q, k, v))
    rmse = []
    for hadamard in (False, True):
        attention, schedule = pair(hadamard=hadamard)
        out, _ = fagen.simulate(attention, schedule, q, k, v)
        rmse.append(float(np.sqrt(((out.astype(np.float64) - fagen.reference(attention, q, k, v)[0]) ** 2).mean())))
    assert rmse[1] < 0.8 * rmse[0], rmse


def test_signs_in_the_source_are_those_of_the_rotation() -> None:
    for head_dim in (64, 128, 256):
        text = emit(plan_of(head_dim, "bf16", checked_options("head", True, False, None, None, None))).text
        (words,) = re.findall(r"FLIPS\[\d+\] = \{ (.*?) \}", text)
        bits = [int(w, 16) >> i & 1 for w in words.split(", ") for i in range(16)]
        assert bits == [int(s < 0) for s in signs(head_dim)]


# edge values: case Q04 ----------------------------------------------------------------------------------------------------


def blocks(value: float, head_dim: int = 64) -> tuple[np.ndarray, ...]:
    return tuple(np.full((1, 32, 1, head_dim), value, np.float32).astype(BF16) for _ in range(3))


@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_q04_zeros(granularity: str, hadamard: bool) -> None:
    tiles = {"tile_q": 32, "tile_kv": 32} if granularity == "block" else {}
    got = simulate_quantise(*blocks(0.0), granularity=granularity, hadamard=hadamard, **tiles)
    for x, scale in zip(got[:3], got[3:6]):
        assert not x.astype(np.float32).any() and np.isfinite(scale).all() and (scale > 0).all()


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_q04_zero_keys_and_queries_give_the_mean_of_v(mask: str) -> None:
    """Also where a mask puts −∞ beside a vanishing scale."""
    attention, schedule = pair(mask=mask)
    v = np.random.default_rng(0).standard_normal((1, 90, 1, 64)).astype(BF16)
    q, k = np.zeros((1, 70, 2, 64), BF16), np.zeros((1, 90, 1, 64), BF16)
    out, _ = fagen.simulate(attention, schedule, q, k, v)
    exact, _ = fagen.reference(attention, q, k, v)
    assert np.abs(out.astype(np.float64) - exact).max() < 0.03


@pytest.mark.parametrize(("mask", "precision"), [("full", "e4m3"), ("full", "int8"), ("causal", "e4m3")])
def test_smoothing_shifts_no_row_that_sees_no_key(mask: str, precision: str) -> None:
    """NaN in its q makes the shift NaN, but lse of such a row is −∞ whatever q is."""
    attention, schedule = pair(mask=mask, smooth_k=True, precision=precision, scale_granularity="block")
    q, k = (np.random.default_rng(n).standard_normal((1, n, 2, 64)).astype(BF16) for n in (260, 0 if mask == "full" else 90))
    q[0, 5, 0, 3] = np.nan
    out, lse = fagen.simulate(attention, schedule, q, k, k)
    assert (lse[0, :, :100] == -np.inf).all() and not out[0, :100].astype(np.float32).any()


@pytest.mark.parametrize("precision", ["e4m3", "int8"])
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_joined_tiles_without_keys(granularity: str, precision: str) -> None:
    joined = {"tile_kv": 64, "reference": "stale", "fuse_tiles": True, "scale_granularity": granularity, "precision": precision}
    attention, schedule = fagen.load(PAPER_FP8, dtype="bf16", **joined)
    q, k = np.ones((1, 70, 2, 128), BF16), np.ones((1, 0, 1, 128), BF16)
    out, lse = fagen.simulate(attention, schedule, q, k, k)
    assert not out.astype(np.float32).any() and (lse == -np.inf).all()


def test_q04_values_past_the_range_saturate_and_nan_stays() -> None:
    """The largest finite value has code 448; infinities are ±448, NaN is NaN, and neither moves the scale."""
    q, k, v = (np.random.default_rng(i).standard_normal((1, 32, 1, 64)).astype(BF16) for i in range(3))
    v[0, 3, 0, :4] = [np.inf, -np.inf, np.nan, 2.0**6]
    got = simulate_quantise(q, k, v)
    assert got.v_descale[0, 0] == np.float32(64) / np.float32(448)
    assert got.v[0, 3, 0, :2].astype(np.float32).tolist() == [448, -448]
    assert np.isnan(got.v[0, 3, 0, 2].astype(np.float32)) and float(got.v[0, 3, 0, 3]) == 448
    assert np.isnan(got.v.astype(np.float32)).sum() == 1


def test_q04_a_block_of_tiny_values_keeps_them() -> None:
    got = simulate_quantise(*blocks(1e-30), granularity="block", tile_q=32, tile_kv=32)
    value = got.v.astype(np.float32) * got.v_descale.reshape(1, 1, 1, 1)
    assert np.abs(value / np.float32(BF16.type(1e-30)) - 1).max() <= 0.0625
    assert LEAST_AMAX == qs.LEAST_AMAX


def test_q04_an_outlier_costs_its_own_head_only() -> None:
    """Elements of the other heads are off by half a step of e4m3 in its normal range at most."""
    q, k, v = (np.random.default_rng(i).standard_normal((1, 64, 2, 64)).astype(BF16) for i in range(3))
    v[0, 0, 0, 0] = 1e4
    per_head, per_tensor = (simulate_quantise(q, k, v, granularity=g) for g in ("head", "tensor"))
    exact = v[:, :, 1].astype(np.float32)
    scaled = per_head.v[:, :, 1].astype(np.float32) * per_head.v_descale[0, 1]
    normal = np.abs(exact) / per_head.v_descale[0, 1] >= 2.0**-6
    assert (np.abs(scaled - exact)[normal] / np.abs(exact)[normal]).max() <= 0.0625
    lost = per_tensor.v[:, :, 1].astype(np.float32) * per_tensor.v_descale[0]
    assert (np.abs(lost - exact)[normal] / np.abs(exact)[normal]).max() > 0.5


def test_a_group_shares_qs_scale() -> None:
    """Q03: descales (batch, KV heads), also of q; each (batch, KV head) its own."""
    q, k, v = inputs(64, "bf16", Problem(3, 40, 50, 4, 2))
    q = (q.astype(np.float32) * np.arange(1, 5)[None, None, :, None]).astype(BF16)
    got = simulate_quantise(q, k, v)
    largest = np.abs(q.astype(np.float32)).max(axis=(1, 3)).reshape(3, 2, 2).max(axis=2)
    np.testing.assert_array_equal(got.q_descale, largest / np.float32(448))
    assert len(np.unique(got.q_descale)) == 6


# programs -----------------------------------------------------------------------------------------------------------------


def test_the_attention_kernel_is_that_of_e4m3_tensors() -> None:
    """Only where its inputs lie, and a least scale, differ."""
    plan, inner = assemble(*pair()), assemble(*fagen.load(PAPER_FP8, head_dim=64))
    (kernel,), (own,) = [k for k in plan.kernels if k.name == "attention"], inner.kernels
    assert [s.kind for r in kernel.roles for s in walk(r.body)] == [s.kind for r in own.roles for s in walk(r.body)]
    assert {m.tensor for m in kernel.maps} == {"q_e4m3", "k_e4m3", "v_e4m3"}
    assert (kernel.smem, kernel.mbars, kernel.grid) == (own.smem, own.mbars, own.grid)


@pytest.mark.parametrize(
    "changes, names",
    [
        ({}, "measure scales quantise attention"),
        ({"hadamard": True}, "measure scales quantise attention"),
        ({"smooth_k": True}, "measure mean scales quantise attention lse_shift"),
    ],
    ids=str,
)
def test_the_kernels_of_a_plan(changes: dict[str, Any], names: str) -> None:
    plan = fagen.plan(*pair(**changes))
    assert [k.name for k in plan.kernels] == names.split()
    assert [k.name for k in plan.part("quantise").kernels] == names.split("attention")[0].split()
    assert "attention" in plan.part("attend").kernels[0].name


def test_blocks_are_read_once() -> None:
    """Everything else twice; a smoothed k is read for its mean too."""
    p = Problem(1, 256, 512, 4, 2)
    q, k = 256 * 4 * 64, 512 * 2 * 64
    for granularity, smooth, read in (("head", False, 2 * (q + 2 * k)), ("block", False, q + 2 * k), ("block", True, q + 3 * k)):
        tiles = (64, 64) if granularity == "block" else (None, None)
        plan = plan_of(64, "bf16", checked_options(granularity, True, smooth, *tiles, None))
        loads = [
            s.src
            for kernel in plan.kernels
            for r in kernel.roles
            for s in walk(r.body)
            if isinstance(s, (qs.LoadRows, qs.StageRows))
        ]
        assert sum({"q": q}.get(t, k) for t in loads) == read
    assert moved_bytes(fagen.plan(*pair()), p) == 2 * 2 * (q + 2 * k) + q + 2 * k


@each_way
def test_every_mutant_is_flagged_or_explained(way: dict[str, Any]) -> None:
    plan = plan_of(
        64,
        "bf16",
        checked_options(way["granularity"], way["hadamard"], way["smooth_k"], *(way.get(n) for n in ("tile_q", "tile_kv")), None),
    )
    for kernel in plan.kernels:
        report = run_mutants(kernel, plan.attention, plan.schedule)
        assert not report.survivors, [m.description for m in report.survivors]
        assert report.flagged > 0 or not any(isinstance(s, CtaSync) for r in kernel.roles for s in walk(r.body))


def test_a_missing_barrier_is_found_by_the_simulator_too() -> None:
    """Without the CTA barrier a warp may take maxima that are not there: NaN, for some interleaving."""
    from dataclasses import replace

    from fagen.oracle.simulator import simulate_outputs

    plan = plan_of(64, "bf16", checked_options("head", False, False, None, None, None))

    def without(body: Any) -> Any:
        from fagen.plan.steps import bodies

        kept = [s for s in body if not isinstance(s, CtaSync)]
        return tuple(replace(s, **{f: without(b) for f, b in bodies(s)}) for s in kept)

    kernels = tuple(replace(k, roles=tuple(replace(r, body=without(r.body)) for r in k.roles)) for k in plan.kernels)
    broken = replace(plan, kernels=kernels)
    q, k, v = inputs(64, "bf16", RAGGED)
    found = [simulate_outputs(broken, q, k, v, seed=seed)[1] for seed in range(3)]
    assert any(np.isnan(spaces["q_descale"]).any() or np.isnan(spaces["q_e4m3"]).any() for spaces in found)


# machine code -------------------------------------------------------------------------------------------------------------


@cache
def built(head_dim: int, dtype: str, way: int) -> Any:
    w = WAYS[way]
    tiles = {"tile_q": 128, "tile_kv": 96 if head_dim == 256 else 224} if w["granularity"] == "block" else {}
    options = checked_options(w["granularity"], w["hadamard"], w["smooth_k"], tiles.get("tile_q"), tiles.get("tile_kv"), None)
    plan = plan_of(head_dim, dtype, options)
    return build(plan, emit(plan))  # raises for a spill, or counts that are not the program's


COMPILED = [(64, "bf16", 3), (128, "fp16", 6), (128, "bf16", 7), (128, "bf16", 10), (256, "bf16", 11)]


@pytest.mark.skipif(sass.nvdisasm() is None, reason=f"no nvdisasm; {sass.INSTALL}")
@pytest.mark.parametrize("head_dim, dtype, way", COMPILED, ids=lambda x: str(x))
def test_rows_move_in_16_byte_accesses(head_dim: int, dtype: str, way: int, tmp_path: Any) -> None:
    """Every load of the tensors and every store of codes, without a spill."""
    kernel = built(head_dim, dtype, way)
    cubin = tmp_path / "k.cubin"
    cubin.write_bytes(kernel.cubin)
    text = subprocess.run([sass.nvdisasm(), str(cubin)], capture_output=True, text=True, check=True).stdout
    code = dict(re.findall(r"\.text\.(\w+):(.*?)(?=\n\s*\.section|\Z)", text, re.DOTALL))
    for k in kernel.plan.kernels:
        steps = [s for r in k.roles for s in walk(r.body)]
        blocks = {f.name: f.blocks for f in k.roles[0].frags}
        stored = [blocks.get(s.x, 1) if isinstance(s.x, str) else 1 for s in steps if isinstance(s, qs.QuantiseRows)]
        assert len(re.findall(r"\bSTG\.E\.128\b", code[k.name])) == sum(stored)
        staged = re.findall(r"\bLDGSTS\S*", code[k.name])
        assert all(".128" in op for op in staged) and bool(staged) == any(isinstance(s, qs.StageRows) for s in steps)
        if any(isinstance(s, qs.LoadRows) for s in steps):
            assert not re.findall(r"\bLDG\.E\.(?:U16|S16|U8|64)\b", code[k.name])
    for report in kernel.report.kernels:
        assert report.registers <= 65536 // (kernel.plan.kernels[0].threads)


def test_streaming_kernels_fit_an_sm_several_times() -> None:
    """Bytes in flight: at least two CTAs of eight warps, each lane with 128 bytes on their way."""
    for way, least in ((6, 3), (7, 2)):
        for report in built(128, "bf16" if way != 6 else "fp16", way).report.kernels:
            if report.name in ("measure", "quantise"):
                assert 65536 // (256 * -(-report.registers // 8) * 8) >= least, (way, report.name, report.registers)


# calls --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, name, said",
    [
        ({"granularity": "row"}, "granularity", "'row'"),
        ({"hadamard": 1}, "hadamard", "int"),
        ({"smooth_k": None}, "smooth_k", "NoneType"),
        ({"tile_q": 64}, "tile_q", "rows of a block"),
        ({"granularity": "block", "tile_q": 64}, "tile_kv", "multiple of 16"),
        ({"granularity": "block", "tile_q": 40, "tile_kv": 64}, "tile_q", "40"),
        ({"scale": 0.5}, "scale", "smooth_k"),
        ({"smooth_k": True, "scale": -1.0}, "scale", "-1.0"),
    ],
    ids=str,
)
def test_options_are_refused_by_name(changes: dict[str, Any], name: str, said: str) -> None:
    with pytest.raises(InputError) as e:
        simulate_quantise(*inputs(64, "bf16", RAGGED), **changes)
    assert e.value.argument == name and said in str(e.value)


def test_tensors_are_refused_by_name() -> None:
    q, k, v = inputs(64, "bf16", RAGGED)
    for args, name in (
        ((q.astype(np.float32), k, v), "q"),
        ((q, k[..., :32], v), "k"),
        ((q, k.astype(np.float16), v), "k"),
        ((q[0], k, v), "q"),
    ):
        with pytest.raises(InputError) as e:
            simulate_quantise(*args)
        assert e.value.argument == name


def test_descales_of_16_bit_tensors_are_refused() -> None:
    attention, schedule = pair()
    with pytest.raises(InputError, match="q_descale"):
        fagen.simulate(attention, schedule, *inputs(64, "bf16", RAGGED), q_descale=2.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    device = install(monkeypatch)
    monkeypatch.setattr(MODULE, "workspaces", sys.modules["fagen.launch"].workspaces)
    return device


def launched(fake: FakeCuda, plan: Plan, call: Any) -> list[Any]:
    """(tensor maps, Params) of each kernel of the plan, in the order of the launches."""
    seen: list[Any] = []

    def kernel(params: int) -> None:
        maps, p = read_arguments(plan.kernels[len(seen)], params)
        seen.append((maps, {n: getattr(p, n) for n, _ in p._fields_}))

    fake.kernel = kernel
    call()
    assert len(seen) == len(plan.kernels)
    return seen


@pytest.mark.parametrize("changes", [{}, {"smooth_k": True}], ids=str)
def test_kernels_hand_on_their_workspaces(changes: dict[str, Any], fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch)
    plan = assemble(*pair(**changes))
    q, k, v = (Tensor(x) for x in inputs(64, "bf16", RAGGED))
    calls = launched(fake, plan, lambda: Kernel(plan, "", b"", None)(q, k, v))
    of = dict(zip((k.name for k in plan.kernels), calls))
    (maps, attention), (_, quantise) = of["attention"], of["quantise"]
    for t, rows, heads in (("q", 150, 4), ("k", 203, 2), ("v", 203, 2)):
        address, *numbers = maps[f"{t}_e4m3"]
        assert address == quantise[f"{t}_e4m3"]
        assert numbers[:9] == [64, rows, 1, heads, 2, 64, 64, rows * 64, heads * rows * 64]
        scales = of["scales"][1]
        assert attention[f"{t}_descale"] == scales[f"{t}_descale"] != scales[f"{t}_inverse"] == quantise[f"{t}_inverse"]
        assert (attention[f"{t}_descale_sb"], attention[f"{t}_descale_sh"], attention[f"{t}_descale_value"]) == (2, 1, 1.0)
        assert quantise[t] == of["measure"][1][t] and quantise[f"{t}_ss"] == heads * 64
    addresses = [quantise[f"{t}_e4m3"] for t in "qkv"]
    assert len(set(addresses)) == 3
    if changes:
        assert of["lse_shift"][1]["lse_shifts"] == quantise["lse_shifts"] and of["lse_shift"][1]["elements"] == 2 * 4 * 150


def test_quantise_allocates_and_launches_on_the_callers_stream(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = fake_torch(monkeypatch)
    made: list[tuple[Any, str]] = []

    def empty(shape: Any, dtype: Any, device: Any) -> Tensor:
        made.append((shape, dtype.name))
        return Tensor(np.zeros(shape, {"float8_e4m3fn": E4M3, "float32": np.float32}[dtype.name]), device)

    torch.empty = empty
    monkeypatch.setattr(MODULE, "build", lambda plan, source: type("B", (), {"source": source, "cubin": b"", "report": None})())
    monkeypatch.setattr(MODULE, "_kernels", {})
    q, k, v = (Tensor(x) for x in inputs(64, "bf16", RAGGED))
    got = fagen.quantise(q, k, v, granularity="block", tile_q=64, tile_kv=96, hadamard=True)
    assert isinstance(got, Quantised) and got.lse_shift is None
    assert made == [
        ((2, 150, 4, 64), "float8_e4m3fn"),
        ((2, 203, 2, 64), "float8_e4m3fn"),
        ((2, 203, 2, 64), "float8_e4m3fn"),
        ((2, 4, 3), "float32"),
        ((2, 2, 3), "float32"),
        ((2, 2, 3), "float32"),
    ]
    assert [x.stream for x in fake.launches] == [0x70]
    before = len(fake.calls)
    fagen.quantise(q, k, v, granularity="block", tile_q=64, tile_kv=96, hadamard=True)
    assert "cuModuleLoadData" not in fake.calls[before:] and len(fake.launches) == 2
    kernel = next(iter(MODULE._kernels.values()))
    assert isinstance(kernel, QuantiseKernel)
    seen = launched(fake, kernel.plan, lambda: fagen.quantise(q, k, v, granularity="block", tile_q=64, tile_kv=96, hadamard=True))
    ((_, p),) = seen
    assert p["q"] == q.data_ptr() and p["q_e4m3_ss"] == 4 * 64 and p["q_e4m3_sh"] == 64 and p["q_e4m3_sb"] == 150 * 4 * 64


def test_quantise_of_numpy_goes_to_the_device_and_back(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "build", lambda plan, source: type("B", (), {"source": source, "cubin": b"", "report": None})())
    monkeypatch.setattr(MODULE, "_kernels", {})
    q, k, v = inputs(64, "bf16", RAGGED)
    got = fagen.quantise(q, k, v, smooth_k=True)
    assert got.q.shape == q.shape and got.q.dtype == E4M3 and got.k_descale.shape == (2, 2) and got.lse_shift.shape == (2, 4, 150)
    assert len(fake.launches) == 4
    empty = fagen.quantise(q[:0], k[:0], v[:0])
    assert empty.q.shape == (0, 150, 4, 64) and len(fake.launches) == 4


def test_quantise_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen import driver

    def no_gpu() -> Any:
        raise LaunchError("no GPU: nothing here")

    monkeypatch.setattr(driver, "current_device", no_gpu)
    with pytest.raises(LaunchError, match="no GPU"):
        fagen.quantise(*inputs(64, "bf16", RAGGED))


def test_the_yardstick_quantises_as_the_schedule_says() -> None:
    assert quantiser_of(pair()[1]) == Quantiser(granularity="head")
    assert quantiser_of(pair(hadamard=True, smooth_k=True)[1]) == Quantiser(granularity="head", hadamard=True, smooth_k=True)
    assert quantiser_of(fagen.load(PAPER_FP8)[1]) is None
    assert ml_dtypes.finfo(E4M3).max == 448
