"""Scales of tensors, heads and blocks, and promotion, on a device: the check grid, arrays of every form, the error that is predicted.

Kernels come from FAGEN_TEST_KERNELS (`PYTHONPATH=tests/gpu python -m test_scales_gpu DIR` builds them) where this machine should not compile.
"""

from __future__ import annotations

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
from fagen import InputError
from fagen.cli import common
from fagen.compile import Built, write_built
from fagen.descales import by_row
from fagen.launch import Kernel
from fagen.oracle import make_descales, make_inputs, reference, simulate
from fagen.plan import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
FOLDER = os.environ.get("FAGEN_TEST_KERNELS")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PROBLEM = Problem(3, 300, 331, 4, 2)

STALE: dict[str, Any] = {"reference": "stale", "overlap": "within"}
THREE: dict[str, Any] = {"tile_q": 192, "consumers": 3, "stages": 3, **STALE}
GRID: list[dict[str, Any]] = [
    {"mask": mask, **changes}
    for mask in ("full", "causal")
    for changes in (
        {"scale_granularity": "tensor", "head_dim": 64},
        {"scale_granularity": "block"},
        {"scale_granularity": "block", "head_dim": 64, "overlap": "none", "promote_every": 3, "tile_kv": 96},
        {"scale_granularity": "block", "tile_kv": 160, **STALE},
        {"scale_granularity": "block", "head_dim": 256, "tile_kv": 64, **STALE},
        {"scale_granularity": "block", "tile_kv": 96, **THREE},
        {"tile_kv": 96, **THREE},
        {"scale_granularity": "block", "promote_every": 1, "tile_kv": 64, **STALE},
        {"promote_every": 2, "tile_kv": 96},
        {"promote_every": 1, "head_dim": 64, "tile_q": 128, "consumers": 2, "tile_kv": 128, "overlap": "pingpong"},
        {"promote_every": 2, "head_dim": 64, "tile_q": 128, "consumers": 2, "tile_kv": 96, "fuse_tiles": True, **STALE},
        {"scale_granularity": "block", "head_dim": 64, "tile_q": 128, "consumers": 2, "tile_kv": 96, "fuse_tiles": True, **STALE},
    )
]
LONG: list[dict[str, Any]] = [
    {"head_dim": 64, "tile_q": 64, "consumers": 1, "tile_kv": 96, "overlap": "within", "out_dtype": "fp16"}
    | ({} if every is None else {"promote_every": every})
    for every in (None, 8, 1)
]
ZEROS: dict[str, Any] = {"mask": "causal", "head_dim": 64, "tile_q": 128, "consumers": 2, "tile_kv": 96}
FORMS: list[dict[str, Any]] = [
    {"scale_granularity": g, "head_dim": 64, "tile_q": 128, "consumers": 2, "tile_kv": 96} for g in ("tensor", "block")
]


@cache
def _built(changes: tuple[tuple[str, Any], ...]) -> Built:
    return common.built(select_fp8(dict(changes)), folder=FOLDER)


def built(changes: dict[str, Any]) -> Built:
    return _built(tuple(changes.items()))


def make(changes: dict[str, Any]) -> Kernel:
    b = built(changes)
    return Kernel(b.plan, b.source.text, b.cubin, b.report)


@pytest.mark.parametrize("changes", GRID, ids=lambda c: " ".join(map(str, c.values())))
def test_the_grid_passes(changes: dict[str, Any], tmp_path: Path) -> None:
    """With random descales, those of v's blocks up to 2^48 apart or 0; two launches of each case give the same bits."""
    b = built(changes)
    passes_the_grid(b, 2, tmp_path)


@pytest.mark.parametrize("changes", LONG, ids=lambda c: f"promote_every={c.get('promote_every')}")
def test_the_predicted_error_of_long_sums(changes: dict[str, Any], record_property: Any) -> None:
    """Values around 1 over 8192 keys, where the tensor core's sums matter most: the simulator's exact sums predict the RMSE to 10 %."""
    kernel = make(changes)
    a, s = kernel.plan.attention, kernel.plan.schedule
    q, k, v = make_inputs(a, Problem(1, 64, 8192, 2, 1), seed=2)
    v = (v.astype(np.float32) * 0.5 + 1).astype(E4M3)
    want, _ = reference(a, q, k, v)

    def rmse(out: Any) -> float:
        return float(np.sqrt(np.mean((out.astype(np.float64) - want) ** 2)))

    measured = rmse(kernel(q, k, v)[0])
    exact, coarse = (rmse(simulate(a, s, q, k, v, exact_sums=x)[0]) for x in (True, False))
    print(f"promote_every={s.promote_every}: measured {measured:.3e}, exact sums {exact:.3e}, coarse sums {coarse:.3e}")
    record_property("rmse", {"measured": measured, "exact": exact, "coarse": coarse})
    assert abs(measured - exact) <= 0.1 * measured


@pytest.mark.parametrize("changes", FORMS, ids=lambda c: c["scale_granularity"])
def test_arrays_in_device_memory(torch: Any, changes: dict[str, Any]) -> None:
    kernel = make(changes)
    a, s = kernel.plan.attention, kernel.plan.schedule
    q, k, v = make_inputs(a, PROBLEM)
    device = [torch.from_numpy(x.view(np.uint8)).cuda().view(torch.float8_e4m3fn) for x in (q, k, v)]
    for seed in (1, 2):
        scales = make_descales(PROBLEM, s, seed=seed)
        out, lse = kernel(*device, **{n: torch.from_numpy(x).cuda() for n, x in scales.items()})
        same, same_lse = kernel(q, k, v, **scales)
        assert np.array_equal(out.float().cpu().numpy(), same.astype(np.float32)) and np.array_equal(lse.cpu().numpy(), same_lse)
        want, want_lse = reference(a, q, k, v, **by_row(s, PROBLEM, scales))
        assert np.sqrt(np.mean((same.astype(float) - want) ** 2)) < 0.05 * np.sqrt(np.mean(want**2))
        np.testing.assert_allclose(same_lse, want_lse, atol=5e-3)
    one = torch.ones(3, 2, device="cuda")
    with pytest.raises(InputError, match="k_descale: has shape"):
        kernel(*device, k_descale=one)


@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
def test_q04_quantised_zeros_attend_to_all_alike(torch: Any, dtype: str, granularity: str) -> None:
    """In two steps: both descales are so small that their product is 0 in float32. It is the product that has a least value, not one of
    them. Arrays on the device nobody checks: a NaN shows there."""
    kernel = make({**ZEROS, "dtype": dtype, "scale_granularity": granularity})
    a, s = kernel.plan.attention, kernel.plan.schedule
    tiles = {"tile_q": s.tile_q, "tile_kv": s.tile_kv} if granularity == "block" else {}
    q, k, v = (torch.zeros(1, n, h, 64, device="cuda", dtype=torch.bfloat16) for n, h in ((300, 2), (331, 1), (331, 1)))
    v.normal_(generator=torch.Generator(device="cuda").manual_seed(0))
    z = fagen.quantise(q, k, v, precision="fp8" if dtype == "e4m3" else dtype, granularity=granularity, **tiles)
    assert float(z.q_descale.max() * z.k_descale.max()) == 0
    exact, exact_lse = reference(a.replace(dtype="bf16"), *(x.float().cpu().numpy().astype(ml_dtypes.bfloat16) for x in (q, k, v)))
    none = {n: torch.zeros_like(getattr(z, n)) for n in ("q_descale", "k_descale")}
    for descales in ({"q_descale": z.q_descale, "k_descale": z.k_descale}, none, {"q_descale": 0, "k_descale": 0.0}):
        out, lse = kernel(z.q, z.k, z.v, v_descale=z.v_descale, **descales)
        assert np.abs(out.double().cpu().numpy() - exact).max() < 0.03
        np.testing.assert_allclose(lse.cpu().numpy(), exact_lse, rtol=1e-5)
    random = fagen.quantise(*(x.normal_() for x in (q, k, v)), precision="fp8" if dtype == "e4m3" else dtype)[:3]
    ones, same = (
        kernel(*random, q_descale=0.01, k_descale=0.5),
        kernel(*random, q_descale=0.01 * 2.0**-100, k_descale=0.5 * 2.0**100),
    )
    assert all(torch.equal(x, y) for x, y in zip(ones, same)) and float(ones[1].std()) > 0.1
    wrong = torch.full_like(z.k_descale, float("nan"))
    out, lse = kernel(z.q, z.k, z.v, q_descale=z.q_descale, k_descale=wrong, v_descale=z.v_descale)
    assert bool(lse.isnan().all()) and bool(out.isnan().all())


def main() -> None:
    """Build every kernel of this file into a folder."""
    zeros = [{**ZEROS, "dtype": d, "scale_granularity": g} for d in ("e4m3", "int8") for g in ("tensor", "head", "block")]
    for changes in (*GRID, *LONG, *FORMS, *zeros):
        item = select_fp8(changes)
        write_built(common.built(item), sys.argv[1], item.name)
        print(item.name, flush=True)


if __name__ == "__main__":
    main()
