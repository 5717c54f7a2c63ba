"""fa3_fp8 on a device (the paper's form of it for V given transposed): the check grid, descales as numbers and as arrays of any strides,
CUDA graphs.

Kernels come from FAGEN_TEST_KERNELS (`fagen build fa3_fp8 --variants -o DIR`, and chain/fa3_to_fa3_fp8_1_e4m3 with `--set v_transposed=true`)
where this machine should not compile.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from grid import passes_the_grid, select_fp8

from fagen import InputError
from fagen.cli import common
from fagen.compile import Built
from fagen.launch import Kernel
from fagen.oracle import CheckProblem, check, make_descales, make_inputs, transpose_v
from fagen.plan import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
FOLDER = os.environ.get("FAGEN_TEST_KERNELS")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PROBLEM = Problem(3, 200, 331, 4, 2)


@cache
def built(**changes: Any) -> Built:
    return common.built(select_fp8(changes), folder=FOLDER)


def make(**changes: Any) -> Kernel:
    b = built(**{"head_dim": 64, **changes})
    return Kernel(b.plan, b.source.text, b.cubin, b.report)


# the grid -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("v_transposed", [False, True])
@pytest.mark.parametrize("head_dim, out_dtype", [(64, "bf16"), (128, "bf16"), (256, "bf16"), (64, "fp16")])
def test_the_grid_passes(head_dim: int, out_dtype: str, v_transposed: bool, mask: str, tmp_path: Path) -> None:
    """With descales in every layout; three launches of each case give the same bits."""
    b = built(head_dim=head_dim, out_dtype=out_dtype, v_transposed=v_transposed, mask=mask)
    passes_the_grid(b, 3, tmp_path)


def test_numpy(tmp_path: Path) -> None:
    for v_transposed in (False, True):
        kernel = make(v_transposed=v_transposed)
        q, k, v = make_inputs(kernel.plan.attention, PROBLEM)
        given = np.ascontiguousarray(v.transpose(0, 2, 3, 1)) if v_transposed else v  # rows of 331 bytes: padded on the way
        for descales in ({}, make_descales(PROBLEM), {"q_descale": 0.5, "v_descale": -2}, {"k_descale": 0}):
            out, lse = kernel(q, k, given, **descales)
            verdict = check(kernel.plan.attention, q, k, v, out, lse, schedule=kernel.plan.schedule, **descales)
            assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    "changes",
    [{}, {"mask": "causal"}, {"overlap": "both"}, {"tile_kv": 64, "reference": "stale", "stages": 3}]
    + [{"tile_kv": kv, "reference": "stale", "fuse_tiles": True} for kv in (32, 64, 96, 128)],
    ids=str,
)
def test_q01_a_maximum_that_rises_within_a_row(changes: dict[str, Any]) -> None:
    """By 2.5 log2 e = 3.6 powers of two at key 128: P must still fit e4m3, or the numerator is clipped and the row sum is not.

    Blocks are walked from the last to the first: with the keys turned round the maximum rises, and all weights of a half share one rounding."""
    kernel = make(**{"head_dim": 128, "scale": 2.0**-7, **changes})
    q, k, v = np.ones((1, 1, 6, 128)), np.zeros((1, 256, 1, 128)), np.zeros((1, 256, 1, 128))
    k[0, 128:], v[0, 128:] = 2.5, 1.0
    for order, rtol in ((1, 2**-8), (-1, 2**-5)):
        out, lse = kernel(*(np.ascontiguousarray(x[:, ::order]).astype(E4M3) for x in (q, k, v)))
        np.testing.assert_allclose(out.astype(float), 1 / (1 + np.exp(-2.5)), rtol=rtol)
        np.testing.assert_allclose(lse, 2.5 + np.log(128 * (1 + np.exp(-2.5))), rtol=1e-5)


# torch ----------------------------------------------------------------------------------------------------------------------------


def on_gpu(torch: Any, x: np.ndarray) -> Any:
    """The array with its strides; e4m3 by its bits."""
    owner = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    flat = np.lib.stride_tricks.as_strided(owner, (owner.nbytes // owner.itemsize,), (owner.itemsize,))
    bits = torch.from_numpy(flat.view(np.uint8).copy()).cuda().view(torch.float8_e4m3fn if x.dtype == E4M3 else torch.float32)
    offset = (x.ctypes.data - owner.ctypes.data) // x.itemsize
    return bits.as_strided(x.shape, tuple(s // x.itemsize for s in x.strides), offset)


def on_host(x: Any) -> np.ndarray:
    """float32 as it is, bf16 as ml_dtypes'."""
    values = np.asarray(x.float().cpu().numpy())
    return values if x.dtype.itemsize == 4 else values.astype(ml_dtypes.bfloat16)


def tensors(torch: Any, kernel: Kernel, problem: Problem = PROBLEM) -> tuple[Any, tuple[Any, ...]]:
    q, k, v = make_inputs(kernel.plan.attention, problem)
    given = transpose_v(v) if kernel.plan.schedule.v_transposed else v
    return (q, k, v), tuple(on_gpu(torch, x) for x in (q, k, given))


def same(torch: Any, a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(a, b))


@pytest.mark.parametrize("v_transposed", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "fused", "transposed", "strided_k"])
def test_descales_of_any_strides(torch: Any, layout: Any, v_transposed: bool) -> None:
    kernel = make(v_transposed=v_transposed)
    host, device = tensors(torch, kernel)
    for seed in (0, 1):
        scales = make_descales(PROBLEM, seed=seed, layout=layout)
        given = {n: on_gpu(torch, x) for n, x in scales.items()}
        got = kernel(*device, **given)
        verdict = check(kernel.plan.attention, *host, *(on_host(x) for x in got), schedule=kernel.plan.schedule, **scales)
        assert verdict.passed, verdict.reason
        assert same(torch, got, kernel(*device, **{n: x.contiguous() for n, x in given.items()}))


def test_powers_of_two_are_exact(torch: Any) -> None:
    """v's descale multiplies the output and nothing else; q's and k's are one factor; numbers, expanded and whole arrays agree."""
    kernel = make(mask="causal")
    _, device = tensors(torch, kernel)
    out, lse = kernel(*device)
    assert same(torch, kernel(*device, q_descale=1.0, k_descale=1, v_descale=np.float32(1)), (out, lse))
    doubled, same_lse = kernel(*device, v_descale=2.0)
    assert torch.equal(doubled, out * 2) and torch.equal(same_lse, lse)
    by_q, by_k = kernel(*device, q_descale=4.0), kernel(*device, k_descale=4.0)
    assert same(torch, by_q, by_k) and not torch.equal(by_q[0], out)
    four = torch.full((1, 1), 4.0, device="cuda").expand(3, 2)
    assert same(torch, by_q, kernel(*device, q_descale=four))
    assert same(torch, by_q, kernel(*device, q_descale=torch.full((3, 2), 2.0, device="cuda"), k_descale=2.0))
    assert same(torch, (out, lse), kernel(*device)), "nothing stays"


def test_each_head_has_its_own(torch: Any) -> None:
    kernel = make()
    _, device = tensors(torch, kernel)
    factors = torch.tensor([[2.0, 0.25], [0.5, 8.0], [1.0, 4.0]], device="cuda")
    out, _ = kernel(*device)
    scaled, _ = kernel(*device, v_descale=factors)
    assert torch.equal(scaled.float(), out.float() * factors.repeat_interleave(2, 1)[:, None, :, None])
    sharp, sharp_lse = kernel(*device, k_descale=factors)
    for b in range(3):
        for h in range(2):
            alone = kernel(*(x[b : b + 1] for x in device), k_descale=float(factors[b, h]))
            heads = slice(2 * h, 2 * h + 2)
            assert torch.equal(sharp[b, :, heads], alone[0][0, :, heads]) and torch.equal(sharp_lse[b, heads], alone[1][0, heads])


def test_a_graph_reads_the_arrays_of_the_moment(torch: Any) -> None:
    kernel = make()
    _, device = tensors(torch, kernel)
    scale = torch.ones(3, 2, device="cuda")
    want = [kernel(*device, v_descale=float(x)) for x in (1, 2)]
    kernel(*device, v_descale=scale)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = kernel(*device, v_descale=scale)
    for value, expected in zip((1.0, 2.0), want):
        scale.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert same(torch, (out, lse), expected)


def test_wrong_arguments_are_refused_and_the_context_lives(torch: Any) -> None:
    kernel, turned = make(), make(v_transposed=True)
    _, device = tensors(torch, kernel)
    q, k, v = device
    one = torch.ones(3, 2, device="cuda")
    want = kernel(*device)
    for descales, text in (
        ({"q_descale": one.double()}, "q_descale: is float64; a descale is fp32"),
        ({"k_descale": one.T}, r"k_descale: has shape \(2, 3\); expected \(3, 2\)"),
        ({"v_descale": one.sum()}, r"v_descale: has shape \(\); expected \(3, 2\)"),
        ({"v_descale": one.cpu()}, "v_descale: .*cpu"),
        ({"q_descale": float("nan")}, "q_descale: is nan"),
        ({"q_descale": -1.0}, "q_descale: is -1; a negative descale"),
    ):
        with pytest.raises(InputError, match=text):
            kernel(*device, **descales)
    with pytest.raises(InputError, match=r"v: has shape .*; this kernel needs V transposed"):
        turned(q, k, v)
    with pytest.raises(InputError, match=r"v: has shape .*; this kernel takes V as"):
        kernel(q, k, v.permute(0, 2, 3, 1))
    with pytest.raises(InputError, match="v: is bf16; this kernel reads e4m3"):
        kernel(q, k, v.to(torch.bfloat16))
    assert same(torch, kernel(*device), want)


@pytest.mark.parametrize("layout", ["fused", "transposed", "strided_k"])
def test_views_equal_copies(torch: Any, layout: Any) -> None:
    for v_transposed in (False, True):
        kernel = make(v_transposed=v_transposed)
        q, k, v = make_inputs(kernel.plan.attention, CheckProblem(2, 203, 203, 4, 2), layout=layout)
        views = tuple(on_gpu(torch, x) for x in (q, k, transpose_v(v, layout) if v_transposed else v))
        copies = (
            views[0].contiguous(),
            views[1].contiguous(),
            on_gpu(torch, transpose_v(v)) if v_transposed else views[2].contiguous(),
        )
        want = kernel(*copies)
        for _ in range(2):
            assert same(torch, kernel(*views), want)


def test_the_layout_of_v_changes_rounding_only(torch: Any) -> None:
    """The keys of a product stand in another order."""
    results = []
    for v_transposed in (False, True):
        kernel = make(v_transposed=v_transposed, overlap="both")  # names a knob, so that both are of the paper's form
        _, device = tensors(torch, kernel)
        results.append(kernel(*device))
    (out, lse), (out_t, lse_t) = results
    assert torch.equal(lse, lse_t)
    torch.testing.assert_close(out.float(), out_t.float(), rtol=2**-6, atol=2**-10)
