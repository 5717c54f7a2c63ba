"""The kernels that quantise on a device: the simulator's bits, every code, whole plans on the check grid, graphs, `fagen.attention`, bench.

Kernels of whole plans come from FAGEN_TEST_KERNELS (see `CHANGES` for what to build) where this machine should not compile;
`fagen.quantise` and `fagen.attention` always compile.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid import passes_the_grid, select_fp8

import fagen
from fagen.cli import common
from fagen.compile import Built, write_built
from fagen.explore.bench_result import BenchSpec, CaseSpec, KernelRef
from fagen.explore.bench_watch import run_watched
from fagen.launch import Kernel
from fagen.oracle import DTYPES, cast, check, make_inputs
from fagen.plan.kernel import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
FOLDER = os.environ.get("FAGEN_TEST_KERNELS")
BF16, E4M3 = DTYPES["bf16"], DTYPES["e4m3"]
CHANGES = [
    {"dtype": "bf16"},
    {"dtype": "fp16", "mask": "causal"},
    {"dtype": "bf16", "hadamard": True},
    {"dtype": "bf16", "hadamard": True, "smooth_k": True},
]
"""`fagen build fa3_fp8 --set precision=e4m3 --set dtype=… …`, with head_dim 64, 128 and 256."""


def built(**changes: Any) -> Built:
    return common.built(select_fp8({"precision": "e4m3", **changes}), folder=FOLDER)


def make(**changes: Any) -> Kernel:
    b = built(**{"head_dim": 64, **changes})
    return Kernel(b.plan, b.source.text, b.cubin, b.report)


def inputs(head_dim: int, dtype: str, problem: Problem) -> tuple[np.ndarray, ...]:
    q, k, v = make_inputs(fagen.Attention(head_dim=head_dim, dtype=dtype), problem, seed=1)
    mean = 3 * np.random.default_rng(2).standard_normal((1, 1, problem.hkv, head_dim), np.float32)
    return q, (k.astype(np.float32) + mean).astype(k.dtype), v


# the kernels alone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "granularity, hadamard, smooth_k", itertools.product(("tensor", "head", "block"), (False, True), (False, True))
)
@pytest.mark.parametrize("head_dim, dtype", [(64, "fp16"), (128, "bf16"), (256, "bf16")])
def test_the_simulators_bits(head_dim: int, dtype: str, granularity: str, hadamard: bool, smooth_k: bool) -> None:
    """But for a smoothed k, whose mean is summed in another order: a few codes may be the neighbours."""
    tiles = {"tile_q": 128, "tile_kv": 96} if granularity == "block" else {}
    way: dict[str, Any] = {"granularity": granularity, "hadamard": hadamard, "smooth_k": smooth_k, **tiles}
    for problem in (Problem(2, 300, 333, 4, 2), Problem(1, 5, 0, 2, 1), Problem(1, 1100, 2100, 3, 1)):
        q, k, v = inputs(head_dim, dtype, problem)
        got, want = fagen.quantise(q, k, v, **way), fagen.simulate_quantise(q, k, v, **way)
        for name, a, b in zip(got._fields, got, want):
            if a is None:
                assert b is None
                continue
            assert a.shape == b.shape and a.dtype == b.dtype, name
            if name == "lse_shift":
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
            elif smooth_k and name == "k":
                assert (a.view(np.uint8) != b.view(np.uint8)).mean() < 1e-3 if a.size else True
            elif smooth_k and name == "k_descale":
                np.testing.assert_allclose(a, b, rtol=1e-6)
            else:
                assert np.array_equal(a.view(np.uint8), b.view(np.uint8)), name


def test_q04_every_code_and_every_tie() -> None:
    """All codes of e4m3 and the values half-way between neighbours, with scale 1: rounded to nearest even, as NumPy's twin does."""
    codes = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    finite = np.sort(codes[np.isfinite(codes)])
    values = np.concatenate([codes, (finite[:-1] + finite[1:]) / 2, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    assert np.array_equal(values.astype(BF16).astype(np.float32), values, equal_nan=True), "each is a bf16 number"
    v = np.zeros((1, 16, 1, 64), np.float32)
    v.reshape(-1)[: values.size] = values
    v = v.astype(BF16)
    got = fagen.quantise(v, v, v)
    assert got.v_descale.item() == 1
    want = cast(v.astype(np.float32), "e4m3")
    nan = np.isnan(want.astype(np.float32))
    assert np.array_equal(np.isnan(got.v.astype(np.float32)), nan)
    assert np.array_equal(got.v.view(np.uint8)[~nan], want.view(np.uint8)[~nan])


def test_torch_tensors_of_any_strides_on_their_stream(torch: Any) -> None:
    fused = torch.randn(2, 300, 8, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = fagen.quantise(q, k, v, hadamard=True)
    stream.synchronize()
    same = fagen.quantise(q.contiguous(), k.contiguous(), v.contiguous(), hadamard=True)
    torch.cuda.synchronize()
    for a, b in zip(got[:6], same[:6]):
        assert a.is_cuda and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert got.q.dtype == torch.float8_e4m3fn and got.q.is_contiguous()


# whole plans --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_grid_passes(head_dim: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Three launches of each case give the same bits."""
    b = built(head_dim=head_dim, **changes)
    passes_the_grid(b, 3, tmp_path)


def test_zero_keys_under_a_mask() -> None:
    kernel = make(mask="causal", dtype="bf16")
    v = np.random.default_rng(0).standard_normal((1, 90, 1, 64)).astype(BF16)
    q, k = np.zeros((1, 70, 2, 64), BF16), np.zeros((1, 90, 1, 64), BF16)
    out, _ = kernel(q, k, v)
    exact, _ = fagen.reference(kernel.plan.attention, q, k, v)
    assert np.abs(out.astype(np.float64) - exact).max() < 0.03


def test_graphs(torch: Any) -> None:
    """A captured plan with its workspaces, replayed on new inputs in the same places."""
    kernel = make(dtype="bf16", hadamard=True, smooth_k=True)
    q, k, v = (torch.randn(2, n, h, 64, device="cuda", dtype=torch.bfloat16) for n, h in ((300, 4), (333, 2), (333, 2)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out, lse = kernel(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kernel(q, k, v, out=out, lse=lse)
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    want, want_lse = kernel(q, k, v)
    torch.cuda.synchronize()
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_call(torch: Any, dtype: str, causal: bool) -> None:
    shapes = ((300, 4), (333, 2), (333, 2))
    q, k, v = (torch.randn(2, n, h, 128, device="cuda", dtype=getattr(torch, dtype)) for n, h in shapes)
    out, lse = fagen.attention(q, k, v, causal=causal, precision="fp8", return_lse=True)
    assert out.dtype == q.dtype
    arrays = [x.float().cpu().numpy().astype(DTYPES["bf16" if dtype == "bfloat16" else "fp16"]) for x in (q, k, v, out)]
    (kernel,) = {id(x): x for x in fagen.attend._kernels.values() if x.plan.schedule.precision == "e4m3" and x.plan.attention.causal == causal
                 and x.plan.attention.output_dtype == ("bf16" if dtype == "bfloat16" else "fp16")}.values()  # fmt: skip
    a, s = kernel.plan.attention, kernel.plan.schedule
    verdict = check(a, *arrays, lse.cpu().numpy(), schedule=s)
    assert verdict.passed, verdict.reason
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    plain = fagen.attention(q8, k8, v8, causal=causal, precision="fp8")
    assert torch.equal(plain, fagen.attention(q8, k8, v8, causal=causal))


# bench --------------------------------------------------------------------------------------------------------------------


def test_bench_in_parts(torch: Any, tmp_path: Path) -> None:
    b = built(dtype="bf16", hadamard=True, head_dim=128)
    write_built(b, tmp_path, "whole")
    refs = tuple(KernelRef(f"fp8 {part}".strip(), str(tmp_path), "whole", part=part) for part in ("", "quantise", "attend"))
    spec = BenchSpec((CaseSpec(b.plan.attention, Problem(4, 4096, 4096, 16, 16), refs),), (), 6, False, 0)
    (case,) = run_watched(spec).cases
    whole, quantise, attend = (row.burst.ms.median for row in case.rows)
    assert [row.outcome for row in case.rows] == ["timed"] * 3
    assert max(quantise, attend) < whole < 1.15 * (quantise + attend)
    assert case.rows[1].bytes == 5 * 3 * 4 * 4096 * 16 * 128
    assert 0.2 < case.rows[1].burst.copy_share < 1.2
