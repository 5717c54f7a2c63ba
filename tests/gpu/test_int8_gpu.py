"""Scores of 8-bit integers on a device: the check grid, the quantisers' bits, what integers cannot hold, calls through torch.

Kernels come from FAGEN_TEST_KERNELS (`PYTHONPATH=tests/gpu python -m test_int8_gpu DIR` builds them) where this machine should not compile; those of
`fagen.quantise` and `fagen.attention` are always compiled here.
"""

from __future__ import annotations

import itertools
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from grid import passes_the_grid, select_fp8

import fagen
from fagen import tuned
from fagen.cli import common
from fagen.compile import Built, write_built
from fagen.launch import Kernel
from fagen.oracle import DTYPES, CheckProblem, check, make_case, make_inputs
from fagen.plan.kernel import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
FOLDER = os.environ.get("FAGEN_TEST_KERNELS")
BF16 = DTYPES["bf16"]
STALE: dict[str, Any] = {"reference": "stale", "overlap": "within"}
RUNNING: dict[str, Any] = {"reference": "running", "overlap": "both", "tile_q": 128, "consumers": 2, "stages": 2}
GRID: list[dict[str, Any]] = [
    {"mask": mask, **changes}
    for mask in ("full", "causal")
    for changes in (
        *({"dtype": "int8", "head_dim": d} for d in (64, 128, 256)),
        {"dtype": "int8", "head_dim": 64, "tile_q": 192, "consumers": 3, "tile_kv": 96, "stages": 3, **STALE},
        {"dtype": "int8", "tile_q": 128, "consumers": 2, "tile_kv": 128, **STALE, "fuse_tiles": True},
        {"dtype": "int8", "scale_granularity": "block", "tile_kv": 96, "promote_every": 2},
        {"dtype": "int8", "v_transposed": True, "out_dtype": "fp16"},
        {"dtype": "int8", "overlap": "none", "tile_kv": 64},
        *({"dtype": "int8", "v_dtype": "bf16", "head_dim": d} for d in (64, 128, 256)),
        {"dtype": "int8", "v_dtype": "fp16", "out_dtype": "fp16", **RUNNING, "tile_kv": 160},
        {"dtype": "int8", "v_dtype": "bf16", **RUNNING, "tile_kv": 128, "overlap": "none", "scale_granularity": "tensor"},
        {"dtype": "int8", "v_dtype": "bf16", **RUNNING, **STALE, "tile_kv": 128, "fuse_tiles": True},
        {"dtype": "int8", "v_dtype": "bf16", **RUNNING, **STALE, "tile_kv": 96, "scale_granularity": "block", "stages": 3},
        {"dtype": "int8", "v_dtype": "bf16", **RUNNING, "roles": "uniform", "overlap": "within", "stages": 1, "tile_kv": 64},
        {"dtype": "bf16", "precision": "int8_qk", "hadamard": True},
        {
            "dtype": "fp16",
            "precision": "int8_qk",
            "hadamard": True,
            "smooth_k": True,
            "head_dim": 64,
            "scale_granularity": "block",
            "tile_kv": 48,
        },
        {"dtype": "bf16", "precision": "int8"},
        {"dtype": "fp16", "precision": "int8", "hadamard": True, "head_dim": 64},
        {"dtype": "bf16", "precision": "int8", "hadamard": True, "smooth_k": True, "head_dim": 256},
        {"dtype": "bf16", "precision": "int8", "hadamard": True, "scale_granularity": "block", "tile_kv": 192},
    )
]


@cache
def _built(changes: tuple[tuple[str, Any], ...]) -> Built:
    return common.built(select_fp8(dict(changes)), folder=FOLDER)


def built(changes: dict[str, Any]) -> Built:
    return _built(tuple(changes.items()))


def make(changes: dict[str, Any]) -> Kernel:
    b = built(changes)
    return Kernel(b.plan, b.source.text, b.cubin, b.report)


# the grid -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", GRID, ids=lambda c: " ".join(map(str, c.values())))
def test_the_grid_passes(changes: dict[str, Any], tmp_path: Path) -> None:
    """Two launches of each case give the same bits."""
    b = built(changes)
    passes_the_grid(b, 2, tmp_path)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_largest_integers_lose_nothing(head_dim: int) -> None:
    """Scores of head_dim · 127² and a little less, told apart by single steps."""
    kernel = make({"mask": "full", "dtype": "int8", "head_dim": head_dim})
    q = np.full((1, 64, 1, head_dim), 127, np.int8)
    k = np.full((1, 64, 1, head_dim), 127, np.int8)
    k[0, np.arange(64), 0, 0] -= np.arange(64, dtype=np.int8)
    v = np.ones((1, 64, 1, head_dim), ml_dtypes.float8_e4m3fn)
    _, lse = kernel(q, k, v, q_descale=1 / (127 * kernel.plan.attention.softmax_scale))
    want = 127.0 * head_dim + np.log(np.exp(-np.arange(64.0)).sum())
    np.testing.assert_allclose(lse, want, rtol=2e-6)


# quantising ---------------------------------------------------------------------------------------------------------------


def inputs(head_dim: int, dtype: str, problem: Problem) -> tuple[np.ndarray, ...]:
    q, k, v = make_inputs(fagen.Attention(head_dim=head_dim, dtype=dtype), problem, seed=1)
    mean = 3 * np.random.default_rng(2).standard_normal((1, 1, problem.hkv, head_dim), np.float32)
    return q, (k.astype(np.float32) + mean).astype(k.dtype), v


WAYS = list(itertools.product(("tensor", "head", "block"), (False, True), (False, True)))


def way_of(granularity: str, hadamard: bool, smooth_k: bool) -> dict[str, Any]:
    tiles = {"tile_q": 128, "tile_kv": 96} if granularity == "block" else {}
    return {"precision": "int8", "granularity": granularity, "hadamard": hadamard, "smooth_k": smooth_k, **tiles}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("head_dim, dtype", [(64, "fp16"), (128, "bf16"), (256, "bf16")])
def test_the_simulators_bits(head_dim: int, dtype: str, way: Any) -> None:
    """But for a smoothed k, whose mean is summed in another order: a few codes may be the neighbours."""
    for problem in (Problem(2, 300, 333, 4, 2), Problem(1, 5, 0, 2, 1), Problem(1, 1100, 2100, 3, 1)):
        q, k, v = inputs(head_dim, dtype, problem)
        got, want = fagen.quantise(q, k, v, **way_of(*way)), fagen.simulate_quantise(q, k, v, **way_of(*way))
        for name, a, b in zip(got._fields, got, want):
            if a is None:
                assert b is None
                continue
            assert a.shape == b.shape and a.dtype == b.dtype, name
            if name == "lse_shift":
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
            elif way[2] and name == "k":
                assert (a != b).mean() < 1e-3 if a.size else True
            elif way[2] and name == "k_descale":
                np.testing.assert_allclose(a, b, rtol=1e-6)
            else:
                assert np.array_equal(a.view(np.uint8), b.view(np.uint8)), name


def test_halves_go_to_even() -> None:
    """With scale 1: every half from −126.5 to 126.5, whole numbers, and what lies just beside a half in bf16."""
    halves = np.arange(-126.5, 127)
    values = np.concatenate([halves, np.arange(-127.0, 128), [0.498046875, 0.50390625, 2.484375, 2.515625]]).astype(np.float32)
    assert np.array_equal(values.astype(BF16).astype(np.float32), values), "each is a bf16 number"
    q = np.zeros((1, 16, 1, 64), np.float32)
    q.reshape(-1)[: values.size] = values
    got = fagen.quantise(*(q.astype(BF16),) * 3, precision="int8")
    assert got.q_descale.item() == 1 and np.array_equal(got.q, np.rint(q).astype(np.int8))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    "way", [("head", False, False), ("head", True, True), ("block", False, True), ("tensor", True, False)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_nan_and_infinities_show_where_the_simulator_has_them(value: float, way: Any, causal: bool) -> None:
    """Codes, descales, and the same rows of out and lse."""
    q, k, v = inputs(64, "bf16", Problem(2, 300, 300, 4, 2))
    q[1, 150, 2, 5] = value
    k[0, 70, 1, 63] = value
    got, want = fagen.quantise(q, k, v, **way_of(*way)), fagen.simulate_quantise(q, k, v, **way_of(*way))
    for name in ("q_descale", "k_descale"):
        a, b = getattr(got, name), getattr(want, name)
        assert np.array_equal(np.isnan(a), np.isnan(b)) and np.isnan(a).any(), name
    granularity, hadamard, smooth_k = way
    options: dict[str, Any] = {"scale_granularity": granularity, "hadamard": hadamard, "smooth_k": smooth_k}
    attention, schedule = fagen.load(
        "fa3_fp8", head_dim=64, dtype="bf16", precision="int8", mask="causal" if causal else "full", **options
    )
    out, lse = fagen.compile(attention, schedule)(q, k, v)
    _, rows = fagen.simulate(attention, schedule, q, k, v)
    assert np.array_equal(np.isnan(lse), np.isnan(rows)) and np.isnan(lse[1, 2, 150])
    assert np.array_equal(np.isnan(out.astype(np.float32)).all(axis=3).transpose(0, 2, 1), np.isnan(lse))
    assert np.isnan(lse[0, 2:, 70:]).all()


# calls --------------------------------------------------------------------------------------------------------------------


def attended(q: Any, k: Any, v: Any, precision: str, causal: bool, device: Any) -> tuple[Any, Any]:
    """out and lse of one call on torch's 16-bit tensors (2 × 300 and 333 rows, 4 and 2 heads of 128), held to float64."""
    out, lse = fagen.attention(q, k, v, causal=causal, precision=precision, return_lse=True)
    assert out.dtype == q.dtype
    name = {"bfloat16": "bf16", "float16": "fp16"}[str(q.dtype).removeprefix("torch.")]
    attention = fagen.Attention(head_dim=128, dtype=name, mask="causal" if causal else "full")
    schedule = tuned.choose_quantised(attention, Problem(2, 300, 333, 4, 2), device, precision=precision).schedule
    q, k, v, o = (x.float().cpu().numpy().astype(DTYPES[name]) for x in (q, k, v, out))
    verdict = check(attention, q, k, v, o, lse.cpu().numpy(), schedule=schedule)
    assert verdict.passed, verdict.reason
    return out, lse


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_call(torch: Any, device: Any, dtype: str, causal: bool) -> None:
    """16-bit tensors; then the 8-bit ones that `fagen.quantise` makes of them, which give the same bits."""
    q, k, v = (torch.randn(2, n, h, 128, device="cuda", dtype=getattr(torch, dtype)) for n, h in ((300, 4), (333, 2), (333, 2)))
    out, lse = attended(q, k, v, "int8", causal, device)
    z = fagen.quantise(q, k, v, precision="int8", hadamard=True)
    assert (z.q.dtype, z.k.dtype, z.v.dtype) == (torch.int8, torch.int8, torch.float8_e4m3fn)
    scales = {"q_descale": z.q_descale, "k_descale": z.k_descale, "v_descale": z.v_descale}
    again, again_lse = fagen.attention(z.q, z.k, z.v, out=torch.empty_like(out), causal=causal, return_lse=True, **scales)
    torch.cuda.synchronize()
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_call_with_a_v_of_16_bits(torch: Any, device: Any, dtype: str, causal: bool) -> None:
    """The same of "int8_qk": v, here a strided view, is read where it lies."""
    q, k = (torch.randn(2, n, h, 128, device="cuda", dtype=getattr(torch, dtype)) for n, h in ((300, 4), (333, 2)))
    v = torch.randn(2, 2, 666, 128, device="cuda", dtype=q.dtype)[:, :, ::2].transpose(1, 2)
    out, lse = attended(q, k, v, "int8_qk", causal, device)
    z = fagen.quantise(q, k, v, precision="int8_qk", hadamard=True)
    assert (z.q.dtype, z.k.dtype) == (torch.int8, torch.int8) and z.v is v and z.v_descale is None
    scales = {"q_descale": z.q_descale, "k_descale": z.k_descale}
    for _ in range(2):  # the second one goes the short way
        again, again_lse = fagen.attention(z.q, z.k, v, causal=causal, return_lse=True, **scales)
        torch.cuda.synchronize()
        assert torch.equal(again, out) and torch.equal(again_lse, lse)
    with pytest.raises(fagen.InputError, match=r"^v_descale: given beside a"):
        fagen.attention(z.q, z.k, v, causal=causal, v_descale=1.0, **scales)


def test_numpy_against_float64(device: Any) -> None:
    attention, problem = fagen.Attention(head_dim=128, dtype="int8", mask="causal"), CheckProblem(2, 203, 511, 4, 2, "descaled")
    schedule = tuned.choose(attention, problem, device).schedule
    c = make_case(attention, schedule, problem, seed=5)
    out, lse = fagen.attention(c.q, c.k, c.v, causal=True, return_lse=True, **c.descales)
    verdict = check(attention, c.q, c.k, c.v, out, lse, schedule=schedule, **c.row_descales)
    assert verdict.passed, verdict.reason


def write_all(folder: str) -> None:
    """Every kernel of `GRID`, to carry to the device."""
    for changes in GRID:
        item = select_fp8(changes)
        write_built(common.built(item), folder, item.name)


if __name__ == "__main__":
    write_all(sys.argv[1])
